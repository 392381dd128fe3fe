"""What is known of a folder of episodes beside the episodes: the file `dataset.json`.

It keeps the spaces, in the order of their keys, and the named selections of episodes,
which single files cannot tell.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reverie.api import UserError
from reverie.spaces import Space, Spaces
from reverie.storage.atomic import write_json

NAME = "dataset.json"


@dataclass(frozen=True)
class About:
    obs_space: Spaces
    act_space: Spaces
    masks: dict[str, list[str]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    """Where it came from, what was left out, and the like: for people."""

    def write(self, folder: Path) -> None:
        data = {
            "obs": [[key, space.to_json()] for key, space in self.obs_space.items()],
            "act": [[key, space.to_json()] for key, space in self.act_space.items()],
            "masks": self.masks,
            **self.more,
        }
        write_json(folder / NAME, data)


def read_about(folder: Path) -> About | None:
    """What the folder says of itself, or None if it says nothing."""
    path = folder / NAME
    if not path.exists():
        return None
    try:
        data = json.loads(path.read_text())
        spaces = [
            {str(key): Space.from_json(space) for key, space in data.pop(kind)}
            for kind in ("obs", "act")
        ]
        masks = {str(k): [str(n) for n in v] for k, v in data.pop("masks").items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}).\n"
            "  Fix: remove it, and spaces are inferred from the episodes."
        ) from None
    return About(spaces[0], spaces[1], masks, data)
