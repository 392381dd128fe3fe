"""`reverie draw openloop`: videos of recorded episodes that the model continues."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from reverie.api import UserError
from reverie.cli.main import main
from reverie.play import open_loop
from reverie.play.open_loop import draw_open_loop, sample_clips
from reverie.render.open_loop import LABELS
from reverie.render.video import encode_gif


@pytest.mark.parametrize("loaded", ["dreamer", "vta", "iris"], indirect=True)
def test_a_video_of_recorded_episodes(loaded, tmp_path):
    path = draw_open_loop(loaded, tmp_path / "a" / "dream.gif", 2, 2, 2)
    with Image.open(path) as image:
        assert image.n_frames >= 2
        wide = image.size[0]
    draw_open_loop(loaded, path, clips=1, observed=2, horizon=2)
    with Image.open(path) as image:
        assert LABELS < image.size[0] < wide


def test_clips_are_parts_of_recorded_episodes(loaded):
    clips = sample_clips(loaded, 3, 4, seed=1)
    assert clips["image"].shape[:2] == (3, 4)
    again = sample_clips(loaded, 3, 4, seed=1)
    np.testing.assert_array_equal(clips["image"], again["image"])
    with pytest.raises(UserError, match="No recorded episode has 1000 rows; the long"):
        sample_clips(loaded, 3, 1000, seed=1)


def test_a_gif_has_at_most_the_given_size(loaded, tmp_path):
    path, sizes = tmp_path / "dream.gif", []
    for clips in (4, 1):
        draw_open_loop(loaded, path, clips, observed=2, horizon=3)
        sizes.append(path.stat().st_size)
    limit = sum(sizes) // 2
    draw_open_loop(loaded, path, 4, 2, 3, max_bytes=limit)
    assert path.stat().st_size <= limit
    with pytest.raises(UserError, match=r"more than 0 kB(.|\n)*horizon"):
        draw_open_loop(loaded, path, 4, 2, 3, max_bytes=10)


def test_without_a_decoder_there_is_nothing_to_draw(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(open_loop, "predict", lambda *arguments: {})
    with pytest.raises(UserError, match=r"no decoder(.|\n)*--dreamer.draw True"):
        draw_open_loop(loaded, tmp_path / "dream.gif", 2, 2, 2)


def test_fewer_colors_make_a_gif_smaller():
    frames = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), np.uint8)
    assert len(encode_gif(frames, colors=16)) < 0.7 * len(encode_gif(frames))


def test_the_command(run_folder, tmp_path, capsys):
    folder = str(run_folder("dreamer"))
    words = ["draw", "openloop", folder, "--observed", "2", "--horizon", "3"]
    assert main([*words, "--out", str(tmp_path / "x.gif"), "--max-kb", "500"]) == 0
    assert (tmp_path / "x.gif").is_file()
    assert "x.gif (" in capsys.readouterr().out
    assert main([*words, "--out", "x.mp4", "--max-kb", "500"]) == 2
    assert main(["draw", "openloop"]) == 2
    assert main(["draw", "openloop", folder, "--clips", "0"]) == 2
    assert main(["draw", "openloop", str(run_folder("random"))]) == 2
    assert "has no world model" in capsys.readouterr().err
