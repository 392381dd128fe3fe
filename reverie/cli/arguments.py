"""Parsing of command lines: positional arguments, options, and settings of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from reverie import config as configs
from reverie.api import UserError
from reverie.config import Layer, UnknownSetting

T = TypeVar("T")

PATH_ERRORS = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
"""Error codes of the operating system for paths that cannot be read or written."""


class Arguments(NamedTuple):
    """A parsed command line."""

    positional: list[str]
    presets: list[str]
    """Presets, from `--configs`."""
    files: list[str]
    """Config files, from `--config`."""
    flags: list[tuple[str, Any]]
    """All other flags, as pairs of name (without `--`) and value."""

    def take_options(
        self, schema: type[T], layers: Sequence[tuple[str, Layer]] = ()
    ) -> T:
        """Remove the flags that set fields of a dataclass, and return the dataclass.

        `layers` are named groups of values that override the defaults of the dataclass.
        Flags override both.
        """
        fields = {field.name for field in dataclasses.fields(schema)}  # type: ignore
        taken = [
            flag
            for flag in self.flags
            if flag[0].split(".")[0].replace("-", "_") in fields
        ]
        self.flags[:] = [flag for flag in self.flags if flag not in taken]
        base = configs.resolve(schema, layers)
        try:
            flags = configs.flag_layer(schema, taken, base)
        except UnknownSetting as error:
            group = error.name.rpartition(".")[0] + "."
            settings = configs.settings_of(cast(type, schema))
            names = [name for name in settings if name.startswith(group)]
            hint = configs.suggest(error.name, names)
            raise UserError(
                f"There is no option --{error.name}.{hint}"
                f"\n  Fix: choose from {', '.join('--' + name for name in names)}."
            ) from None
        return configs.resolve(schema, [*layers, ("the flags", flags)])

    def refuse_other_flags(self, command: str, options: Collection[str]) -> None:
        """Raise an error if there are flags that `take_options` did not remove."""
        for flag, _ in self.flags:
            names = ", ".join(f"--{name}" for name in options)
            fix = f"choose from {names}." if names else f"{command} --help"
            raise UserError(
                f"`{command}` has no option --{flag}."
                f"{configs.suggest(flag.replace('-', '_'), options)}\n  Fix: {fix}"
            )

    def refuse_presets(self, reason: str, has_settings: bool = True) -> None:
        """Raise an error with this reason if there are presets or config files.

        `has_settings` is False for commands that have no flags for settings.
        """
        if self.presets or self.files:
            hint = "; single settings can be changed with flags" if has_settings else ""
            raise UserError(f"{reason}\n  Fix: remove --configs and --config{hint}.")


def parse_arguments(argv: Sequence[str], max_positional: int = 0) -> Arguments:
    """Parse the arguments of a command; positional arguments come before all flags.

    A word after `max_positional` positional arguments that is not a flag is an error.
    """
    count = 0
    while count < min(max_positional, len(argv)) and argv[count][:2] != "--":
        count += 1
    presets: list[str] = []
    files: list[str] = []
    flags: list[tuple[str, Any]] = []
    for name, value in configs.parse_flags(argv[count:]):
        if name in ("configs", "config"):
            if value is None:
                raise UserError(f"--{name} needs a value.\n  Fix: --{name} NAME")
            values = value if isinstance(value, list) else [value]
            names = [name for text in values for name in text.split(",") if name]
            (presets if name == "configs" else files).extend(names)
        else:
            flags.append((name, value))
    return Arguments(list(argv[:count]), presets, files, flags)


def to_config(arguments: Arguments) -> Any:
    """Return the config of a run with these presets, files and flags."""
    from reverie.run.config import resolve

    return resolve(arguments.presets, arguments.files, arguments.flags)


@contextlib.contextmanager
def explain_path_errors() -> Iterator[None]:
    """Raise `UserError` with a fix for operating system errors about a path."""
    try:
        yield
    except OSError as error:
        if error.errno not in PATH_ERRORS or not error.filename:
            raise
        raise UserError(
            f"Cannot use {error.filename}: {error.strerror}.\n"
            "  Fix: give a file or folder that you have permission to read or write."
        ) from None
