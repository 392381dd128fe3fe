"""Images and videos of sequences with segment boundaries.

In a strip, a sequence has four rows: the true frames, with a red border at events; the
frames of the model, with a yellow border where a segment begins; a red bar at events
(if events are known); and a bar with the height of the boundary probability, yellow at
boundaries. Bars are below their frames.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, UInt8

from reverie.render.channels import to_rgb

EVENT_COLOR = (230, 40, 40)
BOUNDARY_COLOR = (250, 210, 40)
NO_BOUNDARY_COLOR = (70, 90, 130)
BACKGROUND = (24, 24, 28)
BORDER, GAP, BAR_HEIGHT = 2, 2, 12
"""Width of borders, distance between frames, and height of bars, in pixels."""


def boundary_strip(
    truth: UInt8[np.ndarray, "N T h w c"],
    model: UInt8[np.ndarray, "N T h w c"],
    boundaries: Bool[np.ndarray, "N T"],
    probabilities: Float[np.ndarray, "N T"],
    events: Bool[np.ndarray, "N T"] | None = None,
) -> UInt8[np.ndarray, "height width 3"]:
    """Draw sequences below each other, with one column per frame."""
    parts = []
    for i in range(len(truth)):
        is_event = np.zeros_like(boundaries[i]) if events is None else events[i]
        frames = _row(truth[i], is_event, EVENT_COLOR)
        rows = [frames, _row(model[i], boundaries[i], BOUNDARY_COLOR)]
        if events is not None:
            heights = is_event.astype(float)
            bars = _bars(heights, is_event, EVENT_COLOR, frames, BAR_HEIGHT // 3)
            rows.append(bars)
        rows.append(
            _bars(probabilities[i], boundaries[i], BOUNDARY_COLOR, frames, BAR_HEIGHT)
        )
        parts += [*rows, _background(3 * GAP, frames.shape[1])]
    return np.concatenate(parts[:-1])


def imagined_strip(
    frames: UInt8[np.ndarray, "N T h w c"], boundaries: Bool[np.ndarray, "N T"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Draw imagined sequences as rows, with a border where segments begin."""
    rows = [_row(frames[i], boundaries[i], BOUNDARY_COLOR) for i in range(len(frames))]
    gap = _background(GAP, rows[0].shape[1])
    return np.concatenate([part for row in rows for part in (row, gap)][:-1])


def boundary_video(
    truth: UInt8[np.ndarray, "N T h w c"],
    model: UInt8[np.ndarray, "N T h w c"],
    boundaries: Bool[np.ndarray, "N T"],
    events: Bool[np.ndarray, "N T"] | None = None,
) -> UInt8[np.ndarray, "T height width 3"]:
    """Make a video with the truth above the model and one column per sequence."""
    is_event = np.zeros_like(boundaries) if events is None else events
    frames = []
    for t in range(truth.shape[1]):
        top = _row(truth[:, t], is_event[:, t], EVENT_COLOR)
        bottom = _row(model[:, t], boundaries[:, t], BOUNDARY_COLOR)
        frames.append(np.concatenate([top, bottom]))
    return np.stack(frames)


def _row(frames: np.ndarray, marks: np.ndarray, color: tuple[int, ...]) -> np.ndarray:
    """Draw frames next to each other, with a colored border where `marks` is True."""
    tiles = [_tile(f, m, color) for f, m in zip(frames, marks, strict=True)]
    return np.concatenate(tiles, 1)


def _tile(
    frame: np.ndarray, marked: bool | np.bool_, color: tuple[int, ...]
) -> np.ndarray:
    """Draw a frame with a border, colored if marked, and a gap."""
    height, width = frame.shape[:2]
    tile = _background(height + 2 * BORDER + GAP, width + 2 * BORDER + GAP)
    if marked:
        tile[: height + 2 * BORDER, : width + 2 * BORDER] = color
    inside = tile[BORDER : BORDER + height, BORDER : BORDER + width]
    inside[:] = to_rgb(frame, last=True)
    return tile


def _bars(
    heights: np.ndarray,
    marks: np.ndarray,
    color: tuple[int, ...],
    frames: np.ndarray,
    max_height: int,
) -> np.ndarray:
    """Draw a bar below each frame; a height of 1 has `max_height` pixels.

    Bars are colored where `marks` is True. `frames` is the row of frames above them.
    """
    width = frames.shape[1] // len(heights)
    bars = _background(max_height + GAP, frames.shape[1])
    for t, (height, marked) in enumerate(zip(heights, marks, strict=True)):
        pixels = round(float(np.clip(height, 0, 1)) * max_height)
        columns = slice(t * width, (t + 1) * width - GAP)
        bar_color = color if marked else NO_BOUNDARY_COLOR
        bars[max_height - pixels : max_height, columns] = bar_color
    return bars


def _background(height: int, width: int) -> np.ndarray:
    image = np.empty((height, width, 3), np.uint8)
    image[:] = BACKGROUND
    return image
