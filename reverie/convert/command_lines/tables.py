"""The tables of one implementation: programs, preset blocks and flags."""

from __future__ import annotations

from typing import NamedTuple


class Flag(NamedTuple):
    """A flag of another program, and the flags that replace it."""

    pattern: str
    """Regular expression of its name, or of its name, a space and its value."""
    here: str = ""
    """Arguments that replace it; empty if it has no equivalent. May contain groups of
    the pattern (`\\1`), `{value}`, `{agent}` (the agent of the run), `{env}` (settings
    of the task's suite, such as `env.atari`) and the value of another flag by its name.
    An argument `COMMAND:NAME` replaces the command."""
    note: str = ""
    """A sentence about differences, or why it has no equivalent."""


class Block(NamedTuple):
    """A preset block of another program."""

    here: str = ""
    """Blocks that replace it, separated by spaces; empty if none is needed."""
    note: str = ""
    """A sentence about differences, or why it has no equivalent."""


class Program(NamedTuple):
    """A program or script."""

    pattern: str
    """Regular expression of its path or module."""
    here: str
    """The command that replaces it, with its first arguments."""
    note: str = ""
    """A sentence about differences."""
    takes_arguments: bool = True
    """False if `here` is a complete example, and the arguments are not translated."""


class Original(NamedTuple):
    """An implementation of an algorithm."""

    name: str
    page: str
    """Documentation for its users, below the repository."""
    programs: tuple[Program, ...]
    blocks: dict[str, Block]
    flags: tuple[Flag, ...]
    """The first one that matches is used."""
    hydra_block: str = ""
    """Preset block of a command line with arguments `NAME=VALUE` that select none."""


def settings(here: str, *names: str, note: str = "") -> tuple[Flag, ...]:
    """Return flags `theirs=ours`, or `same`, whose settings have the prefix `here`."""
    pairs = [(name.partition("=")[0], name.rpartition("=")[2]) for name in names]
    return tuple(
        Flag(theirs.replace(".", r"\."), f"--{here}{ours} {{value}}", note)
        for theirs, ours in pairs
    )


def without_equivalent(note: str, *names: str) -> tuple[Flag, ...]:
    """Return flags that have no equivalent, for one reason."""
    return tuple(Flag(name, "", note) for name in names)
