"""Tells the author of an environment what is wrong with it, and how to mend it.

`check_env` plays a few episodes with random actions and looks at everything an agent
will rely on: keys, dtypes, shapes and ranges, the flags of each row, what happens
around the end of an episode, and whether a seed gives the same episode twice.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np

from reverie.api import Env, Obs, UserError
from reverie.envs.wrappers import Wrapper
from reverie.spaces import FLAGS, RESERVED, Space, Spaces, agent_obs_space

T = TypeVar("T")
Severity = Literal["error", "warning"]
SLOW_STEP = 0.2
"""Seconds; slower steps than this make most training runs wait for the simulator."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong or suspicious."""

    severity: Severity
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}\n  Fix: {self.fix}"


def check_env(
    env: Env, steps: int = 1000, episodes: int = 3, seed: int = 0
) -> list[Finding]:
    """Everything found wrong with an environment, each thing once, errors first.

    Plays until `steps` are taken and an episode has ended, or `episodes` have. Looks at
    what the author wrote: wrappers of `reverie.envs.make` mend and refuse things, so
    they are taken off first.
    """
    while isinstance(env, Wrapper):
        env = env.env
    checker = _Checker(env)
    if checker.check_spaces() and checker.play(steps, episodes, seed):
        checker.check_determinism(seed)
    return sorted(checker.findings, key=lambda finding: finding.severity)


def describe(task: str, env: Env, findings: list[Finding]) -> str:
    """What an agent will see of an environment, and what was found, for a terminal."""
    lines = [f"{task} as an agent meets it"]
    for title, spaces in (
        ("sees", agent_obs_space(env.obs_space)),
        ("does", env.act_space),
    ):
        for key, space in sorted(spaces.items()):
            lines.append(f"  {title}  {key:<12} {_in_words(space)}")
    logged = sorted(key for key in env.obs_space if key.startswith("log/"))
    if logged:
        more = f" and {len(logged) - 3} more" * (len(logged) > 3)
        lines.append(f"  for people only: {', '.join(logged[:3])}{more}")
    errors = sum(finding.severity == "error" for finding in findings)
    lines.append("")
    lines += [str(finding) for finding in findings]
    if findings:
        lines.append(f"{errors} errors, {len(findings) - errors} warnings")
    else:
        lines.append("Nothing wrong was found.")
    return "\n".join(lines)


def _in_words(space: Space) -> str:
    shape = "x".join(map(str, space.shape)) or "one"
    if space.is_image:
        return f"{shape} image"
    if space.is_discrete:
        return f"{shape} of {space.classes} classes"
    low, high = space.low.min(initial=np.inf), space.high.max(initial=-np.inf)
    return f"{shape} {space.dtype} in [{low:g}, {high:g}]"


