"""Many environments stepping together, in this process or in worker processes.

`make_vec_env` gives either behind one interface (`reverie.api.VecEnv`). Rows are
new arrays, one call's never overwritten by the next; the pool reads its newest batch
again when an environment fails, so write only into copies.

An environment that raises is closed, warned about and built anew: its row repeats the
last observation with `is_last` set (and not `is_terminal`), the row after it is the
first of a new episode. `VecEnvConfig.failures` of these in a row, without a finished
episode or a thousand steps between them, stop the run with `EnvFailure`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Env, Metrics, Obs, StateDict, UserError, VecEnv
from reverie.envs.seeding import derive_seed
from reverie.envs.vector.batch import (
    common_spaces,
    restart_metrics,
    row_of,
    saved_rows,
    saved_waiting,
    truncated_row,
    vec_env_state,
    waits,
    write_row,
)
from reverie.envs.vector.env_slot import EnvSlot, MakeEnv, warn_of_error


@dataclass(frozen=True)
class VecEnvConfig:
    workers: int = 0
    """Worker processes: 0 steps all environments in this process, -1 picks one per
    environment but no more than there are cores. A run that steps environments while it
    trains (`run.overlap`), and an evaluation of several by its rule, take 0 for -1."""
    timeout: float = 60.0
    """Seconds a worker may take for one step or reset before it is restarted."""
    start_timeout: float = 300.0
    """Seconds a worker may take to start and build its environments."""
    failures: int = 5
    """Failures of one environment in a row after which the run stops."""
    lockstep: bool = False
    """Let environments whose episode has ended wait until all have, and reset them
    together, as the original Δ-IRIS does. Rows of those that wait are not stored."""
    native: Literal["", "ale", "envpool"] = ""
    """Step Atari in the C++ of a package instead, see `native.py`; empty does not."""

    def __post_init__(self) -> None:
        if self.workers < -1 or self.failures < 1 or self.timeout <= 0:
            raise ValueError(
                "the pool needs workers >= -1, failures >= 1 and timeout > 0, got "
                f"workers={self.workers}, failures={self.failures}, "
                f"timeout={self.timeout}"
            )


@dataclass(frozen=True)
class IndexOffset:
    """Counts environments from another number on, so that two pools of one run get
    different seeds."""

    make_env: MakeEnv
    first: int

    def __call__(self, index: int) -> Env:
        return self.make_env(self.first + index)


def make_vec_env(
    make_env: MakeEnv,
    count: int,
    config: VecEnvConfig | None = None,
    seed: int | None = None,
) -> VecEnv:
    """Build `count` environments, `make_env(index)` each, and step them together.

    Without `seed` the environments keep the seeds `make_env` gave them.
    """
    config = config or VecEnvConfig()
    if count < 1:
        raise UserError(
            f"A pool needs at least one environment, got {count}.\n"
            "  Fix: --run.envs 1 or more."
        )
    if config.native:
        return _make_native(make_env, count, config, seed)
    if config.workers == 0:
        return SyncVecEnv(make_env, count, config, seed)
    from reverie.envs.vector.workers import WorkerVecEnv

    return WorkerVecEnv(make_env, count, config, seed)


def _make_native(
    make_env: MakeEnv, count: int, config: VecEnvConfig, seed: int | None
) -> VecEnv:
    """Hand the name and the settings of a task to a vector environment."""
    from reverie.envs.suites.atari.native import make_native

    made: Any = make_env
    first = 0
    while isinstance(made, IndexOffset):
        made, first = made.make_env, first + made.first
    task = getattr(made, "task", None)
    if not isinstance(task, str):
        raise UserError(
            "A native vector environment needs a task by its name.\n"
            "  Fix: --task atari_pong, or leave out --env.vector.native."
        )
    seed = made.seed if seed is None else seed
    return make_native(task, made.config, count, config, derive_seed(seed, first))


class SyncVecEnv:
    """All environments in this process, one after the other."""

    def __init__(
        self,
        make_env: MakeEnv,
        count: int,
        config: VecEnvConfig,
        seed: int | None = None,
    ):
        self._events: Counter[str] = Counter()
        self._slots = [
            EnvSlot(make_env, i, config.failures, seed) for i in range(count)
        ]
        for slot in self._slots:
            slot.open()
        self.obs_space, self.act_space = common_spaces(
            [(slot.obs_space, slot.act_space) for slot in self._slots]
        )
        self._obs: Obs | None = None
        self._action: Action | None = None
        self._broken = False
        self._lockstep = config.lockstep
        self.waiting = np.zeros(count, bool)  # whose rows only repeat their end

    def __len__(self) -> int:
        return len(self._slots)

    def reset(self) -> Obs:
        obs = self._empty()
        for index, slot in enumerate(self._slots):
            write_row(obs, index, slot.reset())
            self._note(slot)
        self._obs = obs
        self.waiting = np.zeros(len(self), bool)
        return dict(obs)

    def step(self, action: Action) -> Obs:
        self.send(action)
        return self.recv()

    def send(self, action: Action) -> None:
        """Begin a step; `recv` returns its rows."""
        assert self._obs is not None, "call reset first"
        assert self._action is None, "call recv before the next send"
        self._action = action

    def recv(self) -> Obs:
        assert self._action is not None, "call send first"
        assert self._obs is not None
        action, self._action = self._action, None
        before, obs = self._obs, self._empty()
        self._broken = True  # until every row is there
        self.waiting = waits(before["is_last"], self._lockstep)
        for index, slot in enumerate(self._slots):
            if self.waiting[index]:
                row = row_of(before, index)
            elif before["is_last"][index]:
                row = slot.reset()
            else:
                row = slot.step(
                    {key: value[index] for key, value in action.items()}
                ) or truncated_row(before, index)
            write_row(obs, index, row)
            self._note(slot)
        self._broken = False
        self._obs = obs
        return dict(obs)

    def close(self) -> None:
        for slot in self._slots:
            slot.close()

    def metrics(self) -> Metrics:
        return restart_metrics(self._events)

    def state_dict(self) -> StateDict:
        """Where every environment stands; after `EnvFailure` only that it must begin
        anew."""
        assert self._obs is not None, "call reset first"
        assert self._action is None, "call recv before saving"
        slots = [slot.state_dict() for slot in self._slots]
        if self._broken:
            slots = [{**slot, "failures": 0, "env": None} for slot in slots]
        return vec_env_state(slots, self._obs, self.obs_space, self.waiting)

    def load_state_dict(self, state: StateDict) -> Obs:
        """Continue where the state was saved; returns the rows to go on from.

        Environments without state of their own begin a new episode.
        """
        saved = saved_rows(state, self.obs_space, len(self))
        obs = self._empty()
        for index, slot in enumerate(self._slots):
            exact = slot.load_state_dict(state["envs"][index])
            row = row_of(saved, index) if exact else slot.reset()
            write_row(obs, index, row)
            self._note(slot)
        self._obs, self._action = obs, None
        self.waiting = saved_waiting(state, obs)
        return dict(obs)

    def _empty(self) -> Obs:
        return {
            key: np.empty((len(self), *space.shape), space.dtype)
            for key, space in self.obs_space.items()
        }

    def _note(self, slot: EnvSlot) -> None:
        for error in slot.take_errors():
            self._events["errors"] += 1
            warn_of_error(slot.index, error)
