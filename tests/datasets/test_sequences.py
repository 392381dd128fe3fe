"""Sequences to watch: what they hold, that steps repeat, and what can be wrong."""

from __future__ import annotations

import errno
import sys
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.datasets import sequences as sources
from reverie.datasets.episode_format import from_steps
from reverie.datasets.sequences import Source, SourceConfig
from reverie.datasets.sequences.feed import SourceFeed
from reverie.datasets.synthetic import balls, maze
from reverie.datasets.synthetic.chunks import Chunks
from reverie.rows import Window
from reverie.spaces import EVENT, Space
from reverie.storage.episodes import write_episode

WINDOW = Window(4, 12)


def make_balls(**settings) -> balls.Balls:
    config = SourceConfig(**{"chunk": 16, "refresh": 5, "evaluation": 8, **settings})
    return balls.Balls(config, WINDOW, 0)


@pytest.fixture(scope="module")
def maze_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("maze")
    maze.write_maze(folder, train=3, test=2, length=40)
    return folder


def spoil(folder, **changes):
    """Put one changed file in place of the training episodes."""
    path = folder / "train" / "episode_00000.npz"
    with np.load(path) as data:
        arrays = {key: data[key] for key in data.files}
    arrays |= changes
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})


def test_a_collision_changes_exactly_the_colour_of_a_ball_that_hit():
    draws = balls.FreshDraws(np.random.default_rng(0))
    track = balls.simulate(draws, 200, 30, 2.0)
    on_wall = ((track.pos <= 3) | (track.pos >= 29)).any(-1)
    changed = np.diff(track.colour, axis=1) != 0
    np.testing.assert_array_equal(changed, on_wall[:, 1:])
    np.testing.assert_array_equal(changed.any(-1), track.hit[:, 1:])
    assert not track.hit[:, 0].any()


def test_hits_are_as_frequent_as_in_the_recorded_generator():
    found = balls.make_sequences(np.random.default_rng(1), 2000, 30, 2.0)
    assert found[EVENT][:, 1:].mean() == pytest.approx(0.263, abs=0.01)


def test_a_step_always_gives_the_same_sequences_whatever_was_asked_before():
    whole, later = make_balls(), make_balls()
    batches = [whole.batch(step) for step in range(12)]
    for step in (11, 4, 7):
        again = later.batch(step)
        for key, value in batches[step].items():
            np.testing.assert_array_equal(value, again[key])
    whole.close()
    later.close()


def test_chunks_are_drawn_without_repetition_and_then_replaced():
    source = make_balls(chunk=16, refresh=4)
    rows = np.concatenate([source.batch(step)["image"] for step in range(4)])
    assert len(np.unique(rows.reshape(16, -1), axis=0)) == 16
    fresh = source.batch(4)["image"]
    known = {row.tobytes() for row in rows}
    assert not any(row.tobytes() in known for row in fresh)
    source.close()


def test_without_refresh_the_chunk_stays():
    source = make_balls(chunk=8, refresh=0)
    first = np.concatenate([source.batch(step)["image"] for step in (0, 1)])
    later = np.concatenate([source.batch(step)["image"] for step in (100, 101)])
    assert {row.tobytes() for row in first} == {row.tobytes() for row in later}
    source.close()


def test_the_evaluation_set_is_apart_from_training():
    source = make_balls()
    seen = {row.tobytes() for step in range(5) for row in source.batch(step)["image"]}
    held = source.evaluation()
    assert len(held["image"]) == 8
    assert not any(row.tobytes() in seen for row in held["image"])
    np.testing.assert_array_equal(held["image"], source.evaluation()["image"])
    source.close()


def test_smaller_pictures_of_the_balls_show_the_same_sequences():
    full, small = make_balls(), make_balls(side=16)
    one, two = full.batch(3), small.batch(3)
    assert two["image"].shape == (4, 12, 16, 16, 3)
    assert two["image"].dtype == small.obs_space["image"].dtype == np.uint8
    assert small.obs_space["image"].shape == (16, 16, 3)
    np.testing.assert_array_equal(one[EVENT], two[EVENT])
    corner = one["image"][:, :, 2:4, 6:8].mean((2, 3))
    np.testing.assert_allclose(two["image"][:, :, 1, 3], corner, atol=0.5)
    with pytest.raises(ValueError, match="8, 16 or 32"):
        SourceConfig(side=20)


