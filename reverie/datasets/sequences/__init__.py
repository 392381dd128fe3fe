"""Sequence datasets: sequences without an environment, generated or read from files.

A sequence dataset is a class that implements `SequenceDataset`. The task
`sequences_<name>` selects a class of `SEQUENCE_DATASETS` by its name there; the task
`sequences_package.module:Class` selects a user's own class. The members are:

- `batch(step)`: the sequences of a training step, arrays `(B, T, ...)` by key. The same
  step always gives the same sequences, so that a run can be resumed;
- `evaluation()`: sequences that are never part of a training batch;
- `close()`: stop threads and close files;
- `loss`: the reconstruction loss of images, `bernoulli` or `gaussian`;
- `obs_space` and `act_space`: one image, and the actions (an empty dict if there are
  none).

A class may also have a static method `unused_settings(config)`, which returns the names
of the settings in `SequenceConfig` that it does not use, with the reason.

The time convention is that of `api.py`: the action of a row leads to the next row.
Ground-truth events (segment boundaries), if known, have the key `log/event`, bool
`(B, T)`; keys under `log/` are used by evaluation and never by a loss.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import math
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from reverie.api import UserError
from reverie.plugins import add_current_folder
from reverie.rows import Window
from reverie.spaces import Arrays, Spaces

Loss = Literal["bernoulli", "gaussian"]

PREFIX = "sequences_"
"""Prefix of the tasks that are sequence datasets."""

LOSSES: tuple[str, ...] = get_args(Loss)
METHODS = ("batch", "evaluation", "close")
"""Methods that a sequence dataset must have."""

SEQUENCE_DATASETS = {
    "balls": "reverie.datasets.synthetic.balls:BouncingBalls",
    "maze": "reverie.datasets.synthetic.maze:Maze",
}


@dataclass(frozen=True)
class SequenceConfig:
    """Sequence datasets (tasks `sequences_*`)."""

    folder: str = ""
    """Folder of the files to read, as written by `reverie data balls` or `reverie data
    maze`. If empty, bouncing balls are generated during training, and the maze is read
    from `data/maze`."""
    actions: bool = True
    """Use the recorded actions, if the dataset has any. The authors of VTA train
    without actions."""
    chunk: int = 8192
    """Number of sequences generated together; batches are taken from them in shuffled
    order."""
    refresh: int = 512
    """Updates after which a new chunk replaces the current one; 0 keeps the first."""
    evaluation: int = 1024
    """Number of sequences in the evaluation set."""
    memory: float = 2.0
    """Size of the cache of decompressed episodes in GiB, for datasets that are read
    from files of single episodes."""
    dt: float = 2.0
    """Time between two frames of the bouncing balls; they start at 1.5 pixels per unit
    of time."""
    side: int = 32
    """Height and width of the images of bouncing balls in pixels: 32, or 16 or 8,
    which are downscaled by averaging."""

    def __post_init__(self) -> None:
        if self.side not in (8, 16, 32):
            raise ValueError("side must be 8, 16 or 32")
        if min(self.chunk, self.evaluation) < 1 or self.refresh < 0:
            raise ValueError(
                "chunk and evaluation must be at least 1 and refresh at least 0"
            )
        for name in ("dt", "memory"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be a finite number above 0")


@runtime_checkable
class SequenceDataset(Protocol):
    """A sequence dataset; the docstring of this module explains its members."""

    loss: Loss
    obs_space: Spaces
    act_space: Spaces

    def batch(self, step: int) -> Arrays: ...

    def evaluation(self) -> Arrays: ...

    def close(self) -> None: ...


def is_sequence_task(task: str) -> bool:
    """True if the task is a sequence dataset rather than an environment."""
    return task.startswith(PREFIX)


def find_sequence_class(task: str) -> type:
    """Return the class of a task `sequences_*`."""
    name = task.removeprefix(PREFIX)
    class_path = name if ":" in name else SEQUENCE_DATASETS.get(name)
    if class_path is None:
        near = difflib.get_close_matches(name, SEQUENCE_DATASETS, 1, 0)[0]
        raise UserError(
            f"There is no sequence dataset {name!r}.\n  Fix: did you mean --task "
            f"{PREFIX}{near}? For your own, use --task {PREFIX}package.module:Class."
        )
    module, _, class_name = class_path.partition(":")
    add_current_folder(module)
    try:
        found: type = getattr(importlib.import_module(module), class_name)
    except Exception as error:  # user code may raise anything
        raise UserError(
            f"Task {task!r} cannot be imported: {error}.\n  Fix: name an importable "
            "class as package.module:Class, and run from the folder of its file."
        ) from None
    if not isinstance(found, type) or getattr(found, "loss", None) not in LOSSES:
        raise UserError(
            f"Task {task!r} is not a sequence dataset: {class_name} must be a class "
            f"with an attribute `loss` that is one of {', '.join(LOSSES)}.\n"
            "  Fix: add it; see reverie/datasets/sequences/__init__.py."
        )
    return found


def make_sequence_dataset(
    task: str, config: SequenceConfig, window: Window, seed: int
) -> SequenceDataset:
    """Return the dataset of a task, with batches of this window."""
    dataset_class = find_sequence_class(task)
    missing = [m for m in METHODS if not callable(getattr(dataset_class, m, None))]
    if missing:
        raise UserError(
            f"Task {task!r} is not a sequence dataset: {dataset_class.__name__} has no "
            f"{missing[0]}().\n  Fix: add the methods {', '.join(METHODS)}."
        )
    with explain_user_code_errors(dataset_class):
        dataset: SequenceDataset = dataset_class(config, window, seed)
    return dataset


@contextlib.contextmanager
def explain_user_code_errors(dataset_class: type) -> Iterator[None]:
    """Raise errors of a user's class as `UserError` with file and line."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # user code may raise anything
        if dataset_class.__module__.startswith("reverie."):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise UserError(
            f"{dataset_class.__name__} failed with {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno}).\n"
            "  Fix: correct it, and run the same command again."
        ) from error
