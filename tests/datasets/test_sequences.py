"""Sequence datasets: contents, reproducibility and errors."""

from __future__ import annotations

import errno
import sys
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.datasets.episode_format import from_steps
from reverie.datasets.sequences import (
    SEQUENCE_DATASETS,
    SequenceConfig,
    SequenceDataset,
    find_sequence_class,
    make_sequence_dataset,
)
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.datasets.synthetic import balls, maze
from reverie.datasets.synthetic.chunks import ChunkedSequences
from reverie.rows import Window
from reverie.spaces import EVENT, Space
from reverie.storage.episodes import write_episode

WINDOW = Window(4, 12)


def make_balls(**settings) -> balls.BouncingBalls:
    config = SequenceConfig(**{"chunk": 16, "refresh": 5, "evaluation": 8, **settings})
    return balls.BouncingBalls(config, WINDOW, 0)


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


def test_a_collision_changes_the_color_of_the_ball_that_hit():
    sampler = balls.NumpyBallSampler(np.random.default_rng(0))
    track = balls.simulate(sampler, 200, 30, 2.0)
    on_wall = ((track.pos <= 3) | (track.pos >= 29)).any(-1)
    changed = np.diff(track.color, axis=1) != 0
    np.testing.assert_array_equal(changed, on_wall[:, 1:])
    np.testing.assert_array_equal(changed.any(-1), track.hit[:, 1:])
    assert not track.hit[:, 0].any()


def test_collisions_are_as_frequent_as_in_the_original():
    found = balls.make_sequences(np.random.default_rng(1), 2000, 30, 2.0)
    assert found[EVENT][:, 1:].mean() == pytest.approx(0.263, abs=0.01)


def test_a_batch_depends_only_on_its_step():
    whole, later = make_balls(), make_balls()
    batches = [whole.batch(step) for step in range(12)]
    for step in (11, 4, 7):
        again = later.batch(step)
        for key, value in batches[step].items():
            np.testing.assert_array_equal(value, again[key])
    whole.close()
    later.close()


def test_chunks_are_sampled_without_replacement_and_refreshed():
    source = make_balls(chunk=16, refresh=4)
    rows = np.concatenate([source.batch(step)["image"] for step in range(4)])
    assert len(np.unique(rows.reshape(16, -1), axis=0)) == 16
    fresh = source.batch(4)["image"]
    known = {row.tobytes() for row in rows}
    assert not any(row.tobytes() in known for row in fresh)
    source.close()


def test_without_refresh_the_first_chunk_is_kept():
    source = make_balls(chunk=8, refresh=0)
    first = np.concatenate([source.batch(step)["image"] for step in (0, 1)])
    later = np.concatenate([source.batch(step)["image"] for step in (100, 101)])
    assert {row.tobytes() for row in first} == {row.tobytes() for row in later}
    source.close()


def test_the_evaluation_set_differs_from_the_training_data():
    source = make_balls()
    seen = {row.tobytes() for step in range(5) for row in source.batch(step)["image"]}
    held = source.evaluation()
    assert len(held["image"]) == 8
    assert not any(row.tobytes() in seen for row in held["image"])
    np.testing.assert_array_equal(held["image"], source.evaluation()["image"])
    source.close()


def test_downscaled_balls_are_the_same_sequences():
    full, small = make_balls(), make_balls(side=16)
    one, two = full.batch(3), small.batch(3)
    assert two["image"].shape == (4, 12, 16, 16, 3)
    assert two["image"].dtype == small.obs_space["image"].dtype == np.uint8
    assert small.obs_space["image"].shape == (16, 16, 3)
    np.testing.assert_array_equal(one[EVENT], two[EVENT])
    corner = one["image"][:, :, 2:4, 6:8].mean((2, 3))
    np.testing.assert_allclose(two["image"][:, :, 1, 3], corner, atol=0.5)
    with pytest.raises(ValueError, match="8, 16 or 32"):
        SequenceConfig(side=20)


