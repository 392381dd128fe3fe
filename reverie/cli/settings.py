"""What stands on a command line: places, blocks of settings, files and flags."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from reverie import config as configs
from reverie.api import UserError


class Settings(NamedTuple):
    """Command-line arguments, sorted: what was named by position, and the settings."""

    places: list[str]
    names: list[str]
    files: list[str]
    flags: list[tuple[str, Any]]

    def take(self, name: str, default: Any) -> Any:
        """Remove a flag of the command's own and return its value."""
        given = [pair for pair in self.flags if pair[0].replace("-", "_") == name]
        for pair in given:
            self.flags.remove(pair)
        return given[-1][1] if given else default


def read_settings(arguments: list[str], places: int = 0) -> Settings:
    """Sort arguments; at most so many `places` come before the first flag."""
    count = 0
    while count < min(places, len(arguments)) and arguments[count][:2] != "--":
        count += 1
    names: list[str] = []
    files: list[str] = []
    flags: list[tuple[str, Any]] = []
    for name, value in configs.parse_flags(arguments[count:]):
        if name in ("configs", "config"):
            if value is None:
                raise UserError(f"--{name} needs a value.\n  Fix: --{name} NAME")
            values = value if isinstance(value, list) else [value]
            words = [w for text in values for w in text.split(",") if w]
            (names if name == "configs" else files).extend(words)
        else:
            flags.append((name, value))
    return Settings(arguments[:count], names, files, flags)


def to_config(settings: Settings) -> Any:
    """The config of a run that these settings ask for."""
    from reverie.run.config import resolve

    return resolve(settings.names, settings.files, settings.flags)


def acted_in(config: Any) -> Any:
    """A config for those who want an environment."""
    from reverie.datasets.sequences import is_source

    if is_source(config.task):
        raise UserError(
            f"{config.task} is there to be watched: it has no environment.\n"
            f"  Fix: reverie train --agent vta --task {config.task}, or name a "
            "task that `reverie envs` lists."
        )
    return config


def own_options(
    flags: list[tuple[str, Any]], known: dict[str, Any], command: str
) -> dict[str, Any]:
    """Flags of a command's own, by the names and types of their defaults."""
    found = dict(known)
    for flag, value in flags:
        name = flag.replace("-", "_")
        if name not in known:
            raise UserError(
                f"`{command}` has no option --{flag}.{configs.suggest(name, known)}\n"
                f"  Fix: choose from {', '.join('--' + k for k in known)}."
            )
        try:
            found[name] = type(known[name])(value)
            counts = not isinstance(known[name], str)
            wrong = counts and not 0 <= found[name] < math.inf
        except (TypeError, ValueError):
            wrong = True
        if wrong or value is None:
            what = "needs a value" if value is None else f"cannot be {value!r}"
            example = "FOLDER" if known[name] == "" else known[name]
            raise UserError(f"--{flag} {what}.\n  Fix: --{flag} {example}")
    return found


def show_settings(arguments: list[str]) -> int:
    """`reverie config`."""
    print(configs.dump(to_config(read_settings(arguments))), end="")
    return 0
