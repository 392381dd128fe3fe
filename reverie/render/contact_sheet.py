"""Contact sheets: frames of an episode in a grid."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8


def contact_sheet(
    frames: UInt8[np.ndarray, "T h w c"],
    count: int = 24,
    columns: int = 8,
    gap: int = 4,
) -> UInt8[np.ndarray, "H W c"]:
    """Arrange up to `count` evenly spaced frames, including first and last, in rows."""
    if not len(frames):
        raise ValueError("a contact sheet needs at least one frame")
    chosen = np.linspace(0, len(frames) - 1, min(count, len(frames))).round()
    frames = frames[chosen.astype(int)]
    columns = min(columns, len(frames))
    rows = -(-len(frames) // columns)
    _, height, width, channels = frames.shape
    shape = (rows * (height + gap) + gap, columns * (width + gap) + gap, channels)
    sheet = np.full(shape, 255, np.uint8)
    for number, frame in enumerate(frames):
        row, column = divmod(number, columns)
        top, left = gap + row * (height + gap), gap + column * (width + gap)
        sheet[top : top + height, left : left + width] = frame
    return sheet
