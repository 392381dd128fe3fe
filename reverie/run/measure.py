"""Measure how well the boundaries of a watched world agree with the true events.

Where there are none, or where none may be looked at, two runs that differ in nothing
but their seed say something too: boundaries that are about the data are found by both.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reverie.agents import boundary_metrics
from reverie.api import UserError
from reverie.run import checkpoint
from reverie.run.folder import home_of
from reverie.run.watch import load_watcher

FRESH = 1_000_000
"""Added to the seed: the run has seen none of these sequences, in no role."""


def measure_boundaries(logdir: Path, sequences: int = 1000) -> dict[str, Any]:
    """Watch fresh sequences with the newest checkpoint of a run, or the one named.

    Writes the numbers to `boundaries.json` in the run folder and returns them.
    """
    path = checkpoint.locate(logdir)
    config, agent, feed = load_watcher(logdir, FRESH, evaluation=sequences)
    try:
        report = agent.report(feed)
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
        "sequences": sequences,
        **numbers,
    }
    data = json.dumps(result, indent=1).encode()
    with contextlib.suppress(PermissionError):  # somebody else's run may be measured
        checkpoint.replace_file(home_of(path) / "boundaries.json", data)
    return result


def compare_boundaries(
    logdir: Path, other: Path, sequences: int = 1000
) -> dict[str, Any]:
    """How far two runs agree, on sequences that are fresh to the first; no labels."""
    _, agent, feed = load_watcher(logdir, FRESH, evaluation=sequences)
    try:
        data = feed("report")
    finally:
        feed.close()
    _, another, others = load_watcher(other, FRESH, evaluation=1)
    others.close()
    watchers: list[Any] = [agent, another]
    seen = [(x.source.obs_space, x.source.act_space) for x in (feed, others)]
    windows = {(w.config.vta.context, w.config.vta.length) for w in watchers}
    if seen[0] != seen[1] or len(windows) > 1:
        raise UserError(
            f"{logdir} and {other} look at sequences of different kinds or lengths.\n"
            "  Fix: compare runs of one task, with the same source.side and "
            "watcher.vta.context and length."
        )
    found = [w.watch(data).read[:, 1:].cpu().numpy() for w in watchers]
    return {
        "sequences": sequences,
        "agreement": boundary_metrics.agreement(*found),
        "rates": [float(marks.mean()) for marks in found],
    }


def in_words(result: dict[str, Any]) -> str:
    """The result as a person wants it, baselines below it."""
    lines = [
        f"{result['task']}: {result['sequences']} fresh sequences, "
        f"{result['segments/count']:.2f} segments each, loss {result['loss']:.2f}"
    ]
    rows = {"boundaries": "boundaries/"}
    names = [key.split("/")[1] for key in result if key.startswith("baselines/")]
    rows |= {f"  {name}": f"baselines/{name}/" for name in dict.fromkeys(names)}
    for name, prefix in rows.items():
        if f"{prefix}exact/f1" in result:
            exact, near = (result[f"{prefix}{kind}/f1"] for kind in ("exact", "near"))
            lines.append(f"{name:<12} F1 exact {exact:.3f}, within a frame {near:.3f}")
    if "boundaries/exact/precision" in result:
        parts = [result[f"boundaries/exact/{key}"] for key in ("precision", "recall")]
        lines.insert(2, "  precision {:.3f}, recall {:.3f}".format(*parts))
    costs = [key.split("/")[1] for key in result if key.startswith("costs/")]
    if costs:
        lines.append("nats a frame at a boundary, at a missed event, elsewhere")
    for name in dict.fromkeys(costs):
        kinds = ("boundary", "event", "other")
        values = (f"{result[f'costs/{name}/{kind}']:8.2f}" for kind in kinds)
        lines.append(f"  {name:<10} {' '.join(values)}")
    return "\n".join(lines)
