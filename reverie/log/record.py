"""What a logger hands to its sinks at every write, and what a sink is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Score:
    """The outcome of one episode, at the step it ended."""

    step: int
    name: str
    value: float


@dataclass(frozen=True)
class Record:
    """Everything there is to say at one step, on the host and sorted by kind."""

    step: int
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)  # h w c, uint8
    videos: dict[str, np.ndarray] = field(default_factory=dict)  # t h w c, uint8
    scores: tuple[Score, ...] = ()


class Sink(Protocol):
    """One place where records go.

    `write` may raise: the logger says so once and the run goes on. `truncate_after`
    forgets what lies beyond a step the run has gone back to, where the place can.
    """

    name: str

    def write(self, record: Record) -> None: ...

    def truncate_after(self, step: int) -> None: ...

    def close(self) -> None: ...
