"""Evaluate a run on held-out recorded episodes (`reverie eval`).

The result has the losses of each episode and, for world models, the open-loop error of
every key by horizon and the statistics of rollout ensembles. The folder `eval` gets a
plot per key, a figure of ensembles per vector and a video per image.
"""

from __future__ import annotations

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
from reverie.evaluation.result import FOLDER, EvalResult, make_result
from reverie.evaluation.rollout_ensembles import ensemble_table
from reverie.render.curve import draw_curves
from reverie.render.video import can_write_mp4, upscale, write_image, write_video
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


def eval_recordings(logdir: Path, flags: Sequence[tuple[str, Any]] = ()) -> EvalResult:
    """Evaluate the newest checkpoint of a run, or the checkpoint that is named.

    `offline.eval_data` may select other recorded episodes.
    """
    run = open_run(logdir, flags)
    config = run.config.offline
    dataset = OfflineEpisodes(config, run.config.seed)
    try:
        agent = run.load_agent(dataset)
        feed = dataset.open_feed(agent, run.device)
        try:
            results = evaluate_held_out(agent, feed, dataset.images, config.eval)
        finally:
            feed.close()
        names = dataset.held_out.names()[: config.eval.episodes or None]
    finally:
        dataset.close()
    files: list[Path] = []
    with ignore_unwritable():
        files = _write_media(run.folder / FOLDER, config.eval.context, results)
    summary = {
        "count": len(results.losses) or len(names),
        "loss": mean_losses(results.losses),
        "openloop": {key: _curves(errors) for key, errors in results.errors.items()},
        "ensemble": ensemble_table(results.ensembles),
    }
    episodes = [
        {"name": episode.name, "rows": episode.rows, **episode.losses}
        for episode in results.losses
    ]
    data = config.eval_data or config.data
    return make_result(
        run, "recordings", summary, episodes, data, [str(path) for path in files]
    )


def describe(result: EvalResult) -> str:
    """Return the result as lines of text."""
    summary = result.summary
    lines = [f"{result.data}: {summary['count']} held-out episodes"]
    lines += [f"  loss {k:<24} {value:.4g}" for k, value in summary["loss"].items()]
    for key, curves in summary["openloop"].items():
        errors = [
            f"{LABELS[name]} {np.nanmean(_floats(curve)):.4g}"
            for name, curve in curves.items()
        ]
        lines.append(f"  open-loop error {key:<13} {', '.join(errors)}")
    for key, table in summary["ensemble"].items():
        rmse, spread, coverage = (
            np.nanmean([_floats(row) for row in table[name]])
            for name in ("rmse", "spread", "coverage")
        )
        lines.append(
            f"  ensembles {key:<19} RMSE {rmse:.4g}, spread {spread:.4g}, coverage "
            f"{100 * coverage:.0f} % (calibrated: "
            f"{100 * table['calibrated_coverage']:.0f} %)"
        )
    return "\n".join(lines)


def _curves(errors: OpenLoopErrors) -> dict[str, list[float | None]]:
    """Return means over episodes by horizon; None where no episode is long enough."""
    curves: dict[str, list[float | None]] = {}
    for name, values in errors._asdict().items():
        exists = ~np.isnan(values).all(0)
        curves[name] = [
            float(np.nanmean(column)) if some else None
            for column, some in zip(values.T, exists, strict=True)
        ]
    return curves


def _floats(curve: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in curve]


def _write_media(folder: Path, context: int, results: HeldOutResults) -> list[Path]:
    """Write plots of the open-loop errors, and all videos and figures."""
    paths = []
    for key, errors in results.errors.items():
        lines = {
            LABELS[name]: [(i + 1.0, x) for i, x in enumerate(curve) if x is not None]
            for name, curve in _curves(errors).items()
        }
        title = f"{key}: open-loop error after {context} observed rows"
        plot = draw_curves(
            lines, title, "steps ahead", "mean squared error", smooth=False
        )
        paths.append(write_image(folder / f"{_file_name(key)}.png", plot))
    suffix = "mp4" if can_write_mp4() else "gif"
    for key, value in results.media.items():
        name = _file_name(key)
        if value.ndim == 4:
            path = write_video(folder / f"{name}.{suffix}", upscale(value), FPS)
        else:
            path = write_image(folder / f"{name}.png", value)
        paths.append(path)
    return paths


def _file_name(key: str) -> str:
    return key.replace("/", "_")
