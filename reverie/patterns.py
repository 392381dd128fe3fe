"""Regular expressions in settings, evaluated in bounded time.

Python's engine backtracks: `(a+)+b` takes years on thirty letters. Patterns that cannot
take long, such as those of all presets, are evaluated in this process; others in a
child process that is ended after a few seconds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from typing import Literal

from reverie.api import UserError

Method = Literal["fullmatch", "match", "search"]

MAX_LENGTH = 1000
"""Maximum number of characters of a pattern."""
MAX_PATHS = 20_000
"""Patterns with at most this many ways to match a name run in this process."""
NAME_LENGTH = 60
"""Typical length of the name of a setting, metric or parameter."""
MAX_SECONDS = 5.0
"""Time limit of the child process."""

_REPETITION = re.compile(r"(?<!\()[*+?{]")  # not the ? of `(?:`
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_CHILD_CODE = """
import json, re, sys
pattern, method, names = json.load(sys.stdin)
find = getattr(re.compile(pattern), method)
json.dump([bool(find(name)) for name in names], sys.stdout)
"""


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; raise `re.error` if it is invalid, too long or too complex."""
    if len(pattern) > MAX_LENGTH:
        raise re.error(f"it has more than {MAX_LENGTH} characters")
    try:
        return re.compile(pattern)
    except (RecursionError, OverflowError, MemoryError):
        raise re.error("it is too complex") from None


def select_names(
    pattern: str, names: Iterable[str], method: Method = "fullmatch"
) -> list[str]:
    """Return the names that match a pattern.

    Raises `re.error` if it is not valid, and `UserError` if it takes too long.
    """
    find = getattr(compile_pattern(pattern), method)
    names = list(names)
    is_long = max(map(len, names), default=0) > 3 * NAME_LENGTH
    if _max_paths(pattern, method) <= MAX_PATHS and not is_long:
        return [name for name in names if find(name)]
    found = _find_in_child(pattern, names, method)
    return [name for name, matches in zip(names, found, strict=True) if matches]


def matches(pattern: str, name: str) -> bool:
    """True if the whole name matches a pattern; raises as `select_names`."""
    return bool(select_names(pattern, [name]))


def _max_paths(pattern: str, method: Method) -> float:
    """Return an upper bound of the number of ways to match one name."""
    if _REPEATED_GROUP.search(pattern):
        return float("inf")
    repetitions = len(_REPETITION.findall(pattern)) + (method == "search")
    alternatives = 1 + pattern.count("|")
    choices = max(1, pattern.count("(")) if alternatives > 1 else 0
    if repetitions > 5 or choices > 20:
        return float("inf")
    return float(alternatives**choices * NAME_LENGTH**repetitions)


def _find_in_child(pattern: str, names: list[str], method: Method) -> list[bool]:
    """Return which names match; raise if the child process takes too long."""
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _CHILD_CODE],
            input=json.dumps([pattern, method, names]),
            capture_output=True,
            text=True,
            timeout=MAX_SECONDS,
            check=True,
        )
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        raise UserError(
            f"The regular expression {pattern!r} takes too long.\n  Fix: write it "
            "without repetitions inside of repetitions, such as (a+)+, and with fewer "
            "`.*` and `|`."
        ) from None
    return [bool(found) for found in json.loads(process.stdout)]