@pytest.mark.parametrize("refresh", [0, 4])
def test_a_chunk_is_made_once_and_at_most_one_ahead(refresh):
    made = []

    def make(rng, count):
        made.append(rng)
        return {"x": np.arange(count)}

    chunks = Chunks(make, 8, refresh, 2, seed=0)
    for step in range(4):
        chunks.batch(step)
    chunks.close()
    assert len(made) <= (2 if refresh else 1)


def test_a_chunk_smaller_than_a_batch_is_refused():
    with pytest.raises(UserError, match="holds no batch"):
        make_balls(chunk=3)


def test_written_balls_are_read_back(tmp_path):
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
        ({"image": np.zeros((3, 14)), "event": np.zeros((3, 14))}, "wanted uint8"),
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
def test_files_of_balls_that_cannot_be_used_are_named(tmp_path, arrays, complaint):
    if arrays:
        np.savez(tmp_path / "train.npz", **arrays)
    with pytest.raises(UserError, match=complaint):
        make_balls(folder=str(tmp_path))


def test_maze_files_are_read_with_actions_and_junctions(maze_folder):
    config = SourceConfig(folder=str(maze_folder), evaluation=5)
    source = maze.Maze(config, WINDOW, 0)
    batch = source.batch(3)
    assert batch["image"].shape == (4, 12, 32, 32, 3)
    assert batch["action"].shape == batch[EVENT].shape == (4, 12)
    np.testing.assert_array_equal(batch["image"], source.batch(3)["image"])
    assert len(source.evaluation()["image"]) == 5


def test_a_maze_can_be_watched_without_actions(maze_folder, tmp_path):
    with_actions = maze.Maze(SourceConfig(folder=str(maze_folder)), WINDOW, 0)
    for path in maze_folder.rglob("*.npz"):
        place = tmp_path / path.relative_to(maze_folder)
        place.parent.mkdir(exist_ok=True)
        with np.load(path) as data:
            np.savez(place, video=data["video"], junction=data["junction"])
    for folder in (maze_folder, tmp_path):  # told of them or not
        config = SourceConfig(folder=str(folder), actions=False)
        source = maze.Maze(config, WINDOW, 0)
        assert source.act_space == {}
        batch, wanted = source.batch(1), with_actions.batch(1)
        assert set(batch) == {"image", EVENT}
        np.testing.assert_array_equal(batch["image"], wanted["image"])
        np.testing.assert_array_equal(batch[EVENT], wanted[EVENT])
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UserError, match=r"no 'actions'(.|\n)*--source.actions False"),
    ):
        maze.Maze(SourceConfig(folder=str(tmp_path)), WINDOW, 0)


def test_advice_about_a_maze_spoils_no_files(maze_folder, tmp_path):
    config = SourceConfig(folder=str(maze_folder))
    long = Window(4, 400)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(UserError, match="a window has 400") as caught,
    ):
        maze.Maze(config, long, 0)
    other = maze_folder / "maze"
    fix = f"`reverie data maze --out {other} --length 400`, and give --source.folder"
    assert fix in str(caught.value)
    assert "actions" not in str(caught.value)
    config = SourceConfig(folder=str(tmp_path / "none"))
    with pytest.raises(UserError, match=rf"--out {tmp_path / 'none'} --length 400`"):
        maze.Maze(config, long, 0)


def test_an_event_of_the_maze_is_the_first_frame_at_a_junction(maze_folder):
    path = maze_folder / "train" / "episode_00001.npz"
    with np.load(path) as data:
        junction = data["junction"]
    event = maze.read_episode(path, 10)[EVENT]
    starts = [t for t in range(1, 40) if junction[t] and not junction[t - 1]]
    assert np.flatnonzero(event).tolist() == starts


def test_maze_frames_of_another_size_are_shrunk(maze_folder, tmp_path):
    path = tmp_path / "big.npz"
    small = maze.read_episode(maze_folder / "train" / "episode_00002.npz", 10)
    big = small["image"].repeat(2, 1).repeat(2, 2)
    np.savez(path, video=big, actions=small["action"])
    found = maze.read_episode(path, 10)
    np.testing.assert_array_equal(found["image"], small["image"])
    assert EVENT not in found


@pytest.mark.filterwarnings("error")
def test_a_ray_along_the_grid_is_drawn_like_its_neighbours():
    angles = np.pi / 6, np.pi / 6 + 1e-6  # the first ray looks along x exactly
    along, beside = maze.draw(np.array([(1.6, 1.5, angle) for angle in angles]))
    np.testing.assert_array_equal(along[:, 0], beside[:, 0])


