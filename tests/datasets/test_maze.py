"""Maze episodes: rendering, events, invalid files."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.api import UserError
from reverie.datasets.sequences import (
    SequenceConfig,
)
from reverie.datasets.synthetic import maze
from reverie.rows import Window
from reverie.spaces import EVENT

WINDOW = Window(4, 12)


@pytest.fixture(scope="module")
def maze_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maze")
    maze.write_maze(folder, train=3, test=2, length=40)
    return folder


def modify_episode(folder, **changes):
    """Change arrays of the first training episode."""
    path = folder / "train" / "episode_00000.npz"
    with np.load(path) as data:
        arrays = {key: data[key] for key in data.files}
    arrays |= changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})


def test_maze_files_are_read_with_actions_and_junctions(maze_folder):
    config = SequenceConfig(folder=str(maze_folder), evaluation=5)
    source = maze.Maze(config, WINDOW, 0)
    batch = source.batch(3)
    assert batch["image"].shape == (4, 12, 32, 32, 3)
    assert batch["action"].shape == batch[EVENT].shape == (4, 12)
    np.testing.assert_array_equal(batch["image"], source.batch(3)["image"])
    assert len(source.evaluation()["image"]) == 5


def test_maze_without_actions(maze_folder, tmp_path):
    with_actions = maze.Maze(SequenceConfig(folder=str(maze_folder)), WINDOW, 0)
    for path in maze_folder.rglob("*.npz"):
        place = tmp_path / path.relative_to(maze_folder)
        place.parent.mkdir(exist_ok=True)
        with np.load(path) as data:
            np.savez(place, video=data["video"], junction=data["junction"])
    for folder in (maze_folder, tmp_path):  # with and without actions in the files
        config = SequenceConfig(folder=str(folder), actions=False)
        source = maze.Maze(config, WINDOW, 0)
        assert source.act_space == {}
        batch, wanted = source.batch(1), with_actions.batch(1)
        assert set(batch) == {"image", EVENT}
        np.testing.assert_array_equal(batch["image"], wanted["image"])
        np.testing.assert_array_equal(batch[EVENT], wanted[EVENT])
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UserError, match=r"no 'actions'(.|\n)*--sequences.actions False"),
    ):
        maze.Maze(SequenceConfig(folder=str(tmp_path)), WINDOW, 0)


def test_the_suggested_maze_folder_has_no_files(maze_folder, tmp_path):
    config = SequenceConfig(folder=str(maze_folder))
    long = Window(4, 400)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UserError, match="the window of 400") as caught,
    ):
        maze.Maze(config, long, 0)
    other = maze_folder / "maze"
    fix = f"`reverie data maze --out {other} --length 400`, and use --sequences.folder"
    assert fix in str(caught.value)
    assert "actions" not in str(caught.value)
    config = SequenceConfig(folder=str(tmp_path / "none"))
    with pytest.raises(UserError, match=rf"--out {tmp_path / 'none'} --length 400`"):
        maze.Maze(config, long, 0)


def test_a_maze_event_is_the_first_frame_at_a_junction(maze_folder):
    path = maze_folder / "train" / "episode_00001.npz"
    with np.load(path) as data:
        junction = data["junction"]
    event = maze.read_maze_episode(path, 10)[EVENT]
    starts = [t for t in range(1, 40) if junction[t] and not junction[t - 1]]
    assert np.flatnonzero(event).tolist() == starts


def test_maze_frames_are_resized(maze_folder, tmp_path):
    path = tmp_path / "big.npz"
    small = maze.read_maze_episode(maze_folder / "train" / "episode_00002.npz", 10)
    big = small["image"].repeat(2, 1).repeat(2, 2)
    np.savez(path, video=big, actions=small["action"])
    found = maze.read_maze_episode(path, 10)
    np.testing.assert_array_equal(found["image"], small["image"])
    assert EVENT not in found


@pytest.mark.filterwarnings("error")
def test_a_ray_along_the_grid_is_rendered_like_its_neighbors():
    angles = np.pi / 6, np.pi / 6 + 1e-6  # the first ray is exactly along x
    along, neighbor = maze.render_maze(
        np.array([(1.6, 1.5, angle) for angle in angles])
    )
    np.testing.assert_array_equal(along[:, 0], neighbor[:, 0])


def test_a_missing_maze_is_an_error(tmp_path):
    config = SequenceConfig(folder=str(tmp_path / "none"))
    with pytest.raises(UserError, match="reverie data maze --out"):
        maze.Maze(config, WINDOW, 0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"video": None}, "has no 'video', only actions"),
        ({"actions": None}, "has no 'actions'"),
        ({"video": np.zeros((40, 32, 32), np.uint8)}, "expected \\(T, h, w, 3\\)"),
        ({"actions": np.zeros(39, np.int64)}, "expected \\(40,\\)"),
        ({"actions": np.full(40, 3)}, "from 0 to 2"),
        ({"actions": np.zeros(40)}, "integers from 0 to 2"),
        ({"video": np.full((40, 32, 32, 3), np.nan)}, "NaN or infinite"),
        ({"video": np.zeros((40, 32, 32, 3))}, "expected uint8"),
        ({"video": np.full((40, 32, 32, 3), 300, np.uint16)}, "expected uint8"),
        ({"video": np.zeros((40, 0, 32, 3), np.uint8)}, "expected \\(T, h, w, 3\\)"),
        ({"junction": np.zeros(39, bool)}, "expected bool \\(40,\\)"),
        ({"junction": np.zeros((40, 1), bool)}, "'junction' is bool"),
        ({"junction": np.array(True)}, "'junction' is bool"),
        ({"junction": np.full(40, np.nan)}, "'junction' is float64"),
        (
            {"video": np.zeros((9, 32, 32, 3), np.uint8), "actions": np.zeros(9, int)},
            "has 9 frames, fewer than the window of 12",
        ),
    ],
)
def test_invalid_maze_files_are_errors(tmp_path, changes, complaint):
    maze.write_maze(tmp_path, train=1, test=1, length=40)
    modify_episode(tmp_path, **changes)
    config = SequenceConfig(folder=str(tmp_path))
    with pytest.warns(RuntimeWarning), pytest.raises(UserError, match=complaint):
        maze.Maze(config, WINDOW, 0)
