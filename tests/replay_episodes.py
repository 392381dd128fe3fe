"""Read episodes from a replay buffer, to check its contents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from reverie.replay.buffer import Replay
from reverie.spaces import Arrays


def stored_episodes(replay: Replay, partial: bool = False) -> Iterator[Arrays]:
    """Yield the episodes in a replay, ordered by stream and position.

    With `partial`, also those whose first steps were evicted or that are not over yet.
    """
    index = replay.index
    live = np.arange(index.first, index.total)
    live = live[index.is_live(live)]
    rows = live % index.capacity
    order = np.lexsort((index.position[rows], index.stream[rows]))
    ids, stream = live[order], index.stream[rows][order]
    flags = {key: np.empty(len(ids), bool) for key in ("is_first", "is_last")}
    replay.store.gather(ids, flags)
    begins = flags["is_first"].copy()
    begins[:1] = True
    begins[1:] |= stream[1:] != stream[:-1]
    edges = [*np.flatnonzero(begins).tolist(), len(ids)]
    for start, stop in pairwise(edges):
        if partial or (flags["is_first"][start] and flags["is_last"][stop - 1]):
            episode = {k: s.zeros(stop - start) for k, s in replay.spaces.items()}
            replay.store.gather(ids[start:stop], episode)
            yield episode
