"""Regular expressions in settings, evaluated in bounded time.

Python's engine backtracks, so a pattern such as `(a+)+b` can take time exponential in
the length of a name. Patterns that cannot take long, such as those of all presets, are
evaluated in this process; others in a child process that is killed after a few seconds.
The total time of all patterns is limited as well, because a config may have thousands.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Literal

from reverie.api import UserError

Method = Literal["fullmatch", "match", "search"]

MAX_LENGTH = 1000
"""Maximum number of characters of a pattern."""
MAX_PATHS = 20_000
"""A pattern with at most this many ways to match a name is evaluated in this process.
"""
NAME_LENGTH = 60
"""Typical length of a name of a setting, metric or parameter, for `_max_paths`."""
MAX_NAME_LENGTH = 3 * NAME_LENGTH
"""Longer names are always matched in a child process."""
MAX_SECONDS = 5.0
"""Time limit of the child process."""
MAX_TOTAL_SECONDS = 30.0
"""Limit of the total CPU time of all patterns in a process."""
CHILD_SECONDS = 0.1
"""CPU time that is assumed for the start of a child process."""

_used_seconds = 0.0
"""CPU time of all patterns so far."""

_FLAGS = re.compile(r"\(\?[a-zA-Z-]+[:)]")
"""Flags such as `(?i)` and `(?x)`. Patterns with flags run in a child process: `(?i)`
can be slow to compile, and `(?x)` allows spaces between a group and its repetition,
which `_REPEATED_GROUP` would not find."""
_REPETITION = re.compile(r"(?<!\()[*+?{]")  # not the ? of `(?:`
_REPEATED_GROUP = re.compile(r"\)[*+?{]")
_CHILD_CODE = """
import json, re, sys, time
pattern, method, names = json.load(sys.stdin)
try:
    find = getattr(re.compile(pattern), method)
    found = [bool(find(name)) for name in names]
    json.dump([found, None, time.process_time()], sys.stdout)
except (re.error, RecursionError, OverflowError, MemoryError) as error:
    json.dump([[], str(error), time.process_time()], sys.stdout)
"""


def check_pattern(pattern: str) -> None:
    """Raise `re.error` if a pattern is invalid, too long or too complex."""
    if len(pattern) > MAX_LENGTH:
        raise re.error(f"it has more than {MAX_LENGTH} characters")
    if _FLAGS.search(pattern):
        _find_in_child(pattern, [], "match")
        return
    start = time.thread_time()
    try:
        re.compile(pattern)
    except (RecursionError, OverflowError, MemoryError):
        raise re.error("it is too complex") from None
    _count_seconds(pattern, time.thread_time() - start)


def select_names(
    pattern: str, names: Iterable[str], method: Method = "fullmatch"
) -> list[str]:
    """Return the names that match a pattern.

    Raises `re.error` if it is not valid, and `UserError` if it takes too long.
    """
    check_pattern(pattern)
    names = list(names)
    is_long = max(map(len, names), default=0) > MAX_NAME_LENGTH
    if _max_paths(pattern, method) <= MAX_PATHS and not is_long:
        start = time.thread_time()
        find = getattr(re.compile(pattern), method)
        selected = [name for name in names if find(name)]
        _count_seconds(pattern, time.thread_time() - start)
        return selected
    found = _find_in_child(pattern, names, method)
    return [name for name, matches in zip(names, found, strict=True) if matches]


def matches(pattern: str, name: str) -> bool:
    """True if the whole name matches a pattern; raises as `select_names`."""
    return bool(select_names(pattern, [name]))


def _max_paths(pattern: str, method: Method) -> float:
    """Return an upper bound of the number of ways to match one name.

    Each repetition can match up to `NAME_LENGTH` different lengths, and each group can
    choose between all alternatives. Repeated groups have no useful bound.
    """
    if _REPEATED_GROUP.search(pattern) or _FLAGS.search(pattern):
        return float("inf")
    repetitions = len(_REPETITION.findall(pattern)) + (method == "search")
    alternatives = 1 + pattern.count("|")
    choices = max(1, pattern.count("(")) if alternatives > 1 else 0
    if repetitions > 5 or choices > 20:
        return float("inf")
    return float(alternatives**choices * NAME_LENGTH**repetitions)


def _find_in_child(pattern: str, names: Sequence[str], method: Method) -> list[bool]:
    """Return for each name whether it matches, computed in a child process."""
    return _run_child(pattern, tuple(names), method)  # the cache needs a tuple


@functools.lru_cache(maxsize=256)
def _run_child(pattern: str, names: tuple[str, ...], method: Method) -> list[bool]:
    _count_seconds(pattern, CHILD_SECONDS)
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
        raise _too_slow(pattern) from None
    found, error, seconds = json.loads(process.stdout)
    _count_seconds(pattern, seconds)
    if error is not None:
        raise re.error(error)
    return list(found)


def _count_seconds(pattern: str, seconds: float) -> None:
    """Add to the total time of all patterns; raise if it exceeds the limit."""
    global _used_seconds
    _used_seconds += seconds
    if _used_seconds > MAX_TOTAL_SECONDS:
        raise _too_slow(pattern, " together with the ones before it")


def _too_slow(pattern: str, addition: str = "") -> UserError:
    """Return the error for a pattern that takes too long."""
    return UserError(
        f"The regular expression {pattern!r}{addition} takes too long.\n  Fix: write "
        "it without repetitions inside of repetitions, such as (a+)+, and with fewer "
        "`.*` and `|`."
    )
