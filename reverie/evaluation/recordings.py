"""Evaluate a run on held-out recorded episodes (`reverie eval`).

The result has the losses of each episode and, for world models, the open-loop error of
every key by horizon and the statistics of rollout ensembles. The errors of each key are
plotted in the folder `eval`, which also contains a figure of the ensembles of each
vector and a video of each image key.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverie.evaluation.held_out import (
    HeldOutResults,
    OpenLoopErrors,
    evaluate_held_out,
    mean_losses,
)
from reverie.evaluation.result import EvalResult, make_result, output_folder
from reverie.evaluation.rollout_ensembles import ensemble_table
from reverie.render.curve import draw_curves
from reverie.render.video import upscale, video_suffix, write_image, write_video
from reverie.run.load import open_run
from reverie.run.offline.datasets import OfflineEpisodes
from reverie.storage.atomic import ignore_unwritable

LABELS = {
    "model": "world model",
    "copy": "last observed row",
    "mean": "mean of all rows",
}
"""Predictions whose open-loop errors are compared."""
FPS = 8
"""Frames per second of the videos."""


def eval_recordings(logdir: Path, flags: Sequence[tuple[str, Any]] = ()) -> EvalResult:
    """Evaluate the newest checkpoint of a run, or a given checkpoint.

    `offline.eval_data` may select other recorded episodes.
    """
    run = open_run(logdir, flags)
    config = run.config.offline
    dataset = OfflineEpisodes(config, run.config.seed)
    with contextlib.closing(dataset):
        agent = run.load_agent(dataset)
        with contextlib.closing(dataset.open_feed(agent, run.device)) as feed:
            results = evaluate_held_out(agent, feed, dataset.images, config.eval)
        count = len(dataset.held_out.names()[: config.eval.episodes or None])
    files: list[Path] = []
    with ignore_unwritable():
        files = _write_media(output_folder(run.folder), config.eval.context, results)
    summary = {
        "count": len(results.losses) or count,
        "loss": mean_losses(results.losses),
        "openloop": {key: _curves(errors) for key, errors in results.errors.items()},
        "ensemble": ensemble_table(results.ensembles),
    }
    episodes = [
        {"name": episode.name, "rows": episode.rows, **episode.losses}
        for episode in results.losses
    ]
    names = [str(path) for path in files]
    return make_result(
        run, "recordings", summary, episodes, config.evaluated_data, names
    )


def describe(result: EvalResult) -> str:
    """Return the result as lines of text."""
    summary = result.summary
    lines = [f"{result.data}: {summary['count']} held-out episodes"]
    lines += [f"  loss {k:<24} {value:.4g}" for k, value in summary["loss"].items()]
    for key, curves in summary["openloop"].items():
        errors = [
            f"{LABELS[name]} {np.nanmean(curve):.4g}" for name, curve in curves.items()
        ]
        lines.append(f"  open-loop error {key:<13} {', '.join(errors)}")
    for key, table in summary["ensemble"].items():
        rmse, spread, coverage = (
            np.nanmean(table[name]) for name in ("rmse", "spread", "coverage")
        )
        lines.append(
            f"  ensembles {key:<19} RMSE {rmse:.4g}, spread {spread:.4g}, coverage "
            f"{100 * coverage:.0f} % (calibrated: "
            f"{100 * table['calibrated_coverage']:.0f} %)"
        )
    return "\n".join(lines)


def _curves(errors: OpenLoopErrors) -> dict[str, list[float]]:
    """Return means over episodes by horizon; NaN where no episode is long enough."""
    return {
        name: [
            math.nan if np.isnan(column).all() else float(np.nanmean(column))
            for column in values.T
        ]
        for name, values in errors._asdict().items()
    }


def _write_media(folder: Path, context: int, results: HeldOutResults) -> list[Path]:
    """Write plots of the open-loop errors, and all videos and figures."""
    images: dict[str, np.ndarray] = {}
    for key, errors in results.errors.items():
        lines = {
            LABELS[name]: [
                (i + 1.0, x) for i, x in enumerate(curve) if not math.isnan(x)
            ]
            for name, curve in _curves(errors).items()
        }
        title = f"{key}: open-loop error after {context} observed rows"
        axes = "steps ahead", "mean squared error"
        images[key] = draw_curves(lines, title, *axes, smooth=False)
    paths = []
    for key, value in (images | results.media).items():
        path = folder / key.replace("/", "_")
        if value.ndim == 4:
            path = write_video(f"{path}.{video_suffix()}", upscale(value), FPS)
        else:
            path = write_image(f"{path}.png", value)
        paths.append(path)
    return paths