@pytest.mark.parametrize("refresh", [0, 4])
def test_a_chunk_is_generated_once_and_at_most_one_ahead(refresh):
    made = []

    def make(rng, count):
        made.append(rng)
        return {"x": np.arange(count)}

    chunks = ChunkedSequences(make, 8, refresh, 2, seed=0)
    for step in range(4):
        chunks.batch(step)
    chunks.close()
    assert len(made) <= (2 if refresh else 1)


def test_a_chunk_smaller_than_a_batch_is_an_error():
    with pytest.raises(UserError, match="is smaller than a batch"):
        make_balls(chunk=3)


def test_balls_are_written_and_read(tmp_path):
    assert balls.write_balls(tmp_path, train=6, test=3, length=14) == 9
    source = make_balls(folder=str(tmp_path))
    with np.load(tmp_path / "train.npz") as data:
        known = {row[:12].tobytes() for row in data["image"]}
    assert {row.tobytes() for row in source.batch(7)["image"]} <= known
    held = source.evaluation()
    assert held["image"].shape == (3, 12, 32, 32, 3)
    assert held[EVENT].shape == (3, 12)
    source.close()


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        (None, "reverie data balls --out"),
        ({"image": np.zeros((3, 14, 32, 32, 3), np.uint8)}, "event"),
        ({"image": np.zeros((3, 14)), "event": np.zeros((3, 14))}, "expected uint8"),
        (
            {
                "image": np.zeros((3, 9, 32, 32, 3), np.uint8),
                "event": np.zeros((3, 9)),
            },
            "data balls --out .* --length 12",
        ),
        (
            {
                "image": np.zeros((3, 14, 32, 32, 3), np.uint8),
                "event": np.zeros((3, 14), bool),
            },
            "3 sequences, at least 4",
        ),
        (
            {
                "image": np.zeros((4, 14, 32, 32, 3), np.uint8),
                "event": np.full((4, 14), np.nan),
            },
            "'event' is float64",
        ),
    ],
)
def test_invalid_files_of_balls_are_errors(tmp_path, arrays, complaint):
    if arrays:
        np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(UserError, match=complaint):
        make_balls(folder=str(tmp_path))


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


