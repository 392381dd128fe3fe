"""The open-loop video, checked pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.render.open_loop import (
    BACKGROUND,
    GAP,
    IMAGINED_COLOR,
    LABELS,
    MARKER,
    OBSERVED_COLOR,
    TITLE,
    open_loop_video,
)

TOP = TITLE + MARKER + 2
SIDE = 48


def sequences(batch=2, steps=6, height=SIDE, width=SIDE, channels=3):
    """Return random frames, real and of the model."""
    random = np.random.default_rng(0)
    shape = (batch, steps, height, width, channels)
    return random.integers(0, 256, (2, *shape), np.uint8)


def cell(video, step, row, column, side=SIDE):
    """Return the pixels of one frame of a sequence."""
    top, left = TOP + row * (side + GAP), LABELS + column * (side + GAP)
    return video[step, top : top + side, left : left + side]


def test_rows_are_real_model_and_halved_error():
    truth, model = sequences()
    video = open_loop_video(truth, model, observed=2)
    assert video.shape[0] == 6 + 6
    np.testing.assert_array_equal(cell(video, 4, 0, 1), truth[1, 4])
    np.testing.assert_array_equal(cell(video, 4, 1, 1), model[1, 4])
    error = (model[1, 4].astype(int) - truth[1, 4] + 255) // 2
    np.testing.assert_array_equal(cell(video, 4, 2, 1), error)


def test_no_error_is_gray():
    truth, _ = sequences()
    video = open_loop_video(truth, truth, observed=2)
    assert set(cell(video, 0, 2, 0).flat) == {127}


def test_a_thin_line_marks_predicted_frames():
    video = open_loop_video(*sequences(), observed=2)
    for t in range(6):
        line = video[t, TITLE : TITLE + MARKER, LABELS : LABELS + SIDE]
        assert (line == (OBSERVED_COLOR if t < 2 else IMAGINED_COLOR)).all()


def test_clips_are_separated_by_a_gap():
    video = open_loop_video(*sequences(), observed=2)
    gap = video[:, TITLE:, LABELS + SIDE : LABELS + SIDE + GAP]
    assert (gap == BACKGROUND).all()


def test_title_and_labels_are_written():
    video = open_loop_video(*sequences(), observed=2)
    assert (video[0, :TITLE] != BACKGROUND).any()
    assert (video[0, :TITLE] != video[3, :TITLE]).any()
    for row in range(3):
        top = TOP + row * (SIDE + GAP)
        assert (video[0, top : top + SIDE, :LABELS] != BACKGROUND).any()


@pytest.mark.parametrize(("steps", "pause"), [(4, 4), (30, 10)])
def test_the_last_frame_is_repeated(steps, pause):
    video = open_loop_video(*sequences(steps=steps), observed=2)
    assert len(video) == steps + pause
    assert (video[steps:] == video[steps - 1]).all()


@pytest.mark.parametrize(("side", "factor"), [(4, 12), (12, 4), (20, 4), (64, 1)])
def test_tiny_images_are_enlarged_without_interpolation(side, factor):
    truth, model = sequences(batch=1, steps=2, height=side, width=side)
    video = open_loop_video(truth, model, observed=1)
    frame = cell(video, 0, 0, 0, side * factor)
    np.testing.assert_array_equal(frame[::factor, ::factor], truth[0, 0])
    np.testing.assert_array_equal(
        frame, truth[0, 0].repeat(factor, 0).repeat(factor, 1)
    )


def test_at_most_six_sequences_are_drawn():
    video = open_loop_video(*sequences(batch=9), observed=2)
    assert video.shape[2] == LABELS + 6 * (SIDE + GAP)


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_any_number_of_channels_is_converted_to_rgb(channels):
    truth, model = sequences(channels=channels)
    video = open_loop_video(truth, model, observed=2)
    assert video.shape[-1] == 3
    frame = cell(video, 0, 0, 0)
    np.testing.assert_array_equal(frame[..., -1], truth[0, 0, ..., -1])
    if channels < 3:
        np.testing.assert_array_equal(frame[..., 0], truth[0, 0, ..., -1])


def test_boundaries_are_marked_below_the_real_frames():
    truth, model = sequences(batch=1, steps=2)
    marks = np.array([[False, True]])
    plain = open_loop_video(truth, model, observed=1)
    video = open_loop_video(truth, model, observed=1, boundaries=marks)
    assert video.shape[1] > plain.shape[1]
    row = TOP + SIDE + 1
    assert tuple(video[0, row, LABELS]) != tuple(video[1, row, LABELS])
