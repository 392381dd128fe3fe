"""Open-loop videos: truth, model and error.

Every column is a sequence, with truth, model and error from top to bottom; gray means
no error. The border is green while the model observes the truth and red when it
predicts open loop. Black frames separate the repetitions of the video.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, UInt8

from reverie.render.channels import to_rgb

BORDER = 2
PAUSE = 10
OBSERVED_COLOR, IMAGINED_COLOR = (0, 255, 0), (255, 0, 0)
STRIP = 4
BOUNDARY_COLOR, INSIDE_COLOR = (230, 40, 40), (40, 60, 160)


def error_image(
    truth: UInt8[np.ndarray, "*b h w c"], model: UInt8[np.ndarray, "*b h w c"]
) -> UInt8[np.ndarray, "*b h w c"]:
    """Return the difference of two images; gray means no error."""
    error: np.ndarray = (model.astype(np.int16) - truth + 255) // 2
    return error.astype(np.uint8)


def open_loop_video(
    truth: UInt8[np.ndarray, "B T h w c"],
    model: UInt8[np.ndarray, "B T h w c"],
    observed: int,
    count: int = 6,
    boundaries: Bool[np.ndarray, "B T"] | None = None,
) -> UInt8[np.ndarray, "frames height width 3"]:
    """Make a video `(T + min(10, T), 3 h + 4, n (w + 4), 3)` of n = `count` sequences.

    The first `observed` frames of `model` are reconstructions. If the model has segment
    boundaries, a strip below the truth is red at boundaries and blue elsewhere.
    """
    truth, model = to_rgb(truth[:count], last=True), to_rgb(model[:count], last=True)
    rows = [truth, model, error_image(truth, model)]
    if boundaries is not None:
        strip = np.empty((*truth.shape[:2], STRIP, *truth.shape[3:]), np.uint8)
        strip[:] = INSIDE_COLOR
        strip[boundaries[:count]] = BOUNDARY_COLOR
        rows.insert(1, strip)
    stack = np.concatenate(rows, 2)  # (n, T, 3 h [+ strip], w, 3)
    sequences, steps, height, width, _ = stack.shape

    shape = (sequences, steps, height + 2 * BORDER, width + 2 * BORDER, 3)
    video = np.empty(shape, np.uint8)
    video[:, :observed] = OBSERVED_COLOR
    video[:, observed:] = IMAGINED_COLOR
    video[:, :, BORDER:-BORDER, BORDER:-BORDER] = stack
    grid = video.transpose(1, 2, 0, 3, 4).reshape(steps, shape[2], -1, 3)
    return np.concatenate([grid, np.zeros_like(grid[:PAUSE])])
