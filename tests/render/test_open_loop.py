"""The open-loop video, checked pixel by pixel."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.render.open_loop import open_loop_video


def sequences(batch=2, steps=6, height=3, width=5, channels=3):
    random = np.random.default_rng(0)
    shape = (batch, steps, height, width, channels)
    return random.integers(0, 256, (2, *shape), np.uint8)


def test_rows_are_truth_model_and_halved_error():
    truth, model = sequences()
    video = open_loop_video(truth, model, observed=2)
    assert video.shape == (6 + 6, 3 * 3 + 4, 2 * (5 + 4), 3)
    second = video[4, 2:-2, 9 + 2 : 18 - 2]
    np.testing.assert_array_equal(second[:3], truth[1, 4])
    np.testing.assert_array_equal(second[3:6], model[1, 4])
    error = (model[1, 4].astype(int) - truth[1, 4] + 255) // 2
    np.testing.assert_array_equal(second[6:], error)


def test_no_error_is_gray():
    truth, _ = sequences()
    video = open_loop_video(truth, truth, observed=2)
    assert set(video[0, 8:11, 2:7].flat) == {127}


def test_the_border_is_red_for_open_loop_frames():
    video = open_loop_video(*sequences(), observed=2)
    for t in range(6):
        color = [0, 255, 0] if t < 2 else [255, 0, 0]
        for border in (video[t, :2], video[t, -2:], video[t, :, :2], video[t, :, 7:11]):
            assert (border == color).all()


@pytest.mark.parametrize(("steps", "pause"), [(4, 4), (30, 10)])
def test_up_to_ten_black_frames_follow(steps, pause):
    video = open_loop_video(*sequences(steps=steps), observed=2)
    assert len(video) == steps + pause
    assert not video[steps:].any()
    assert video[steps - 1].any()


def test_at_most_six_sequences_are_drawn():
    assert open_loop_video(*sequences(batch=9), observed=2).shape[2] == 6 * 9


@pytest.mark.parametrize("channels", [1, 2, 4])
def test_any_number_of_channels_is_converted_to_rgb(channels):
    truth, model = sequences(channels=channels)
    video = open_loop_video(truth, model, observed=2)
    assert video.shape[-1] == 3
    last = min(channels, 3)
    np.testing.assert_array_equal(video[0, 2:5, 2:7, -1], truth[0, 0, ..., -1])
    if last < 3:
        np.testing.assert_array_equal(video[0, 2:5, 2:7, 0], truth[0, 0, ..., -1])
