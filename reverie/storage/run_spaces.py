"""The file `spaces.json` of a run folder: the spaces its agent was trained with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from reverie.api import UserError
from reverie.spaces import Space, Spaces
from reverie.storage.atomic import write_json


class RunSpaces(NamedTuple):
    """Observation and action space of a run."""

    obs_space: Spaces
    act_space: Spaces


def write_spaces(logdir: Path, obs_space: Spaces, act_space: Spaces) -> None:
    """Write the spaces, so that the agent can be built without its environment."""
    spaces = {"obs": obs_space, "act": act_space}
    data = {
        kind: {key: space.to_json() for key, space in entries.items()}
        for kind, entries in spaces.items()
    }
    write_json(logdir / "spaces.json", data)


def read_spaces(logdir: Path) -> RunSpaces:
    """Return the spaces of a run."""
    path = logdir / "spaces.json"
    try:
        data = json.loads(path.read_text())
        kinds = [
            {key: Space.from_json(space) for key, space in data[kind].items()}
            for kind in ("obs", "act")
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read: {error}.\n  Fix: use the folder of a run."
        ) from None
    return RunSpaces(*kinds)
