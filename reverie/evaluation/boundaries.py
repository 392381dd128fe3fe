"""Measure how well the boundaries of a watched world agree with the true events.

Where there are none, or where none may be looked at, two runs that differ in nothing
but their seed say something too: boundaries that are about the data are found by both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reverie.agents.vta import boundary_metrics
from reverie.api import Batch, UserError
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.run import checkpoint
from reverie.run.config import Config
from reverie.run.folder import run_folder_of
from reverie.run.sequences import load_watcher
from reverie.storage.atomic import ignore_unwritable, write_json

FRESH = 1_000_000
"""Added to the seed: the run has seen none of these sequences, in no role."""


def measure_boundaries(
    logdir: Path, sequences: int = 1000, flags: Sequence[tuple[str, Any]] = ()
) -> dict[str, Any]:
    """Watch fresh sequences with the newest checkpoint of a run, or the one named.

    A folder holds as many as it does, and those that were set aside are all there is.
    Writes the numbers to `boundaries.json` in the run folder and returns them.
    """
    path = checkpoint.find_checkpoint(logdir)
    config, agent, feed = load_watcher(logdir, FRESH, flags, evaluation=sequences)
    try:
        report = agent.report(feed)
        count = _count(feed("report"))
    finally:
        feed.close()
    numbers = {
        key: float(value)
        for key, value in report.items()
        if (value.ndim if isinstance(value, torch.Tensor) else np.ndim(value)) == 0
    }
    result = {
        "checkpoint": path.name,
        "task": config.task,
        "folder": _folder(config, feed),
        "sequences": count,
        **numbers,
    }
    plain = {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in result.items()
    }
    with ignore_unwritable():
        write_json(run_folder_of(path) / "boundaries.json", plain)
    return result


def compare_boundaries(
    logdir: Path,
    other: Path,
    sequences: int = 1000,
    flags: Sequence[tuple[str, Any]] = (),
) -> dict[str, Any]:
    """How far two runs agree, on sequences that are fresh to the first; no labels."""
    config, agent, feed = load_watcher(logdir, FRESH, flags, evaluation=sequences)
    try:
        data = feed("report")
    finally:
        feed.close()
    _, another, others = load_watcher(other, FRESH, flags, evaluation=1)
    others.close()
    watchers: list[Any] = [agent, another]
    seen = [(x.dataset.obs_space, x.dataset.act_space) for x in (feed, others)]
    windows = {(w.config.world.context, w.config.world.length) for w in watchers}
    if seen[0] != seen[1] or len(windows) > 1:
        raise UserError(
            f"{logdir} and {other} look at sequences of different kinds or lengths.\n"
            "  Fix: compare runs of one task, with the same sequences.side and "
            "actions, and vta.world.context and length."
        )
    found = [w.watch(data).boundary[:, 1:].cpu().numpy() for w in watchers]
    return {
        "folder": _folder(config, feed),
        "sequences": _count(data),
        "agreement": boundary_metrics.agreement(*found),
        "rates": [float(marks.mean()) for marks in found],
    }


def _folder(config: Config, feed: SequenceFeed) -> str:
    """What sequences were set aside in; a source may have a folder by default."""
    return str(getattr(feed.dataset, "folder", "") or config.sequences.folder)


def _count(data: Batch) -> int:
    return len(next(iter(data.values())))


def which(result: dict[str, Any]) -> str:
    """The sequences of a result, in words."""
    count, folder = result["sequences"], result["folder"]
    return (
        f"{count} sequences set aside in {folder}"
        if folder
        else f"{count} fresh sequences"
    )


def agreement_in_words(found: dict[str, Any]) -> str:
    """How far two runs agree, as a person wants it."""
    return (
        f"Boundaries agree to {found['agreement']:.3f} (Cohen's kappa: 1 is always, 0 "
        f"as by chance) in {which(found)}; they begin at "
        "{:.3f} and {:.3f} of all frames.".format(*found["rates"])
    )


def in_words(result: dict[str, Any]) -> str:
    """The result as a person wants it, baselines below it."""
    lines = [
        f"{result['task']}: {which(result)}, "
        f"{result['segments/count']:.2f} segments each, loss {result['loss']:.2f}"
    ]
    if "boundaries/exact/f1" not in result:
        return lines[0]
    if math.isnan(result["boundaries/exact/f1"]):
        return f"{lines[0]}\nThere are no events in them to compare boundaries with."
    rows = {"boundaries": "boundaries/"}
    names = [key.split("/")[1] for key in result if key.startswith("baselines/")]
    rows |= {f"  {name}": f"baselines/{name}/" for name in dict.fromkeys(names)}
    for name, prefix in rows.items():
        exact, near = (result[f"{prefix}{kind}/f1"] for kind in ("exact", "near"))
        lines.append(f"{name:<12} F1 exact {exact:.3f}, within a frame {near:.3f}")
    parts = [result[f"boundaries/exact/{key}"] for key in ("precision", "recall")]
    lines.insert(2, "  precision {:.3f}, recall {:.3f}".format(*parts))
    said = [result[f"calibration/{key}"] for key in ("brier", "error", "auc")]
    lines.append(
        "chances: Brier score {:.3f}, calibration error {:.3f}, area under the curve "
        "{:.3f}".format(*said)
    )
    costs = [key.split("/")[1] for key in result if key.startswith("costs/")]
    lines.append("nats a frame at a boundary, at a missed event, elsewhere")
    for name in dict.fromkeys(costs):
        kinds = ("boundary", "event", "other")
        nats = [result[f"costs/{name}/{kind}"] for kind in kinds]
        values = (f"{'-' if math.isnan(x) else f'{x:.2f}':>8}" for x in nats)
        lines.append(f"  {name:<10} {' '.join(values)}")
    return "\n".join(lines)
