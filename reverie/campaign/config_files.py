"""Checksums of the config files (`--config`) of a campaign.

The runs read these files when they start. The checksums are saved in `campaign.yaml`,
so that all runs of a campaign have the same settings.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from reverie.api import UserError
from reverie.storage.limits import MAX_JSON_BYTES, is_shell_pipe, read_bytes


def absolute_paths(values: Sequence[str]) -> list[str]:
    """Return the values of `--config` with absolute paths; each may be a list `A,B`."""
    words = [word for value in values for word in value.split(",") if word]
    paths = [Path(word).expanduser().absolute() for word in words]
    for path in paths:
        if is_shell_pipe(path):
            raise UserError(
                f"The runs of a campaign cannot read the pipe {path}.\n"
                "  Fix: save the settings in a file, and give its path to --config."
            )
    return [str(path) for path in paths]


def checksums(values: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 checksum of each config file, by path."""
    return {str(path): _checksum(path) for path in map(_file_of, values)}


def check_unchanged(saved: Mapping[str, str]) -> None:
    """Raise if a config file is missing or does not have its saved checksum."""
    for name, expected in saved.items():
        try:
            if _checksum(Path(name)) == expected:
                continue
            problem = "has changed since the campaign was created"
        except FileNotFoundError:
            problem = "is missing, but the runs of the campaign need it"
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or f"it {error}"
            problem = f"cannot be read: {reason}"
        raise UserError(
            f"The config file {name} {problem}.\n"
            "  Fix: restore the file, or create another campaign with another --logdir."
        )


def _checksum(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, MAX_JSON_BYTES)).hexdigest()


def _file_of(value: str) -> Path:
    """Return the path in a value such as `configs.yaml:crafter`, a part of a file."""
    path = Path(value)
    return path if path.exists() else Path(value.split(":")[0])
