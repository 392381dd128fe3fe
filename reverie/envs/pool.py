"""Many environments stepping together, in this process or in worker processes.

`make_pool` gives either behind one interface (`reverie.api.Envs`). Rows come back as
new arrays, one call's never overwritten by the next; the pool reads its newest batch
again when an environment fails, so write only into copies.

An environment that raises is closed, warned about and built anew: its row repeats the
last observation with `is_last` set (and not `is_terminal`), the row after it is the
first of a new episode. `PoolConfig.failures` of these in a row, with neither a finished
episode nor a thousand steps between them, stop the run with `EnvFailure`.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

import numpy as np

from reverie.api import (
    Action,
    Env,
    Envs,
    Metrics,
    Obs,
    Spaces,
    StateDict,
    Stateful,
    UserError,
)
from reverie.envs.seeding import derive_seed

MakeEnv = Callable[[int], Env]
Rows = Mapping[str, np.ndarray]

HEALTHY_STEPS = 1000
"""After so many good steps earlier failures are forgiven."""

log = logging.getLogger("reverie.envs")


@dataclass(frozen=True)
class PoolConfig:
    workers: int = 0
    """Worker processes: 0 steps all environments in this process, -1 picks one per
    environment but no more than there are cores. A run that steps environments while it
    trains (`run.overlap`) takes 0 for -1."""
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
class Shifted:
    """Counts environments from another number on, so that two pools of one run get
    different seeds."""

    make_env: MakeEnv
    first: int

    def __call__(self, index: int) -> Env:
        return self.make_env(self.first + index)


class EnvFailure(UserError):
    """An environment failed so often that going on makes no sense."""


def make_pool(
    make_env: MakeEnv,
    count: int,
    config: PoolConfig | None = None,
    seed: int | None = None,
) -> Envs:
    """Build `count` environments, `make_env(index)` each, and step them together.

    Without `seed` the environments keep the seeds `make_env` gave them.
    """
    config = config or PoolConfig()
    if count < 1:
        raise UserError(
            f"A pool needs at least one environment, got {count}.\n"
            "  Fix: --run.envs 1 or more."
        )
    if config.native:
        return _make_native(make_env, count, config, seed)
    if config.workers == 0:
        return LocalPool(make_env, count, config, seed)
    from reverie.envs.workers import WorkerPool

    return WorkerPool(make_env, count, config, seed)


def _make_native(
    make_env: MakeEnv, count: int, config: PoolConfig, seed: int | None
) -> Envs:
    """Hand the name and the settings of a task to a vector environment."""
    from reverie.envs.native import make_native

    made: Any = make_env
    first = 0
    while isinstance(made, Shifted):
        made, first = made.make_env, first + made.first
    task = getattr(made, "task", None)
    if not isinstance(task, str):
        raise UserError(
            "A native vector environment needs a task by its name.\n"
            "  Fix: --task atari_pong, or leave out --env.pool.native."
        )
    seed = made.seed if seed is None else seed
    return make_native(task, made.config, count, config, derive_seed(seed, first))


class LocalPool:
    """All environments in this process, one after the other."""

    def __init__(
        self,
        make_env: MakeEnv,
        count: int,
        config: PoolConfig,
        seed: int | None = None,
    ):
        self._events: Counter[str] = Counter()
        self._seats = [Seat(make_env, i, config.failures, seed) for i in range(count)]
        for seat in self._seats:
            seat.open()
        self.obs_space, self.act_space = common_spaces(
            [(seat.obs_space, seat.act_space) for seat in self._seats]
        )
        self._obs: Obs | None = None
        self._action: Action | None = None
        self._broken = False
        self._lockstep = config.lockstep
        self.waiting = np.zeros(count, bool)  # whose rows only repeat their end

    def __len__(self) -> int:
        return len(self._seats)

    def reset(self) -> Obs:
        obs = self._empty()
        for index, seat in enumerate(self._seats):
            write_row(obs, index, seat.reset())
            self._note(seat)
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
        for index, seat in enumerate(self._seats):
            if self.waiting[index]:
                row = row_of(before, index)
            elif before["is_last"][index]:
                row = seat.reset()
            else:
                row = seat.step(
                    {key: value[index] for key, value in action.items()}
                ) or truncated_row(before, index)
            write_row(obs, index, row)
            self._note(seat)
        self._broken = False
        self._obs = obs
        return dict(obs)

    def close(self) -> None:
        for seat in self._seats:
            seat.close()

    def metrics(self) -> Metrics:
        return pool_metrics(self._events)

    def state_dict(self) -> StateDict:
        """Where every environment stands; after `EnvFailure` only that it must begin
        anew."""
        assert self._obs is not None, "call reset first"
        assert self._action is None, "call recv before saving"
        seats = [seat.state_dict() for seat in self._seats]
        if self._broken:
            seats = [{**seat, "failures": 0, "env": None} for seat in seats]
        return pool_state(seats, self._obs, self.obs_space, self.waiting)

    def load_state_dict(self, state: StateDict) -> Obs:
        """Continue where the state was saved; returns the rows to go on from.

        Environments without state of their own begin a new episode.
        """
        saved = saved_rows(state, self.obs_space, len(self))
        obs = self._empty()
        for index, seat in enumerate(self._seats):
            exact = seat.load_state_dict(state["envs"][index])
            row = row_of(saved, index) if exact else seat.reset()
            write_row(obs, index, row)
            self._note(seat)
        self._obs, self._action = obs, None
        self.waiting = saved_waiting(state, obs)
        return dict(obs)

    def _empty(self) -> Obs:
        return {
            key: np.empty((len(self), *space.shape), space.dtype)
            for key, space in self.obs_space.items()
        }

    def _note(self, seat: Seat) -> None:
        for error in seat.take_errors():
            self._events["errors"] += 1
            warn_of_error(seat.index, error)


class Seat:
    """The place of one environment in a pool: builds, restarts and resumes it."""

    def __init__(
        self,
        make_env: MakeEnv,
        index: int,
        failures: int,
        seed: int | None,
        attempt: int = 0,
    ):
        self.index = index
        self.attempt = attempt
        self._make_env = make_env
        self._allowed = failures
        self._seed = seed
        self._env: Env | None = None
        self._fresh = True
        self._failures = 0
        self._good_steps = 0
        self._errors: list[str] = []

    def open(self) -> None:
        """Build the environment; errors of the first build are the caller's."""
        try:
            env = self._build()
        except UserError:
            raise
        except Exception as error:
            raise EnvFailure(
                f"Environment {self.index} could not be built: {summary(error)}\n"
                "  Fix: mend that; `reverie check-env TASK` builds just one."
            ) from error
        self.obs_space: Spaces = dict(env.obs_space)
        self.act_space: Spaces = dict(env.act_space)

    def reset(self) -> Obs:
        """The first row of a new episode, however often it takes to get one."""
        while True:
            try:
                obs = self._build().reset(self._fresh_seed() if self._fresh else None)
                self._fresh = False
                return obs
            except UserError:
                raise
            except Exception as error:
                self._fail(error)
                time.sleep(min(0.1 * 2**self._failures, 5.0))

    def step(self, action: Action) -> Obs | None:
        """The next row, or None when the environment failed."""
        assert self._env is not None
        try:
            obs = self._env.step(action)
        except UserError:
            raise
        except Exception as error:
            self._fail(error)
            return None
        self._good_steps += 1
        if obs["is_last"] or self._good_steps >= HEALTHY_STEPS:
            self._failures = self._good_steps = 0
        return obs

    def take_errors(self) -> list[str]:
        """Errors since the last call, each in a few words."""
        errors, self._errors = self._errors, []
        return errors

    def state_dict(self) -> StateDict:
        env = self._env
        return {
            "attempt": self.attempt,
            "failures": self._failures,
            "env": env.state_dict() if is_resumable(env) else None,
        }

    def load_state_dict(self, state: StateDict) -> bool:
        """Take over a saved state; False if a new episode has to be begun instead."""
        self.attempt, self._failures = int(state["attempt"]), int(state["failures"])
        env = self._build()
        if state["env"] is None or not is_resumable(env):
            self.attempt += 1  # or the same episodes would come again
            self._fresh = True
            return False
        env.load_state_dict(state["env"])
        self._fresh = False
        return True

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except Exception as error:
                log.debug("environment %d did not close: %s", self.index, error)

    def _build(self) -> Env:
        if self._env is None:
            self._env = self._make_env(self.index)
            self._fresh = True
        return self._env

    def _fresh_seed(self) -> int | None:
        if self._seed is None and self.attempt == 0:
            return None
        return derive_seed(self._seed or 0, self.index, self.attempt)

    def _fail(self, error: Exception) -> None:
        self.close()
        self.attempt += 1
        self._failures += 1
        self._good_steps = 0
        self._errors.append(summary(error))
        if self._failures >= self._allowed:
            raise EnvFailure(
                failure_message(self.index, self._failures, summary(error))
            ) from error


