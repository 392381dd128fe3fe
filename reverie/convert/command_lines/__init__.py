"""Tables that translate command lines of other implementations to those of Reverie.

Each YAML file describes one implementation of an algorithm: its programs, presets
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
    """A program, preset or flag of another implementation, and what replaces it.

    In a file: `- PATTERN: NEW`, with the other fields below it.
    """

    pattern: str
    """For a program, a regular expression of its path or module; for a flag, of its
    name, optionally with a space and its value; for a preset, its name."""
    new: str = ""
    """The command, presets or flags that replace it; empty if it has no equivalent.
    For a flag, these placeholders are filled in: groups of the pattern (`\\1`),
    `{value}`, `{agent}` (the agent of the run), `{env}` (settings of the task's suite,
    such as `env.atari`), and `{NAME}` for the value of another flag. If it begins with
    `COMMAND:NAME`, the command is replaced by `reverie NAME`."""
    note: str = ""
    """A sentence about differences, or why it has no equivalent."""
    takes_arguments: bool = True
    """False if `new` is a complete example, so that the arguments of the program are
    not translated."""
    options: Mapping[str, str] | None = None
    """If `takes_arguments` is False: the options of the program that are kept, and
    their names in Reverie."""
    example: str = ""
    """If not empty, the program has the same arguments in Reverie, and they are copied.
    If the command line has none, the translation has these example arguments."""
    preset: str = ""
    """Preset to add if the settings in `new` have an effect only with it. A preset that
    selects another agent is added only if the command line has neither presets nor a
    task."""
    agent: str = ""
    """For a flag: it is replaced only if the command trains this agent."""
    unless_equal: str = ""
    """Name of another flag: the entry is skipped if both flags have the same value."""


class Original(NamedTuple):
    """The table of one other implementation."""

    name: str
    page: str
    """Path of the documentation for its users, in the repository."""
    programs: tuple[Replacement, ...]
    presets: dict[str, Replacement]
    flags: tuple[Replacement, ...]
    """The first one that matches is used."""
    program_presets: dict[str, Replacement]
    """Replacements of presets whose names exist in Reverie with another meaning. They
    are used if the command line begins with a program of the implementation."""
    hydra_preset: str = ""
    """Preset to use if a command line has arguments `NAME=VALUE` of which none
    selects a preset."""


@functools.cache
def originals() -> tuple[Original, ...]:
    """Return the tables of all implementations."""
    from reverie.convert.dreamerv3_torch import config as dreamerv3_torch
    from reverie.convert.vta import config as vta

    torch_table = _read("dreamerv3_torch", dreamerv3_torch.NAMES)
    vta_table = _read("vta", vta.NAMES)
    # the variant of VTA for Dreamer is a fork of dreamerv3-torch
    vta_flags = (*vta_table.flags, *torch_table.flags)
    return (
        _read("dreamerv3"),
        torch_table,
        _read("delta_iris"),
        vta_table._replace(flags=vta_flags),
    )


def _read(name: str, names: Mapping[str, str] | None = None) -> Original:
    """Read a table. `names` maps additional flags to the settings that replace them.

    In the table, `names_preset` is the `preset` of the flags in `names`, all names in
    `flags` may begin with `optional_prefix`, and `other_flags` are tried last.
    """
    file = resources.files(__package__) / f"{name}.yaml"
    table = yaml.safe_load(file.read_text("utf-8"))
    preset = table.get("names_preset", "")
    more_flags = tuple(
        Replacement(
            re.escape(key).replace("_", "[-_]"),
            f"--{setting} {{value}}",
            preset=preset,
        )
        for key, setting in (names or {}).items()
        if key != setting  # equal names are valid in Reverie
    )
    flags = _replacements(table["flags"])
    if prefix := table.get("optional_prefix"):
        start = f"(?:{re.escape(prefix)})?"
        flags = tuple(f._replace(pattern=f"{start}(?:{f.pattern})") for f in flags)
    return Original(
        table["name"],
        table["page"],
        _replacements(table["programs"]),
        _by_pattern(table.get("presets", [])),
        (*flags, *more_flags, *_replacements(table.get("other_flags", []))),
        _by_pattern(table.get("program_presets", [])),
        table.get("hydra_preset", ""),
    )


def _by_pattern(items: list[dict[str, Any]]) -> dict[str, Replacement]:
    return {each.pattern: each for each in _replacements(items)}


def _replacements(items: list[dict[str, Any]]) -> tuple[Replacement, ...]:
    replacements = []
    for item in items:
        (pattern, new), *fields = item.items()
        replacements.append(Replacement(pattern, new or "", **dict(fields)))
    return tuple(replacements)
