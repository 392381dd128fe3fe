"""The file `spaces.json` of a run folder: the spaces its agent was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from reverie.api import UserError
from reverie.spaces import Spaces, spaces_from_json, spaces_to_json
from reverie.storage.atomic import write_json
from reverie.storage.limits import read_json

SPACES_FILE = "spaces.json"


class RunSpaces(NamedTuple):
    """Observation and action space of a run."""

    obs_space: Spaces
    act_space: Spaces


def write_spaces(logdir: Path, obs_space: Spaces, act_space: Spaces) -> None:
    """Write the spaces, so that the agent can be built without its environment."""
    data = {"obs": spaces_to_json(obs_space), "act": spaces_to_json(act_space)}
    write_json(logdir / SPACES_FILE, data)


def read_spaces(logdir: Path) -> RunSpaces:
    """Read the spaces that `write_spaces` wrote; raise `UserError` if not possible."""
    path = logdir / SPACES_FILE
    try:
        data = read_json(path)
        return RunSpaces(spaces_from_json(data["obs"]), spaces_from_json(data["act"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read: {error}.\n  Fix: use the folder of a run."
        ) from None
