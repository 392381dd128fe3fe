"""Evaluate the segment boundaries of agents that train on sequences (VTA).

Boundaries are compared with the true events of the data, if it has any. Without
events, two runs that differ only in their seed can be compared with each other:
boundaries that depend on the data are found by both.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from reverie.agents.vta import boundary_metrics
from reverie.api import Batch, UserError
from reverie.capabilities import AgentConfig, FindsBoundaries
from reverie.datasets.sequences import is_sequence_task
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.evaluation.result import EvalResult, make_result
from reverie.run.config import Config
from reverie.run.imported import find_imported
from reverie.run.load import SavedRun, open_run
from reverie.run.offline.datasets import OfflineSequences

SEED_OFFSET = 1_000_000
"""Added to the seed, so that generated sequences differ from the training data."""


class SequenceRun(NamedTuple):
    """A run with its agent and the feed of its sequences."""

    run: SavedRun
    agent: FindsBoundaries
    feed: SequenceFeed

    @property
    def data(self) -> str:
        """Path of the data; empty if it is generated."""
        config = self.run.config
        if is_sequence_task(config.task):
            folder = getattr(self.feed.dataset, "folder", "")
            return str(folder or config.sequences.folder)
        return config.offline.evaluated_data


def open_sequence_run(
    logdir: Path,
    sequences: int,
    flags: Sequence[tuple[str, Any]] = (),
    seed_offset: int = 0,
    presets: Sequence[str] = (),
    files: Sequence[str] = (),
) -> SequenceRun:
    """Load a run and this many evaluation sequences; fewer if its data has fewer.

    `presets` and `files` give the settings for a checkpoint of another implementation,
    which contains none.
    """
    if imported := find_imported(logdir, Config):  # check before reading its settings
        _check_trains_on_sequences(
            logdir, imported.agent, getattr(Config(), imported.agent)
        )
    run = open_run(logdir, flags, presets=presets, files=files)
    _check_trains_on_sequences(logdir, run.config.agent, run.config.agent_config)
    settings = replace(run.config.sequences, evaluation=sequences)
    dataset = OfflineSequences(replace(run.config, sequences=settings), seed_offset)
    # only weights are loaded, so the agent's random generators start from this seed
    config = replace(run.config, seed=run.config.seed + seed_offset)
    agent = replace(run, config=config).load_agent(dataset)
    if not isinstance(agent, FindsBoundaries):
        raise UserError(
            f"{logdir}: the agent {config.agent!r} does not find boundaries.\n"
            "  Fix: use the --logdir of a run of the agent vta."
        )
    return SequenceRun(run, agent, SequenceFeed(dataset.dataset, run.device))


def _check_trains_on_sequences(logdir: Path, agent: str, config: AgentConfig) -> None:
    if config.sequence_window is None:
        raise UserError(
            f"{logdir} was not trained on a sequence dataset: its agent is {agent!r}.\n"
            "  Fix: use the --logdir of a run of agent vta, or model_best.pt of VTA."
        )


def eval_boundaries(
    logdir: Path,
    sequences: int = 1000,
    flags: Sequence[tuple[str, Any]] = (),
    presets: Sequence[str] = (),
    files: Sequence[str] = (),
) -> EvalResult:
    """Evaluate the newest checkpoint of a run, or a given checkpoint.

    Generated sequences are new; for data in files, the held-out sequences are used.
    """
    opened = open_sequence_run(logdir, sequences, flags, SEED_OFFSET, presets, files)
    with contextlib.closing(opened.feed) as feed:
        report = opened.agent.report(feed)
        count = _batch_size(feed("report"))
    scalars = {
        key: float(value)
        for key, value in report.items()
        if (value.ndim if isinstance(value, torch.Tensor) else np.ndim(value)) == 0
    }
    summary = {"count": count, **scalars}
    return make_result(opened.run, "boundaries", summary, [], opened.data)


class Agreement(NamedTuple):
    """Agreement of the boundaries of two runs."""

    kappa: float
    """Cohen's kappa."""
    rates: list[float]
    """Fraction of frames that are boundaries, for each run."""
    sequences: int
    data: str


