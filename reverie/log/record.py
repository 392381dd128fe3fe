"""The data passed from the logger to its sinks, and the protocol of a sink."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np


class Score(NamedTuple):
    """Score of one episode, at the step it ended."""

    step: int
    name: str
    value: float


@dataclass(frozen=True)
class Record:
    """All metrics of one write, in host memory."""

    step: int
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)  # h w c, uint8
    videos: dict[str, np.ndarray] = field(default_factory=dict)  # t h w c, uint8
    scores: tuple[Score, ...] = ()


class Sink:
    """A destination of metrics.

    All methods may raise: the logger prints one warning and the run continues. Sinks
    may also have `state_dict` and `load_state_dict` to resume exactly.
    """

    name: ClassVar[str]

    def write(self, record: Record) -> None:
        raise NotImplementedError

    def progress(self, step: int) -> None:
        """Called at every step."""

    def truncate_after(self, step: int) -> None:
        """Remove what was written after this step, if possible.

        Called when a run resumes from a checkpoint of this step.
        """

    def close(self) -> None:
        """Flush and release files and connections."""