class _Checker:
    def __init__(self, env: Env):
        self.env = env
        self.findings: list[Finding] = []
        self.told: set[str] = set()
        self.obs_space: Spaces = {}
        self.act_space: Spaces = {}

    def note(self, severity: Severity, what: str, fix: str, about: str = "") -> None:
        """Keep a finding, unless one about the same thing has been kept."""
        about = about or what
        if about not in self.told:
            self.told.add(about)
            self.findings.append(Finding(severity, what, fix))

    # Spaces

    def check_spaces(self) -> bool:
        """Look at what is promised; False if there is nothing to play with."""
        for name in ("obs_space", "act_space"):
            spaces = self._attempt(f"`{name}`", partial(_get, self.env, name))
            if not isinstance(spaces, dict) or not all(
                isinstance(key, str) and isinstance(space, Space)
                for key, space in spaces.items()
            ):
                self.note(
                    "error",
                    f"`{name}` is not a dict of reverie.spaces.Space by name",
                    f"return {{name: Space(dtype, shape, low, high)}} from `{name}`",
                )
                return False
            setattr(self, name, spaces)
        self._check_flags()
        if not agent_obs_space(self.obs_space):
            self.note(
                "error",
                "the observation space has nothing an agent may look at",
                "add an image or a vector beside the flags",
            )
        for key, space in agent_obs_space(self.obs_space).items():
            self._check_seen(key, space)
        if not self.act_space:
            self.note("error", "the action space is empty", "add at least one action")
        for key, space in self.act_space.items():
            self._check_action(key, space)
        return bool(self.act_space)

    def _check_flags(self) -> None:
        for key in FLAGS:
            kind = "f" if key == "reward" else "b"
            wanted = "np.float32" if key == "reward" else "bool"
            space = self.obs_space.get(key)
            if space is None:
                self.note(
                    "error",
                    f"the observation space lacks {key!r}",
                    f"add {key!r}: Space(np.dtype({wanted}))",
                )
            elif space.shape != () or space.dtype.kind != kind:
                self.note(
                    "error",
                    f"{key!r} is {space.dtype} of shape {space.shape}",
                    f"make it one {wanted}: Space(np.dtype({wanted}))",
                )

    def _check_seen(self, key: str, space: Space) -> None:
        shape = space.shape
        if 0 in shape:
            self.note("error", f"{key!r} has no entries: shape {shape}", "leave it out")
        if len(shape) == 3 and space.dtype != np.uint8:
            self.note(
                "error",
                f"{key!r} looks like an image but is {space.dtype}",
                "return it as uint8 from 0 to 255, channels last",
            )
        elif len(shape) == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4):
            self.note(
                "warning",
                f"{key!r} has shape {shape}, which looks like channels first",
                "transpose it to (height, width, channels)",
            )
        elif len(shape) > 3:
            self.note(
                "error",
                f"{key!r} has {len(shape)} axes",
                "stack frames along the channels, or flatten it to a vector",
            )
        if space.dtype.kind in "iu" and not space.is_image and space.classes > 65536:
            self.note(
                "warning",
                f"{key!r} is an integer with {space.classes} values, each a class",
                "give it narrow bounds, or return it as float",
            )

    def _check_action(self, key: str, space: Space) -> None:
        if key in RESERVED or key in self.obs_space:
            self.note(
                "error",
                f"the action {key!r} has the name of something else in a row",
                "rename it",
            )
        if space.dtype.kind == "f" and not (
            np.isfinite(space.low).all() and np.isfinite(space.high).all()
        ):
            self.note(
                "warning",
                f"the action {key!r} has no finite bounds, so it cannot be scaled; "
                "agents will act within [-1, 1]",
                "give it bounds in `act_space`",
            )
        if space.dtype.kind in "iu" and space.classes < 2:
            self.note(
                "warning",
                f"the action {key!r} has only one value",
                "leave it out",
            )

    # Playing

    def play(self, steps: int, episodes: int, seed: int) -> bool:
        """Play with random actions; False if that did not work at all."""
        rng = np.random.default_rng(seed)
        obs = self._first_row(seed)
        if obs is None:
            return False
        taken = ended = 0
        times: list[float] = []
        while taken < steps or ended < 1:
            begin = time.perf_counter()
            action = _random_action(self.act_space, rng)
            after = self._attempt("`step`", partial(self.env.step, action))
            if after is None:
                return False
            times.append(time.perf_counter() - begin)
            self._check_row(after, first=False)
            self._check_aliasing(obs, after)
            obs = after
            taken += 1
            if bool(obs.get("is_last", False)):
                ended += 1
                if ended >= episodes:
                    break
                obs = self._first_row(None)
                if obs is None:
                    return False
            elif taken >= 20 * steps:
                break
        if not ended:
            self.note(
                "warning",
                f"no episode ended within {taken} steps",
                "set `is_last` at a time limit, or cut episodes with --env.length",
            )
        if np.median(times) > SLOW_STEP:
            self.note(
                "warning",
                f"a step takes {np.median(times):.2f} s",
                "use worker processes: --env.vector.workers -1",
            )
        return True

    def check_determinism(self, seed: int) -> None:
        """Play the beginning twice from one seed."""
        first, second = self._beginning(seed), self._beginning(seed)
        for one, two in zip(first, second, strict=False):
            for key in one:
                if key in two and not np.array_equal(one[key], two[key]):
                    self.note(
                        "warning",
                        f"the same seed and actions gave another {key!r}",
                        "draw all randomness from a generator made in `reset(seed)`",
                    )
                    return

    def _beginning(self, seed: int, steps: int = 20) -> list[Obs]:
        rng = np.random.default_rng(seed)
        obs = self._attempt("`reset(seed)`", partial(self.env.reset, seed))
        rows: list[Obs] = []
        while obs is not None and len(rows) < steps:
            rows.append({k: np.array(v) for k, v in obs.items()})
            if bool(obs.get("is_last", False)):
                break
            action = _random_action(self.act_space, rng)
            obs = self._attempt("`step`", partial(self.env.step, action))
        return rows

    def _first_row(self, seed: int | None) -> Obs | None:
        obs = self._attempt("`reset`", partial(self.env.reset, seed))
        if obs is not None:
            self._check_row(obs, first=True)
            if bool(obs.get("is_last", False)):
                self.note(
                    "error",
                    "`reset` returned a row with `is_last`",
                    "begin a new episode in `reset`: set is_last to False",
                )
                return None
        return obs

    def _check_row(self, obs: Obs, first: bool) -> None:
        where = "`reset`" if first else "`step`"
        for key in sorted(self.obs_space.keys() - obs.keys()):
            self.note(
                "error",
                f"{where} did not return {key!r}, which `obs_space` promises",
                f"return {key!r} in every observation",
                about=f"missing {key}",
            )
        for key in sorted(obs.keys() - self.obs_space.keys()):
            self.note(
                "error",
                f"{where} returned {key!r}, which `obs_space` does not know",
                f"add {key!r} to `obs_space`, or leave it out",
                about=f"extra {key}",
            )
        for key in sorted(obs.keys() & self.obs_space.keys()):
            self._check_value(key, self.obs_space[key], obs[key], where)
        is_first, is_last, is_terminal = (
            bool(np.any(obs.get(key, False)))
            for key in ("is_first", "is_last", "is_terminal")
        )
        if is_first != first:
            self.note(
                "error",
                f"{where} returned is_first={is_first}",
                "set is_first in what `reset` returns, and nowhere else",
            )
        if is_terminal and not is_last:
            self.note(
                "error",
                "`is_terminal` was set without `is_last`",
                "set both when the task itself ends the episode",
            )
        if first and np.any(obs.get("reward", 0)):
            self.note(
                "error",
                f"`reset` returned the reward {obs['reward']}",
                "return 0: nothing has been done yet; a row's reward is that of "
                "arriving at it",
            )

    def _check_value(self, key: str, space: Space, value: object, where: str) -> None:
        problem = space.problem(value)
        if problem is None:
            if not np.isfinite(np.asarray(value, np.float64)).all():
                self.note(
                    "error",
                    f"{where}: {key!r} has infinite entries",
                    "clip it to finite numbers",
                )
            return
        array = np.asarray(value)
        severity: Severity = "error"
        if array.dtype == object:
            kind, fix = "object", "return one array of numbers"
        elif array.shape != space.shape:
            kind, fix = "shape", f"return shape {space.shape}, or correct `obs_space`"
        elif array.dtype != space.dtype:
            kind = "dtype"
            fix = f"return np.asarray({key}, np.{space.dtype}), or correct `obs_space`"
            if space.is_image and array.dtype.kind == "f":
                fix = (
                    f"return np.asarray({key}, np.uint8), if it has numbers from 0 to "
                    f"255, or (255 * {key}).astype(np.uint8), if from 0 to 1"
                )
            if array.dtype.kind == space.dtype.kind != "u":
                severity = "warning"  # only the width differs, which is mended for you
        elif "NaN" in problem:
            kind = "NaN"
            fix = "find the division by zero or the diverged simulation behind it"
        else:
            kind = "range"
            fix = "widen `low` and `high` (for integers `high` is one past the largest)"
        self.note(severity, f"{where}: {key!r} {problem}", fix, about=f"{kind} {key}")

    def _check_aliasing(self, before: Obs, after: Obs) -> None:
        for key in sorted(before.keys() & after.keys()):
            old, new = before[key], after[key]
            arrays = isinstance(old, np.ndarray) and isinstance(new, np.ndarray)
            if arrays and old.size and np.shares_memory(old, new):
                self.note(
                    "warning",
                    f"{key!r} is the same array in every step",
                    f"return a copy: {key}.copy()",
                )

    def _attempt(self, what: str, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except UserError as error:
            self.note("error", f"{what} was refused: {error}", "mend that first")
        except Exception as error:
            self.note(
                "error",
                f"{what} raised {type(error).__name__}: {error}",
                "mend that first; everything else was checked up to there",
            )
        return None


def _get(env: Env, name: str) -> Any:
    return getattr(env, name)


def _random_action(spaces: Spaces, rng: np.random.Generator) -> dict[str, np.ndarray]:
    return {key: space.sample(rng) for key, space in spaces.items()}
