"""An episode at a glance: some of its frames, in rows; and cameras side by side."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

PAPER = 255


def contact_sheet(
    frames: UInt8[np.ndarray, "T h w c"],
    count: int = 24,
    columns: int = 8,
    gap: int = 4,
) -> UInt8[np.ndarray, "H W c"]:
    """Up to `count` frames, evenly chosen from the first to the last, in rows."""
    if not len(frames):
        raise ValueError("an episode without frames cannot be shown")
    chosen = np.linspace(0, len(frames) - 1, min(count, len(frames))).round()
    shown = frames[chosen.astype(int)]
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    _, height, width, channels = shown.shape
    shape = (rows * (height + gap) + gap, columns * (width + gap) + gap, channels)
    sheet = np.full(shape, PAPER, np.uint8)
    for index, frame in enumerate(shown):
        row, column = divmod(index, columns)
        top, left = gap + row * (height + gap), gap + column * (width + gap)
        sheet[top : top + height, left : left + width] = frame
    return sheet


def cameras(
    images: UInt8[np.ndarray, "*b h w c"],
) -> UInt8[np.ndarray, "*b h W rgb"]:
    """Cameras that were stacked along the channels, side by side, in colours.

    Three channels are one camera; where they are no multiple of three, only the first
    is shown, in grey.
    """
    count, rest = divmod(images.shape[-1], 3)
    if rest or not count:
        return images[..., :1].repeat(3, -1)
    return np.concatenate(np.split(images, count, -1), -2)
