"""Open-loop videos: real frames, frames of the model, and their difference.

Every column is a sequence; its rows are labeled `real`, `model` and `difference` (gray
means no error). While the model observes the real frames, the line above a column is
blue; when it predicts from actions alone, the line is orange, and the title counts the
predicted steps. The last frame is repeated before the video starts again.
"""

from __future__ import annotations

import functools

import numpy as np
from jaxtyping import Bool, UInt8

from reverie.render.channels import to_rgb

MIN_SIDE = 48
"""Frames whose shorter side has fewer pixels are enlarged by an integer factor."""
MIN_FACTOR, TINY = 4, 32
"""Minimum factor of tiny frames, whose shorter side has at most `TINY` pixels."""
GAP = 6
"""Pixels between columns and rows."""
MARKER = 2
"""Height of the line that shows whether frames are observed or predicted."""
TITLE, LABELS = 18, 66
"""Height of the title and width of the labels, in pixels."""
FONT_SIZE = 11
PAUSE = 10
"""Number of times the last frame is repeated."""
STRIP = 4
"""Height of the strip that shows segment boundaries."""
BACKGROUND, TEXT_COLOR = (18, 21, 27), (215, 221, 229)
OBSERVED_COLOR, IMAGINED_COLOR = (90, 176, 255), (255, 180, 84)
BOUNDARY_COLOR, INSIDE_COLOR = (230, 40, 40), (40, 60, 160)
ROWS = ("real", "model", "difference")


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
    """Make a video of `count` sequences.

    The first `observed` frames of `model` are reconstructions, the others predictions.
    The last frame is repeated `min(PAUSE, T)` times. If the model has segment
    boundaries, a strip below the real frames is red at boundaries and blue elsewhere.
    """
    truth, model = to_rgb(truth[:count], last=True), to_rgb(model[:count], last=True)
    rows = [_enlarge(x) for x in (truth, model, error_image(truth, model))]
    if boundaries is not None:
        shape = (*truth.shape[:2], STRIP, rows[0].shape[3], 3)
        strip = np.empty(shape, np.uint8)
        strip[:] = INSIDE_COLOR
        strip[boundaries[:count]] = BOUNDARY_COLOR
        rows[0] = np.concatenate([rows[0], strip], 2)
    sequences, steps, _, width, _ = rows[0].shape
    top = TITLE + MARKER + 2
    heights = [row.shape[2] for row in rows]
    tops = [top + sum(heights[:n]) + n * GAP for n in range(len(rows))]
    size = (tops[-1] + heights[-1] + GAP, LABELS + sequences * (width + GAP))
    video = np.empty((steps, *size, 3), np.uint8)
    video[:] = _empty_frame(size, tuple(tops), tuple(heights))
    for t in range(steps):
        text = _title(t, steps, observed)
        video[t, :TITLE, LABELS : LABELS + text.shape[1]] = text[:, : size[1] - LABELS]
    for number in range(sequences):
        left = LABELS + number * (width + GAP)
        columns = slice(left, left + width)
        video[:observed, TITLE : TITLE + MARKER, columns] = OBSERVED_COLOR
        video[observed:, TITLE : TITLE + MARKER, columns] = IMAGINED_COLOR
        for row, start, height in zip(rows, tops, heights, strict=True):
            video[:, start : start + height, columns] = row[number]
    return np.concatenate([video, np.repeat(video[-1:], min(PAUSE, steps), 0)])


def _enlarge(
    images: UInt8[np.ndarray, "B T h w 3"],
) -> UInt8[np.ndarray, "B T H W 3"]:
    """Repeat the pixels of small images."""
    side = min(images.shape[2:4])
    factor = max(-(-MIN_SIDE // side), MIN_FACTOR if side <= TINY else 1)
    return images.repeat(factor, 2).repeat(factor, 3) if factor > 1 else images


@functools.lru_cache(maxsize=8)
def _empty_frame(
    size: tuple[int, int], tops: tuple[int, ...], heights: tuple[int, ...]
) -> UInt8[np.ndarray, "height width 3"]:
    """Return an empty frame with the labels of the rows."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (size[1], size[0]), BACKGROUND)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(FONT_SIZE)
    for label, top, height in zip(ROWS, tops, heights, strict=True):
        point = (LABELS - 8, top + height / 2)
        draw.text(point, label, TEXT_COLOR, font, anchor="rm")
    return np.asarray(image)


@functools.lru_cache(maxsize=1024)
def _title(step: int, steps: int, observed: int) -> UInt8[np.ndarray, "height width 3"]:
    """Return the text above the sequences."""
    from PIL import Image, ImageDraw, ImageFont

    text = f"step {step + 1} of {steps}: "
    text += (
        "observed"
        if step < observed
        else f"predicted, {step + 1 - observed} of {steps - observed}"
    )
    font = ImageFont.load_default(FONT_SIZE)
    image = Image.new("RGB", (round(font.getlength(text)) + 4, TITLE), BACKGROUND)
    point, color = (0, TITLE / 2), TEXT_COLOR
    ImageDraw.Draw(image).text(point, text, color, font, anchor="lm")
    return np.asarray(image)
