"""Environment checker: report violations of the `Env` interface with their fixes.

`check_env` runs a few episodes with random actions. It checks the spaces, the dtypes,
shapes and ranges of observations, the episode flags, and whether a seed reproduces an
episode.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from reverie.api import Env, Obs, UserError
from reverie.envs.adapters.gymnasium import GymnasiumEnv
from reverie.envs.registry import EnvConfig, make
from reverie.envs.wrappers import without_wrappers
from reverie.plugins import is_failure, summarize_error
from reverie.spaces import RESERVED, STEP_KEYS, Space, Spaces, agent_obs_space

T = TypeVar("T")
Severity = Literal["error", "warning"]
SLOW_STEP = 0.2
"""Seconds per step above which a warning suggests worker processes."""
MAX_CLASSES = 65536
"""A warning is reported for integers with more values, as they are encoded one-hot."""

GYMNASIUM_NAMES = {"obs_space": "observation_space", "act_space": "action_space"}


@dataclass(frozen=True)
class Finding:
    """One problem of an environment."""

    severity: Severity
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.message}\n  Fix: {self.fix}"


def check_env(
    env: Env, steps: int = 1000, episodes: int = 3, seed: int = 0
) -> list[Finding]:
    """Return the problems of an environment without duplicates, errors first.

    Runs until `steps` steps are taken and an episode has ended, or until `episodes`
    episodes have ended, but for at most `20 * steps` steps. The wrappers of
    `reverie.envs.make` are removed first, because they correct or reject some problems.
    """
    checker = _Checker(without_wrappers(env))
    if checker.check_spaces() and checker.check_episodes(steps, episodes, seed):
        checker.check_determinism(seed)
    return sorted(checker.findings, key=lambda finding: finding.severity)


def check_task(task: str, config: EnvConfig, seed: int) -> tuple[Env, list[Finding]]:
    """Build a task, check it and close it; raise `UserError` if it cannot be built."""
    try:
        env = make(task, config, seed)
    except BaseException as error:  # the environment may raise any exception
        if not is_failure(error):
            raise
        raise UserError(
            f"Creating the environment {task} failed: {summarize_error(error)}\n"
            "  Fix: correct this error in the environment and check it again."
        ) from error
    try:
        return env, check_env(env)
    finally:
        with contextlib.suppress(Exception, SystemExit):
            env.close()


def describe(task: str, env: Env, findings: list[Finding]) -> str:
    """Format the spaces that an agent sees, and the findings, for a terminal."""
    lines = [f"{task}: spaces seen by an agent"]
    for title, spaces in (
        ("observation", agent_obs_space(env.obs_space)),
        ("action", env.act_space),
    ):
        for key, space in sorted(spaces.items()):
            lines.append(f"  {title:<11}  {key:<12} {_describe_space(space)}")
    logged = sorted(key for key in env.obs_space if key.startswith("log/"))
    if logged:
        remaining = f" and {len(logged) - 3} more" * (len(logged) > 3)
        lines.append(f"  logged only: {', '.join(logged[:3])}{remaining}")
    errors = sum(finding.severity == "error" for finding in findings)
    lines.append("")
    lines += [str(finding) for finding in findings]
    if findings:
        lines.append(f"{errors} errors, {len(findings) - errors} warnings")
    else:
        lines.append("No problems found.")
    return "\n".join(lines)


def _describe_space(space: Space) -> str:
    shape = "x".join(map(str, space.shape)) or "scalar"
    if space.is_image:
        return f"{shape} image"
    if space.is_discrete:
        return f"{shape}, {space.classes} classes"
    low, high = space.low.min(initial=np.inf), space.high.max(initial=-np.inf)
    return f"{shape} {space.dtype} in [{low:g}, {high:g}]"


class _Checker:
    """Runs the checks on one environment and collects the findings."""

    def __init__(self, env: Env):
        self.env = env
        self.is_gymnasium = isinstance(env, GymnasiumEnv)
        self.findings: list[Finding] = []
        self.reported_topics: set[str] = set()
        self.obs_space: Spaces = {}
        self.act_space: Spaces = {}

    def add(self, severity: Severity, message: str, fix: str, topic: str = "") -> None:
        """Add a finding, unless there is one with the same topic (or message)."""
        if (topic := topic or message) not in self.reported_topics:
            self.reported_topics.add(topic)
            self.findings.append(Finding(severity, message, fix))

    def error(self, message: str, fix: str, topic: str = "") -> None:
        self.add("error", message, fix, topic)

    def warn(self, message: str, fix: str) -> None:
        self.add("warning", message, fix)

    def _name(self, name: str) -> str:
        """Return the name of an attribute of `Env` in the API of the environment."""
        return GYMNASIUM_NAMES[name] if self.is_gymnasium else name

    def _time_limit(self) -> str:
        if self.is_gymnasium:
            return "return `truncated=True` from `step` at a time limit"
        return "set `is_last` at a time limit"

    # Spaces

    def check_spaces(self) -> bool:
        """Check the declared spaces; False if episodes cannot be run."""
        for name in ("obs_space", "act_space"):
            spaces = self._call(f"`{name}`", partial(getattr, self.env, name))
            if not isinstance(spaces, dict) or not all(
                isinstance(key, str) and isinstance(space, Space)
                for key, space in spaces.items()
            ):
                self.error(
                    f"`{name}` is not a dict with reverie.spaces.Space values",
                    f"return {{name: Space(dtype, shape, low, high)}} from `{name}`",
                )
                return False
            setattr(self, name, spaces)
        self._check_step_keys()
        if not agent_obs_space(self.obs_space):
            self.error(
                "the observation space has no key that an agent can use",
                "add an image or a vector to it",
            )
        for key, space in agent_obs_space(self.obs_space).items():
            self._check_obs_space(key, space)
        if not self.act_space:
            self.error("the action space is empty", "add at least one action")
        for key, space in self.act_space.items():
            self._check_act_space(key, space)
        return bool(self.act_space)

    def _check_step_keys(self) -> None:
        """Check that the reward and the episode flags are scalars with their dtypes."""
        for key in STEP_KEYS:
            kind = "f" if key == "reward" else "b"
            dtype = "np.float32" if key == "reward" else "bool"
            space = self.obs_space.get(key)
            if space is None:
                self.error(
                    f"the observation space lacks {key!r}",
                    f"add {key!r}: Space(np.dtype({dtype}))",
                )
            elif space.shape != () or space.dtype.kind != kind:
                self.error(
                    f"{key!r} is {space.dtype} of shape {space.shape}",
                    f"make it a scalar: Space(np.dtype({dtype}))",
                )

    def _check_obs_space(self, key: str, space: Space) -> None:
        shape = space.shape
        if 0 in shape:
            self.error(f"{key!r} has no entries: shape {shape}", "remove it")
        if len(shape) == 3 and space.dtype != np.uint8:
            self.error(
                f"{key!r} looks like an image but is {space.dtype}",
                "return it as uint8 from 0 to 255, channels last",
            )
        elif len(shape) == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4):
            self.warn(
                f"{key!r} has shape {shape}, which looks like channels first",
                "transpose it to (height, width, channels)",
            )
        elif len(shape) > 3:
            self.error(
                f"{key!r} has {len(shape)} axes",
                "stack frames along the channels, or flatten it to a vector",
            )
        if (
            space.dtype.kind in "iu"
            and not space.is_image
            and space.classes > MAX_CLASSES
        ):
            self.warn(
                f"{key!r} is an integer with {space.classes} classes, encoded one-hot",
                "give it tighter bounds, or return it as float",
            )

    def _check_act_space(self, key: str, space: Space) -> None:
        if key in RESERVED or key in self.obs_space:
            self.error(
                f"the action {key!r} has a reserved name or the name of an observation",
                "rename it",
            )
        if not space.is_bounded:
            self.warn(
                f"the action {key!r} has no finite bounds, so it cannot be scaled; "
                "agents will use [-1, 1]",
                f"set finite bounds in `{self._name('act_space')}`",
            )
        if space.dtype.kind in "iu" and space.classes < 2:
            self.warn(f"the action {key!r} has only one value", "remove it")

    # Episodes

    def check_episodes(self, steps: int, episodes: int, seed: int) -> bool:
        """Run episodes with random actions; False if the environment failed."""
        rng = np.random.default_rng(seed)
        obs = self._reset(seed)
        if obs is None:
            return False
        steps_taken = ended = 0
        times: list[float] = []
        while steps_taken < steps or ended < 1:
            start = time.perf_counter()
            action = _random_action(self.act_space, rng)
            next_obs = self._call("`step`", partial(self.env.step, action))
            if next_obs is None:
                return False
            times.append(time.perf_counter() - start)
            self._check_obs(next_obs, from_reset=False)
            self._check_aliasing(obs, next_obs)
            obs = next_obs
            steps_taken += 1
            if bool(obs.get("is_last", False)):
                ended += 1
                if ended >= episodes:
                    break
                obs = self._reset(None)
                if obs is None:
                    return False
            elif steps_taken >= 20 * steps:
                break
        if not ended:
            self.warn(
                f"no episode ended within {steps_taken} steps",
                f"{self._time_limit()}, or set a time limit with --env.length",
            )
        if np.median(times) > SLOW_STEP:
            self.warn(
                f"a step takes {np.median(times):.2f} s",
                "use worker processes: --env.vector.workers -1",
            )
        return True

    def check_determinism(self, seed: int) -> None:
        """Check that the same seed and actions give the same observations twice."""
        first, second = self._first_observations(seed), self._first_observations(seed)
        for obs, other in zip(first, second, strict=False):
            for key in obs:
                if key in other and not _are_equal(obs[key], other[key]):
                    self.warn(
                        f"the same seed and actions gave a different {key!r}",
                        "use one random generator, created in `reset(seed)`",
                    )
                    return

    def _first_observations(self, seed: int, steps: int = 20) -> list[Obs]:
        """Return the observations of a seeded reset and of seeded random actions."""
        rng = np.random.default_rng(seed)
        obs = self._call("`reset(seed)`", partial(self.env.reset, seed))
        observations: list[Obs] = []
        while obs is not None and len(observations) < steps:
            observations.append({k: np.array(v) for k, v in obs.items()})
            if bool(obs.get("is_last", False)):
                break
            action = _random_action(self.act_space, rng)
            obs = self._call("`step`", partial(self.env.step, action))
        return observations

    def _reset(self, seed: int | None) -> Obs | None:
        """Reset and check the observation; None if no episode can be started."""
        obs = self._call("`reset`", partial(self.env.reset, seed))
        if obs is not None:
            self._check_obs(obs, from_reset=True)
            if bool(obs.get("is_last", False)):
                self.error(
                    "`reset` returned an observation with `is_last`",
                    "start a new episode in `reset`: set is_last to False",
                )
                return None
        return obs

    def _check_obs(self, obs: Obs, from_reset: bool) -> None:
        """Check the keys, values, episode flags and reward of one observation."""
        where = "`reset`" if from_reset else "`step`"
        for key in sorted(self.obs_space.keys() - obs.keys()):
            self.error(
                f"{where} did not return {key!r}, which is in `obs_space`",
                f"return {key!r} in every observation",
                topic=f"missing {key}",
            )
        for key in sorted(obs.keys() - self.obs_space.keys()):
            self.error(
                f"{where} returned {key!r}, which is not in `obs_space`",
                f"add {key!r} to `obs_space`, or remove it",
                topic=f"extra {key}",
            )
        for key in sorted(obs.keys() & self.obs_space.keys()):
            self._check_value(key, self.obs_space[key], obs[key], where)
        is_first, is_last, is_terminal = (
            bool(np.any(obs.get(key, False)))
            for key in ("is_first", "is_last", "is_terminal")
        )
        if is_first != from_reset:
            self.error(
                f"{where} returned is_first={is_first}",
                "set is_first in observations returned by `reset`, and only there",
            )
        if is_terminal and not is_last:
            self.error(
                "`is_terminal` was set without `is_last`",
                "set both when the episode terminates",
            )
        if from_reset and np.any(obs.get("reward", 0)):
            self.error(
                f"`reset` returned the reward {obs['reward']}",
                "return 0: a reward belongs to the action before the observation",
            )

    def _check_value(self, key: str, space: Space, value: object, where: str) -> None:
        """Report a value that is not in its space, with a fix."""
        problem = space.problem(value)
        if problem is None:
            return
        declared = f"`{self._name('obs_space')}`"
        array = np.asarray(value)
        severity: Severity = "error"
        if array.dtype == object:
            kind, fix = "object", "return an array of numbers"
        elif array.shape != space.shape:
            kind, fix = "shape", f"return shape {space.shape}, or correct {declared}"
        elif array.dtype != space.dtype:
            kind = "dtype"
            fix = f"return np.asarray({key}, np.{space.dtype}), or correct {declared}"
            if space.is_image and array.dtype.kind == "f":
                fix = (
                    f"return np.asarray({key}, np.uint8) if values are in [0, 255], "
                    f"or (255 * {key}).astype(np.uint8) if they are in [0, 1]"
                )
            if array.dtype.kind == space.dtype.kind != "u":
                severity = "warning"  # only the bit width differs; `make` converts it
        elif "NaN" in problem:
            kind = "NaN"
            fix = "look for a division by zero or a diverged simulation"
        elif "infinite" in problem:
            kind, fix = "infinite", "clip it to finite numbers"
        else:
            kind, fix = "range", f"widen `low` and `high` in {declared}"
            if not self.is_gymnasium:
                fix += " (for integers, `high` is exclusive)"
            elif space.is_discrete and not space.shape:
                fix = f"increase `n` or change `start` in {declared}"
        self.add(severity, f"{where}: {key!r} {problem}", fix, topic=f"{kind} {key}")

    def _check_aliasing(self, obs: Obs, next_obs: Obs) -> None:
        """Warn if a step overwrites the arrays of the previous observation."""
        for key in sorted(obs.keys() & next_obs.keys()):
            old, new = obs[key], next_obs[key]
            are_arrays = isinstance(old, np.ndarray) and isinstance(new, np.ndarray)
            if are_arrays and old.size and np.shares_memory(old, new):
                self.warn(
                    f"every step returns the same array as {key!r} and overwrites it",
                    f"return a copy: {key}.copy()",
                )

    def _call(self, name: str, call: Callable[[], T]) -> T | None:
        """Return the result of a call, or None if it raised an exception."""
        try:
            return call()
        except BaseException as error:
            # raise Ctrl-C, but report a KeyboardInterrupt raised by the environment
            if isinstance(error, KeyboardInterrupt) and not is_failure(error):
                raise
            self.error(
                f"{name} raised {summarize_error(error)}",
                "correct this error and check again; the remaining checks were skipped",
            )
        return None


def _are_equal(first: np.ndarray, second: np.ndarray) -> bool:
    """True if two arrays have the same values; NaN is equal to NaN."""
    are_floats = first.dtype.kind == second.dtype.kind == "f"
    return np.array_equal(first, second, equal_nan=are_floats)


def _random_action(spaces: Spaces, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {key: space.sample(rng) for key, space in spaces.items()}