def test_a_missing_maze_says_how_to_make_one(tmp_path):
    config = SourceConfig(folder=str(tmp_path / "none"))
    with pytest.raises(UserError, match="reverie data maze --out"):
        maze.Maze(config, WINDOW, 0)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"video": None}, "has no 'video', only actions"),
        ({"actions": None}, "has no 'actions'"),
        ({"video": np.zeros((40, 32, 32), np.uint8)}, "wanted \\(T, h, w, 3\\)"),
        ({"actions": np.zeros(39, np.int64)}, "wanted 40"),
        ({"actions": np.full(40, 3)}, "from 0 to 2"),
        ({"actions": np.zeros(40)}, "whole numbers"),
        ({"video": np.full((40, 32, 32, 3), np.nan)}, "not finite"),
        ({"video": np.zeros((40, 32, 32, 3))}, "wanted uint8"),
        ({"video": np.full((40, 32, 32, 3), 300, np.uint16)}, "wanted uint8"),
        ({"video": np.zeros((40, 0, 32, 3), np.uint8)}, "wanted \\(T, h, w, 3\\)"),
        ({"junction": np.zeros(39, bool)}, "wanted bool \\(40,\\)"),
        ({"junction": np.zeros((40, 1), bool)}, "'junction' is bool"),
        ({"junction": np.array(True)}, "'junction' is bool"),
        ({"junction": np.full(40, np.nan)}, "'junction' is float64"),
        (
            {"video": np.zeros((9, 32, 32, 3), np.uint8), "actions": np.zeros(9, int)},
            "has 9 frames, a window has 12",
        ),
    ],
)
def test_maze_files_that_cannot_be_used_are_named(tmp_path, changes, complaint):
    maze.write_maze(tmp_path, train=1, test=1, length=40)
    spoil(tmp_path, **changes)
    config = SourceConfig(folder=str(tmp_path))
    with pytest.warns(RuntimeWarning), pytest.raises(UserError, match=complaint):
        maze.Maze(config, WINDOW, 0)


def test_recorded_episodes_are_watched_with_actions_on_their_own_rows(tmp_path):
    rng = np.random.default_rng(0)
    for index in range(12):
        image = np.full((20, 8, 8, 3), index, np.uint8)
        action = np.arange(20, dtype=np.float32)[:, None]  # t led to row t
        reward = rng.integers(2, size=20).astype(np.float32)
        np.savez(
            tmp_path / f"e{index:02d}.npz", image=image, action=action, reward=reward
        )
    config = SourceConfig(folder=str(tmp_path), evaluation=40)
    source = sources.make("sequences_episodes", config, WINDOW, 0)
    held = source.evaluation()
    assert set(held["image"][:, 0, 0, 0, 0]) == {0, 10}
    assert not {0, 10} & set(source.batch(0)["image"][:, 0, 0, 0, 0])
    steps = np.diff(source.batch(0)["action"][..., 0])
    assert ((steps == 1) | (steps < 0)).all()  # the last row of an episode has none
    assert source.batch(0)["action"].min() >= 0
    assert source.act_space["action"].shape == (1,)
    quiet = sources.make(
        "sequences_episodes", replace(config, actions=False), WINDOW, 0
    )
    assert quiet.act_space == {}
    assert set(quiet.batch(0)) == {"image", EVENT}
    for path in tmp_path.glob("*.npz"):
        with np.load(path) as data:
            np.savez(path, image=data["image"])
    bare = sources.make("sequences_episodes", replace(config, actions=False), WINDOW, 0)
    np.testing.assert_array_equal(bare.batch(0)["image"], quiet.batch(0)["image"])


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"image": np.zeros((20, 8, 8, 3), np.uint8)}, "has no 'action'"),
        ({"image": np.zeros((20, 8)), "action": np.zeros((20, 1))}, "wanted uint8"),
        (
            {
                "image": np.zeros((20, 8, 8, 3), np.uint8),
                "action": np.full((20, 1), np.nan),
            },
            "not finite",
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
            "wanted uint8",
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
                ({"action": np.array(["left"] * 20)}, "wanted numbers"),
                ({"reward": np.zeros(5)}, "wanted 20 numbers"),
                ({"reward": np.array(0.0)}, "wanted 20 numbers"),
                ({"reward": np.array(["none"] * 20)}, "'reward' is <U4"),
                ({"reward": np.full(20, np.nan)}, "'reward' has entries"),
            )
        ),
    ],
)
def test_episodes_that_cannot_be_used_are_named(tmp_path, arrays, complaint):
    for index in range(2):
        np.savez(tmp_path / f"e{index}.npz", **arrays)
    config = SourceConfig(folder=str(tmp_path))
    with pytest.warns(RuntimeWarning), pytest.raises(UserError, match=complaint):
        sources.make("sequences_episodes", config, WINDOW, 0)


