"""A learned world, worn as an environment.

A dream begins where some real rows end (`Start`), and goes on in the world alone: the
actions are taken there, and the images, rewards and ends are what it makes of them. So
`play`, `evaluate` and everything else that takes an environment works in a dream.

The first row shows the last real one. A dream has no memory of its own to save: a run
that resumes begins a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from reverie.api import Action, Batch, Env, Obs, UserError
from reverie.capabilities import WorldModelEnv
from reverie.spaces import FLAGS, Space, Spaces

Start = Callable[[np.random.Generator], Batch]
"""Makes the rows from which a dream begins, `(T, ...)` by key."""

PATIENCE = 1000
"""Episodes that may end too soon before one is long enough to begin a dream in."""


class ImaginedEnv:
    """One dream after another; implements `api.Env`."""

    def __init__(
        self, dreams: WorldModelEnv, start: Start, length: int = 0, seed: int = 0
    ):
        """`length` is after how many steps a dream is cut; 0 for never."""
        if length < 0:
            raise UserError(
                f"A dream cannot last {length} steps.\n  Fix: give 0 for no limit."
            )
        self.dreams, self.start, self.length = dreams, start, length
        self._rng = np.random.default_rng(seed)
        self._state: Any = None
        self._steps = 0

    @property
    def obs_space(self) -> Spaces:
        flags = {key: Space(np.dtype(bool)) for key in FLAGS if key != "reward"}
        reward = Space(np.dtype(np.float32))
        return {**self.dreams.obs_space, "reward": reward, **flags}

    @property
    def act_space(self) -> Spaces:
        return self.dreams.act_space

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
            self.dreams.seed(seed)
        rows = self.start(self._rng)
        self._check(rows)
        self._state = self.dreams.begin({k: x[None] for k, x in rows.items()})
        self._steps = 0
        newest = {key: rows[key][-1] for key in self.dreams.obs_space}
        return self._row(newest, reward=0.0, first=True)

    def step(self, action: Action) -> Obs:
        assert self._state is not None, "call reset first"
        many = {key: np.asarray(value)[None] for key, value in action.items()}
        self._state, rows = self.dreams.step(self._state, many)
        self._steps += 1
        ends = bool(rows["is_terminal"][0])
        cut = ends or self._steps == self.length
        seen = {key: rows[key][0] for key in self.dreams.obs_space}
        return self._row(seen, float(rows["reward"][0]), last=cut, terminal=ends)

    def close(self) -> None:
        self._state = None

    def _check(self, rows: Batch) -> None:
        """Raise unless real rows are of what the world has learnt."""
        for key, space in {**self.dreams.obs_space, **self.dreams.act_space}.items():
            came = np.shape(rows[key])[1:] if key in rows else None
            if came != space.shape:
                has = "no such key" if came is None else f"shape {came}"
                raise UserError(
                    f"The world was learnt with {key!r} of shape {space.shape}, but "
                    f"the rows to begin a dream from have {has}.\n  Fix: begin where "
                    "the agent was trained, with the same settings."
                )

    def _row(
        self,
        seen: Obs,
        reward: float,
        first: bool = False,
        last: bool = False,
        terminal: bool = False,
    ) -> Obs:
        return {
            **{k: np.asarray(x, self.obs_space[k].dtype) for k, x in seen.items()},
            "reward": np.float32(reward),
            "is_first": np.bool_(first),
            "is_last": np.bool_(last),
            "is_terminal": np.bool_(terminal),
        }


class StartInEnv:
    """Begin dreams in a real environment: reset it, and take some random steps.

    With no steps a dream begins at the first row of an episode. An episode that ends
    on the way is followed by another, so the rows are always of one.
    """

    def __init__(self, env: Env, steps: int = 0):
        self.env, self.steps = env, steps

    def __call__(self, rng: np.random.Generator) -> Batch:
        rows: list[dict[str, np.ndarray]] = []
        obs, ended = self.env.reset(int(rng.integers(2**31))), 0
        while True:
            if obs["is_last"]:  # nothing can be dreamt beyond the end
                rows.clear()
                ended += 1
                if ended == PATIENCE:
                    raise UserError(
                        f"None of {ended} episodes lasted for {self.steps + 1} steps, "
                        "so that no dream can begin there.\n  Fix: begin after fewer."
                    )
                obs = self.env.reset()
            action = {k: s.sample(rng) for k, s in self.env.act_space.items()}
            rows.append({k: np.asarray(x) for k, x in {**obs, **action}.items()})
            if len(rows) > self.steps:
                return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            obs = self.env.step(action)


class StartInEpisodes:
    """Begin dreams anywhere in recorded episodes, but not at their end."""

    def __init__(self, episodes: list[Batch], steps: int = 5):
        """`steps` real rows are shown before the one a dream begins at, if there are
        as many."""
        self.episodes = [e for e in episodes if len(e["is_first"]) > 1]
        self.steps = steps
        if not self.episodes:
            raise UserError(
                "There is no recorded episode to begin a dream from.\n"
                "  Fix: collect some steps first."
            )

    def __call__(self, rng: np.random.Generator) -> Batch:
        episode = self.episodes[rng.integers(len(self.episodes))]
        at = int(rng.integers(len(episode["is_first"]) - 1))
        rows = slice(max(0, at - self.steps), at + 1)
        return {key: np.asarray(value[rows]) for key, value in episode.items()}
