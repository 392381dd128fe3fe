"""Borders and bars of strips and videos are at the right frames."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.render.boundaries import (
    BACKGROUND,
    BAR_HEIGHT,
    BORDER,
    BOUNDARY_COLOR,
    EVENT_COLOR,
    GAP,
    NO_BOUNDARY_COLOR,
    boundary_strip,
    boundary_video,
    imagined_strip,
)

SIDE, STEPS = 8, 5
TILE = SIDE + 2 * BORDER + GAP
FRAME = slice(BORDER, BORDER + SIDE)


def frames(shift: int = 0) -> np.ndarray:
    """Frame t is gray with the value 10 t + shift."""
    values = (10 * np.arange(STEPS) + shift).astype(np.uint8)
    return np.broadcast_to(values[None, :, None, None, None], (1, STEPS, SIDE, SIDE, 3))


def at(*steps: int) -> np.ndarray:
    """Return flags of one sequence that are True at these steps."""
    return np.isin(np.arange(STEPS), steps)[None]


def tile(image: np.ndarray, row: int, step: int) -> np.ndarray:
    """Return a frame of a strip with its border."""
    top, left = row * TILE, step * TILE
    return image[top : top + TILE, left : left + TILE]


@pytest.mark.parametrize("step", range(STEPS))
def test_borders_and_bars_are_at_their_frames(step):
    other = (step + 1) % STEPS
    probability = np.where(at(other), 1.0, 0.25)
    strip = boundary_strip(frames(), frames(100), at(other), probability, at(step))
    for t in range(STEPS):
        truth, model = tile(strip, 0, t), tile(strip, 1, t)
        assert (truth[FRAME, FRAME] == 10 * t).all()
        assert (model[FRAME, FRAME] == 10 * t + 100).all()
        assert tuple(truth[0, 0]) == (EVENT_COLOR if t == step else BACKGROUND)
        assert tuple(model[0, 0]) == (BOUNDARY_COLOR if t == other else BACKGROUND)
    # Below are two rows of bars, of events and of probabilities.
    middle = TILE // 2
    events = strip[2 * TILE]
    low = strip[2 * TILE + BAR_HEIGHT // 3 + GAP + BAR_HEIGHT - 1]
    high = strip[2 * TILE + BAR_HEIGHT // 3 + GAP]
    for t in range(STEPS):
        column = t * TILE + middle
        assert tuple(events[column]) == (EVENT_COLOR if t == step else BACKGROUND)
        assert tuple(low[column]) == (
            BOUNDARY_COLOR if t == other else NO_BOUNDARY_COLOR
        )
        assert tuple(high[column]) == (BOUNDARY_COLOR if t == other else BACKGROUND)


def test_without_events_there_is_no_event_bar():
    probability = np.zeros((1, STEPS))
    with_events = boundary_strip(frames(), frames(), at(0), probability, at(2))
    plain = boundary_strip(frames(), frames(), at(0), probability)
    assert len(with_events) - len(plain) == BAR_HEIGHT // 3 + GAP


def test_a_video_has_borders_at_the_right_time():
    video = boundary_video(frames(), frames(100), at(3), at(1))
    assert video.shape == (STEPS, 2 * TILE, TILE, 3)
    for t in range(STEPS):
        assert tuple(video[t, 0, 0]) == (EVENT_COLOR if t == 1 else BACKGROUND)
        assert tuple(video[t, TILE, 0]) == (BOUNDARY_COLOR if t == 3 else BACKGROUND)
        assert (video[t, FRAME, FRAME] == 10 * t).all()


def test_imagined_sequences_have_borders_where_segments_begin():
    strip = imagined_strip(frames(), at(0, 3))
    framed = [tuple(tile(strip, 0, t)[0, 0]) == BOUNDARY_COLOR for t in range(STEPS)]
    assert framed == [True, False, False, True, False]


def test_sequences_are_rows_in_strips_and_columns_in_videos():
    two, marks, probability = (
        np.concatenate([frames(), frames(50)]),
        at(0),
        np.zeros((2, 5)),
    )
    marks = np.concatenate([marks, marks])
    video = boundary_video(two, two, marks)
    assert video.shape == (STEPS, 2 * TILE, 2 * TILE, 3)
    assert (video[2, FRAME, FRAME] == 20).all()
    assert (video[2, TILE:, TILE:][FRAME, FRAME] == 70).all()
    alone = boundary_strip(two[:1], two[:1], marks[:1], probability[:1])
    both = boundary_strip(two, two, marks, probability)
    second = both[len(alone) + 3 * GAP :]
    assert np.array_equal(both[: len(alone)], alone)
    assert second.shape == alone.shape
    assert (tile(second, 0, 2)[FRAME, FRAME] == 70).all()
    gray = boundary_strip(two[..., :1], two[..., :1], marks, probability)
    assert np.array_equal(gray, both)
