"""The file `dataset.json` in a folder of episodes.

It stores the spaces in the order of their keys and the named subsets of episodes, which
the episode files do not contain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reverie.api import UserError
from reverie.spaces import Spaces, spaces_from_json, spaces_to_json
from reverie.storage.atomic import write_json
from reverie.storage.limits import read_json

FILE_NAME = "dataset.json"


@dataclass(frozen=True)
class DatasetMetadata:
    """Contents of `dataset.json`."""

    obs_space: Spaces
    act_space: Spaces
    masks: dict[str, list[str]] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    """Further entries, such as the source and the episodes that were skipped."""

    def write(self, folder: Path) -> None:
        data = {
            "obs": spaces_to_json(self.obs_space),
            "act": spaces_to_json(self.act_space),
            "masks": self.masks,
            **self.extra,
        }
        write_json(folder / FILE_NAME, data)


def read_metadata(folder: Path) -> DatasetMetadata | None:
    """Return the metadata of a folder; None if it has no `dataset.json`."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    try:
        data = read_json(path)
        spaces = [spaces_from_json(data.pop(kind)) for kind in ("obs", "act")]
        masks = {str(k): [str(n) for n in v] for k, v in data.pop("masks").items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}).\n"
            "  Fix: remove it; spaces are then inferred from the episodes."
        ) from None
    return DatasetMetadata(spaces[0], spaces[1], masks, data)
