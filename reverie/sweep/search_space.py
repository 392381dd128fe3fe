"""The search space: the range of values of each hyperparameter.

    bc.head.kind: [mlp, mixture]                    a list of choices
    bc.opt.lr: {low: 1e-5, high: 1e-3, log: true}   a float, log-uniform
    bc.head.layers: {low: 1, high: 4}               an int, if the setting is one

Grid search needs a finite number of values: choices, ints, or a `count` or `step` for
floats.
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
from reverie.run.spec_file import to_arguments

MAX_POINTS = 10_000
"""Maximum number of values of a setting in a grid search."""


@dataclass(frozen=True)
class CategoricalRange:
    """A list of choices. Each choice is one or more words of a command line."""

    options: tuple[tuple[str, ...], ...]

    log = False  # as in `NumericRange`

    @property
    def values(self) -> list[str]:
        """The choices as strings, which are the values of the hyperparameter."""
        return [" ".join(words) for words in self.options]

    def suggest(self, trial: Any, name: str) -> str:
        """Return the value that an Optuna trial proposes."""
        return trial.suggest_categorical(name, self.values)

    def to_arguments(self, value: Any) -> list[str]:
        """Return a value as words of a command line."""
        return list(self.options[self.values.index(value)])

    def validation_values(self) -> list[Any]:
        """Return the values to check before the first run, here all choices."""
        return self.values

    def grid(self, name: str) -> list[Any]:
        """Return the values of a grid search."""
        return self.values

    def to_yaml(self) -> Any:
        return [words[0] if len(words) == 1 else list(words) for words in self.options]


@dataclass(frozen=True)
class NumericRange:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    """Sample log-uniformly."""
    step: float | None = None
    """Distance between neighboring values; None for any value."""
    count: int | None = None
    """Number of values in a grid search."""
    integer: bool = False

    def suggest(self, trial: Any, name: str) -> float:
        if self.integer:
            low, high, step = int(self.low), int(self.high), int(self.step or 1)
            return trial.suggest_int(name, low, high, step=step, log=self.log)
        return trial.suggest_float(
            name, self.low, self.high, step=self.step, log=self.log
        )

    def to_arguments(self, value: Any) -> list[str]:
        return [repr(value)]

    def validation_values(self) -> list[Any]:
        """Return the values to check before the first run, here both ends."""
        ends = [self.low, self.high]
        return [int(end) for end in ends] if self.integer else ends

    def grid(self, name: str) -> list[Any]:
        step = self.step or 1
        # 1e-9: a rounding error must not remove the last value
        steps = math.floor((self.high - self.low) / step + 1e-9)
        count = self.count or (steps + 1 if self.step or self.integer else 0)
        # with `log`, `count` is required: the error below says so
        if count > MAX_POINTS and (self.count or not self.log):
            raise UserError(
                f"The grid of {name} has {count:,} values, and at most {MAX_POINTS:,} "
                "are supported.\n  Fix: add `count: 5` to it, or list the values."
            )
        if self.count:
            space = np.geomspace if self.log else np.linspace
            values = space(self.low, self.high, self.count).tolist()
            values[0] = self.low  # `geomspace` has rounding errors
            values[-1] = self.high if self.count > 1 else self.low
        elif self.step or (self.integer and not self.log):
            values = [self.low + step * i for i in range(steps + 1)]
        else:
            raise UserError(
                f"Grid search needs the number of values of {name}.\n"
                "  Fix: add `count: 5` to its range, or list the values."
            )
        if self.integer:
            return list(dict.fromkeys(round(value) for value in values))
        return values

    def to_yaml(self) -> Any:
        data: dict[str, Any] = {"low": self.low, "high": self.high}
        data |= {"log": True} if self.log else {}
        data |= {"step": self.step} if self.step else {}
        return data | ({"count": self.count} if self.count else {})


Range = CategoricalRange | NumericRange


def parse_range(name: str, data: Any, setting_type: Any) -> Range:
    """Read the range of a setting from the value in a YAML file."""
    if isinstance(data, Mapping):
        return _parse_numeric(name, data, _number_type(setting_type))
    if not isinstance(data, list):
        raise _range_error(
            name,
            f"is {data!r}, which is neither a list of choices nor low and high",
            f"{name}: {{low: 1, high: 10}}, or move {name} to `settings` if it is "
            "fixed.",
        )
    options = tuple(dict.fromkeys(tuple(to_arguments(value)) for value in data))
    if not options:
        raise _range_error(name, "is empty", f"{name}: [CHOICE, CHOICE]")
    return CategoricalRange(options)


def _parse_numeric(
    name: str, data: Mapping[str, Any], number_type: type | None
) -> NumericRange:
    """Read and check a range with `low` and `high`."""
    if number_type is None:
        problem = "has low and high, but the setting is not a number"
        raise _range_error(name, problem, f"{name}: [CHOICE, CHOICE]")
    keys = [field.name for field in fields(NumericRange) if field.name != "integer"]
    for key in data:
        if key not in keys:
            hint = suggest(str(key), keys)
            fix = f"choose from {', '.join(keys)}."
            raise _range_error(name, f"has an unknown key {key!r}", fix, hint)
    for key in ("low", "high"):
        if key not in data:
            fix = f"{name}: {{low: 1, high: 10}}"
            raise _range_error(name, f"has no `{key}`", fix)
    log, integer = data.get("log", False), number_type is int
    if not isinstance(log, bool):
        problem = f"needs true or false for `log`, not {log!r}"
        raise _range_error(name, problem, "log: true")
    low = _parse_number(name, "low", data["low"], integer)
    high = _parse_number(name, "high", data["high"], integer)
    step = data.get("step")
    step = None if step is None else _parse_number(name, "step", step, integer)
    count = data.get("count")
    count = None if count is None else int(_parse_number(name, "count", count, True))
    if low > high:
        fix = f"{name}: {{low: {high:g}, high: {low:g}}}"
        raise _range_error(name, f"is empty: {low:g} is above {high:g}", fix)
    if log and low <= 0:
        fix = "use a `low` above zero, or remove `log`."
        raise _range_error(name, f"is logarithmic but starts at {low:g}", fix)
    if log and step is not None:
        raise _range_error(name, "has both `log` and `step`", "use `count`.")
    if (step is not None and step <= 0) or (count is not None and count < 1):
        problem = "has a `step` or `count` that is not above zero"
        raise _range_error(name, problem, "count: 5")
    return NumericRange(low, high, log, step, count, integer)


def _parse_number(name: str, key: str, value: Any, integer: bool) -> float:
    """Return the number `key` of a range; raise if it is not finite or not integer."""
    try:
        # PyYAML reads 1e-3 as a string
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or (integer and number != int(number)):
        expected = "a whole number" if integer else "a number"
        problem = f"needs {expected} for `{key}`, not {value!r}"
        raise _range_error(name, problem, f"{key}: 1")
    return number


def _range_error(name: str, problem: str, fix: str, hint: str = "") -> UserError:
    return UserError(f"The range of {name} {problem}.{hint}\n  Fix: {fix}")


def _number_type(setting_type: Any) -> type | None:
    """Return float or int if the setting is a number, else None."""
    types = typing.get_args(setting_type) or (setting_type,)
    return next((number for number in (float, int) if number in types), None)
