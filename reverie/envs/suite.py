"""A row of the suite table: what a suite is, how to get it, what is in the way."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from reverie.api import Env


@dataclass(frozen=True)
class Suite:
    """One row of the table: what a suite is, and how to get it."""

    name: str
    about: str
    licence: str
    tasks: tuple[str, ...] = ()
    """Its task names without the prefix; empty where they are not a closed list."""
    more: Callable[[str], bool] | None = None
    """Whether it has a task that is not listed; may ask the package."""
    naming: str = ""
    """How its tasks are named, where they are not listed."""
    build: Callable[[str, Any], Env] | None = None
    """Makes a task by name; None while there is no adapter yet."""
    package: str = ""
    """The module that must be importable; empty for built-ins."""
    extra: str = ""
    """The extra that installs it, where that is not called like the suite."""
    script: str = ""
    """The script of the repository that installs it, where pip alone cannot."""
    newest_python: tuple[int, int] | None = None
    """The newest Python its packages install on, where there is such a limit."""
    note: str = ""
    """What else there is to say about getting it."""

    @property
    def install(self) -> str:
        if self.script:
            return f"sh {self.script} VENV"
        extra = self.extra or self.name
        return f"pip install 'reverie[{extra}]'" if self.package else ""

    @property
    def is_installed(self) -> bool:
        return not self.package or importlib.util.find_spec(self.package) is not None

    def full_name(self, task: str) -> str:
        return f"{self.name}_{task}" if task else self.name

    @property
    def example(self) -> str:
        """A task of it by its full name."""
        if self.tasks:
            return self.full_name(self.tasks[0])
        return self.naming.rpartition("such as ")[2]

    def describe(self, every_task: bool = False) -> str:
        """What it is, its tasks, and whether it is installed or how to get it."""
        tasks = [self.full_name(task) for task in self.tasks]
        shown = ", ".join(tasks[:4]) + f", ... ({len(tasks)})" * (len(tasks) > 4)
        named = (
            [textwrap.fill(" ".join(tasks), 76, break_on_hyphens=False)]
            if every_task
            else [shown]
        )
        if not tasks or (every_task and self.naming):
            named = [*filter(None, named), self.naming]
        if self.is_installed:
            state = "installed" if self.package else "built in"
        else:
            state = f"{self.install} {self.note}".strip()
        about = f"{self.name:<11} {self.about} ({self.licence})"
        return about + textwrap.indent("\n" + "\n".join([*named, state]), " " * 12)

    def has_more(self, name: str) -> bool:
        """Whether a name that is not listed is a task all the same."""
        try:
            return self.more is not None and self.more(name)
        except ImportError:
            return False

    @property
    def missing(self) -> tuple[str, str]:
        """That its package is not installed; and how to get it on this Python."""
        note = f" {self.note}" if self.note else ""
        lacks = f"needs the package {self.package!r}, which is not installed.{note}"
        if self.newest_python is None or sys.version_info[:2] <= self.newest_python:
            return lacks, self.install
        newest, here = (
            ".".join(map(str, version))
            for version in (self.newest_python, sys.version_info[:2])
        )
        lacks += f" It installs on Python {newest} at most, and this is {here}."
        if self.script:  # makes its own
            return lacks, f"{self.install} python{newest}"
        return lacks, f"python{newest} -m venv OTHER && OTHER/bin/{self.install}"


def nearest(word: str, names: Iterable[str]) -> str:
    """A question that names what was probably meant, or nothing."""
    close = difflib.get_close_matches(word, list(names), 3)
    return f" Did you mean {' or '.join(close)}?" if close else ""