def compare_boundaries(
    logdir: Path,
    other: Path,
    sequences: int = 1000,
    flags: Sequence[tuple[str, Any]] = (),
    presets: Sequence[str] = (),
    files: Sequence[str] = (),
) -> Agreement:
    """Compare the boundaries of two runs on evaluation sequences of the first."""
    options = (flags, SEED_OFFSET, presets, files)
    first = open_sequence_run(logdir, sequences, *options)
    with contextlib.closing(first.feed) as feed:
        batch = feed("report")
    second = open_sequence_run(other, 1, *options)
    second.feed.close()
    agents = [first.agent, second.agent]
    datasets = [first.feed.dataset, second.feed.dataset]
    spaces = [(dataset.obs_space, dataset.act_space) for dataset in datasets]
    windows = {(a.modeled_rows.start, a.modeled_rows.stop) for a in agents}
    if spaces[0] != spaces[1] or len(windows) > 1:
        raise UserError(
            f"{logdir} and {other} use sequences of different shapes.\n  Fix: compare "
            "runs with the same task, sequences.side, sequences.actions, "
            "vta.world.context and vta.world.length."
        )
    # the first frame of a sequence is always a boundary
    boundaries = [a.evaluate(batch).boundary[:, 1:].cpu().numpy() for a in agents]
    return Agreement(
        boundary_metrics.cohens_kappa(*boundaries),
        [float(x.mean()) for x in boundaries],
        _batch_size(batch),
        first.data,
    )


def _batch_size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _describe_data(count: int, data: str) -> str:
    return f"{count} held-out sequences of {data}" if data else f"{count} new sequences"


def describe_agreement(agreement: Agreement) -> str:
    """Return the agreement of two runs as a sentence."""
    return (
        f"Agreement of the boundaries: Cohen's kappa {agreement.kappa:.3f} (1: equal, "
        f"0: chance) on {_describe_data(agreement.sequences, agreement.data)}; "
        "{:.3f} and {:.3f} of all frames are boundaries.".format(*agreement.rates)
    )


def describe(result: EvalResult) -> str:
    """Return the result of the agent and of the baselines as lines of text."""
    summary = result.summary
    lines = [
        f"{result.task}: {_describe_data(summary['count'], result.data)}, "
        f"{summary['segments/count']:.2f} segments per sequence, "
        f"loss {summary['loss']:.2f}"
    ]
    if "boundaries/exact/f1" not in summary:
        return lines[0]
    if math.isnan(summary["boundaries/exact/f1"]):
        return f"{lines[0]}\nThe data has no events to compare the boundaries with."
    rows = {"boundaries": "boundaries/"}
    names = [key.split("/")[1] for key in summary if key.startswith("baselines/")]
    rows |= {f"  {name}": f"baselines/{name}/" for name in dict.fromkeys(names)}
    for name, prefix in rows.items():
        exact, near = (summary[f"{prefix}{kind}/f1"] for kind in ("exact", "near"))
        lines.append(f"{name:<12} F1 exact {exact:.3f}, within one frame {near:.3f}")
    parts = [summary[f"boundaries/exact/{key}"] for key in ("precision", "recall")]
    lines.insert(2, "  precision {:.3f}, recall {:.3f}".format(*parts))
    values = [summary[f"calibration/{key}"] for key in ("brier", "error", "auc")]
    lines.append(
        "boundary probabilities: Brier score {:.3f}, calibration error {:.3f}, area "
        "under the ROC curve {:.3f}".format(*values)
    )
    lines.append("loss in nats per frame at a boundary, at a missed event, elsewhere")
    losses = [key.split("/")[1] for key in summary if key.startswith("costs/")]
    for name in dict.fromkeys(losses):
        kinds = ("boundary", "event", "other")  # `event`: an event without a boundary
        nats = [summary[f"costs/{name}/{kind}"] for kind in kinds]
        columns = (f"{'-' if math.isnan(x) else f'{x:.2f}':>8}" for x in nats)
        lines.append(f"  {name:<10} {' '.join(columns)}")
    return "\n".join(lines)
