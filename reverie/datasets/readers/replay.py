"""Reader of the episodes in the replay buffer of a run.

Segment files store the stream (uninterrupted steps of one environment) and the position
of every row, so neither a checkpoint nor the agent is needed. Only complete episodes
are read, without the extras of the agent (latents).
"""

from __future__ import annotations

import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.readers import Reader
from reverie.spaces import STEP_KEYS, agent_obs_space, step_spaces
from reverie.storage import array_file as files
from reverie.storage.array_file import ArrayFile
from reverie.storage.os_errors import FILE_INTACT
from reverie.storage.run_spaces import read_spaces
from reverie.storage.segments import POSITION, STREAM


class ReplayReader(Reader):
    """Reads complete episodes of `LOGDIR/replay`, named by environment and step.

    In a run on several devices, rank 0 writes to this folder, and the other ranks to
    its subfolders `rank*`.
    """

    def __init__(self, path: str | Path):
        self.origin = str(path)
        self.folder = Path(path) / "replay"
        self.masks: dict[str, list[str]] = {}
        obs_space, act_space = read_spaces(Path(path))
        self._spaces = agent_obs_space(obs_space), act_space
        self._keys = [*self.obs_space, *self.act_space, *STEP_KEYS]
        ranks = sorted(self.folder.glob("rank*"), key=lambda x: (len(x.name), x.name))
        self._folders = [self.folder, *ranks]
        self._sources = [
            (folder, source)
            for folder in self._folders
            for source in _list_segments(folder)
        ]
        self._rows = self._find_episodes()
        self._names = list(self._rows)

    def rows(self, name: str) -> int:
        return len(self._rows[name])

    def read(self, name: str) -> Episode:
        rows = self._rows[name]  # file number and row in that file
        spaces = {**self.obs_space, **self.act_space, **step_spaces()}
        episode = {key: spaces[key].zeros(len(rows)) for key in self._keys}
        for number in np.unique(rows[:, 0]).tolist():
            folder, source = self._sources[number]
            if why := files.find_corruption(folder, source.record):
                raise BadEpisode(f"is in {source.record.name}, which {why}")
            columns = source.open(folder)[1]
            in_file = rows[:, 0] == number
            for key in self._keys:
                episode[key][in_file] = columns[key][rows[in_file, 1]]
        return episode

    def _find_episodes(self) -> dict[str, np.ndarray]:
        """Return the file number and the row in that file of each episode's rows."""
        spaces = {**self.obs_space, **self.act_space, **step_spaces()}
        shapes = {key: spaces[key].shape for key in self._keys}
        shapes |= {STREAM: (), POSITION: ()}
        parts = []
        # streams of every folder are numbered from 0, so those of a rank get an offset
        first_streams = {self.folder: 0}
        next_stream = 0
        for number, (folder, source) in enumerate(self._sources):
            columns = source.open(folder)[1]
            if missing := [key for key in shapes if key not in columns]:
                raise UserError(
                    f"{folder / source.record.name} has no {', '.join(missing)}, "
                    "which are in the spaces of the run.\n"
                    "  Fix: use the folder of one run."
                )
            rows = columns[STREAM].shape[:1]
            if any(columns[key].shape != rows + shapes[key] for key in shapes):
                raise UserError(
                    f"{folder / source.record.name} has arrays of other shapes "
                    "than the spaces of the run.\n  Fix: use the folder of one run."
                )
            first_stream = first_streams.setdefault(folder, next_stream)
            stream = np.array(columns[STREAM], np.int64) + first_stream
            next_stream = max(next_stream, int(stream.max(initial=-1)) + 1)
            # stream, position, file number, row in the file, is_first, is_last
            part = np.empty((len(stream), 6), np.int64)
            part[:, 0], part[:, 1] = stream, columns[POSITION]
            part[:, 2], part[:, 3] = number, np.arange(len(stream))
            part[:, 4], part[:, 5] = columns["is_first"], columns["is_last"]
            parts.append(part)
        if not parts:
            return {}
        table = np.concatenate(parts)
        table = table[np.lexsort((table[:, 1], table[:, 0]))]
        # rows that are in two segments count once
        _, unique = np.unique(table[:, :2], axis=0, return_index=True)
        table = table[np.sort(unique)]
        stream, position, _, _, first, last = table.T
        gap = (np.diff(stream) != 0) | (np.diff(position) != 1)
        is_start = np.concatenate([[True], gap]) | (first == 1)
        return {
            f"env{stream[start]}_step{position[start]}": table[start:stop, 2:4]
            for start, stop in complete_episodes(is_start, first, last)
        }


def complete_episodes(
    is_start: np.ndarray, is_first: np.ndarray, is_last: np.ndarray
) -> list[tuple[int, int]]:
    """Return the first row of each complete episode, and one past its last row.

    `is_start` marks rows that do not continue the row before them.
    """
    edges = [*np.flatnonzero(is_start).tolist(), len(is_start)]
    pairs = pairwise(edges)
    return [pair for pair in pairs if is_first[pair[0]] and is_last[pair[1] - 1]]


def _list_segments(folder: Path) -> list[ArrayFile]:
    """Return the segment files of a folder.

    Of files that begin at the same step, only the longest is returned: the others are
    partial segments of earlier saves. Files that cannot be read are skipped.
    """
    longest: dict[int, tuple[int, Path]] = {}
    for path in sorted(folder.glob(f"*{files.SUFFIX}")):
        parts = path.stem.split("-")  # first, count, checksum; extras have one more
        if len(parts) == 3 and parts[0].isdecimal() and parts[1].isdecimal():
            first, count = int(parts[0]), int(parts[1])
            longest[first] = max(longest.get(first, (-1, path)), (count, path))
    sources = []
    for _, path in longest.values():
        try:
            source = files.read_layout(folder, files.record_from_name(path))
            source.open(folder)
            sources.append(source)
        except (OSError, ValueError) as error:
            # for example too many open files: the segment itself is not damaged
            if isinstance(error, OSError) and error.errno in FILE_INTACT:
                raise
            warnings.warn(f"{path} {error}, so it is skipped.", stacklevel=2)
    return sources
