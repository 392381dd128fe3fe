"""The data passed from the logger to its sinks, and the protocol of a sink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np


class Score(NamedTuple):
    """Score of one episode, at the step at which it ended."""

    step: int
    name: str
    value: float
    length: float | None = None
    """Number of actions."""
    seconds: float | None = None
    """Duration of the run until the episode ended."""
    others: Mapping[str, float] = MappingProxyType({})
    """Other values of the episode, by name, such as `episode/success`."""


@dataclass(frozen=True)
class Record:
    """All metrics of one write, in host memory."""

    step: int
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    images: dict[str, np.ndarray] = field(default_factory=dict)  # h w c, uint8
    videos: dict[str, np.ndarray] = field(default_factory=dict)  # t h w c, uint8
    scores: tuple[Score, ...] = ()
    seconds: float | None = None
    """Duration of the run so far, in seconds of wall-clock time."""


class Sink:
    """A destination of metrics.

    All methods may raise: the logger prints one warning and the run continues.
    """

    name: ClassVar[str]

    def write(self, record: Record) -> None:
        raise NotImplementedError

    def progress(self, step: int) -> None:
        """Called at every step."""

    def clear_line(self) -> None:
        """Called before other text is printed."""

    def truncate_after(self, step: int) -> None:
        """Remove what was written after this step, if possible.

        Called when a run resumes from a checkpoint of this step.
        """

    def close(self) -> None:
        """Flush and release files and connections."""


@runtime_checkable
class ResumableSink(Protocol):
    """A sink that restores its files as they were when its state was saved."""

    name: ClassVar[str]
    has_final_line: bool

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(
        self, state: dict[str, Any], final_step: int | None = None
    ) -> None:
        """Restore the state.

        Lines that a finished run wrote at its last step, `final_step`, are kept.
        `has_final_line` is True if there are any.
        """
