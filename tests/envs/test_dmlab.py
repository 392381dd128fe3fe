"""DeepMind Lab with a fake simulator that has the documented API."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import fake_deepmind_lab
import numpy as np
import pytest
from fake_deepmind_lab import INSTRUCTION, Lab

from reverie import envs
from reverie.api import UserError
from reverie.envs import text_embedding
from reverie.envs.suites.dmlab import LEVELS, DMLab, DMLabConfig

Make = Callable[..., tuple[DMLab, Lab]]
MAZE = "explore_goal_locations_small"

POPART = [
    [0, 0, 0, 1, 0, 0, 0],
    [0, 0, 0, -1, 0, 0, 0],
    [0, 0, -1, 0, 0, 0, 0],
    [0, 0, 1, 0, 0, 0, 0],
    [-10, 0, 0, 0, 0, 0, 0],
    [10, 0, 0, 0, 0, 0, 0],
    [-60, 0, 0, 0, 0, 0, 0],
    [60, 0, 0, 0, 0, 0, 0],
    [0, 10, 0, 0, 0, 0, 0],
    [0, -10, 0, 0, 0, 0, 0],
    [-10, 0, 0, 1, 0, 0, 0],
    [10, 0, 0, 1, 0, 0, 0],
    [-60, 0, 0, 1, 0, 0, 0],
    [60, 0, 0, 1, 0, 0, 0],
    [0, 0, 0, 0, 1, 0, 0],
]
IMPALA = [
    *POPART[:4],
    [-20, 0, 0, 0, 0, 0, 0],
    [20, 0, 0, 0, 0, 0, 0],
    [-20, 0, 0, 1, 0, 0, 0],
    [20, 0, 0, 1, 0, 0, 0],
    [0, 0, 0, 0, 1, 0, 0],
]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    labs = fake_deepmind_lab.install(monkeypatch)

    def build(level: str = MAZE, **settings: Any) -> tuple[DMLab, Lab]:
        env = DMLab(level, DMLabConfig(**settings))
        env.reset(seed=0)
        return env, labs.newest

    return build


def step(env: DMLab, action: int = 0) -> Any:
    return env.step({"action": np.int32(action)})


def run_episode(env: DMLab) -> list[Any]:
    rows = [step(env)]
    while not rows[-1]["is_last"]:
        rows.append(step(env))
    return rows


def test_defaults_are_those_of_dreamerv3(make: Make) -> None:
    config = DMLabConfig()
    assert (config.size, config.repeat, config.actions) == ((64, 64), 4, "popart")
    assert config.episodic
    assert not config.holdout
    env, lab = make()
    assert env.obs_space["image"].shape == (64, 64, 3)
    assert lab.observed == ["RGB_INTERLEAVED"]
    assert lab.config == {"width": "64", "height": "64", "logLevel": "WARN"}
    assert len(LEVELS) == 30
    with pytest.raises(ValueError, match="repeat >= 1"):
        DMLabConfig(repeat=0)


@pytest.mark.parametrize(("name", "actions"), [("popart", POPART), ("impala", IMPALA)])
def test_action_sets(make: Make, name: str, actions: list[list[int]]) -> None:
    env, lab = make(actions=name, repeat=1)
    assert env.act_space["action"].classes == len(actions)
    for index, action in enumerate(actions):
        step(env, index)
        assert lab.steps[-1] == (action, 1)


def test_actions_are_repeated_for_four_frames(
    make: Make,
) -> None:
    env, lab = make()
    row = step(env, 14)
    assert lab.steps == [(POPART[14], 4)]
    assert row["reward"] == 4.0
    assert envs.action_repeat(f"dmlab_{MAZE}", envs.EnvConfig()) == 4


def test_the_size_is_height_and_width(make: Make) -> None:
    env, lab = make(size=(48, 80))
    assert (lab.config["height"], lab.config["width"]) == ("48", "80")
    assert env.reset()["image"].shape == (48, 80, 3)


def test_the_last_observation_repeats_the_image(make: Make) -> None:
    env, _ = make()
    *_, before, last = run_episode(env)
    assert np.array_equal(before["image"], last["image"])
    assert not before["is_last"]
    assert last["is_terminal"]
    assert env.reset()["is_first"]


def test_the_end_is_terminal_only_if_episodic(make: Make) -> None:
    env, _ = make(episodic=False)
    last = run_episode(env)[-1]
    assert last["is_last"]
    assert not last["is_terminal"]


def test_images_are_copies(make: Make) -> None:
    env, _ = make()
    first, second = step(env)["image"], step(env)["image"]
    assert not np.shares_memory(first, second)
    assert not np.array_equal(first, second)


def test_test_levels_are_used_only_with_holdout(make: Make) -> None:
    level = "rooms_collect_good_objects_test"
    _, lab = make(level)
    assert lab.level == "rooms_collect_good_objects_train"
    assert "mixerSeed" not in lab.config
    _, lab = make(level, holdout=True)
    assert lab.level == level
    assert lab.config["allowHoldOutLevels"] == "true"
    assert lab.config["mixerSeed"] == str(0x600D5EED)
    _, lab = make()
    assert lab.level == MAZE


def test_every_level_can_be_built(make: Make) -> None:
    for level in (*LEVELS, "rooms_collect_good_objects_train"):
        assert envs.make(f"dmlab_{level}").reset()["is_first"]
    with pytest.raises(UserError, match="dmlab_rooms_watermaze"):
        envs.make("dmlab_rooms_watermase")


def test_seeds_reproduce_the_sequence_of_episodes(make: Make) -> None:
    env, lab = make()
    env.reset(seed=7)
    env.reset()
    env.reset(seed=7)
    env.reset()
    first, second, repeated_first, repeated_second = lab.seeds[1:]
    assert first != second
    assert (first, second) == (repeated_first, repeated_second)


def test_language_levels_observe_their_instruction(make: Make) -> None:
    env, lab = make("language_execute_random_task")
    assert lab.observed == ["RGB_INTERLEAVED", "INSTR"]
    row = env.reset()
    assert row["instruction"].shape == (32 * 32,)
    assert np.array_equal(row["instruction"], text_embedding.embed_text(INSTRUCTION))
    rows = run_episode(env)
    assert np.array_equal(rows[-1]["instruction"], row["instruction"])


def test_words_are_embedded_by_their_hash() -> None:
    vectors = np.random.default_rng(0).normal(0, 1, (65_536, 32)).astype(np.float32)
    text = text_embedding.embed_text("Get 2 apples!").reshape(32, 32)
    for index, word in enumerate(["get", "2", "apples", "!"]):
        bucket = zlib.crc32(word.encode()) % 65_536
        assert np.array_equal(text[index], vectors[bucket])
    assert (text[4:] == vectors[0]).all()
    assert text_embedding.embed_text("word " * 40).shape == (1024,)


def test_closing_closes_the_simulator(make: Make) -> None:
    env, lab = make()
    env.close()
    assert lab.closed
