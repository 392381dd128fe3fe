"""What a sweep may choose a setting from: a list of choices, or all between two ends.

    bc.head.kind: [mlp, mixture]                    a choice
    bc.opt.lr: {low: 1e-5, high: 1e-3, log: true}   a number
    bc.head.layers: {low: 1, high: 4}               a whole number, as the setting is

A grid needs finitely many values: the choices, whole numbers, or so many steps between
the ends (`count: 5`, or `step: 0.1`).
"""

from __future__ import annotations

import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.config import suggest


@dataclass(frozen=True)
class Choice:
    """One of a few values, each as the words that a command line has for it."""

    options: tuple[tuple[str, ...], ...]

    log = False

    def suggest(self, trial: Any, name: str) -> str:
        return trial.suggest_categorical(name, self.probes())

    def words(self, value: Any) -> list[str]:
        return list(self.options[self.probes().index(value)])

    def probes(self) -> list[Any]:
        """Values that stand for all, to see whether the setting takes them."""
        return [" ".join(words) for words in self.options]

    def grid(self, name: str) -> list[Any]:
        return self.probes()

    def plain(self) -> Any:
        """As a file would have it."""
        return [words[0] if len(words) == 1 else list(words) for words in self.options]


@dataclass(frozen=True)
class Between:
    """A number from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Each power of ten is as likely as any other."""
    step: float | None = None
    count: int | None = None
    """How many of them a grid has."""
    whole: bool = False

    def suggest(self, trial: Any, name: str) -> float:
        if self.whole:
            low, high, step = int(self.low), int(self.high), int(self.step or 1)
            return trial.suggest_int(name, low, high, step=step, log=self.log)
        return trial.suggest_float(
            name, self.low, self.high, step=self.step, log=self.log
        )

    def words(self, value: Any) -> list[str]:
        return [repr(value)]

    def probes(self) -> list[Any]:
        ends = [self.low, self.high]
        return [int(end) for end in ends] if self.whole else ends

    def grid(self, name: str) -> list[Any]:
        if self.count:
            space = np.geomspace if self.log else np.linspace
            found = space(self.low, self.high, self.count).tolist()
            found[0] = self.low  # not a hair beside it
            found[-1] = self.high if self.count > 1 else self.low
        elif self.step or (self.whole and not self.log):
            step = self.step or 1
            steps = math.floor((self.high - self.low) / step + 1e-9)
            found = [self.low + step * i for i in range(steps + 1)]
        else:
            raise UserError(
                f"A grid needs to know how many values of {name} to try.\n"
                "  Fix: add `count: 5` to its range, or list the values."
            )
        return list(dict.fromkeys(round(x) for x in found)) if self.whole else found

    def plain(self) -> Any:
        found: dict[str, Any] = {"low": self.low, "high": self.high}
        found |= {"log": True} if self.log else {}
        found |= {"step": self.step} if self.step else {}
        return found | ({"count": self.count} if self.count else {})


Range = Choice | Between


def parse_range(name: str, data: Any, kind: Any) -> Range:
    """The range that a file gives for a setting of some type."""
    if isinstance(data, Mapping):
        return _between(name, data, _number_type(kind))
    if not isinstance(data, list):
        raise UserError(
            f"The range of {name} is {data!r}.\n"
            f"  Fix: {name}: {{low: 1, high: 10}}, or a list of choices; what never "
            "changes stands under `settings`."
        )
    options = tuple(dict.fromkeys(tuple(as_words(value)) for value in data))
    if not options:
        raise UserError(
            f"The range of {name} is empty.\n  Fix: {name}: [one choice, another]"
        )
    return Choice(options)


def as_words(value: Any) -> list[str]:
    """A value of a file as the words of a command line."""
    if isinstance(value, Mapping):
        raise UserError(
            f"{dict(value)!r} is no value of a setting.\n  Fix: write a word, a number "
            "or a list of them."
        )
    return [str(x) for x in value] if isinstance(value, list | tuple) else [str(value)]


def _between(name: str, data: Mapping[str, Any], number: type | None) -> Between:
    if number is None:
        raise UserError(
            f"{name} is no number, so it has no low and high.\n"
            f"  Fix: {name}: [one choice, another]"
        )
    known = [field.name for field in fields(Between) if field.name != "whole"]
    for key in data:
        if key not in known:
            raise UserError(
                f"The range of {name} has no {key!r}.{suggest(str(key), known)}\n"
                f"  Fix: choose from {', '.join(known)}."
            )
    for end in ("low", "high"):
        if end not in data:
            raise UserError(
                f"The range of {name} has no {end} end.\n"
                f"  Fix: {name}: {{low: 1, high: 10}}"
            )
    log, whole = data.get("log", False), number is int
    if not isinstance(log, bool):
        raise UserError(f"The log of {name} is {log!r}.\n  Fix: log: true, or false")
    low = _number(name, "low", data["low"], whole)
    high = _number(name, "high", data["high"], whole)
    step = data.get("step")
    step = None if step is None else _number(name, "step", step, whole)
    count = data.get("count")
    count = None if count is None else int(_number(name, "count", count, whole=True))
    if low > high:
        raise UserError(
            f"The range of {name} is empty: {low:g} is above {high:g}.\n"
            f"  Fix: {name}: {{low: {high:g}, high: {low:g}}}"
        )
    if log and low <= 0:
        raise UserError(
            f"The range of {name} has a logarithm and begins at {low:g}.\n"
            "  Fix: begin above zero, or leave out `log`."
        )
    if log and step is not None:
        raise UserError(
            f"The range of {name} has both `log` and `step`.\n  Fix: use `count`."
        )
    if (step is not None and step <= 0) or (count is not None and count < 1):
        raise UserError(
            f"The range of {name} has no values that far apart.\n"
            "  Fix: give a step or a count above zero."
        )
    return Between(low, high, log, step, count, whole)


def _number(name: str, end: str, value: Any, whole: bool) -> float:
    try:
        found = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):  # YAML has 1e-3 for a word
        found = math.nan
    if not math.isfinite(found) or (whole and found != int(found)):
        wanted = "a whole number" if whole else "a number"
        raise UserError(
            f"The {end} of {name} is {value!r}, and should be {wanted}.\n"
            f"  Fix: {end}: 1"
        )
    return found


def _number_type(kind: Any) -> type | None:
    """Whether a type takes fractions, or whole numbers, or neither."""
    kinds = typing.get_args(kind) or (kind,)
    return next((number for number in (float, int) if number in kinds), None)
