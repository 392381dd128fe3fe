"""The episodes in the replay of a run, read where they lie.

Every segment file says of each row which environment it came from and when, so neither
a checkpoint nor the agent is needed. Only whole episodes count. Extras of the agent
(latents) are not part of an episode.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, with_flags
from reverie.datasets.readers import Reader
from reverie.spaces import FLAGS, Space, Spaces, agent_obs_space
from reverie.storage import array_file as files
from reverie.storage.array_file import ArrayFile
from reverie.storage.segments import POSITION, STREAM


class ReplayReader(Reader):
    """Whole episodes of `LOGDIR/replay`, named by environment and first step."""

    def __init__(self, path: str | Path):
        self.origin = str(path)
        self.folder = Path(path) / "replay"
        self.masks: dict[str, list[str]] = {}
        obs_space, act_space = _read_spaces(Path(path) / "spaces.json")
        self._spaces = agent_obs_space(obs_space), act_space
        self._keys = [*self.obs_space, *self.act_space, *FLAGS]
        self._sources = _newest(self.folder)
        self._found = self._find()

    def names(self) -> list[str]:
        return list(self._found)

    def rows(self, name: str) -> int:
        return len(self._found[name])

    def read(self, name: str) -> Episode:
        where = self._found[name]
        spaces = with_flags({**self.obs_space, **self.act_space})
        episode = {key: spaces[key].zeros(len(where)) for key in self._keys}
        for number in np.unique(where[:, 0]).tolist():
            source = self._sources[number]
            if why := files.find_damage(self.folder, source.record):
                raise BadEpisode(f"lies in {source.record.name}, which {why}")
            columns = source.open(self.folder)[1]
            mine = where[:, 0] == number
            for key in self._keys:
                episode[key][mine] = columns[key][where[mine, 1]]
        return episode

    def _find(self) -> dict[str, np.ndarray]:
        """For every whole episode the file and the row of each of its rows."""
        parts = []
        for number, source in enumerate(self._sources):
            columns = source.open(self.folder)[1]
            if missing := [key for key in self._keys if key not in columns]:
                raise UserError(
                    f"{self.folder / source.record.name} has no {', '.join(missing)}, "
                    "which the spaces of the run have.\n  Fix: give a run's own folder."
                )
            stream = np.array(columns[STREAM], np.int64)
            part = np.empty((len(stream), 6), np.int64)
            part[:, 0], part[:, 1] = stream, columns[POSITION]
            part[:, 2], part[:, 3] = number, np.arange(len(stream))
            part[:, 4], part[:, 5] = columns["is_first"], columns["is_last"]
            parts.append(part)
        if not parts:
            return {}
        table = np.concatenate(parts)
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        _, once = np.unique(table[:, :2], axis=0, return_index=True)
        table = table[np.sort(once)]
        stream, position, first, last = (
            table[:, 0],
            table[:, 1],
            table[:, 4],
            table[:, 5],
        )
        gap = (np.diff(stream) != 0) | (np.diff(position) != 1)
        begins = np.concatenate([[True], gap]) | (first == 1)
        found = {}
        edges = [*np.flatnonzero(begins).tolist(), len(table)]
        for start, stop in pairwise(edges):
            if first[start] and last[stop - 1]:
                name = f"env{stream[start]}_step{position[start]}"
                found[name] = table[start:stop, 2:4]
        return found


def _newest(folder: Path) -> list[ArrayFile]:
    """The segment files; of those that begin at the same step the longest."""
    longest: dict[int, tuple[int, Path]] = {}
    for path in sorted(folder.glob(f"*{files.SUFFIX}")):
        parts = path.stem.split("-")  # first, count, checksum; extras have one more
        if len(parts) == 3 and parts[0].isdigit() and parts[1].isdigit():
            first, count = int(parts[0]), int(parts[1])
            longest[first] = max(longest.get(first, (-1, path)), (count, path))
    found = []
    for _, path in longest.values():
        found.append(files.read_layout(folder, files.record_from_name(path)))
    return found


def _read_spaces(path: Path) -> tuple[Spaces, Spaces]:
    try:
        data = json.loads(path.read_text())
        obs, act = (
            {key: Space.from_json(space) for key, space in data[kind].items()}
            for kind in ("obs", "act")
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}).\n  Fix: give the folder of a run."
        ) from None
    return obs, act