def test_recorded_episodes_have_aligned_actions(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(12):
        image = np.full((20, 8, 8, 3), index, np.uint8)
        action = np.arange(20, dtype=np.float32)[:, None]  # t led to row t
        reward = rng.integers(2, size=20).astype(np.float32)
        np.savez(
            tmp_path / f"e{index:02d}.npz", image=image, action=action, reward=reward
        )
    config = SequenceConfig(folder=str(tmp_path), evaluation=40)
    source = make_sequence_dataset("sequences_episodes", config, WINDOW, 0)
    held = source.evaluation()
    assert set(held["image"][:, 0, 0, 0, 0]) == {0, 10}
    assert not {0, 10} & set(source.batch(0)["image"][:, 0, 0, 0, 0])
    steps = np.diff(source.batch(0)["action"][..., 0])
    assert ((steps == 1) | (steps < 0)).all()  # the last row of an episode has none
    assert source.batch(0)["action"].min() >= 0
    assert source.act_space["action"].shape == (1,)
    quiet = make_sequence_dataset(
        "sequences_episodes", replace(config, actions=False), WINDOW, 0
    )
    assert quiet.act_space == {}
    assert set(quiet.batch(0)) == {"image", EVENT}
    for path in tmp_path.glob("*.npz"):
        with np.load(path) as data:
            np.savez(path, image=data["image"])
    bare = make_sequence_dataset(
        "sequences_episodes", replace(config, actions=False), WINDOW, 0
    )
    np.testing.assert_array_equal(bare.batch(0)["image"], quiet.batch(0)["image"])


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"image": np.zeros((20, 8, 8, 3), np.uint8)}, "has no 'action'"),
        ({"image": np.zeros((20, 8)), "action": np.zeros((20, 1))}, "one image"),
        (
            {
                "image": np.zeros((20, 8, 8, 3), np.uint8),
                "action": np.full((20, 1), np.nan),
            },
            "NaN or infinite",
        ),
        (
            {"image": np.zeros((5, 8, 8, 3), np.uint8), "action": np.zeros((5, 1))},
            "has 5 frames",
        ),
        (
            {"image": np.zeros((20, 8, 8, 3), np.uint8), "action": np.zeros((9, 1))},
            "numbers in 20 rows",
        ),
        (
            {"image": np.zeros((20, 8, 8, 0), np.uint8), "action": np.zeros(20)},
            "one image",
        ),
        *(
            (
                {
                    "image": np.zeros((20, 8, 8, 3), np.uint8),
                    "action": np.zeros(20),
                    **wrong,
                },
                complaint,
            )
            for wrong, complaint in (
                ({"action": np.array(1)}, "'action' is int64"),
                ({"action": np.array(["left"] * 20)}, "expected numbers"),
                ({"reward": np.zeros(5)}, "expected numbers in 20 rows"),
                ({"reward": np.array(0.0)}, "expected numbers in 20 rows"),
                ({"reward": np.array(["none"] * 20)}, "'reward' is <U4"),
                ({"reward": np.full(20, np.nan)}, "'reward' has NaN"),
            )
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_invalid_recorded_episodes_are_errors(tmp_path, arrays, complaint):
    for index in range(2):
        np.savez(tmp_path / f"e{index}.npz", **arrays)
    config = SequenceConfig(folder=str(tmp_path))
    with pytest.raises(UserError, match=complaint):
        make_sequence_dataset("sequences_episodes", config, WINDOW, 0)


def test_the_image_of_an_episode_may_have_any_name(tmp_path):
    for index in range(3):
        np.savez(tmp_path / f"e{index}.npz", camera=np.zeros((20, 8, 8, 1), np.uint8))
    config = SequenceConfig(folder=str(tmp_path), actions=False)
    source = make_sequence_dataset("sequences_episodes", config, WINDOW, 0)
    assert set(source.obs_space) == set(source.batch(0)) == {"camera"}


def test_recorded_episodes_must_have_the_same_shape(tmp_path):
    for index, (rows, side) in enumerate([(2, 8), (20, 8), (20, 16), (20, 16)]):
        image = np.zeros((rows, side, side, 3), np.uint8)
        np.savez(tmp_path / f"e{index}.npz", image=image, action=np.zeros(rows))
    config = SequenceConfig(folder=str(tmp_path))
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UserError, match=r"expected \(8, 8, 3\)"),
    ):
        make_sequence_dataset("sequences_episodes", config, WINDOW, 0)


def test_episodes_without_rewards_have_no_events(tmp_path):
    arrays = {
        "image": np.zeros((20, 8, 8, 3), np.uint8),
        "action": np.zeros((20, 1)),
        "reward": np.ones((20, 1)),
    }
    for index in range(3):
        np.savez(tmp_path / f"e{index}.npz", **arrays)
    config = SequenceConfig(folder=str(tmp_path))
    source = make_sequence_dataset("sequences_episodes", config, WINDOW, 0)
    assert source.evaluation()[EVENT].all()
    del arrays["reward"]
    np.savez(tmp_path / "e1.npz", **arrays)
    source = make_sequence_dataset("sequences_episodes", config, WINDOW, 0)
    assert EVENT not in source.evaluation()


def write_episodes(folder):
    """Write eleven episodes with a camera and action t in row t. One is short."""
    for index in range(11):
        rows = 4 if index == 5 else 21
        camera = np.full((rows, 8, 8, 3), index, np.uint8)
        steps = np.arange(rows - 1)
        episode = from_steps(
            {"camera": camera, "speed": np.zeros(rows)},
            {"action": steps},
            (steps % 5 == 0).astype(float),
            np.zeros(rows - 1),
        )
        write_episode(folder, f"e{index:02d}", episode)


