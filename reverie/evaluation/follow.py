"""Evaluate each new checkpoint of a run while it is trained in another process.

Results are logged in the folder `eval` of the run, to which training does not write.
The steps in its `metrics.jsonl` and `scores.jsonl` are those of the checkpoints.
TensorBoard shows the folder as a separate run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from reverie.api import Metrics, UserError
from reverie.envs import action_repeat
from reverie.evaluation.result import EvalResult, output_folder
from reverie.log.jsonl import METRICS, read_lines
from reverie.log.logger import Logger, make_logger
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import Config
from reverie.run.folder import read_config
from reverie.run.load import UntrainedPolicy

POLL_SECONDS = 2.0
"""Time between two searches for new checkpoints."""
# Metrics with the progress of training at the checkpoint.
UPDATES = "eval/updates"
EPOCH = "eval/epoch"


def follow(
    logdir: Path, evaluate: Callable[[Path], EvalResult], poll: float = POLL_SECONDS
) -> Iterator[EvalResult]:
    """Evaluate the checkpoints of a run, oldest first, until the run has finished.

    Waits for new ones. Checkpoints that are deleted before they are evaluated, that an
    earlier call has evaluated, or whose policy is not trained are skipped.
    """
    logdir = logdir.expanduser()
    config = read_config(logdir)
    with contextlib.closing(_make_logger(config, logdir)) as logger:
        lines = read_lines(output_folder(logdir) / METRICS)
        evaluated = {(x["step"], x[UPDATES]) for x in lines if UPDATES in x}
        seen: set[Path] = set()
        while True:
            paths = Checkpoints(logdir / "ckpt").paths()
            path = next((path for path in paths if path not in seen), None)
            if path is None:
                if paths and _is_final(paths[-1]):
                    return
                time.sleep(poll)
                continue
            seen.add(path)
            with _ignore_deleted(path):
                loop = checkpoint.read_part(path, "loop")
                clock = loop["clock"]
                frames = clock["step"] * action_repeat(config.task, config.env)
                progress = frames, clock["updates"]
                if progress in evaluated:
                    continue
                try:
                    result = evaluate(path)
                except UntrainedPolicy:
                    continue
                evaluated.add(progress)
                # the training time at the checkpoint; None if the run logs no times
                if loop["logger"]["seconds"] is not None:
                    logger.seconds = loop["logger"]["seconds"]
                logger.add({UPDATES: clock["updates"], **_metrics(result)})
                if clock["completed_epochs"] is not None:
                    logger.add({EPOCH: clock["completed_epochs"]})
                logger.write(frames)
                yield result


def wait_for_checkpoint(logdir: Path, poll: float = POLL_SECONDS) -> None:
    """Wait until a run has a checkpoint."""
    read_config(logdir)  # raises if it is not a run folder
    while not Checkpoints(logdir.expanduser() / "ckpt").paths():
        time.sleep(poll)


def _make_logger(config: Config, logdir: Path) -> Logger:
    """Return a logger with the outputs of the run, except for the terminal.

    `metrics.jsonl` is always written: it records which checkpoints were evaluated.
    """
    outputs = tuple(
        name for name in config.logger.outputs if name not in ("terminal", "jsonl")
    )
    settings = dataclasses.asdict(config)
    return make_logger(
        dataclasses.replace(config.logger, outputs=("jsonl", *outputs)),
        output_folder(logdir),
        settings=settings,
        name=f"{logdir.resolve().name}-eval",
    )


def _is_final(path: Path) -> bool:
    """True if this is the last checkpoint of a finished run."""
    with _ignore_deleted(path):
        return checkpoint.read_part(path, "loop")["final_log"] is not None
    return False


@contextlib.contextmanager
def _ignore_deleted(path: Path) -> Iterator[None]:
    """Ignore errors about a checkpoint that training has deleted in the meantime."""
    try:
        yield
    except (UserError, OSError):
        if path.exists():
            raise


def _metrics(result: EvalResult) -> Metrics:
    """Return the scalars of a result, named as in evaluations during training."""
    prefix = "eval/episode" if result.kind == "episodes" else "eval"
    scalars = {k: v for k, v in result.summary.items() if isinstance(v, int | float)}
    return {f"{prefix}/{key}": value for key, value in scalars.items()}
