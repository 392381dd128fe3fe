"""Pictures of what a run has learnt, as files a person opens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverie.agents.vta.agent import shades
from reverie.api import UserError
from reverie.render.boundaries import boundary_strip, boundary_video, imagined_strip
from reverie.render.video import can_write_mp4, upscale, write_image, write_video
from reverie.run.checkpoint import find_checkpoint
from reverie.run.folder import run_folder_of
from reverie.run.sequences import load_watcher
from reverie.spaces import EVENT

SCALE = 2
FPS = 4


def draw_boundaries(
    logdir: Path,
    index: int = 0,
    samples: int = 10,
    folder: Path | None = None,
    flags: Sequence[tuple[str, Any]] = (),
) -> list[Path]:
    """Draw where a watcher's world sees segments begin, in sequences it never saw.

    Writes a strip and a film of one sequence, and strips of two dreams that go on from
    its first frames, one of them jumping from segment to segment. `flags` change
    settings of the run.
    """
    if samples < 1 or not 0 <= index < samples:
        raise UserError(
            f"There is no sequence {index} among {samples}.\n"
            f"  Fix: --idx 0, or --num-samples {max(index, 0) + 1}"
        )
    place = folder or run_folder_of(find_checkpoint(logdir)) / "boundaries"
    config, agent, feed = load_watcher(logdir, flags=flags, evaluation=samples)
    vta: Any = agent
    try:
        data = feed("report")
    finally:
        feed.close()
    count = len(data[vta.world.key])
    if index >= count:  # a folder may hold fewer than were asked for
        raise UserError(
            f"There is no sequence {index}: {config.sequences.folder or config.task} "
            f"has {count} to show.\n  Fix: --idx {count - 1}"
        )
    rows = slice(index, index + 1)
    data = {key: value[rows] for key, value in data.items()}
    watched = vta.watch(data)
    sizes = config.vta.world
    now = slice(sizes.context, sizes.context + sizes.length)
    truth = data[vta.world.key][:, now].cpu().numpy()
    events = data[EVENT][:, now].cpu().numpy() if EVENT in data else None
    found, chance = (
        watched.boundary.cpu().numpy(),
        watched.detector_prob.float().cpu().numpy(),
    )
    drawn = shades(watched.image)

    name = f"sequence_{index}"
    strip = boundary_strip(truth, drawn, found, chance, events)
    written = [write_image(place / f"{name}.png", _larger(strip))]
    film = upscale(boundary_video(truth, drawn, found, events))
    ending = "mp4" if can_write_mp4() else "gif"
    written.append(write_video(place / f"{name}.{ending}", film, FPS))
    some = {key: value for key, value in data.items() if key[:4] != "log/"}
    for kind, jumpy in (("dream", False), ("jumps", True)):
        images, begins = vta.dream(some, jumpy=jumpy)
        strip = imagined_strip(shades(images), begins.cpu().numpy())
        written.append(write_image(place / f"{name}_{kind}.png", _larger(strip)))
    return written


def _larger(picture: np.ndarray) -> np.ndarray:
    return picture.repeat(SCALE, 0).repeat(SCALE, 1)
