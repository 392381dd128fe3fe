"""Statistics of episodes, accumulated row by row while the agent acts."""

from __future__ import annotations

import numpy as np

from reverie.api import Metrics, Obs, StateDict
from reverie.spaces import SUCCESS

MAX_FRAMES = 300
"""Maximum length of the video of an episode, in frames from its start."""

MAX_EPISODES = 10_000
"""Maximum number of episodes in a summary; the newest are kept."""

REWARD_CHANGE = 0.01
"""`reward_rate` is the fraction of steps whose reward changes by at least this."""

ACHIEVEMENT = "log/achievement_"
"""Prefix of the keys of achievements; a positive value means unlocked."""


class EpisodeStats:
    """Collects score, length and `log/*` values of episodes, and videos of one env.

    The score of an episode is the sum of its rewards, its length the number of actions
    (one less than the rows). Metrics have one entry per episode that has ended;
    `episode/success` is 1 if the environment reported success in any of its steps, and
    NaN if it reported neither success nor failure. `episode/achievement_NAME` is 1 if
    the achievement was unlocked.
    """

    def __init__(self, envs: int):
        self.envs = envs
        # of the current episode of each environment: sum of rewards, number of rows,
        # last reward, and how often the reward has changed
        self._values: dict[str, np.ndarray] = {
            "score": np.zeros(envs),
            "rows": np.zeros(envs, np.int64),
            "reward": np.zeros(envs),
            "changes": np.zeros(envs, np.int64),
        }
        self._sum: dict[str, np.ndarray] = {}  # of `log/*` values in the episode
        self._max: dict[str, np.ndarray] = {}
        self._frames: dict[str, list[np.ndarray]] = {}  # of the first environment
        self._ended: list[tuple[float, float]] = []  # score and length, for `summary`

    def add(self, obs: Obs) -> Metrics:
        """Add one row per environment; return the metrics of episodes that end."""
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
        return self._episode_metrics(last) if last.any() else {}

    def summary(self) -> Metrics:
        """Return statistics of the episodes that have ended since the last call.

        Includes the mean reward per step, to compare with imagined rewards.
        """
        ended, self._ended = self._ended, []
        return summarize_ended(ended)

    def state_dict(self) -> StateDict:
        """Return the state without the video; a resumed run starts a new video."""
        return {
            "values": {name: array.copy() for name, array in self._values.items()},
            "sum": {name: array.copy() for name, array in self._sum.items()},
            "max": {name: array.copy() for name, array in self._max.items()},
            "ended": np.array(self._ended, np.float64).reshape(-1, 2),
        }

    def load_state_dict(self, state: StateDict) -> None:
        def per_env(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
            return np.array(array, dtype).reshape(self.envs)

        old = self._values
        self._values = {k: per_env(state["values"][k], old[k].dtype) for k in old}
        self._sum, self._max = (
            {k: per_env(array, np.dtype(float)) for k, array in state[part].items()}
            for part in ("sum", "max")
        )
        self._ended = [(float(s), float(n)) for s, n in state["ended"]]
        self._frames = {}

    def _add_logs(self, obs: Obs) -> None:
        """Update sum and maximum of all scalars with the prefix `log/`."""
        for key, value in obs.items():
            if not key.startswith("log/") or np.ndim(value) != 1:
                continue
            numbers = np.asarray(value, np.float64)
            total = self._sum.setdefault(key, np.zeros(self.envs))
            largest = self._max.setdefault(key, np.full(self.envs, -np.inf))
            total += numbers
            np.maximum(largest, numbers, out=largest)

    def _add_frames(self, obs: Obs, is_first: bool) -> None:
        """Store the images of the first environment, which are batches of uint8."""
        if is_first:
            self._frames = {}
        for key, value in obs.items():
            if getattr(value, "dtype", None) == np.uint8 and np.ndim(value) == 4:
                frames = self._frames.setdefault(key, [])
                if len(frames) < MAX_FRAMES:
                    frames.append(np.array(value[0]))

    def _episode_metrics(self, last: np.ndarray) -> Metrics:
        """Return the metrics of the environments whose episode ends."""
        values = self._values
        rows = values["rows"][last]
        ended = zip(values["score"][last].tolist(), (rows - 1).tolist(), strict=True)
        self._ended += ended
        del self._ended[:-MAX_EPISODES]
        steps = np.maximum(rows - 1, 1)
        metrics: Metrics = {
            "episode/score": values["score"][last],
            "episode/length": rows - 1,
            "epstats/reward_rate": values["changes"][last] / steps,
        }
        for key, total in self._sum.items():
            if key == SUCCESS:
                success = self._max[key][last]  # negative if it is not known
                if (success >= 0).any():
                    successes = np.where(success >= 0, success > 0, np.nan)
                    metrics["episode/success"] = successes
                continue
            if key.startswith(ACHIEVEMENT):
                name = key.removeprefix("log/")
                metrics[f"episode/{name}"] = (self._max[key][last] > 0).astype(float)
            metrics[f"epstats/{key}/avg"] = total[last] / rows
            metrics[f"epstats/{key}/max"] = self._max[key][last]
            metrics[f"epstats/{key}/sum"] = total[last]
        if last[0]:
            for key, frames in self._frames.items():
                metrics[f"epstats/policy_{key}"] = np.stack(frames)
        return metrics


def summarize_ended(episodes: list[tuple[float, float]]) -> Metrics:
    """Return statistics of episodes, given as pairs of score and length."""
    ended = np.array(episodes).reshape(-1, 2)
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
