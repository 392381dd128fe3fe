"""Take whole episodes out of a replay buffer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from reverie.replay.buffer import Replay
from reverie.storage.episodes import Episode


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