def is_resumable(env: Any) -> TypeGuard[Stateful]:
    """Whether an environment can be resumed exactly (`isinstance` cannot tell: it
    overlooks what wrappers hand through)."""
    return hasattr(env, "state_dict") and hasattr(env, "load_state_dict")


def failure_message(index: int, failures: int, why: str) -> str:
    return (
        f"Environment {index} failed {failures} times in a row; the last time: {why}\n"
        "  Fix: `reverie check-env TASK` tells what is wrong with an environment; "
        "--env.pool.failures allows more failures."
    )


def summary(error: BaseException) -> str:
    """An error in one line: what it says, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def warn_of_error(index: int, error: str) -> None:
    log.warning(
        "Environment %d failed and was restarted, its episode counts as truncated: %s",
        index,
        error,
    )


def pool_metrics(events: Counter[str]) -> Metrics:
    """Restarts so far, in all and by cause."""
    causes = ("errors", "crashes", "timeouts")
    metrics = {f"env/{cause}": events[cause] for cause in causes}
    return {"env/restarts": sum(metrics.values()), **metrics}


def common_spaces(spaces: list[tuple[Spaces, Spaces]]) -> tuple[Spaces, Spaces]:
    """The spaces all environments of a pool share."""
    first = spaces[0]
    for index, other in enumerate(spaces):
        if other != first:
            raise UserError(
                f"Environment {index} has other spaces than environment 0.\n"
                "  Fix: let every environment of a run show and take the same."
            )
    return first


def write_row(rows: Rows, index: int, obs: Obs) -> None:
    for key, array in rows.items():
        array[index] = obs[key]


def row_of(rows: Rows, index: int) -> Obs:
    return {key: array[index] for key, array in rows.items()}


def truncated_row(rows: Rows, index: int) -> Obs:
    """The row that closes a broken episode: the last one again, as its end."""
    end: dict[str, Any] = {"reward": 0.0, "is_first": False, "is_last": True}
    return {**row_of(rows, index), **end, "is_terminal": False}


def waits(is_last: np.ndarray, lockstep: bool) -> np.ndarray:
    """Which environments wait for others to end their episode."""
    holds = lockstep and not is_last.all()
    return np.array(is_last, bool) if holds else np.zeros(len(is_last), bool)


def pool_state(
    seats: list[StateDict],
    obs: Obs,
    spaces: Spaces,
    waiting: np.ndarray | None = None,
) -> StateDict:
    # The observations as a list, as their names may contain any character.
    rows = [obs[key].copy() for key in sorted(spaces)]
    state: StateDict = {"envs": seats, "obs": rows}
    if waiting is not None and waiting.any():
        state["waiting"] = waiting.copy()
    return state


def saved_waiting(state: StateDict, obs: Obs) -> np.ndarray:
    """Which environments waited; one that had to begin anew does not."""
    waiting = np.asarray(state.get("waiting", np.zeros(len(obs["is_last"]), bool)))
    return np.asarray(waiting & obs["is_last"])


def saved_rows(state: StateDict, spaces: Spaces, count: int) -> Obs:
    if len(state["envs"]) != count:
        raise UserError(
            f"The checkpoint holds {len(state['envs'])} environments, this run has "
            f"{count}.\n  Fix: set --run.envs {len(state['envs'])}."
        )
    return dict(zip(sorted(spaces), map(np.asarray, state["obs"]), strict=True))