def test_the_image_of_an_episode_may_have_any_name(tmp_path):
    for index in range(3):
        np.savez(tmp_path / f"e{index}.npz", camera=np.zeros((20, 8, 8, 1), np.uint8))
    config = SourceConfig(folder=str(tmp_path), actions=False)
    source = sources.make("sequences_episodes", config, WINDOW, 0)
    assert set(source.obs_space) == set(source.batch(0)) == {"camera"}


def test_several_shapes_are_named_before_what_was_left_out(tmp_path):
    for index, (rows, side) in enumerate([(2, 8), (20, 8), (20, 16), (20, 16)]):
        image = np.zeros((rows, side, side, 3), np.uint8)
        np.savez(tmp_path / f"e{index}.npz", image=image, action=np.zeros(rows))
    config = SourceConfig(folder=str(tmp_path))
    with pytest.warns(RuntimeWarning), pytest.raises(UserError, match="several shapes"):
        sources.make("sequences_episodes", config, WINDOW, 0)


def test_episodes_without_rewards_have_no_events(tmp_path):
    arrays = {
        "image": np.zeros((20, 8, 8, 3), np.uint8),
        "action": np.zeros((20, 1)),
        "reward": np.ones((20, 1)),
    }
    for index in range(3):
        np.savez(tmp_path / f"e{index}.npz", **arrays)
    config = SourceConfig(folder=str(tmp_path))
    source = sources.make("sequences_episodes", config, WINDOW, 0)
    assert source.evaluation()[EVENT].all()
    del arrays["reward"]
    np.savez(tmp_path / "e1.npz", **arrays)
    source = sources.make("sequences_episodes", config, WINDOW, 0)
    assert EVENT not in source.evaluation()


def write_walks(folder):
    """Eleven episodes with a camera; in row t the action t is taken. One is short."""
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


def test_episodes_of_any_kind_are_watched_by_their_only_image(tmp_path):
    write_walks(tmp_path)
    config = SourceConfig(folder=str(tmp_path), evaluation=40)
    with pytest.warns(RuntimeWarning, match="1 of 11 episodes are left out"):
        source = sources.make("sequences_episodes", config, WINDOW, 0)
    assert source.obs_space == {"camera": Space(np.uint8, (8, 8, 3), 0, 256)}
    batch = source.batch(0)
    assert set(batch) == {"camera", "action", EVENT}
    # What is earned by arriving in a row was done in the row before.
    earned = batch["action"][:, :-1] % 5 == 0
    assert np.array_equal(batch[EVENT][:, 1:], earned)
    held = source.evaluation()["camera"][:, 0, 0, 0, 0]
    assert not set(held) & set(batch["camera"][:, 0, 0, 0, 0])
    config = replace(config, actions=False)
    with pytest.warns(RuntimeWarning):
        quiet = sources.make("sequences_episodes", config, WINDOW, 0)
    assert (quiet.act_space, set(quiet.batch(0))) == ({}, {"camera", EVENT})


def test_episodes_with_two_images_say_how_to_keep_one(tmp_path):
    obs = {
        "a": np.zeros((21, 8, 8, 3), np.uint8),
        "b": np.zeros((21, 8, 8, 3), np.uint8),
    }
    steps = np.zeros(20)
    for name in ("one", "two"):
        write_episode(tmp_path, name, from_steps(obs, {"action": steps}, steps, steps))
    with pytest.raises(UserError, match="here are: a, b"):
        sources.make("sequences_episodes", SourceConfig(str(tmp_path)), WINDOW, 0)


def test_no_episodes_say_how_to_write_some(tmp_path):
    with pytest.raises(UserError, match="reverie data export"):
        sources.make("sequences_episodes", SourceConfig(), WINDOW, 0)


def test_an_unknown_source_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="sequences_balls"):
        sources.find("sequences_bals")
    with pytest.raises(UserError, match="cannot be found"):
        sources.find("sequences_nowhere.at:All")


class Blinks:
    """A whole source: a lamp that is switched at random, which is its event."""

    loss: Literal["bernoulli", "gaussian"] = "bernoulli"

    def __init__(self, config: SourceConfig, window: Window, seed: int):
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
def test_a_source_is_one_class_and_one_row(monkeypatch, task):
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    monkeypatch.setitem(sources.SOURCES, "blinks", f"{__name__}:Blinks")
    source = sources.make(task, SourceConfig(), WINDOW, 0)
    assert isinstance(source, Source)
    assert source.batch(0)["image"].shape == (4, 12, 32, 32, 3)


