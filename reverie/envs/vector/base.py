"""Base class of vectorized environments, and functions on batched observations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from reverie.api import Action, Metrics, Obs, StateDict, UserError
from reverie.spaces import Spaces

ObsArrays = Mapping[str, np.ndarray]
"""Observations of all environments: one array per key, the environments on axis 0.

A row is the observation of one environment."""


class BaseVecEnv:
    """Base class of the implementations of `reverie.api.VecEnv`; see its docs."""

    obs_space: Spaces
    act_space: Spaces
    render_fps: float = 0
    """Steps per second in real time, for videos; 0 if unknown."""

    def __init__(self, count: int):
        self._count = count
        self._restarts: Counter[str] = Counter()  # by cause
        self.waiting = np.zeros(count, bool)
        """True for environments whose episode has ended and that wait for the others
        (`VecEnvConfig.lockstep`). They return their last row again in every step."""

    def __len__(self) -> int:
        return self._count

    def step(self, action: Action) -> Obs:
        self.send(action)
        return self.recv()

    def send(self, action: Action) -> None:
        """Start a step; `recv` returns its observations."""
        raise NotImplementedError

    def recv(self) -> Obs:
        raise NotImplementedError

    def metrics(self) -> Metrics:
        """Return the number of restarted environments, in total and by cause."""
        causes = ("errors", "crashes", "timeouts")
        metrics = {f"env/{cause}": self._restarts[cause] for cause in causes}
        return {"env/restarts": sum(metrics.values()), **metrics}

    def _make_state(self, slots: list[StateDict], obs: ObsArrays) -> StateDict:
        """Combine the states of all env slots and the latest observations."""
        # A list, because some keys of observations are not valid in a checkpoint.
        rows = [obs[key].copy() for key in sorted(self.obs_space)]
        state: StateDict = {"envs": slots, "obs": rows}
        if self.waiting.any():
            state["waiting"] = self.waiting.copy()
        return state

    def _saved_obs(self, state: StateDict) -> Obs:
        """Return the observations in a state, and check its number of environments."""
        if len(state["envs"]) != len(self):
            raise UserError(
                f"The checkpoint has {len(state['envs'])} environments, this run has "
                f"{len(self)}.\n  Fix: set --run.envs {len(state['envs'])}."
            )
        arrays = map(np.asarray, state["obs"])
        return dict(zip(sorted(self.obs_space), arrays, strict=True))

    def _load_waiting(self, state: StateDict, obs: ObsArrays) -> None:
        """Restore `waiting`, except where an environment started a new episode."""
        waiting = np.asarray(state.get("waiting", np.zeros(len(self), bool)))
        self.waiting = np.asarray(waiting & obs["is_last"])


def common_spaces(spaces: list[tuple[Spaces, Spaces]]) -> tuple[Spaces, Spaces]:
    """Return the common observation and action spaces; raise if they differ."""
    first = spaces[0]
    for index, other in enumerate(spaces):
        if other != first:
            raise UserError(
                f"The spaces of environment {index} differ from those of environment "
                "0.\n  Fix: give all environments of a run the same spaces."
            )
    return first


def write_row(rows: ObsArrays, index: int, obs: Obs) -> None:
    """Write the observation of environment `index` into the batch."""
    for key, array in rows.items():
        array[index] = obs[key]


def get_row(rows: ObsArrays, index: int) -> Obs:
    """Return the observation of environment `index` from the batch."""
    return {key: array[index] for key, array in rows.items()}


def truncated_row(rows: ObsArrays, index: int) -> Obs:
    """Return the latest row with `is_last` set, to end a failed episode."""
    changes = {"reward": 0.0, "is_first": False, "is_last": True, "is_terminal": False}
    return {**get_row(rows, index), **changes}


def find_waiting(is_last: np.ndarray, lockstep: bool) -> np.ndarray:
    """Return a mask of the environments that wait for the others in lockstep."""
    if lockstep and not is_last.all():
        return np.array(is_last, bool)
    return np.zeros(len(is_last), bool)
