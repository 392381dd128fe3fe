"""YAML files of sweeps and campaigns, which describe several runs.

A file contains options of the sweep or campaign, and under `settings` the settings of
its runs. On the command line, all flags that are not such options are settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.run.config import Config

_HAS_NO_CODE = re.compile(
    r"(device|logdir|run\.from_checkpoint|(actors|logger|offline|slurm)(\.[\w.]+)?)\+?"
)
"""Matches settings whose values may contain a colon but are not imported: data formats
such as `minari:NAME`, devices and addresses. It does not match a pattern of names (such
as `.*agent`), which could set other settings, too."""
_UNSAFE_FLAGS = ("--trust", "--config")
"""Flags that allow code to be imported, or name a file that may do so."""

ResolveCommand = Callable[[str, list[str]], Config]
"""Returns the config of a command with the given arguments."""


def to_arguments(value: Any) -> list[str]:
    """Convert a value from a YAML file to arguments of the command line."""
    if isinstance(value, Mapping):
        raise UserError(
            f"{dict(value)!r} is not a valid value of a setting.\n"
            "  Fix: use a string, a number, or a list of them."
        )
    return [str(x) for x in value] if isinstance(value, list | tuple) else [str(value)]


def add_settings(
    settings: dict[str, list[str]],
    flags: Sequence[tuple[str, Any]],
    options: Collection[str],
) -> list[tuple[str, Any]]:
    """Add flags that are settings of the runs to `settings`; return all other flags.

    The others are `options` of the sweep or campaign.
    """
    given_options = []
    for name, value in flags:
        if name.replace("-", "_") in options:
            given_options.append((name, value))
            continue
        # presets, files and `--name+` are appended, other flags override a setting
        appends = name in ("configs", "config") or name.endswith("+")
        before = settings.get(name, []) if appends else []
        settings[name] = before + to_arguments("True" if value is None else value)
    return given_options


def pop_mapping(path: Path, data: dict[str, Any], key: str) -> dict[str, Any]:
    """Remove a mapping from the data of a file and return it; empty if missing."""
    mapping = data.pop(key, None) or {}
    if not isinstance(mapping, dict):
        raise UserError(
            f"`{key}` in {path} is a {type(mapping).__name__}, not a mapping.\n"
            f"  Fix: write one `name: value` per line below `{key}:`."
        )
    return {str(name): value for name, value in mapping.items()}


def unknown_key(
    origin: object, key: str, known: Collection[str], kind: str, places: str
) -> UserError:
    """Return the error for an unknown key in the file of a sweep or campaign (`kind`).

    `places` names the keys below which the settings of the runs belong.
    """
    name, settings = key.replace("-", "_"), configs.settings_of(Config)
    is_group = any(setting.startswith(f"{name}.") for setting in settings)
    if name in settings or is_group or "." in key:
        return UserError(
            f"{key!r} in {origin} is a setting of runs, not of the {kind}.\n"
            f"  Fix: move it below {places}."
        )
    return UserError(
        f"Unknown key {key!r} in {origin}.{configs.suggest(key, known)}\n"
        f"  Fix: choose from {', '.join(sorted(known))}."
    )


def code_in_spec(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Return pairs of key and import path (or config file) in a saved specification.

    The caller checks that they are trusted, because checking the settings of the runs
    imports these modules. Names and values become arguments of a command line, so flags
    in them are returned, too.
    """
    if isinstance(value, Mapping):
        items = [(f"{name}.{key}".lstrip("."), inner) for key, inner in value.items()]
        # a key `NAME=VALUE` would become the flag `--NAME=VALUE`
        found = [(name or "a key", str(key)) for key in value if "=" in str(key)]
        for key, inner in items:
            found += code_in_spec(inner, key)
        return found
    if isinstance(value, list | tuple):
        return [pair for inner in value for pair in code_in_spec(inner, name)]
    if name == "eval":  # the arguments of `reverie eval`, in one string
        words = str(value).split()
        return [(name, w) for w in words if ":" in w or w.startswith(_UNSAFE_FLAGS)]
    setting = re.sub(r"^(settings|ranges)\.", "", name)
    is_file = setting.split(".")[-1].rstrip("+") == "config"  # it may name modules
    has_path = ":" in str(value) and not _HAS_NO_CODE.fullmatch(setting)
    is_flag = str(value).startswith("--")
    return [(name, str(value))] if is_file or has_path or is_flag else []