def test_a_source_may_be_a_file_in_the_present_folder(tmp_path, monkeypatch):
    text = (
        "from reverie.datasets.synthetic.balls import Balls\nclass Mine(Balls): ...\n"
    )
    (tmp_path / "balls_of_mine.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert sources.find("sequences_balls_of_mine:Mine").__name__ == "Mine"


def test_sequences_that_were_there_outlive_a_full_disk(tmp_path, monkeypatch):
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


class Fussy(Blinks):
    def __init__(self):
        pass


class Clumsy(Blinks):
    def batch(self, step: int):
        return {"image": [] / 2}


@pytest.mark.parametrize(
    ("kind", "error"), [(Fussy, "TypeError"), (Clumsy, "and 'int'")]
)
def test_what_a_source_of_ones_own_raises_is_told_with_its_place(
    monkeypatch, kind, error
):
    monkeypatch.setitem(sources.SOURCES, "mine", f"{__name__}:{kind.__name__}")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])

    def serve_one():
        source = sources.make("sequences_mine", SourceConfig(), WINDOW, 0)
        SourceFeed(source, torch.device("cpu"))("train")

    with pytest.raises(UserError, match=rf"{error}.*\.py:\d+\)\.\n  Fix: mend that"):
        serve_one()


def test_a_mistake_of_ours_in_a_source_is_not_called_the_users(monkeypatch):
    source = sources.make("sequences_balls", SourceConfig(), WINDOW, 0)
    monkeypatch.setattr(source, "batch", lambda step: [] / 2)
    with pytest.raises(TypeError):
        SourceFeed(source, torch.device("cpu"))("train")


class Deaf:
    loss = "l2"


class Lazy:
    loss = "gaussian"


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [("Deaf", "bernoulli, gaussian"), ("Lazy", "has no batch"), ("WINDOW", "no class")],
)
def test_what_is_not_a_source_is_refused(monkeypatch, kind, complaint):
    monkeypatch.setitem(sources.SOURCES, "mine", f"{__name__}:{kind}")
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    with pytest.raises(UserError, match=complaint):
        sources.make("sequences_mine", SourceConfig(), WINDOW, 0)


def serve(**changes):
    """A training batch, and then the evaluation set, of a source with such arrays."""

    class Mine(Blinks):
        def __init__(self):
            super().__init__(SourceConfig(), WINDOW, 0)
            self.act_space = {
                "turn": Space(np.int64, (), 0, 4),
                "push": Space(np.float32, (2,)),
            }

        def batch(self, step):
            turn, push = np.zeros(self.shape, int), np.zeros((*self.shape, 2))
            found = {**super().batch(step), "turn": turn, "push": push, **changes}
            return {key: value for key, value in found.items() if value is not None}

    feed = SourceFeed(Mine(), torch.device("cpu"))
    return feed("train"), feed("report")


def test_discrete_and_continuous_actions_are_served_without_a_complaint(recwarn):
    train, report = serve()
    assert {"image", "turn", "push"} == train.keys() == report.keys() - {EVENT}
    assert not recwarn.list


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"image": None}, "lack 'image'"),
        ({"turn": None}, "lack 'turn'"),
        ({"image": [1, 2]}, "'image' is no array"),
        ({"image": np.zeros((4, 12, 32, 32, 3), np.float32)}, "wanted uint8"),
        ({"image": np.full((4, 12, 32, 32, 3), np.nan)}, "has NaN"),
        ({"image": np.zeros((4, 12, 16, 16, 3), np.uint8)}, "T, 32, 32, 3"),
        ({"image": np.zeros((0, 12, 32, 32, 3), np.uint8)}, "above 0"),
        ({"turn": np.zeros((4, 11), int)}, "'turn' has shape"),
        ({"turn": np.full((4, 12), 4)}, "not from 0 to 3"),
        ({"turn": np.zeros((4, 12))}, "is float64, wanted int64"),
        ({"push": np.full((4, 12, 2), np.inf)}, "'push' has NaN or infinite"),
        ({EVENT: np.zeros((4, 11), bool)}, "'log/event' has shape"),
        ({EVENT: np.zeros((4, 12), int)}, "wanted bool"),
    ],
)
def test_sequences_that_are_not_what_a_source_promised_are_refused(changes, complaint):
    with pytest.raises(UserError, match=complaint):
        serve(**changes)
