"""Flat states of MuJoCo simulators, in the layout of robosuite and robomimic.

A state is `[time, qpos, qvel, act]`; the time may be missing, and `act` is empty in
simulators without activations. `model` and `data` are like `MjModel` and `MjData`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reverie.api import UserError


def read_state(model: Any, data: Any) -> np.ndarray:
    """Return the current state as one vector."""
    act = data.act if model.na else []
    return np.concatenate([[data.time], data.qpos, data.qvel, act])


def split_state(
    model: Any, state: np.ndarray
) -> tuple[float, np.ndarray, np.ndarray, np.ndarray]:
    """Return time (0 if it is missing), positions, velocities and activations."""
    size = model.nq + model.nv + model.na
    state = np.asarray(state, np.float64)
    check_state(state, size + 1, size)
    time = float(state[0]) if state.size > size else 0.0
    qpos, qvel, act = np.split(state[-size:], [model.nq, model.nq + model.nv])
    return time, qpos, qvel, act


def check_state(state: np.ndarray, *sizes: int) -> None:
    """Raise `UserError` unless a recorded state is a vector of one of these sizes."""
    if np.shape(state) not in [(size,) for size in sizes]:
        expected = " or ".join(f"({size},)" for size in sizes)
        raise UserError(
            f"The recorded state has shape {np.shape(state)}, this task has "
            f"{expected}.\n  Fix: use the same task, robot and simulator version as "
            "the recording."
        )
