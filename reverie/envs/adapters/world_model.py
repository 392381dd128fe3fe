"""A learned world model as an environment.

An imagined episode starts from consecutive steps of a real episode, called rows
(`StartSampler`). The observation in the last of these rows is the first observation of
the imagined episode. From there the world model predicts observations, rewards and
terminations from the actions. The state cannot be saved, so a resumed run starts a new
episode.

Actions are in the units of the task, as in every other environment before `envs.make`
scales them, and may be nested like the task's own action space.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from reverie.api import Batch, Env, Obs, UserError
from reverie.capabilities import WorldModelEnv
from reverie.spaces import step_spaces, step_values, to_flat

StartSampler = Callable[[np.random.Generator], Batch]
"""Returns consecutive real rows, `(T, ...)` by key, to start an episode from.

Actions are as in the replay: bounded continuous ones are scaled to [-1, 1]."""

MAX_EPISODES = 1000
"""Maximum number of episodes that `StartInEnv` runs to find one that is long enough."""


class ImaginedEnv:
    """Episodes predicted by a world model; implements `api.Env`."""

    def __init__(
        self, model: WorldModelEnv, start: StartSampler, length: int = 0, seed: int = 0
    ):
        """`length` is the time limit of an episode in steps; 0 disables it."""
        if length < 0:
            raise UserError(
                f"The length of an episode cannot be {length}.\n"
                "  Fix: pass 0 for no time limit."
            )
        self.model, self.start, self.length = model, start, length
        self._rng = np.random.default_rng(seed)
        self._state: Any = None
        self._steps = 0
        self.obs_space = {**model.obs_space, **step_spaces()}
        self.act_space = {k: s.in_native_units() for k, s in model.act_space.items()}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
            self.model.seed(seed)
        rows = self.start(self._rng)
        self._check_shapes(rows)
        self._state = self.model.begin({k: x[None] for k, x in rows.items()})
        self._steps = 0
        latest = {key: rows[key][-1] for key in self.model.obs_space}
        return {**self._cast(latest), **step_values(0.0, first=True)}

    def step(self, action: Any) -> Obs:
        """Return the next row; `action` is flat (by key) or nested like the task's."""
        assert self._state is not None, "call reset first"
        flat_action, actions = to_flat(self.act_space, action), {}
        for key, space in self.act_space.items():
            if key not in flat_action:
                raise UserError(
                    f"The world model needs the action {key!r}.\n"
                    "  Fix: pass every key of its act_space."
                )
            value = np.asarray(flat_action[key], space.dtype)
            value = value.reshape(1, *space.shape)
            actions[key] = self.model.act_space[key].from_native(value)
        self._state, rows = self.model.step(self._state, actions)
        self._steps += 1
        terminal = bool(rows["is_terminal"][0])
        last = terminal or self._steps == self.length
        obs = {key: rows[key][0] for key in self.model.obs_space}
        reward = float(rows["reward"][0])
        return {**self._cast(obs), **step_values(reward, last=last, terminal=terminal)}

    def close(self) -> None:
        self._state = None

    def _check_shapes(self, rows: Batch) -> None:
        """Raise `UserError` if the rows do not match the world model's spaces."""
        for key, space in {**self.model.obs_space, **self.model.act_space}.items():
            shape = np.shape(rows[key])[1:] if key in rows else None
            if shape != space.shape:
                actual = "no such key" if shape is None else f"shape {shape}"
                raise UserError(
                    f"The world model was trained with {key!r} of shape {space.shape}, "
                    f"but the rows to start from have {actual}.\n  Fix: take them from "
                    "the task that the agent was trained on, with the same settings."
                )

    def _cast(self, obs: Obs) -> Obs:
        return {k: np.asarray(x, self.model.obs_space[k].dtype) for k, x in obs.items()}


class StartInEnv:
    """Samples the first `steps + 1` rows of an episode with random actions.

    Episodes that end earlier are discarded.
    """

    def __init__(self, env: Env, steps: int = 0):
        self.env, self.steps = env, steps
        self._scaled = {
            key: space.normalized()
            for key, space in env.act_space.items()
            if space.native is None  # otherwise `envs.make` has scaled it
        }

    def __call__(self, rng: np.random.Generator) -> Batch:
        rows: list[dict[str, np.ndarray]] = []
        obs, ended = self.env.reset(int(rng.integers(2**31))), 0
        while True:
            if obs["is_last"]:
                rows.clear()
                ended += 1
                if ended == MAX_EPISODES:
                    raise UserError(
                        f"None of {ended} episodes had {self.steps + 1} rows to start "
                        "from.\n  Fix: pass a lower `steps` to StartInEnv."
                    )
                obs = self.env.reset()
            action = {k: s.sample(rng) for k, s in self.env.act_space.items()}
            scaled = {k: s.from_native(action[k]) for k, s in self._scaled.items()}
            row = {**obs, **action, **scaled}
            rows.append({key: np.asarray(value) for key, value in row.items()})
            if len(rows) > self.steps:
                return {key: np.stack([row[key] for row in rows]) for key in rows[0]}
            obs = self.env.step(action)


class StartInEpisodes:
    """Samples a random row of recorded episodes, and up to `steps` rows before it.

    The last row of an episode is not sampled, because nothing follows it.
    """

    def __init__(self, episodes: list[Batch], steps: int = 5):
        self.episodes = [e for e in episodes if len(e["is_first"]) > 1]
        self.steps = steps
        if not self.episodes:
            raise UserError(
                "There is no recorded episode to start from.\n"
                "  Fix: pass at least one episode of two or more rows."
            )

    def __call__(self, rng: np.random.Generator) -> Batch:
        episode = self.episodes[rng.integers(len(self.episodes))]
        sampled = int(rng.integers(len(episode["is_first"]) - 1))
        rows = slice(max(0, sampled - self.steps), sampled + 1)
        return {key: np.asarray(value[rows]) for key, value in episode.items()}
