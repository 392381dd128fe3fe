"""`Suite`: the declaration that every module in `envs/suites/` ends with."""

from __future__ import annotations

import difflib
import importlib.util
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from reverie.api import Env, VecEnv
from reverie.plugins import install_command


@dataclass(frozen=True)
class Package:
    """The package of a simulator, and how to install it."""

    module: str
    """Importable module."""
    distributions: tuple[str, ...] = ()
    """Distributions whose versions are recorded in docs/environments.md."""
    max_python: tuple[int, int] | None = None
    """Newest Python version that it can be installed on, if limited."""
    license: str = "MIT"
    group: str = ""
    """Suites with the same group name can be installed in one virtual environment;
    empty if the suite needs a separate one."""
    extra: str = ""
    """Extra of Reverie that installs it, if it is not the name of the suite."""
    script: str = ""
    """Script in this repository that installs it, if pip alone cannot."""
    note: str = ""
    """Sentence that is added to install instructions."""


@dataclass(frozen=True)
class Suite:
    """A group of tasks that share one simulator.

    The registry reads these declarations; the simulator is imported by `make` only.
    """

    name: str
    """Prefix of the task names: `--task NAME_TASK`."""
    description: str
    """What the suite contains, in a few words."""
    make: Callable[[str, Any], Env]
    """Build a task from its name without the prefix and the suite's config (None if
    the suite has no config)."""
    config: type | None = None
    """Dataclass with the suite's settings, available as flags `--env.NAME.*`."""
    config_name: str = ""
    """Field of `EnvConfig` with these settings, if it is not the suite's name."""
    tasks: tuple[str, ...] = ("",)
    """Task names without the prefix: `("",)` if the suite is a single task, `()` if the
    tasks cannot be listed."""
    benchmark: tuple[str, ...] = ()
    """Tasks of the benchmark that the suite is named after; empty for all tasks."""
    accepts: Callable[[str], bool] | None = None
    """Returns True for a task that is not in `tasks`. May import the simulator."""
    name_format: str = ""
    """Format of the task names and one example, if it is not `NAME_TASK`. It is written
    as `FORMAT, such as EXAMPLE`: `gym_ID, such as gym_CartPole-v1`."""
    make_native: Callable[..., VecEnv] | None = None
    """Build several environments with the simulator's own vectorized implementation;
    see `reverie/envs/suites/atari/native.py`."""
    recorded_settings: Callable[[Mapping[str, Any], int], dict[str, Any]] | None = None
    """Convert the `env_args` of a robomimic dataset to settings of this suite. The
    second argument is the maximum number of steps of its episodes."""
    package: Package | None = None
    """Package of the simulator; None if the suite is built in."""

    def own_config(self, config: Any) -> Any:
        """Return this suite's settings in an `EnvConfig`; None if it has no config."""
        return getattr(config, self.config_name or self.name) if self.config else None

    @property
    def license(self) -> str:
        """License of the simulator; of this package if the suite is built in."""
        return self.package.license if self.package else "MIT"

    @property
    def install_command(self) -> str:
        """Shell command that installs the simulator; empty if the suite is built in."""
        package = self.package
        if package is None:
            return ""
        if package.script:
            return f"sh {package.script} VENV"
        return install_command(package.extra or self.name)

    @property
    def is_installed(self) -> bool:
        if self.package is None:
            return True
        return importlib.util.find_spec(self.package.module) is not None

    def full_name(self, task: str) -> str:
        return f"{self.name}_{task}" if task else self.name

    @property
    def example(self) -> str:
        """Full name of one task."""
        if self.tasks:
            return self.full_name(self.tasks[0])
        return self.name_format.rpartition("such as ")[2]

    def describe(self, all_tasks: bool = False) -> str:
        """Format the suite, its tasks and how to install it for a terminal."""
        tasks = [self.full_name(task) for task in self.tasks]
        if all_tasks:
            lines = [textwrap.fill(" ".join(tasks), 76, break_on_hyphens=False)]
        else:
            count = f", ... ({len(tasks)} tasks)" * (len(tasks) > 4)
            lines = [", ".join(tasks[:4]) + count]
        if not tasks or (all_tasks and self.name_format):
            lines = [*filter(None, lines), self.name_format]
        if self.package is None:
            lines.append("built in")
        elif self.is_installed:
            lines.append("installed")
        else:
            lines.append(f"{self.install_command} {self.package.note}".strip())
        title = f"{self.name:<11} {self.description} ({self.license})"
        return title + textwrap.indent("\n" + "\n".join(lines), " " * 12)

    def has_task(self, name: str) -> bool:
        """True if the suite has this task, or if its tasks cannot be listed."""
        if not self.tasks or name in self.tasks:
            return True
        try:
            return self.accepts is not None and self.accepts(name)
        except ImportError:
            return False

    @property
    def install_help(self) -> tuple[str, str]:
        """Return what is missing, and the command that installs it on this Python."""
        package = self.package
        assert package is not None
        note = f" {package.note}" if package.note else ""
        problem = f"needs the package {package.module!r}, which is not installed.{note}"
        if package.max_python is None or sys.version_info[:2] <= package.max_python:
            return problem, self.install_command
        newest, current = (
            ".".join(map(str, version))
            for version in (package.max_python, sys.version_info[:2])
        )
        problem += f" It supports Python {newest} and older; this is Python {current}."
        if package.script:  # the script creates a virtual environment
            return problem, f"{self.install_command} python{newest}"
        command = f"VENV/bin/{self.install_command}"
        return problem, f"python{newest} -m venv VENV && {command}"


@dataclass(frozen=True)
class ImageConfig:
    """Settings of suites with image observations."""

    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""


@dataclass(frozen=True)
class ImageAndStateConfig(ImageConfig):
    """Settings of suites with image observations, state observations or both."""

    repeat: int = 1
    """Simulator steps per action; rewards are summed."""
    image: bool = True
    """Observe a camera image as `image`."""
    proprio: bool = True
    """Observe the state, such as positions and velocities."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or not (self.image or self.proprio):
            raise ValueError(f"needs repeat >= 1 and image or proprio, got {self}")


def suggest(word: str, names: Iterable[str]) -> str:
    """Return ` Did you mean ...?` with the closest names, or an empty string.

    Names that differ only in suite, case, version or the order of words are preferred
    to similar names: `gym_CartPole-v1` for `cartpole`.
    """
    names = list(names)
    stem = _stem(word)
    parts = sorted(word.lower().split("_"))
    matches = [
        name
        for name in names
        if stem in (_stem(name), _stem(name.partition("_")[2]))
        or parts == sorted(name.lower().split("_"))
    ][:3]
    if not matches:
        # compare without the prefix of the suite, which would make all of its tasks
        # similar
        suite = f"{word.lower().partition('_')[0]}_"
        if not any(name.lower().startswith(suite) for name in names):
            suite = ""  # there is no such suite
        tasks = {name.lower().removeprefix(suite): name for name in reversed(names)}
        task = word.lower().removeprefix(suite)
        close = difflib.get_close_matches(task, tasks, n=3, cutoff=0.65)
        matches = [tasks[name] for name in close]
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


def _stem(name: str) -> str:
    """Return the letters and digits of a name without namespace and version."""
    name = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", name.rpartition("/")[2])
    return re.sub(r"[^a-z0-9]", "", name.lower())
