"""What happened, what the world model says happened, and the difference, side by side.

One column per sequence; from top to bottom truth, model and error, where grey means no
difference. The border is green while the model is shown the truth and red from where it
goes on by itself. Black frames at the end separate one round from the next.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, UInt8

BORDER = 2
PAUSE = 10
OBSERVED = (0, 255, 0)
IMAGINED = (255, 0, 0)
STRIP = 4
BEGINS, CONTINUES = (230, 40, 40), (40, 60, 160)


def openloop_video(
    truth: UInt8[np.ndarray, "B T h w c"],
    model: UInt8[np.ndarray, "B T h w c"],
    observed: int,
    count: int = 6,
    marks: Bool[np.ndarray, "B T"] | None = None,
) -> UInt8[np.ndarray, "frames height width 3"]:
    """The film, `(T + min(10, T), 3 h + 4, n (w + 4), 3)` for the first `count`.

    The first `observed` frames of `model` were made with the truth at hand. `marks`
    says where the model sees segments begin: a strip below the truth is red there and
    blue elsewhere.
    """
    truth, model = _rgb(truth[:count]), _rgb(model[:count])
    error = ((model.astype(np.int16) - truth + 255) // 2).astype(np.uint8)
    parts = [truth, model, error]
    if marks is not None:
        strip = np.empty((*truth.shape[:2], STRIP, *truth.shape[3:]), np.uint8)
        strip[:] = CONTINUES
        strip[marks[:count]] = BEGINS
        parts.insert(1, strip)
    stack = np.concatenate(parts, 2)  # (n, T, 3 h, w, 3), and the strip
    sequences, steps, height, width, _ = stack.shape

    shape = (sequences, steps, height + 2 * BORDER, width + 2 * BORDER, 3)
    video = np.empty(shape, np.uint8)
    video[:, :observed] = OBSERVED
    video[:, observed:] = IMAGINED
    video[:, :, BORDER:-BORDER, BORDER:-BORDER] = stack
    grid = video.transpose(1, 2, 0, 3, 4).reshape(steps, shape[2], -1, 3)
    return np.concatenate([grid, np.zeros_like(grid[:PAUSE])])


def _rgb(images: np.ndarray) -> np.ndarray:
    """Three channels: one is repeated, of more than three the last are shown."""
    channels = images.shape[-1]
    return images[..., -3:] if channels >= 3 else np.repeat(images[..., -1:], 3, -1)
