"""ProcGen with a fake simulator; the real one needs NumPy 1.26."""

from __future__ import annotations

import sys
import types
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from reverie import envs
from reverie.api import UserError
from reverie.envs.suites.procgen import GAMES, Procgen, ProcgenConfig


class FakeGame:
    """Levels of ten steps; the step that ends one returns the next level."""

    made: ClassVar[list[FakeGame]] = []

    def __init__(self, num: int, env_name: str, **options: Any):
        assert num == 1
        assert env_name in GAMES
        required = {"distribution_mode", "rand_seed", "num_threads"}
        assert options.keys() - required <= {"num_levels", "start_level", "render_mode"}
        if options["distribution_mode"] == "exploration":
            assert "num_levels" not in options, "exploration mode overrides num_levels"
        self.options = options
        self.rng = np.random.default_rng(options["rand_seed"])
        self.large = options.get("render_mode") == "rgb_array"
        self.closed = False
        self.reward = 0.0
        self._start_level()
        FakeGame.made.append(self)

    def _start_level(self) -> None:
        self.steps, self.level = 0, int(self.rng.integers(1, 200))

    def act(self, action: np.ndarray) -> None:
        assert action.shape == (1,)
        assert action.dtype == np.int32
        assert -1 <= action[0] < 15, "no such action"
        self.steps += 1
        self.reward = 0.0
        if self.steps == 10 or action[0] == -1:
            self.reward = 0.0 if action[0] == -1 else 10.0
            self._start_level()

    def observe(self) -> Any:
        small = np.full((1, 64, 64, 3), self.level + self.steps, np.uint8)
        return np.array([self.reward]), {"rgb": small}, np.array([self.steps == 0])

    def get_info(self) -> list[dict[str, Any]]:
        assert self.large, "needs render_mode"
        noise = np.random.default_rng(self.level * 100 + self.steps)
        return [{"rgb": noise.integers(0, 256, (512, 512, 3), np.uint8)}]

    def get_state(self) -> list[bytes]:
        return [np.array([self.steps, self.level], np.int64).tobytes()]

    def set_state(self, states: list[bytes]) -> None:
        self.steps, self.level = map(int, np.frombuffer(states[0], np.int64))

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("procgen")
    module.__spec__ = types.SimpleNamespace(name="procgen")
    module.ProcgenGym3Env = FakeGame
    monkeypatch.setitem(sys.modules, "procgen", module)
    FakeGame.made.clear()


def step(env: Any, action: int = 4) -> Any:
    return env.step({"action": np.int32(action)})


def test_defaults_are_those_of_dreamerv3() -> None:
    env = envs.make("procgen_coinrun")
    assert env.obs_space["image"].shape == (96, 96, 3)
    assert env.act_space["action"].classes == 15
    env.reset()
    options = FakeGame.made[-1].options
    assert options["distribution_mode"] == "hard"
    assert (options["num_levels"], options["start_level"]) == (0, 0)
    assert options["render_mode"] == "rgb_array"
    assert len(GAMES) == 16


def test_images_are_downscaled_with_pillow() -> None:
    env = Procgen("coinrun")
    image = env.reset(seed=0)["image"]
    large = Image.fromarray(FakeGame.made[-1].get_info()[0]["rgb"])
    small = large.resize((96, 96), Image.Resampling.BILINEAR)
    assert np.array_equal(image, np.asarray(small))
    native = Procgen("coinrun", ProcgenConfig(size=(64, 64)))
    assert "render_mode" not in FakeGame.made[-1].options
    image = native.reset(seed=0)["image"]
    assert (image == FakeGame.made[-1].level).all()


def test_the_last_observation_repeats_the_image() -> None:
    env = Procgen("maze", ProcgenConfig(size=(64, 64)))
    env.reset(seed=0)
    rows = [step(env) for _ in range(10)]
    assert [bool(row["is_last"]) for row in rows] == [False] * 9 + [True]
    assert rows[-1]["is_terminal"]
    assert rows[-1]["reward"] == 10
    assert np.array_equal(rows[-1]["image"], rows[-2]["image"])
    assert not np.shares_memory(rows[-1]["image"], rows[-2]["image"])
    row = env.reset()
    assert row["is_first"]
    assert row["reward"] == 0
    assert (row["image"] == FakeGame.made[-1].level).all()
    assert FakeGame.made[-1].steps == 0


def test_a_truncated_episode_is_restarted() -> None:
    env = Procgen("maze")
    env.reset(seed=0)
    step(env)
    level = FakeGame.made[-1].level
    env.reset()
    assert FakeGame.made[-1].steps == 0
    assert FakeGame.made[-1].level != level
    env.reset()  # the new episode has just started
    assert len(FakeGame.made) == 2


def test_a_seeded_reset_builds_a_new_simulator() -> None:
    env = Procgen("maze")
    env.reset(seed=5)
    first, second = FakeGame.made
    assert first.closed
    assert second.options["rand_seed"] == 5
    env.close()
    assert second.closed
    env.close()


def test_resuming_is_exact() -> None:
    env = Procgen("maze")
    env.reset(seed=5)
    step(env)
    state = env.state_dict()
    other = Procgen("maze")
    other.load_state_dict(state)
    assert np.array_equal(step(env)["image"], step(other)["image"])
    assert other.state_dict()["game"].tolist() == env.state_dict()["game"].tolist()


def test_levels_and_modes_are_settings() -> None:
    Procgen("maze", ProcgenConfig(levels=200, first_level=7, mode="easy"))
    options = FakeGame.made[-1].options
    assert (options["num_levels"], options["start_level"]) == (200, 7)
    assert options["distribution_mode"] == "easy"
    Procgen("maze", ProcgenConfig(mode="exploration"))
    assert "num_levels" not in FakeGame.made[-1].options


def test_unrequired_tasks_suggest_the_closest_name() -> None:
    with pytest.raises(UserError, match="procgen_coinrun"):
        envs.make("procgen_coinrum")