def test_recorded_episodes_of_other_formats(tmp_path):
    write_episodes(tmp_path)
    config = SequenceConfig(folder=str(tmp_path), evaluation=40)
    with pytest.warns(RuntimeWarning, match="1 of 11 episodes are left out"):
        source = make_sequence_dataset("sequences_episodes", config, WINDOW, 0)
    assert source.obs_space == {"camera": Space(np.uint8, (8, 8, 3), 0, 256)}
    batch = source.batch(0)
    assert set(batch) == {"camera", "action", EVENT}
    # The reward of a row results from the action of the row before.
    earned = batch["action"][:, :-1] % 5 == 0
    assert np.array_equal(batch[EVENT][:, 1:], earned)
    held = source.evaluation()["camera"][:, 0, 0, 0, 0]
    assert not set(held) & set(batch["camera"][:, 0, 0, 0, 0])
    config = replace(config, actions=False)
    with pytest.warns(RuntimeWarning):
        quiet = make_sequence_dataset("sequences_episodes", config, WINDOW, 0)
    assert (quiet.act_space, set(quiet.batch(0))) == ({}, {"camera", EVENT})


def test_two_images_are_an_error(tmp_path):
    obs = {
        "a": np.zeros((21, 8, 8, 3), np.uint8),
        "b": np.zeros((21, 8, 8, 3), np.uint8),
    }
    steps = np.zeros(20)
    for name in ("one", "two"):
        write_episode(tmp_path, name, from_steps(obs, {"action": steps}, steps, steps))
    with pytest.raises(UserError, match="Found: a, b"):
        make_sequence_dataset(
            "sequences_episodes", SequenceConfig(str(tmp_path)), WINDOW, 0
        )


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(UserError, match="reverie data export"):
        make_sequence_dataset("sequences_episodes", SequenceConfig(), WINDOW, 0)


def test_an_unknown_dataset_is_an_error_with_a_suggestion():
    with pytest.raises(UserError, match="sequences_balls"):
        find_sequence_class("sequences_bals")
    with pytest.raises(UserError, match="cannot be imported"):
        find_sequence_class("sequences_nowhere.at:All")


class Blinks:
    """A complete sequence dataset: a lamp that is switched at random."""

    loss: Literal["bernoulli", "gaussian"] = "bernoulli"

    def __init__(self, config: SequenceConfig, window: Window, seed: int):
        self.obs_space = {"image": Space(np.uint8, (32, 32, 3), 0, 256)}
        self.act_space: dict[str, Space] = {}
        self.shape, self.seed = (window.batch, window.length), seed

    def batch(self, step: int):
        event = np.random.default_rng([self.seed, step]).random(self.shape) < 0.2
        light = (event.cumsum(1) % 2 * 255).astype(np.uint8)
        image = np.broadcast_to(light[..., None, None, None], (*self.shape, 32, 32, 3))
        return {"image": image, "log/event": event}

    def evaluation(self):
        return self.batch(-1 % 2**32)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("task", ["sequences_blinks", f"sequences_{__name__}:Blinks"])
def test_a_dataset_is_registered_or_named_by_its_class(monkeypatch, task):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setitem(SEQUENCE_DATASETS, "blinks", f"{__name__}:Blinks")
    source = make_sequence_dataset(task, SequenceConfig(), WINDOW, 0)
    assert isinstance(source, SequenceDataset)
    assert source.batch(0)["image"].shape == (4, 12, 32, 32, 3)


