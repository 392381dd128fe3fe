"""One slot of a vectorized environment: builds, restarts and resumes its environment.

An environment that raises an exception, or calls `sys.exit()`, is closed and rebuilt
with another seed. After too many failures in a row, the run stops with `EnvFailure`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, TypeGuard

from reverie.api import Action, Env, Obs, StateDict, UserError
from reverie.capabilities import Stateful
from reverie.envs.seeding import derive_seed
from reverie.plugins import is_failure, summarize_error
from reverie.spaces import Spaces

MakeEnv = Callable[[int], Env]
"""Function that builds environment number `index`."""

HEALTHY_STEPS = 1000
"""The count of consecutive failures is reset after this many successful steps."""

log = logging.getLogger("reverie.envs")


class EnvFailure(UserError):
    """An environment could not be built, or failed too many times in a row."""


class EnvSlot:
    """Holds one environment and replaces it when it fails."""

    def __init__(
        self,
        make_env: MakeEnv,
        index: int,
        max_failures: int,
        seed: int | None,
        attempt: int = 0,
    ):
        self.index = index
        self.attempt = attempt
        """Number of restarts so far; part of the seed, so that episodes differ."""
        self._make_env = make_env
        self._max_failures = max_failures
        self._seed = seed
        self._env: Env | None = None
        self._needs_seed = True
        """True if the next reset has to seed the environment."""
        self._failures = 0  # in a row
        self._good_steps = 0
        self._errors: list[str] = []

    def open(self) -> None:
        """Build the environment; raise `EnvFailure` at the first error."""
        try:
            env = self._get_env()
            self.obs_space: Spaces = dict(env.obs_space)
            self.act_space: Spaces = dict(env.act_space)
            self.render_fps = float(getattr(env, "render_fps", 0))
        except BaseException as error:
            if not is_failure(error):
                raise
            raise EnvFailure(
                f"Environment {self.index} could not be built: "
                f"{summarize_error(error)}\n  Fix: correct that error; `reverie "
                "check-env TASK` builds a single environment."
            ) from error

    def reset(self) -> Obs:
        """Return the first row of a new episode, rebuilding the env while it fails."""
        while True:
            try:
                obs = self._get_env().reset(self._next_seed())
                self._needs_seed = False
                return obs
            except BaseException as error:
                if not is_failure(error):
                    raise
                self._handle_failure(error)
                time.sleep(min(0.1 * 2**self._failures, 5.0))  # exponential backoff

    def step(self, action: Action) -> Obs | None:
        """Return the next row, or None if the environment failed."""
        assert self._env is not None
        try:
            obs = self._env.step(action)
        except BaseException as error:
            if not is_failure(error):
                raise
            self._handle_failure(error)
            return None
        self._good_steps += 1
        if obs["is_last"] or self._good_steps >= HEALTHY_STEPS:
            self._failures = self._good_steps = 0
        return obs

    def pop_errors(self) -> list[str]:
        """Return summaries of the errors since the last call."""
        errors, self._errors = self._errors, []
        return errors

    def state_dict(self) -> StateDict:
        """Return the state; its entry `env` is None if the env cannot be saved."""
        env, state = self._env, None
        if is_resumable(env):
            try:
                state = env.state_dict()
            except BaseException as error:
                if not is_failure(error):
                    raise
                warn(
                    f"Environment {self.index} could not be saved, so it will start a "
                    f"new episode if the run is resumed: {summarize_error(error)}"
                )
        return {"attempt": self.attempt, "failures": self._failures, "env": state}

    def load_state_dict(self, state: StateDict) -> bool:
        """Restore a state; False if the environment has to start a new episode."""
        self.attempt, self._failures = int(state["attempt"]), int(state["failures"])
        env = self._get_env()
        if state["env"] is None or not is_resumable(env):
            self.attempt += 1  # changes the seed, so that episodes are not repeated
            self._needs_seed = True
            return False
        try:
            env.load_state_dict(state["env"])
        except BaseException as error:
            if not is_failure(error):
                raise
            self._handle_failure(error)
            return False
        self._needs_seed = False
        return True

    def close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            try:
                env.close()
            except BaseException as error:
                # Only Ctrl-C is raised. All other errors, including `UserError`, are
                # logged, because the environment is not used any more.
                if isinstance(error, KeyboardInterrupt) and not is_failure(error):
                    raise
                log.debug("closing env %d: %s", self.index, summarize_error(error))

    def _get_env(self) -> Env:
        """Return the environment; build it if there is none."""
        if self._env is None:
            self._env = self._make_env(self.index)
            self._needs_seed = True
        return self._env

    def _next_seed(self) -> int | None:
        """Return the seed of the next reset; None keeps the env's random state."""
        if not self._needs_seed or (self._seed is None and self.attempt == 0):
            return None
        return derive_seed(self._seed or 0, self.index, self.attempt)

    def _handle_failure(self, error: BaseException) -> None:
        """Close the environment and store the error; raise after too many failures."""
        self.close()
        self.attempt += 1
        self._failures += 1
        self._good_steps = 0
        summary = summarize_error(error)
        self._errors.append(summary)
        if self._failures >= self._max_failures:
            raise EnvFailure(
                failure_message(self.index, self._failures, summary)
            ) from error


def is_resumable(env: Any) -> TypeGuard[Stateful]:
    """True if the environment can be saved and resumed exactly.

    `isinstance` does not find attributes that wrappers forward.
    """
    return hasattr(env, "state_dict") and hasattr(env, "load_state_dict")


def failure_message(index: int, failures: int, reason: str) -> str:
    """Return the message of `EnvFailure` for repeated failures."""
    return (
        f"Environment {index} failed {failures} times in a row; last error: {reason}\n"
        "  Fix: `reverie check-env TASK` reports problems of an environment; "
        "--env.vector.failures allows more failures."
    )


def warn_of_restart(index: int, error: str) -> None:
    warn(
        f"Environment {index} failed and was restarted; its episode counts as "
        f"truncated. Error: {error}"
    )


def warn(message: str) -> None:
    """Log a warning; do nothing if the environment has closed standard error."""
    with contextlib.suppress(OSError, ValueError):
        log.warning("%s", message)
