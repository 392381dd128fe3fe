"""Vectorized environments: `make_vec_env` and the version that runs in this process.

`make_vec_env` returns an implementation of `reverie.api.VecEnv`: in this process, in
worker processes, or the simulator's own. Returned arrays are never overwritten by later
calls, but must not be modified: if an environment fails, its latest row is read again.

An environment that raises an exception is closed and rebuilt, with a warning. Its row
repeats the last observation with `is_last` (but not `is_terminal`), and the next row is
the first one of a new episode. `VecEnvConfig.failures` failures of one environment in a
row, without a finished episode or 1000 steps in between, stop the run with
`EnvFailure`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Env, Obs, StateDict, UserError, VecEnv
from reverie.envs.vector import base
from reverie.envs.vector.env_slot import EnvSlot, MakeEnv, warn_of_restart


@dataclass(frozen=True)
class VecEnvConfig:
    """Settings of vectorized environments."""

    workers: int = 0
    """Number of worker processes. 0 steps all environments in this process, -1 uses one
    process per environment but at most one per CPU core. Runs with `run.overlap` and
    evaluations with several environments use -1 instead of 0."""
    timeout: float = 60.0
    """Seconds that a worker may take for a step or reset before it is restarted."""
    start_timeout: float = 300.0
    """Seconds that a worker may take to start and build its environments."""
    failures: int = 5
    """Consecutive failures of one environment after which the run stops."""
    lockstep: bool = False
    """Reset all environments together: those whose episode has ended wait for the
    others, as in the original Δ-IRIS. Rows of waiting environments are not stored."""
    native: Literal["", "ale", "envpool"] = ""
    """Use a vectorized C++ implementation of Atari; see
    `reverie/envs/suites/atari/native.py`. Empty disables it."""

    def __post_init__(self) -> None:
        if self.workers < -1 or self.failures < 1 or self.timeout <= 0:
            raise ValueError(
                f"needs workers >= -1, failures >= 1 and timeout > 0, got {self}"
            )


@dataclass(frozen=True)
class IndexOffset:
    """Adds an offset to environment indices, so that two vectorized environments of one
    run (such as training and evaluation) get different seeds."""

    make_env: MakeEnv
    offset: int

    def __call__(self, index: int) -> Env:
        return self.make_env(self.offset + index)


def make_vec_env(
    make_env: MakeEnv,
    count: int,
    config: VecEnvConfig | None = None,
    seed: int | None = None,
) -> VecEnv:
    """Build the environments `make_env(0)` to `make_env(count - 1)`, stepped together.

    Without `seed`, the environments keep the seeds that `make_env` gave them.
    """
    config = config or VecEnvConfig()
    if count < 1:
        raise UserError(
            f"At least one environment is needed, got {count}.\n"
            "  Fix: --run.envs 1 or more."
        )
    if config.native:
        return _make_native(make_env, count, config, seed)
    if config.workers == 0:
        slots = [EnvSlot(make_env, i, config.failures, seed) for i in range(count)]
        return SyncVecEnv(slots, config.lockstep)
    from reverie.envs.vector.workers import WorkerVecEnv

    return WorkerVecEnv(make_env, count, config, seed)


def _make_native(
    make_env: MakeEnv, count: int, config: VecEnvConfig, seed: int | None
) -> VecEnv:
    """Build the simulator's own vectorized environment.

    Its first index is the sum of the offsets of all `IndexOffset` around `make_env`.
    """
    factory: Any = make_env
    first = 0
    while isinstance(factory, IndexOffset):
        factory, first = factory.make_env, first + factory.offset
    if not hasattr(factory, "make_native"):
        raise UserError(
            "A native vectorized environment is built from a task name, not from a "
            "function.\n  Fix: --task atari_pong, or remove --env.vector.native."
        )
    vec_env: VecEnv = factory.make_native(count, config, seed, first)
    return vec_env


class SyncVecEnv(base.BaseVecEnv):
    """Steps all environments in this process, one after the other."""

    def __init__(self, slots: list[EnvSlot], lockstep: bool = False):
        super().__init__(len(slots))
        self._slots = slots
        for slot in slots:
            slot.open()
        self.obs_space, self.act_space = base.common_spaces(
            [(slot.obs_space, slot.act_space) for slot in slots]
        )
        self.render_fps = slots[0].render_fps
        self._obs: Obs | None = None
        self._action: Action | None = None
        self._has_failed = False
        self._lockstep = lockstep

    def reset(self) -> Obs:
        obs = self._empty_rows()
        for index, slot in enumerate(self._slots):
            base.write_row(obs, index, slot.reset())
            self._report_errors(slot)
        self._obs = obs
        self.waiting = np.zeros(len(self), bool)
        return dict(obs)

    def send(self, action: Action) -> None:
        assert self._obs is not None, "call reset first"
        assert self._action is None, "call recv before the next send"
        self._action = action

    def recv(self) -> Obs:
        assert self._action is not None, "call send first"
        assert self._obs is not None
        action, self._action = self._action, None
        previous, obs = self._obs, self._empty_rows()
        self._has_failed = True  # stays True if `EnvFailure` is raised below
        self.waiting = base.find_waiting(previous["is_last"], self._lockstep)
        for index, slot in enumerate(self._slots):
            if self.waiting[index]:
                row = base.get_row(previous, index)
            elif previous["is_last"][index]:
                row = slot.reset()
            else:
                next_row = slot.step(base.get_row(action, index))
                row = next_row or base.truncated_row(previous, index)
            base.write_row(obs, index, row)
            self._report_errors(slot)
        # some environments set `sys.excepthook` to None; no thread can start then
        if sys.excepthook is None:
            sys.excepthook = sys.__excepthook__
        self._has_failed = False
        self._obs = obs
        return dict(obs)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()

    def state_dict(self) -> StateDict:
        """Return the states of all environments.

        After `EnvFailure` they are empty, so that all environments start new episodes.
        """
        assert self._obs is not None, "call reset first"
        assert self._action is None, "call recv before saving"
        slots = [slot.state_dict() for slot in self._slots]
        if self._has_failed:
            slots = [{**slot, "failures": 0, "env": None} for slot in slots]
        return self._make_state(slots, self._obs)

    def load_state_dict(self, state: StateDict) -> Obs:
        """Restore a state and return its observations.

        Environments that cannot save their state start a new episode.
        """
        saved = self._saved_obs(state)
        obs = self._empty_rows()
        for index, slot in enumerate(self._slots):
            is_restored = slot.load_state_dict(state["envs"][index])
            row = base.get_row(saved, index) if is_restored else slot.reset()
            base.write_row(obs, index, row)
            self._report_errors(slot)
        self._obs, self._action = obs, None
        self._load_waiting(state, obs)
        return dict(obs)

    def _empty_rows(self) -> Obs:
        return {
            key: np.empty((len(self), *space.shape), space.dtype)
            for key, space in self.obs_space.items()
        }

    def _report_errors(self, slot: EnvSlot) -> None:
        for error in slot.pop_errors():
            self._restarts["errors"] += 1
            warn_of_restart(slot.index, error)
