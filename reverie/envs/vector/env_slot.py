"""The place of one environment in a pool, which outlives the environment.

One that raises is closed and built anew, with another seed; so often that going on
makes no sense, it ends the run with `EnvFailure`.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeGuard

from reverie.api import Action, Env, Obs, StateDict, UserError
from reverie.capabilities import Stateful
from reverie.envs.seeding import derive_seed
from reverie.spaces import Spaces

MakeEnv = Callable[[int], Env]
"""Builds environment number `index`."""

HEALTHY_STEPS = 1000
"""After so many good steps earlier failures are forgiven."""

log = logging.getLogger("reverie.envs")


class EnvFailure(UserError):
    """An environment failed so often that going on makes no sense."""


class EnvSlot:
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
        "--env.vector.failures allows more failures."
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
