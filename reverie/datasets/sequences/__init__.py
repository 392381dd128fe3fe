"""Sequences to watch: made up on the spot, or read from files; nobody acts in them.

A source is a class in a file of this room with a row in `SOURCES`, and is then the task
`sequences_<name>`; one of your own is `sequences_package.module:Class`. It says five
things:

- `batch(step)`: the sequences of a training step, `(B, T, ...)` each, by key. The same
  step always gives the same sequences, so that a resumed run goes on as it would have;
- `evaluation()`: sequences that training never sees;
- `close()`: nothing more will be asked for;
- `loss`: how images are to be compared, `bernoulli` or `gaussian`;
- `obs_space` and `act_space`: one image, and the actions that lead from row to row
  (an empty dict where there are none).

Time is that of `reverie.api`: the action of a row leads to the next one. Where the true
events are known they come along as `log/event`, bool `(B, T)`; keys under `log/` are
for people and never reach a loss.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np

from reverie.api import UserError
from reverie.rows import Window
from reverie.spaces import Spaces

Arrays = dict[str, np.ndarray]

Loss = Literal["bernoulli", "gaussian"]

PREFIX = "sequences_"

LOSSES: tuple[str, ...] = get_args(Loss)
VERBS = ("batch", "evaluation", "close")

SOURCES = {
    "balls": "reverie.datasets.synthetic.balls:Balls",
    "maze": "reverie.datasets.synthetic.maze:Maze",
    "episodes": "reverie.datasets.sequences.episodes:Episodes",
}


@dataclass(frozen=True)
class SourceConfig:
    """Where sequences to watch come from (tasks `sequences_*`)."""

    folder: str = ""
    """Files to read, for sources that read any."""
    actions: bool = True
    """Tell which actions were taken, for sources that know; the authors of VTA do not,
    and then recordings need not have any."""
    chunk: int = 8192
    """Sequences that are made up together and then drawn from, in shuffled order."""
    refresh: int = 512
    """Updates after which others, made meanwhile, replace them; 0 for never."""
    evaluation: int = 1024
    """Sequences of the evaluation set."""
    dt: float = 2.0
    """How far balls move between two frames."""
    side: int = 32
    """Pixels of a side of the balls' pictures; 16 or 8 are made of means."""

    def __post_init__(self) -> None:
        if self.side not in (8, 16, 32):
            raise ValueError("side must be 8, 16 or 32")
        if min(self.chunk, self.evaluation) < 1 or self.refresh < 0:
            raise ValueError("chunk and evaluation must be at least 1, refresh 0")
        if not 0 < self.dt < math.inf:
            raise ValueError("dt must be a finite number above 0")


@runtime_checkable
class Source(Protocol):
    """See the top of this file."""

    loss: Loss
    obs_space: Spaces
    act_space: Spaces

    def batch(self, step: int) -> Arrays: ...

    def evaluation(self) -> Arrays: ...

    def close(self) -> None: ...


def is_source(task: str) -> bool:
    return task.startswith(PREFIX)


def find(task: str) -> type:
    """The class behind a task name."""
    name = task.removeprefix(PREFIX)
    place = name if ":" in name else SOURCES.get(name)
    if place is None:
        near = difflib.get_close_matches(name, SOURCES, 1, 0)[0]
        raise UserError(
            f"There is nothing called {name!r} to watch.\n  Fix: did you mean "
            f"--task {PREFIX}{near}? Your own is --task {PREFIX}package.module:Class."
        )
    module, _, kind = place.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a file of one's own lies in the present folder
    try:
        found: type = getattr(importlib.import_module(module), kind)
    except Exception as error:  # whatever the code of its author raises
        raise UserError(
            f"Task {task!r} cannot be found: {error}.\n  Fix: name a class that can be "
            "imported, as package.module:Class, from the folder its file lies in."
        ) from None
    if not isinstance(found, type) or getattr(found, "loss", None) not in LOSSES:
        raise UserError(
            f"Task {task!r} is not a source: {kind} is no class with a `loss` that is "
            f"one of {', '.join(LOSSES)}.\n  Fix: see the source of twenty lines in "
            "tests/data/test_sources.py."
        )
    return found


def make(task: str, config: SourceConfig, window: Window, seed: int) -> Source:
    """The source of a task, for batches of this shape."""
    kind = find(task)
    lacks = [verb for verb in VERBS if not callable(getattr(kind, verb, None))]
    if lacks:
        raise UserError(
            f"Task {task!r} is not a source: {kind.__name__} has no {lacks[0]}().\n"
            f"  Fix: give it the methods {', '.join(VERBS)}."
        )
    with telling(kind):
        source: Source = kind(config, window, seed)
    return source


@contextlib.contextmanager
def telling(kind: type) -> Iterator[None]:
    """What a source of one's own raises becomes a sentence; mistakes of ours do not."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # whatever the code of its author raises
        if kind.__module__.startswith("reverie."):
            raise
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{kind.__name__} failed with {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno}).\n"
            "  Fix: mend that, and run the same command again."
        ) from error
