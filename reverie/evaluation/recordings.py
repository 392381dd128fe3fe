"""Judge a run on recordings by those that were set aside, in numbers and pictures.

The run folder gets `judgement.json`, with a line per episode, the open-loop error of
every key by horizon, and what fans say of every entry of a vector; and in `judgement/`
a plot per key, a picture of fans per vector and a film per image.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverie.capabilities import HasWorldModelEnv
from reverie.evaluation.offline import OpenLoop, judge_episodes, look_at_fans, open_loop
from reverie.evaluation.rollout_ensembles import Fans, fan_table
from reverie.render.curve import draw_curves
from reverie.render.video import can_write_mp4, upscale, write_image, write_video
from reverie.run import checkpoint, device
from reverie.run.config import Config, with_flags
from reverie.run.factory import make_agent
from reverie.run.folder import read_config, run_folder_of
from reverie.run.offline_data import Recordings
from reverie.storage.atomic import ignore_unwritable, write_json

NAMES = {"model": "the world", "copy": "the last row", "mean": "the mean row"}
FPS = 8


def judge_run(logdir: Path, flags: Sequence[tuple[str, Any]] = ()) -> dict[str, Any]:
    """Look at all that was set aside, with the newest checkpoint or the one named.

    `offline.eval_data` may name other recordings.
    """
    path = checkpoint.find_checkpoint(logdir)
    home = run_folder_of(path)
    config = with_flags(read_config(home), flags)
    material = Recordings(config.offline, config.seed)
    where = device.pick_device(config.device)
    precision = device.pick_precision(config.precision, where)
    agent = make_agent(config, material, where, precision)
    agent.load_weights(checkpoint.read_part(path, "agent"))
    feed = material.open(agent, where)
    look, images = config.offline.look, material.images
    errors: dict[str, OpenLoop] = {}
    shown: dict[str, Any] = {}  # films and pictures
    fans: dict[str, Fans] = {}
    try:
        table = list(judge_episodes(agent, feed, images, look))
        count = len(table) or len(feed.held_out.names()[: look.episodes or None])
        if isinstance(agent, HasWorldModelEnv):
            errors, shown = open_loop(agent.world_model_env(0), feed, images, look)
            fans, pictures = look_at_fans(agent, feed, images, look)
            shown |= pictures
    finally:
        feed.close()
        material.close()
    result = {
        "checkpoint": path.name,
        "data": config.offline.eval_data or config.offline.data,
        "count": count,
        "losses": _means(table),
        "openloop": {key: _curves(error) for key, error in errors.items()},
        "fans": fan_table(fans),
        "episodes": [
            {"name": name, "rows": rows, **losses} for name, losses, rows in table
        ],
    }
    with ignore_unwritable():
        write_json(home / "judgement.json", result)
        _draw(home / "judgement", config, errors, shown)
    return result


def in_words(result: dict[str, Any]) -> str:
    """The result as a person wants it."""
    lines = [f"{result['data']}: {result['count']} episodes set aside"]
    losses = result["losses"].items()
    lines += [f"  loss {key:<24} {value:.4g}" for key, value in losses]
    for key, curves in result["openloop"].items():
        parts = [
            f"{NAMES[name]} {np.nanmean(_numbers(curve)):.4g}"
            for name, curve in curves.items()
        ]
        lines.append(f"  foreseen {key:<20} {', '.join(parts)}")
    for key, fan in result["fans"].items():
        rmse, spread, coverage = (
            np.nanmean([_numbers(row) for row in fan[name]])
            for name in ("rmse", "spread", "coverage")
        )
        lines.append(
            f"  fans of {key:<21} off by {rmse:.4g}, {spread:.4g} apart, enclose "
            f"{coverage:.0%} of what came ({fan['expected_coverage']:.0%} if they knew)"
        )
    return "\n".join(lines)


def _means(table: list[tuple[str, dict[str, float], int]]) -> dict[str, float]:
    count = max(1, sum(rows for _, _, rows in table))
    keys = table[0][1] if table else {}
    return {k: sum(losses[k] * rows for _, losses, rows in table) / count for k in keys}


def _curves(error: OpenLoop) -> dict[str, list[float | None]]:
    """Means over episodes by horizon; None where no episode is that long."""
    found: dict[str, list[float | None]] = {}
    for name, values in error._asdict().items():
        there = ~np.isnan(values).all(0)
        means = [
            float(np.nanmean(v)) if t else None
            for v, t in zip(values.T, there, strict=True)
        ]
        found[name] = means
    return found


def _numbers(curve: list[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in curve]


def _draw(
    folder: Path, config: Config, errors: dict[str, OpenLoop], shown: dict[str, Any]
) -> None:
    for key, error in errors.items():
        lines = {
            NAMES[name]: [(i + 1.0, x) for i, x in enumerate(curve) if x is not None]
            for name, curve in _curves(error).items()
        }
        title = f"{key} after {config.offline.look.context} rows"
        picture = draw_curves(lines, title, "steps ahead", "error", smooth=False)
        write_image(folder / f"{_file(key)}.png", picture)
    ending = "mp4" if can_write_mp4() else "gif"
    for key, value in shown.items():
        if value.ndim == 4:
            write_video(folder / f"{_file(key)}.{ending}", upscale(value), FPS)
        else:
            write_image(folder / f"{_file(key)}.png", value)


def _file(key: str) -> str:
    return key.replace("/", "_")
