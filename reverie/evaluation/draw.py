"""Figures of the segment boundaries that an agent found (`reverie draw boundaries`)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from reverie.agents.open_loop import to_pixels
from reverie.api import UserError
from reverie.evaluation.boundaries import open_sequence_run
from reverie.evaluation.result import output_folder
from reverie.render.boundaries import boundary_strip, boundary_video, imagined_strip
from reverie.render.video import upscale, video_suffix, write_image, write_video
from reverie.spaces import EVENT

SCALE = 2
"""Factor by which images are enlarged."""
FPS = 4
"""Frames per second of the video."""


def draw_boundaries(
    logdir: Path,
    index: int = 0,
    samples: int = 10,
    folder: Path | None = None,
    flags: Sequence[tuple[str, Any]] = (),
    presets: Sequence[str] = (),
    files: Sequence[str] = (),
) -> list[Path]:
    """Draw the boundaries in one of `samples` evaluation sequences of a run.

    Writes an image and a video of the sequence, and images of two imagined
    continuations of its first frames: frame by frame, and segment by segment.
    """
    if samples < 1 or not 0 <= index < samples:
        raise UserError(
            f"There is no sequence {index} among {samples}.\n"
            f"  Fix: --idx 0, or --num-samples {max(index, 0) + 1}"
        )
    opened = open_sequence_run(logdir, samples, flags, presets=presets, files=files)
    folder = folder or output_folder(opened.run.folder)
    agent = opened.agent
    with contextlib.closing(opened.feed) as feed:
        data = feed("report")
    count = len(data[agent.image_key])
    if index >= count:  # data in files may have fewer
        raise UserError(
            f"There is no sequence {index}: {opened.data or opened.run.config.task} "
            f"has {count} evaluation sequences.\n  Fix: --idx {count - 1}"
        )
    data = {key: value[index : index + 1] for key, value in data.items()}
    evaluation, rows = agent.evaluate(data), agent.modeled_rows
    truth = data[agent.image_key][:, rows].cpu().numpy()
    events = data[EVENT][:, rows].cpu().numpy() if EVENT in data else None
    boundaries = evaluation.boundary.cpu().numpy()
    probability = evaluation.detector_prob.float().cpu().numpy()
    reconstruction = to_pixels(evaluation.image)

    name = f"sequence_{index}"
    strip = boundary_strip(truth, reconstruction, boundaries, probability, events)
    paths = [write_image(folder / f"{name}.png", _enlarge(strip))]
    video = upscale(boundary_video(truth, reconstruction, boundaries, events))
    paths.append(write_video(folder / f"{name}.{video_suffix()}", video, FPS))
    # `imagine` uses every key except the image as an action
    inputs = {key: value for key, value in data.items() if key[:4] != "log/"}
    for kind, by_segment in (("imagined", False), ("imagined_segments", True)):
        images, begins = agent.imagine(inputs, by_segment)
        strip = imagined_strip(to_pixels(images), begins.cpu().numpy())
        paths.append(write_image(folder / f"{name}_{kind}.png", _enlarge(strip)))
    return paths


def _enlarge(image: np.ndarray) -> np.ndarray:
    return image.repeat(SCALE, 0).repeat(SCALE, 1)
