"""Words of other programs' command lines, and what they are called here.

Each YAML file describes one implementation of an algorithm: its programs, preset blocks
and flags. `reverie/cli/originals.py` translates command lines with these tables when a
command is not valid here; the pages `docs/coming-from-*.md` explain the differences.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

import yaml

__all__ = ["Original", "Word", "originals"]


class Word(NamedTuple):
    """A program, preset block or flag of another program, and what replaces it.

    In a file: `- PATTERN: HERE`, with the other fields below it.
    """

    pattern: str
    """Regular expression of the path or module of a program, or of the name of a flag,
    which may include a space and its value; the name of a block."""
    here: str = ""
    """The command, blocks or flags that replace it; empty if it has no equivalent.
    Flags may contain groups of the pattern (`\\1`), `{value}`, `{agent}` (the agent of
    the run), `{env}` (settings of the task's suite, such as `env.atari`) and the value
    of another flag by its name. An argument `COMMAND:NAME` replaces the command."""
    note: str = ""
    """A sentence about differences, or why it has no equivalent."""
    takes_arguments: bool = True
    """False if `here` is a complete example of a program, and the arguments are not
    translated."""
    example: str = ""
    """Arguments of a program that are also valid here; they are used if the command
    line has none."""


class Original(NamedTuple):
    """An implementation of an algorithm."""

    name: str
    page: str
    """Documentation for its users, below the repository."""
    programs: tuple[Word, ...]
    blocks: dict[str, Word]
    flags: tuple[Word, ...]
    """The first one that matches is used."""
    program_blocks: dict[str, Word]
    """Blocks that also exist here, with another algorithm: what replaces them in a
    command line that begins with a program."""
    hydra_block: str = ""
    """Preset block of a command line with arguments `NAME=VALUE` that select none."""
    agent: str = ""
    """The only agent for which flags without an equivalent are known; empty for all."""


@functools.cache
def originals() -> tuple[Original, ...]:
    """Return the tables of all implementations."""
    from reverie.convert.dreamerv3_torch import config as dreamerv3_torch
    from reverie.convert.vta import config as vta

    return (
        _read("dreamerv3"),
        _read("dreamerv3_torch", dreamerv3_torch.NAMES),
        _read("delta_iris"),
        _read("vta", vta.NAMES),
    )


def _read(name: str, names: Mapping[str, str] | None = None) -> Original:
    """Read a table; `names` are more flags, from the converter of config files.

    The last ones to try are the flags under `other_flags`.
    """
    more_flags = tuple(
        Word(re.escape(theirs).replace("_", "[-_]"), f"--{ours} {{value}}")
        for theirs, ours in (names or {}).items()
        if theirs != ours
    )
    file = resources.files(__package__) / f"{name}.yaml"
    table = yaml.safe_load(file.read_text("utf-8"))
    flags = _words(table["flags"])
    if prefix := table.get("optional_prefix"):
        start = f"(?:{re.escape(prefix)})?"
        flags = tuple(f._replace(pattern=f"{start}(?:{f.pattern})") for f in flags)
    return Original(
        table["name"],
        table["page"],
        _words(table["programs"]),
        {word.pattern: word for word in _words(table.get("blocks", []))},
        (*flags, *more_flags, *_words(table.get("other_flags", []))),
        {word.pattern: word for word in _words(table.get("program_blocks", []))},
        table.get("hydra_block", ""),
        table.get("agent", ""),
    )


def _words(items: list[dict[str, Any]]) -> tuple[Word, ...]:
    words = []
    for item in items:
        (pattern, here), *fields = item.items()
        words.append(Word(pattern, here or "", **dict(fields)))
    return tuple(words)
