"""Whole episodes as files, in our own time convention (see `api.py`).

An episode is a dict of arrays that share their first axis. It is stored as a file
`<id>-<rows>-<checksum>.safetensors`; `readers/npz.py` does the same in the layout of
dreamerv3-torch. `cut_episodes` takes them out of a replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from reverie.api import UserError
from reverie.data import segments as files
from reverie.data.replay import Replay
from reverie.data.segments import Arrays

Episode = Arrays


def write_episode(directory: Path, name: str, episode: Episode) -> Path:
    """Write one episode, whole or not at all."""
    directory.mkdir(parents=True, exist_ok=True)
    source = files.write(directory, f"{name}-{len(episode['is_first'])}", episode)
    files.sync(directory, [source.record.name])
    return directory / source.record.name


def read_episode(path: Path) -> Episode:
    """Read one episode; a damaged file is a ValueError that says what is wrong."""
    try:
        size, crc = path.stat().st_size, int(path.stem.rpartition("-")[2], 16)
        record = files.FileRecord(path.name, size, crc)
        if why := files.problem(path.parent, record):
            raise ValueError(f"{path} {why}")
        columns = files.find(path.parent, record).open(path.parent)[1]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a whole episode ({error})") from error
    return {key: np.array(value) for key, value in columns.items()}


def read_episodes(directory: Path) -> Iterator[tuple[str, Episode]]:
    """Every readable episode of a folder by name; damaged files are named, skipped."""
    paths = sorted(directory.glob(f"*{files.SUFFIX}"))
    if not paths:
        raise UserError(
            f"{directory} holds no episodes (*{files.SUFFIX}).\n"
            "  Fix: check the path, or export some first."
        )
    for path in paths:
        try:
            episode = read_episode(path)
        except ValueError as error:
            warnings.warn(f"{error}; skipped", RuntimeWarning, stacklevel=2)
            continue
        yield path.stem.rsplit("-", 2)[0], episode


def cut_episodes(replay: Replay, partial: bool = False) -> Iterator[Episode]:
    """The episodes in a replay, oldest stream first.

    With `partial` also those whose beginning was evicted or whose end is yet to come.
    """
    timeline = replay.timeline
    live = np.arange(timeline.first, timeline.total)
    live = live[timeline.live(live)]
    rows = live % timeline.capacity
    order = np.lexsort((timeline.position[rows], timeline.stream[rows]))
    ids, stream = live[order], timeline.stream[rows][order]
    flags = {key: np.empty(len(ids), bool) for key in ("is_first", "is_last")}
    replay.columns.gather(ids, flags)
    begins = flags["is_first"].copy()
    begins[:1] = True
    begins[1:] |= stream[1:] != stream[:-1]
    edges = [*np.flatnonzero(begins).tolist(), len(ids)]
    for start, stop in pairwise(edges):
        if partial or (flags["is_first"][start] and flags["is_last"][stop - 1]):
            episode = {k: s.zeros(stop - start) for k, s in replay.spaces.items()}
            replay.columns.gather(ids[start:stop], episode)
            yield episode
