"""Sequences as strips: what was seen, what was drawn, and where segments begin.

From top to bottom a sequence has four rows: the true frames, framed in red where an
event happened; the same frames drawn by the world, framed in yellow where a segment
begins; and two bars, the upper one red for events (not there where none are known), the
lower one as high as the chance of a boundary, yellow where one was found. Every mark
stands under its own frame.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, UInt8

EVENT = (230, 40, 40)
FOUND = (250, 210, 40)
QUIET = (70, 90, 130)
PAPER = (24, 24, 28)
BORDER, GAP, BAR = 2, 2, 12


def sequence_strip(
    truth: UInt8[np.ndarray, "N S h w c"],
    drawn: UInt8[np.ndarray, "N S h w c"],
    found: Bool[np.ndarray, "N S"],
    chance: Float[np.ndarray, "N S"],
    events: Bool[np.ndarray, "N S"] | None = None,
) -> UInt8[np.ndarray, "height width 3"]:
    """All sequences below each other, a column for each frame."""
    blocks = []
    for i in range(len(truth)):
        known = np.zeros_like(found[i]) if events is None else events[i]
        rows = [_row(truth[i], known, EVENT), _row(drawn[i], found[i], FOUND)]
        if events is not None:
            rows.append(_bars(known.astype(float), known, EVENT, rows[0], BAR // 3))
        rows.append(_bars(chance[i], found[i], FOUND, rows[0], BAR))
        blocks += [*rows, _paper(3 * GAP, rows[0].shape[1])]
    return np.concatenate(blocks[:-1])


def dream_strip(
    drawn: UInt8[np.ndarray, "N S h w c"], begins: Bool[np.ndarray, "N S"]
) -> UInt8[np.ndarray, "height width 3"]:
    """Dreamt frames, one sequence a row; the first frames of segments are framed."""
    rows = [_row(drawn[i], begins[i], FOUND) for i in range(len(drawn))]
    spaced = [part for row in rows for part in (row, _paper(GAP, row.shape[1]))]
    return np.concatenate(spaced[:-1])


def sequence_video(
    truth: UInt8[np.ndarray, "N S h w c"],
    drawn: UInt8[np.ndarray, "N S h w c"],
    found: Bool[np.ndarray, "N S"],
    events: Bool[np.ndarray, "N S"] | None = None,
) -> UInt8[np.ndarray, "S height width 3"]:
    """A film: truth above, world below, a column per sequence, framed as in strips."""
    known = np.zeros_like(found) if events is None else events
    films = []
    for images, marks, colour in ((truth, known, EVENT), (drawn, found, FOUND)):
        tiles = [
            np.stack([_tile(f, m, colour) for f, m in zip(*pair, strict=True)])
            for pair in zip(images, marks, strict=True)
        ]
        films.append(np.concatenate(tiles, 2))
    return np.concatenate(films, 1)


def _row(frames: np.ndarray, marks: np.ndarray, colour: tuple[int, ...]) -> np.ndarray:
    tiles = [_tile(f, m, colour) for f, m in zip(frames, marks, strict=True)]
    return np.concatenate(tiles, 1)


def _tile(
    frame: np.ndarray, marked: bool | np.bool_, colour: tuple[int, ...]
) -> np.ndarray:
    """A frame with a border, coloured if it is marked, and a gap around it."""
    height, width = frame.shape[:2]
    tile = _paper(height + 2 * BORDER + GAP, width + 2 * BORDER + GAP)
    if marked:
        tile[: height + 2 * BORDER, : width + 2 * BORDER] = colour
    inside = tile[BORDER : BORDER + height, BORDER : BORDER + width]
    inside[:] = frame[..., -3:] if frame.shape[-1] >= 3 else frame[..., -1:]
    return tile


def _bars(
    heights: np.ndarray,
    marks: np.ndarray,
    colour: tuple[int, ...],
    above: np.ndarray,
    tall: int,
) -> np.ndarray:
    """A bar under each frame of the row above, `tall` for a height of one."""
    width = above.shape[1] // len(heights)
    bars = _paper(tall + GAP, above.shape[1])
    for t, (height, marked) in enumerate(zip(heights, marks, strict=True)):
        size = round(float(np.clip(height, 0, 1)) * tall)
        columns = slice(t * width, (t + 1) * width - GAP)
        bars[tall - size : tall, columns] = colour if marked else QUIET
    return bars


def _paper(height: int, width: int) -> np.ndarray:
    paper = np.empty((height, width, 3), np.uint8)
    paper[:] = PAPER
    return paper
