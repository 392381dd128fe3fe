"""`EvalResult`: the result of an evaluation, written to `eval.json` in the run folder.

All kinds of evaluation have the same fields. The metrics in `summary` can be objectives
of a sweep.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from reverie.run.folder import refuse_links
from reverie.run.load import SavedRun
from reverie.storage.atomic import ignore_unwritable, write_json

FILE_NAME = "eval.json"
FOLDER = "eval"
"""Folder of videos and figures in the run folder."""


@dataclass(frozen=True)
class EvalResult:
    """What was evaluated, and the metrics."""

    kind: Literal["episodes", "recordings", "boundaries"]
    """What was evaluated: episodes in an environment, recorded episodes, or segment
    boundaries of sequences."""
    checkpoint: str
    """Name of the checkpoint folder."""
    task: str
    data: str
    """Path or dataset id of the evaluation data; empty for environments and generated
    sequences."""
    seed: int
    size: str
    """Size preset that was selected automatically; empty if the config sets it."""
    summary: dict[str, Any]
    """Metrics over all episodes; lists are curves by prediction horizon."""
    episodes: list[dict[str, Any]]
    """Metrics of each episode; empty for sequences."""
    files: list[str] = field(default_factory=list)
    """Videos, figures and recordings that the evaluation wrote."""


def output_folder(run_folder: Path) -> Path:
    """Return the folder of videos and figures; symbolic links there are refused."""
    refuse_links(run_folder, (FOLDER,), ())
    return run_folder / FOLDER


def make_result(
    run: SavedRun,
    kind: Literal["episodes", "recordings", "boundaries"],
    summary: dict[str, Any],
    episodes: list[dict[str, Any]],
    data: str = "",
    files: list[str] | None = None,
) -> EvalResult:
    """Return a result; also write `eval.json`, unless the folder is not writable."""
    config = run.config
    result = EvalResult(
        kind,
        run.checkpoint.name,
        config.task,
        data,
        config.seed,
        config.size,
        summary,
        episodes,
        files or [],
    )
    with ignore_unwritable():
        write_json(run.folder / FILE_NAME, _without_nan(asdict(result)))
    return result


def _without_nan(data: Any) -> Any:
    """Replace NaN by None, which JSON can represent."""
    if isinstance(data, dict):
        return {key: _without_nan(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_without_nan(value) for value in data]
    return None if isinstance(data, float) and math.isnan(data) else data
