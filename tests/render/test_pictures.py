"""Files a person can open."""

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
from reverie.render.axes import COLOURS
from reverie.render.curve import draw_curves, read_scores, write_curve
from reverie.render.episodes import cameras, contact_sheet
from reverie.render.video import (
    can_write_mp4,
    encode_gif,
    encode_png,
    enlarge,
    write_image,
    write_video,
)
from reverie.storage import atomic
from reverie.storage.atomic import DiskFull


def film(steps=5, channels=3):
    values = np.arange(steps, dtype=np.uint8) * 40
    return np.broadcast_to(values[:, None, None, None], (steps, 8, 12, channels)).copy()


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_a_gif_shows_every_frame(tmp_path, channels):
    path = write_video(tmp_path / "deep" / "film.gif", film(channels=channels), fps=10)
    image = Image.open(path)
    assert (image.size, image.n_frames) == ((12, 8), 5)
    assert image.info["duration"] == 100
    for index in range(5):
        image.seek(index)
        assert abs(image.convert("RGB").getpixel((3, 3))[0] - 40 * index) <= 2
    assert os.listdir(tmp_path / "deep") == ["film.gif"]


def test_a_png_is_exact():
    image = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    np.testing.assert_array_equal(
        np.asarray(Image.open(io.BytesIO(encode_png(image)))), image
    )


def test_a_failed_write_leaves_the_old_picture_and_no_rest(tmp_path, monkeypatch):
    path = write_image(tmp_path / "a.png", np.zeros((4, 4, 3), np.uint8))
    before = path.read_bytes()

    def replace(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "replace", replace)
    with pytest.raises(DiskFull, match="No space"):
        write_image(path, np.ones((4, 4, 3), np.uint8))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.png"]


def test_other_endings_and_empty_films_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"Fix: name the file film\.gif"):
        write_video(tmp_path / "film.avi", film())
    with pytest.raises(ValueError, match="at least one frame"):
        write_video(tmp_path / "film.gif", film()[:0])


def test_mp4_without_an_encoder_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(video_module, "can_write_mp4", lambda: False)
    with pytest.raises(UserError, match=r"pip install 'reverie\[video\]'"):
        write_video(tmp_path / "film.mp4", film())


def test_mp4_frames_are_padded_to_even_sides(tmp_path, monkeypatch):
    frames = []

    class Writer:
        def __init__(self, path, **options):
            Path(path).write_bytes(b"film")
            self.append_data = frames.append

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    fake = type(sys)("imageio.v2")
    fake.get_writer = Writer
    monkeypatch.setitem(sys.modules, "imageio.v2", fake)
    monkeypatch.setattr(video_module, "can_write_mp4", lambda: True)
    path = write_video(tmp_path / "film.mp4", film(channels=1)[:, :7, :11])
    assert path.read_bytes() == b"film"
    assert {frame.shape for frame in frames} == {(8, 12, 3)}


@pytest.mark.skipif(not can_write_mp4(), reason="needs reverie[video]")
def test_a_real_mp4_can_be_read_back(tmp_path):
    import imageio.v3 as imageio

    path = write_video(tmp_path / "film.mp4", enlarge(film()))
    assert imageio.imread(path, plugin="FFMPEG").shape[0] == 5


def test_small_pictures_grow_by_whole_pixels_and_large_ones_stay():
    image = np.arange(4 * 5, dtype=np.uint8).reshape(4, 5, 1)
    large = enlarge(image, at_least=10)
    assert large.shape == (8, 10, 1)
    np.testing.assert_array_equal(large[::2, ::2], image)
    assert enlarge(large, at_least=10) is large
    assert enlarge(film(), at_least=24).shape == (5, 16, 24, 3)


def test_equal_frames_do_not_make_a_film_larger():
    still = np.repeat(film(1), 50, 0)
    assert len(encode_gif(still)) < 2 * len(encode_gif(still[:1])) + 200


def test_a_contact_sheet_begins_and_ends_with_the_episode():
    frames = film(6)
    sheet = contact_sheet(frames, count=4, columns=2, gap=1)
    assert sheet.shape == (2 * 9 + 1, 2 * 13 + 1, 3)
    assert sheet[1, 1, 0] == frames[0, 0, 0, 0]
    assert sheet[-2, -2, 0] == frames[5, 0, 0, 0]
    assert sheet[0].min() == 255
    assert contact_sheet(frames, count=3, gap=0).shape == (8, 36, 3)
    assert contact_sheet(frames[:1]).shape == (16, 20, 3)
    with pytest.raises(ValueError, match="without frames"):
        contact_sheet(frames[:0])


def rising(count=300):
    return [(10.0 * i, -1 + 2 * i / count) for i in range(count)]


def has(image, colour):
    return (np.abs(image.astype(int) - colour).sum(-1) < 12).any()


def test_every_run_is_drawn_in_its_colour():
    image = draw_curves({"a": rising(), "b": [(x, -y) for x, y in rising()]}, "title")
    assert has(image, COLOURS[0])
    assert has(image, COLOURS[1])
    assert not has(image, COLOURS[2])


def test_a_rising_score_rises_in_the_picture():
    image = draw_curves({"a": rising()})
    blue = np.abs(image.astype(int) - COLOURS[0]).sum(-1) < 12
    blue[:120] = False  # the legend
    rows, columns = np.nonzero(blue)
    left, right = columns < 300, columns > 700
    assert rows[left].mean() > rows[right].mean() + 100


@pytest.mark.parametrize(
    "curve",
    [[], [(0, 0)], [(5, 3.0)], [(0, 1e9), (10, -1e9)], [(1, 1), (2, 1)], [(0, 1e-7)]],
)
def test_odd_curves_are_drawn_too(curve):
    assert draw_curves({"run": curve}, "odd").shape == (560, 960, 3)


def test_a_curve_is_made_from_a_run_folder(tmp_path):
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


def test_points_that_are_not_smoothed_stay_where_they_are():
    spike = [(float(i), 10.0 * (i == 5)) for i in range(10)]
    heights = []
    for smooth in (True, False):
        picture = draw_curves({"run": spike}, smooth=smooth).astype(int)
        line = np.abs(picture - COLOURS[0]).sum(-1) < 40
        heights.append(np.ptp(np.flatnonzero(line[200:].any(1))))  # below the legend
    assert heights[1] > 1.5 * heights[0]


def test_stacked_cameras_stand_side_by_side():
    one, two = np.full((2, 4, 5, 3), 10, np.uint8), np.full((2, 4, 5, 3), 20, np.uint8)
    both = cameras(np.concatenate([one, two], -1))
    assert both.shape == (2, 4, 10, 3)
    np.testing.assert_array_equal(both[:, :, :5], one)
    np.testing.assert_array_equal(both[:, :, 5:], two)
    np.testing.assert_array_equal(cameras(one), one)
    grey = np.arange(4, dtype=np.uint8) * np.ones((2, 4, 5, 1), np.uint8)
    np.testing.assert_array_equal(cameras(grey), np.zeros((2, 4, 5, 3)))
