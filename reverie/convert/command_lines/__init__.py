"""Tables that translate command lines of other implementations to those of Reverie.

Each YAML file describes one implementation of an algorithm: its programs, preset blocks
and flags. `reverie/cli/originals.py` translates command lines with these tables if they
are not valid in Reverie; the pages `docs/coming-from-*.md` explain the differences.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any, NamedTuple

import yaml

__all__ = ["Original", "Replacement", "originals"]


class Replacement(NamedTuple):
    """A program, preset block or flag of another implementation, and what replaces it.

    In a file: `- PATTERN: NEW`, with the other fields below it.
    """

    pattern: str
    """Regular expression of the path or module of a program, or of the name of a flag,
    which may include a space and its value; the name of a block."""
    new: str = ""
    """The command, blocks or flags that replace it; empty if it has no equivalent.
    Flags may contain groups of the pattern (`\\1`), `{value}`, `{agent}` (the agent of
    the run), `{env}` (settings of the task's suite, such as `env.atari`) and the value
    of another flag by its name. An argument `COMMAND:NAME` replaces the command."""
    note: str = ""
    """A sentence about differences, or why it has no equivalent."""
    takes_arguments: bool = True
    """False if `new` is a complete example of a program, and the arguments are not
    translated."""
    example: str = ""
    """Arguments to show if the command line has none; given arguments are not changed,
    because the command of Reverie has the same ones."""


class Original(NamedTuple):
    """An implementation of an algorithm."""

    name: str
    page: str
    """Documentation for its users, below the repository."""
    programs: tuple[Replacement, ...]
    blocks: dict[str, Replacement]
    flags: tuple[Replacement, ...]
    """The first one that matches is used."""
    program_blocks: dict[str, Replacement]
    """Replacements of blocks whose names also exist in Reverie, for another algorithm.
    They are used if the command line begins with a program of the implementation."""
    hydra_block: str = ""
    """Preset block to use if a command line has arguments `NAME=VALUE` of which none
    selects a block."""
    agent: str = ""
    """Agent for which flags without an equivalent are explained; empty for all."""


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
        Replacement(re.escape(key).replace("_", "[-_]"), f"--{setting} {{value}}")
        for key, setting in (names or {}).items()
        if key != setting
    )
    file = resources.files(__package__) / f"{name}.yaml"
    table = yaml.safe_load(file.read_text("utf-8"))
    flags = _replacements(table["flags"])
    if prefix := table.get("optional_prefix"):
        start = f"(?:{re.escape(prefix)})?"
        flags = tuple(f._replace(pattern=f"{start}(?:{f.pattern})") for f in flags)
    return Original(
        table["name"],
        table["page"],
        _replacements(table["programs"]),
        {each.pattern: each for each in _replacements(table.get("blocks", []))},
        (*flags, *more_flags, *_replacements(table.get("other_flags", []))),
        {each.pattern: each for each in _replacements(table.get("program_blocks", []))},
        table.get("hydra_block", ""),
        table.get("agent", ""),
    )


def _replacements(items: list[dict[str, Any]]) -> tuple[Replacement, ...]:
    replacements = []
    for item in items:
        (pattern, new), *fields = item.items()
        replacements.append(Replacement(pattern, new or "", **dict(fields)))
    return tuple(replacements)
