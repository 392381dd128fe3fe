"""Image and video files, contact sheets, learning curves."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reverie.api import UserError
from reverie.render import video as video_module
from reverie.render.channels import cameras_side_by_side
from reverie.render.curve import draw_curves, read_scores, write_curve
from reverie.render.episode import contact_sheet
from reverie.render.figure import COLORS
from reverie.render.video import (
    can_write_mp4,
    encode_gif,
    encode_png,
    upscale,
    write_image,
    write_video,
)
from reverie.storage import atomic
from reverie.storage.os_errors import DiskFull


def make_video(steps=5, channels=3):
    values = np.arange(steps, dtype=np.uint8) * 40
    return np.broadcast_to(values[:, None, None, None], (steps, 8, 12, channels)).copy()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_a_gif_has_all_frames(tmp_path, channels):
    path = write_video(
        tmp_path / "deep" / "video.gif", make_video(channels=channels), fps=10
    )
    image = Image.open(path)
    assert (image.size, image.n_frames) == ((12, 8), 5)
    for index in range(5):
        image.seek(index)
        assert abs(image.convert("RGB").getpixel((3, 3))[0] - 40 * index) <= 2
    assert os.listdir(tmp_path / "deep") == ["video.gif"]


@pytest.mark.parametrize(
    ("count", "fps", "frames", "duration"),
    [
        (30, 10, 30, 100),  # the last frame is shown for one more second
        (5, 10, 5, 400),  # slowed down to two seconds
        (300, 100, 150, 20),  # every other frame
    ],
)
def test_a_gif_takes_two_seconds_and_pauses(count, fps, frames, duration):
    video = np.zeros((count, 8, 12, 3), np.uint8)
    video += (np.arange(count) * 37 % 251).astype(np.uint8)[:, None, None, None]
    image = Image.open(io.BytesIO(encode_gif(video, fps)))
    assert image.n_frames == frames
    durations = []
    for index in range(frames):
        image.seek(index)
        durations.append(image.info["duration"])
    assert durations == [duration] * (frames - 1) + [duration + 1000]


def test_a_png_is_exact():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(encode_png(image)))), image
    )


def test_a_failed_write_keeps_the_old_image(tmp_path, monkeypatch):
    path = write_image(tmp_path / "a.png", np.zeros((4, 4, 3), np.uint8))
    before = path.read_bytes()

    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "replace", replace)
    with pytest.raises(DiskFull, match="No space"):
        write_image(path, np.ones((4, 4, 3), np.uint8))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.png"]


def test_other_suffixes_and_empty_videos_raise(tmp_path):
    with pytest.raises(UserError, match=r"Fix: name the file video\.gif"):
        write_video(tmp_path / "video.avi", make_video())
    with pytest.raises(ValueError, match="at least one frame"):
        write_video(tmp_path / "video.gif", make_video()[:0])


def test_mp4_without_an_encoder_raises_with_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(video_module, "can_write_mp4", lambda: False)
    with pytest.raises(UserError, match=r"pip install -e '.*\[video\]'"):
        write_video(tmp_path / "video.mp4", make_video())


def test_mp4_frames_are_padded_to_even_sides(tmp_path, monkeypatch):
    frames = []

    class Writer:
        def __init__(self, path, **options):
            Path(path).write_bytes(b"video")
            self.append_data = frames.append

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    fake = type(sys)("imageio.v2")
    fake.get_writer = Writer
    monkeypatch.setitem(sys.modules, "imageio.v2", fake)
    monkeypatch.setattr(video_module, "can_write_mp4", lambda: True)
    path = write_video(tmp_path / "video.mp4", make_video(channels=1)[:, :7, :11])
    assert path.read_bytes() == b"video"
    assert {frame.shape for frame in frames} == {(8, 12, 3)}


@pytest.mark.skipif(not can_write_mp4(), reason="needs the extra video")
def test_a_real_mp4_can_be_read_back(tmp_path):
    import imageio.v3 as imageio

    path = write_video(tmp_path / "video.mp4", upscale(make_video()))
    # 5 frames in two seconds, and the last one again for one second
    assert imageio.imread(path, plugin="FFMPEG").shape[0] == 5 + 3


def test_small_images_are_enlarged_by_an_integer_factor():
    image = np.arange(4 * 5, dtype=np.uint8).reshape(4, 5, 1)
    large = upscale(image, min_size=10)
    assert large.shape == (8, 10, 1)
    np.testing.assert_array_equal(large[::2, ::2], image)
    assert upscale(large, min_size=10) is large
    assert upscale(make_video(), min_size=24).shape == (5, 16, 24, 3)


def test_equal_frames_do_not_increase_the_size_of_a_gif():
    frames = np.repeat(make_video(1), 50, 0)
    assert len(encode_gif(frames)) < 2 * len(encode_gif(frames[:1])) + 200


def test_a_contact_sheet_has_the_first_and_last_frame():
    frames = make_video(6)
    sheet = contact_sheet(frames, count=4, columns=2, gap=1)
    assert sheet.shape == (2 * 9 + 1, 2 * 13 + 1, 3)
    assert sheet[1, 1, 0] == frames[0, 0, 0, 0]
    assert sheet[-2, -2, 0] == frames[5, 0, 0, 0]
    assert sheet[0].min() == 255
    assert contact_sheet(frames, count=3, gap=0).shape == (8, 36, 3)
    assert contact_sheet(frames[:1]).shape == (16, 20, 3)
    with pytest.raises(ValueError, match="at least one frame"):
        contact_sheet(frames[:0])


def rising(count=300):
    """Return a curve whose score increases from -1 to 1."""
    return [(10.0 * i, -1 + 2 * i / count) for i in range(count)]


def has(image, color):
    """True if a pixel has about this color."""
    return (np.abs(image.astype(int) - color).sum(-1) < 12).any()


def test_every_run_has_its_color():
    image = draw_curves({"a": rising(), "b": [(x, -y) for x, y in rising()]}, "title")
    assert has(image, COLORS[0])
    assert has(image, COLORS[1])
    assert not has(image, COLORS[2])


def test_an_increasing_score_goes_up():
    image = draw_curves({"a": rising()})
    blue = np.abs(image.astype(int) - COLORS[0]).sum(-1) < 12
    blue[:120] = False  # the legend
    rows, columns = np.nonzero(blue)
    left, right = columns < 300, columns > 700
    assert rows[left].mean() > rows[right].mean() + 100


@pytest.mark.parametrize(
    "curve",
    [[], [(0, 0)], [(5, 3.0)], [(0, 1e9), (10, -1e9)], [(1, 1), (2, 1)], [(0, 1e-7)]],
)
def test_unusual_curves_can_be_drawn(curve):
    assert draw_curves({"run": curve}, "odd").shape == (560, 960, 3)


def test_a_curve_of_a_run_folder(tmp_path):
    lines = [{"step": i, "episode/score": i / 10} for i in range(30)]
    lines += [
        {"step": 30, "episode/score": None},
        {"step": 31, "eval/episode/score": 1},
    ]
    text = "\n".join(json.dumps(line) for line in lines) + '\n{"step": 3'
    (tmp_path / "scores.jsonl").write_text(text)
    assert read_scores(tmp_path)[-1] == (29, 2.9)
    assert read_scores(tmp_path / "scores.jsonl", "eval/episode/score") == [(31, 1.0)]
    path = write_curve(tmp_path / "curve.png", {"run": tmp_path}, "catch")
    assert Image.open(path).size == (960, 560)
    with pytest.raises(UserError, match="no scores to draw"):
        write_curve(tmp_path / "curve.png", {"run": tmp_path / "nowhere"})


def test_without_smoothing_points_are_exact():
    spike = [(float(i), 10.0 * (i == 5)) for i in range(10)]
    heights = []
    for smooth in (True, False):
        image = draw_curves({"run": spike}, smooth=smooth).astype(int)
        line = np.abs(image - COLORS[0]).sum(-1) < 40
        heights.append(np.ptp(np.flatnonzero(line[200:].any(1))))  # below the legend
    assert heights[1] > 1.5 * heights[0]


def test_stacked_cameras_are_side_by_side():
    one, two = np.full((2, 4, 5, 3), 10, np.uint8), np.full((2, 4, 5, 3), 20, np.uint8)
    both = cameras_side_by_side(np.concatenate([one, two], -1))
    assert both.shape == (2, 4, 10, 3)
    np.testing.assert_array_equal(both[:, :, :5], one)
    np.testing.assert_array_equal(both[:, :, 5:], two)
    np.testing.assert_array_equal(cameras_side_by_side(one), one)
    gray = np.arange(4, dtype=np.uint8) * np.ones((2, 4, 5, 1), np.uint8)
    np.testing.assert_array_equal(cameras_side_by_side(gray), np.zeros((2, 4, 5, 3)))
