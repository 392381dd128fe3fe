"""How the start of the next sequence is chosen.

A selector draws start ids of whole windows of one span. `Uniform` gives each the same
chance.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from reverie.data.timeline import Timeline


@runtime_checkable
class Selector(Protocol):
    """Chooses where sampled windows begin."""

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray: ...


class Uniform:
    """Every whole window with the same chance.

    Draws live steps and rejects those whose window is not whole yet, which is exact
    and needs no bookkeeping; where few are whole it lists them instead.
    """

    def __init__(self, timeline: Timeline, span: int) -> None:
        self.timeline = timeline
        self.span = span

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        timeline = self.timeline
        size = timeline.total - timeline.first
        whole = timeline.count(self.span)
        assert whole > 0, f"no window of {self.span} steps is stored yet"
        if whole * 64 < size:
            starts = timeline.starts(self.span)
            return starts[rng.integers(0, len(starts), count)]
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:
            tries = 8 + (count - len(drawn)) * size * 5 // (whole * 4)
            ids = rng.integers(timeline.first, timeline.total, tries)
            drawn = np.append(drawn, ids[timeline.whole(ids, self.span)])
        return drawn[:count]
