"""Atari settings, compared with the published ones on a fake emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from reverie import envs
from reverie.envs.suites.atari import GAMES, Atari, AtariConfig, installed_games
from reverie.run.config import resolve

pytest.importorskip("ale_py")

PLAIN = AtariConfig(size=(210, 160), sticky=0.0, gray=False, noops=0)


class FakeEmulator:
    """Replaces the ALE: frame n has value n, a life is lost every 10 frames."""

    def __init__(self, game_length: int = 1000, lives: int = 100):
        self.frame = self.resets = 0
        self.game_length, self.max_lives = game_length, lives
        self.acts: list[int] = []

    def reset_game(self) -> None:
        self.frame = 0
        self.resets += 1

    def act(self, action: int) -> int:
        self.frame += 1
        self.acts.append(int(action))
        return self.frame

    def game_over(self) -> bool:
        return self.frame >= self.game_length

    def lives(self) -> int:
        return self.max_lives - self.frame // 10

    def getScreenRGB(self) -> np.ndarray:
        # Even frames draw the left half, odd ones the right, like flickering sprites.
        screen = np.zeros((210, 160, 3), np.uint8)
        where = np.s_[:, :80] if self.frame % 2 == 0 else np.s_[:, 80:]
        screen[where] = self.frame
        return screen


def make_fake(
    config: AtariConfig, game_length: int = 1000
) -> tuple[Atari, FakeEmulator]:
    env, emulator = Atari("pong", config), FakeEmulator(game_length)
    env._ale = emulator
    return env, emulator


def step(env: Any, action: int = 0) -> Any:
    return env.step({"action": np.int32(action)})


def test_defaults_are_the_200m_settings() -> None:
    env = envs.make("atari_pong")
    assert env.obs_space["image"].shape == (96, 96, 1)
    assert env.act_space["action"].classes == 18
    config = AtariConfig()
    assert (config.repeat, config.sticky, config.noops) == (4, 0.25, 30)
    assert (config.lives, config.length, config.pooling) == ("unused", 108_000, 2)
    assert not config.clip_reward
    assert not config.autostart
    assert config.truncation_is_terminal


def test_the_preset_has_the_100k_settings() -> None:
    config = resolve(flags={"task": "atari100k_pong"})
    atari = config.env.atari
    assert (atari.size, atari.gray) == ((64, 64), False)
    assert (atari.repeat, atari.sticky, atari.noops, atari.pooling) == (4, 0.0, 30, 2)
    assert (atari.actions, atari.lives) == ("minimal", "unused")
    assert (atari.clip_reward, atari.autostart, atari.length) == (False, False, 108_000)
    assert (config.run.envs, config.run.steps, config.run.train_ratio) == (
        1,
        110_000,
        256,
    )
    env = envs.make(config.task, config.env)
    assert env.obs_space["image"].shape == (64, 64, 3)
    assert env.reset()["image"].shape == (64, 64, 3)
    assert env.act_space["action"].classes == 6
    breakout = envs.make("atari100k_breakout", config.env)
    assert breakout.act_space["action"].classes == 4
    assert envs.action_repeat(config.task, config.env) == 4


def test_the_preset_has_the_200m_settings() -> None:
    config = resolve(["atari"])
    assert config.task == "atari_pong"
    assert config.env.atari == AtariConfig()
    assert (config.run.envs, config.run.train_ratio) == (16, 32)
    assert config.run.steps == 51_000_000


def test_without_sticky_actions_the_game_is_deterministic() -> None:
    def play(seed: int) -> bytes:
        plain = AtariConfig(noops=0, sticky=0.0)
        env, rng = Atari("breakout", plain), np.random.default_rng(0)
        env.reset(seed=seed)
        rows = [step(env, rng.integers(18)) for _ in range(60)]
        return b"".join(row["image"].tobytes() for row in rows)

    assert play(1) == play(2)


def test_actions_are_repeated_and_rewards_summed() -> None:
    env, emulator = make_fake(PLAIN)
    env.reset()
    assert step(env, 3)["reward"] == 1 + 2 + 3 + 4
    assert emulator.acts == [3, 3, 3, 3]


def test_the_image_is_the_maximum_of_the_last_two_frames() -> None:
    env, _ = make_fake(PLAIN)
    env.reset()
    image = step(env)["image"]
    assert (image[:, :80] == 4).all()
    assert (image[:, 80:] == 3).all()


def test_the_first_image_is_one_frame() -> None:
    env, _ = make_fake(AtariConfig(size=(210, 160), gray=False, noops=0))
    step(env)  # its frames must not be part of the first image
    assert not env.reset()["image"].any()


def test_resize_comes_before_gray_and_gray_truncates() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (210, 160, 3), np.uint8)
    env = Atari("pong", AtariConfig())
    env._screens = [noise, noise]
    small = Image.fromarray(noise).resize((96, 96), Image.Resampling.BILINEAR)
    gray = np.asarray(small) @ np.array([0.299, 0.587, 1 - (0.299 + 0.587)])
    image = env._image()[..., 0]
    assert np.array_equal(image, gray.astype(np.uint8))
    assert not np.array_equal(image, np.round(gray).astype(np.uint8))


def test_noops_are_uniform_up_to_the_limit() -> None:
    env, emulator = make_fake(AtariConfig(noops=5))
    counts = []
    for _ in range(300):
        env.reset()
        counts.append(emulator.frame)
    assert set(counts) == {0, 1, 2, 3, 4, 5}
    assert set(emulator.acts) == {0}


def test_the_minimum_number_of_noops() -> None:
    env, emulator = make_fake(AtariConfig(noops=3, min_noops=1))
    counts = []
    for _ in range(200):
        env.reset()
        counts.append(emulator.frame)
    assert set(counts) == {1, 2, 3}
    with pytest.raises(ValueError, match="min_noops=4 and noops=3"):
        AtariConfig(noops=3, min_noops=4)


def test_the_frame_limit_is_terminal_only_on_request() -> None:
    for is_terminal in (True, False):
        config = AtariConfig(length=6, noops=0, truncation_is_terminal=is_terminal)
        env, emulator = make_fake(config)
        env.reset()
        assert not step(env)["is_last"]
        row = step(env)
        assert row["is_last"]
        assert row["is_terminal"] == is_terminal
        assert emulator.frame == 6


def test_the_end_of_the_game_stops_the_action_repeat() -> None:
    env, emulator = make_fake(PLAIN, game_length=6)
    env.reset()
    step(env)
    row = step(env)
    assert row["is_last"]
    assert row["is_terminal"]
    assert row["reward"] == 5 + 6
    # The image is the maximum of the last frame and the last one of the previous step.
    assert (row["image"][:, :80] == 6).all()
    assert not row["image"][:, 80:].any()
    assert emulator.frame == 6


@pytest.mark.parametrize(
    ("game_length", "left", "right"), [(5, 4, 5), (6, 6, 0), (7, 4, 7), (8, 8, 7)]
)
def test_an_end_within_a_step_pools_with_the_previous_screen(
    game_length: int, left: int, right: int
) -> None:
    env, _ = make_fake(PLAIN, game_length)
    env.reset()
    step(env)  # frames 1 to 4
    image = step(env)["image"]
    assert (image[:, :80] == left).all()
    assert (image[:, 80:] == right).all()


@pytest.mark.parametrize("pooling", [1, 2, 3])
def test_a_restored_game_has_its_screens(pooling: int) -> None:
    config = AtariConfig(pooling=pooling)
    env = Atari("breakout", config, seed=3)
    env.reset()
    for action in range(5):
        step(env, action)
    other = Atari("breakout", config)
    other.reset()
    other.load_state_dict(env.state_dict())
    assert len(other._screens) == max(1, pooling - 1)
    for action in range(9):
        obs, other_obs = step(env, action), step(other, action)
        assert np.array_equal(obs["image"], other_obs["image"])


@pytest.mark.parametrize("lives", ["unused", "discount", "reset"])
def test_effect_of_a_lost_life(lives: Any) -> None:
    env, emulator = make_fake(AtariConfig(lives=lives, noops=0))
    env.reset()
    rows = [step(env) for _ in range(3)]  # the life is lost in frame 10
    ends = [(bool(row["is_last"]), bool(row["is_terminal"])) for row in rows]
    last = {
        "unused": (False, False),
        "discount": (False, True),
        "reset": (True, True),
    }
    assert ends == [(False, False), (False, False), last[lives]]
    if lives == "reset":
        row = env.reset()
        assert emulator.resets == 1  # the game continues after a no-op step
        assert emulator.acts[12:] == [0] * 4
        assert (row["is_first"], row["reward"]) == (True, 0)
        assert row["image"].max() == 16


def test_the_last_life_ends_with_the_game() -> None:
    env, _ = make_fake(AtariConfig(lives="reset", noops=0))
    env._ale = FakeEmulator(game_length=18, lives=1)  # no life is left from frame 10 on
    env.reset()
    ends = [bool(step(env)["is_last"]) for _ in range(5)]
    assert ends == [False, False, False, False, True]


def test_frames_of_a_game_are_counted_across_its_lives() -> None:
    env, emulator = make_fake(AtariConfig(lives="reset", noops=0, length=20))
    env.reset()
    assert [bool(step(env)["is_last"]) for _ in range(3)] == [False, False, True]
    env.reset()
    assert step(env)["is_last"]
    assert (emulator.frame, emulator.resets) == (20, 1)
    env.reset()
    assert (emulator.frame, emulator.resets) == (0, 2)


def test_a_game_that_ends_in_the_noop_step_is_restarted() -> None:
    env, emulator = make_fake(AtariConfig(lives="reset", noops=0), game_length=14)
    env.reset()
    assert [bool(step(env)["is_last"]) for _ in range(3)] == [False, False, True]
    row = env.reset()
    assert (emulator.frame, emulator.resets) == (0, 2)
    assert not row["image"].any()


def test_reward_clipping_and_autostart() -> None:
    env, emulator = make_fake(AtariConfig(clip_reward=True, autostart=True, noops=0))
    env.reset()
    assert emulator.acts == [1]
    assert step(env)["reward"] == 1


def test_sticky_actions_depend_on_the_seed_only() -> None:
    def play(seed: int) -> bytes:
        env, rng = Atari("breakout", AtariConfig(noops=0)), np.random.default_rng(0)
        env.reset(seed=seed)
        rows = [step(env, rng.integers(18)) for _ in range(150)]
        return b"".join(row["image"].tobytes() for row in rows)

    assert play(1) == play(1)
    assert play(1) != play(2)


def test_all_benchmark_games_are_installed() -> None:
    assert len(GAMES) == 57
    names = {game.replace("_", "") for game in GAMES}
    assert names <= installed_games().keys()
    assert envs.make("atari_james_bond").reset()["is_first"]
    assert envs.split_task("atari_tetris") == ("atari", "tetris")


def test_resizing_before_or_after_the_maximum():
    rng = np.random.default_rng(0)
    screens = rng.integers(0, 256, (2, 210, 160, 3)).astype(np.uint8)
    images = {}
    for first in (False, True):
        config = AtariConfig((64, 64), gray=False, noops=0, resize_first=first)
        env, _ = make_fake(config)
        env._screens = list(screens)
        images[first] = env._image()

    def resized(screen):
        image = Image.fromarray(screen).resize((64, 64), Image.Resampling.BILINEAR)
        return np.asarray(image)

    np.testing.assert_array_equal(images[False], resized(screens.max(0)))
    np.testing.assert_array_equal(images[True], np.maximum(*map(resized, screens)))
    assert (images[True] != images[False]).any()
