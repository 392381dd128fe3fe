"""What there is to say about episodes, gathered row by row while they are played."""

from __future__ import annotations

import numpy as np

from reverie.api import Metrics, Obs, StateDict

FRAMES = 300
"""Longest film kept of an episode; a longer episode shows its beginning."""

KEPT = 10_000
"""Most episodes remembered for a summary; the oldest go first."""

REWARD_CHANGE = 0.01
"""`reward_rate` is the share of steps whose reward differs from the last by this."""


class EpisodeStats:
    """Scores, lengths, `log/*` values and a film of the first environment's episodes.

    A score is the sum of an episode's rewards, its length the steps taken in it (one
    less than its rows). Values come as one entry per episode that ended in this row.
    """

    def __init__(self, envs: int):
        self.envs = envs
        self._values: dict[str, np.ndarray] = {
            "score": np.zeros(envs),
            "rows": np.zeros(envs, np.int64),
            "reward": np.zeros(envs),
            "changes": np.zeros(envs, np.int64),
        }
        self._sum: dict[str, np.ndarray] = {}
        self._max: dict[str, np.ndarray] = {}
        self._film: dict[str, list[np.ndarray]] = {}
        self._ended: list[tuple[float, float]] = []  # score, length since `summary`

    def add(self, obs: Obs) -> Metrics:
        """Take one row of every environment in; say what its ended episodes were like.

        Empty unless an episode ended here.
        """
        first = np.asarray(obs["is_first"], bool)
        last = np.asarray(obs["is_last"], bool)
        reward = np.asarray(obs["reward"], np.float64)
        values = self._values
        for array in (*values.values(), *self._sum.values()):
            array[first] = 0
        for array in self._max.values():
            array[first] = -np.inf

        changed = np.abs(reward - values["reward"]) >= REWARD_CHANGE
        values["changes"] += changed & (values["rows"] > 0)
        values["score"] += reward
        values["reward"][:] = reward
        values["rows"] += 1
        self._add_logs(obs)
        self._add_frames(obs, bool(first[0]))
        return self._finished(last) if last.any() else {}

    def summary(self) -> Metrics:
        """Mean, spread and range of the scores since the last call; then forgets.

        Also the reward of a step, to hold against what a dream promises.
        """
        ended, self._ended = np.array(self._ended).reshape(-1, 2), []
        metrics: Metrics = {"episodes": len(ended)}
        if len(ended):
            score = ended[:, 0]
            metrics |= {
                "return_mean": score.mean(),
                "return_std": score.std(),
                "return_min": score.min(),
                "return_max": score.max(),
                "length_mean": ended[:, 1].mean(),
                "reward_mean": score.sum() / max(1, ended[:, 1].sum()),
            }
        return metrics

    def state_dict(self) -> StateDict:
        """All but the film: after a resume it begins where the run does."""
        return {
            "values": {name: array.copy() for name, array in self._values.items()},
            "sum": {name: array.copy() for name, array in self._sum.items()},
            "max": {name: array.copy() for name, array in self._max.items()},
            "ended": np.array(self._ended, np.float64).reshape(-1, 2),
        }

    def load_state_dict(self, state: StateDict) -> None:
        def copies(nest: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {name: np.array(value) for name, value in nest.items()}

        self._values = copies(state["values"])
        self._sum, self._max = copies(state["sum"]), copies(state["max"])
        self._ended = [(float(s), float(n)) for s, n in state.get("ended", ())]
        self._film = {}

    def _add_logs(self, obs: Obs) -> None:
        for key, value in obs.items():
            if not key.startswith("log/") or np.ndim(value) != 1:
                continue
            number = np.asarray(value, np.float64)
            total = self._sum.setdefault(key, np.zeros(self.envs))
            largest = self._max.setdefault(key, np.full(self.envs, -np.inf))
            total += number
            np.maximum(largest, number, out=largest)

    def _add_frames(self, obs: Obs, begins: bool) -> None:
        if begins:
            self._film = {}
        for key, value in obs.items():
            if getattr(value, "dtype", None) == np.uint8 and np.ndim(value) == 4:
                film = self._film.setdefault(key, [])
                if len(film) < FRAMES:
                    film.append(np.array(value[0]))

    def _finished(self, last: np.ndarray) -> Metrics:
        values = self._values
        rows = values["rows"][last]
        ended = zip(values["score"][last].tolist(), (rows - 1).tolist(), strict=True)
        self._ended += ended
        del self._ended[:-KEPT]
        steps = np.maximum(rows - 1, 1)
        metrics: Metrics = {
            "episode/score": values["score"][last],
            "episode/length": rows - 1,
            "epstats/reward_rate": values["changes"][last] / steps,
        }
        for key, total in self._sum.items():
            metrics[f"epstats/{key}/avg"] = total[last] / rows
            metrics[f"epstats/{key}/max"] = self._max[key][last]
            metrics[f"epstats/{key}/sum"] = total[last]
        if last[0]:
            for key, film in self._film.items():
                metrics[f"epstats/policy_{key}"] = np.stack(film)
        return metrics