def test_a_dataset_class_in_the_working_directory(tmp_path, monkeypatch):
    text = "from reverie.datasets.synthetic import balls\n"
    text += "class Mine(balls.BouncingBalls): ...\n"
    (tmp_path / "balls_of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert find_sequence_class("sequences_balls_of_mine:Mine").__name__ == "Mine"


def test_existing_files_survive_a_full_disk(tmp_path, monkeypatch):
    balls.write_balls(tmp_path, train=2, test=2, length=4)
    before = (tmp_path / "train.npz").read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(UserError, match="disk is full"):
        balls.write_balls(tmp_path, train=3, test=2, length=4)
    assert (tmp_path / "train.npz").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


class WrongArguments(Blinks):
    def __init__(self):
        pass


class RaisesInBatch(Blinks):
    def batch(self, step: int):
        return {"image": [] / 2}


@pytest.mark.parametrize(
    ("kind", "error"), [(WrongArguments, "TypeError"), (RaisesInBatch, "and 'int'")]
)
def test_errors_in_user_classes_have_file_and_line(monkeypatch, kind, error):
    monkeypatch.setitem(SEQUENCE_DATASETS, "mine", f"{__name__}:{kind.__name__}")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    def serve_one():
        source = make_sequence_dataset("sequences_mine", SequenceConfig(), WINDOW, 0)
        SequenceFeed(source, torch.device("cpu"))("train")

    with pytest.raises(UserError, match=rf"{error}.*\.py:\d+\)\.\n  Fix: correct it"):
        serve_one()


def test_errors_in_built_in_classes_are_not_user_errors(monkeypatch):
    source = make_sequence_dataset("sequences_balls", SequenceConfig(), WINDOW, 0)
    monkeypatch.setattr(source, "batch", lambda step: [] / 2)
    with pytest.raises(TypeError):
        SequenceFeed(source, torch.device("cpu"))("train")


class WrongLoss:
    loss = "l2"


class NoMethods:
    loss = "gaussian"


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("WrongLoss", "bernoulli, gaussian"),
        ("NoMethods", "has no batch"),
        ("WINDOW", "must be a class"),
    ],
)
def test_classes_that_are_not_datasets_are_errors(monkeypatch, kind, complaint):
    monkeypatch.setitem(SEQUENCE_DATASETS, "mine", f"{__name__}:{kind}")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    with pytest.raises(UserError, match=complaint):
        make_sequence_dataset("sequences_mine", SequenceConfig(), WINDOW, 0)


def serve(**changes):
    """Return a training batch and the evaluation set of a dataset with such arrays."""

    class Mine(Blinks):
        def __init__(self):
            super().__init__(SequenceConfig(), WINDOW, 0)
            self.act_space = {
                "turn": Space(np.int64, (), 0, 4),
                "push": Space(np.float32, (2,)),
            }

        def batch(self, step):
            turn, push = np.zeros(self.shape, int), np.zeros((*self.shape, 2))
            arrays = {**super().batch(step), "turn": turn, "push": push, **changes}
            return {key: value for key, value in arrays.items() if value is not None}

    feed = SequenceFeed(Mine(), torch.device("cpu"))
    return feed("train"), feed("report")


def test_discrete_and_continuous_actions_are_valid(recwarn):
    train, report = serve()
    assert {"image", "turn", "push"} == train.keys() == report.keys() - {EVENT}
    assert not recwarn.list


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"image": None}, "'image' is missing"),
        ({"turn": None}, "'turn' is missing"),
        ({"image": [1, 2]}, "'image' is not an array"),
        ({"image": np.zeros((4, 12, 32, 32, 3), np.float32)}, "expected uint8"),
        ({"image": np.full((4, 12, 32, 32, 3), np.nan)}, "has NaN"),
        ({"image": np.zeros((4, 12, 16, 16, 3), np.uint8)}, "T, 32, 32, 3"),
        ({"image": np.zeros((0, 12, 32, 32, 3), np.uint8)}, "above 0"),
        ({"turn": np.zeros((4, 11), int)}, "'turn' has shape"),
        ({"turn": np.full((4, 12), 4)}, "not from 0 to 3"),
        ({"turn": np.zeros((4, 12))}, "is float64, expected int64"),
        ({"push": np.full((4, 12, 2), np.inf)}, "'push' has NaN or infinite"),
        ({EVENT: np.zeros((4, 11), bool)}, "'log/event' has shape"),
        ({EVENT: np.zeros((4, 12), int)}, "expected bool"),
    ],
)
def test_arrays_that_do_not_match_the_spaces_are_errors(changes, complaint):
    with pytest.raises(UserError, match=complaint):
        serve(**changes)
