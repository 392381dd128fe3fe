"""Craftax with fake versions of JAX and the game, which compile for minutes."""

from __future__ import annotations

import enum
import sys
import types
from typing import Any, NamedTuple

import numpy as np
import pytest

from reverie import envs
from reverie.api import UserError
from reverie.envs.suite import ImageConfig
from reverie.envs.suites import craftax
from reverie.envs.suites.craftax import Craftax


class Achievement(enum.Enum):
    COLLECT_WOOD = 1
    EAT_COW = 0


class State(NamedTuple):
    timestep: int
    player_health: float
    achievements: np.ndarray
    seed: int


class Space(NamedTuple):
    shape: tuple[int, ...] = ()
    n: int = 0


class FakeGame:
    """Ends after ten steps; action 5 is fatal, action 1 collects wood."""

    default_params = types.SimpleNamespace(max_timesteps=10)

    def __init__(self, pixels: bool):
        self.pixels = pixels

    def observation_space(self, params: Any) -> Space:
        return Space(shape=(63, 63, 3) if self.pixels else (9,))

    def action_space(self, params: Any) -> Space:
        return Space(n=17)

    def reset(self, key: int, params: Any) -> Any:
        state = State(0, 9.0, np.zeros(2, bool), key % 1000)
        return self._obs(state), state

    def step(self, key: int, state: State, action: int, params: Any) -> Any:
        assert 0 <= action < 17
        achievements = state.achievements | np.array([False, action == 1])
        health = 0.0 if action == 5 else state.player_health
        next_state = State(state.timestep + 1, health, achievements, state.seed)
        done = next_state.timestep >= params.max_timesteps or health <= 0
        return self._obs(next_state), next_state, float(action == 1), done, {}

    def _obs(self, state: State) -> np.ndarray:
        shape = (63, 63, 3) if self.pixels else (9,)
        return np.full(shape, (state.seed % 7 + state.timestep) / 20)


@pytest.fixture(autouse=True)
def simulator(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []

    def make(name: str, auto_reset: bool) -> FakeGame:
        assert not auto_reset
        names.append(name)
        return FakeGame("Pixels" in name)

    def module(name: str, **contents: Any) -> None:
        made: Any = types.ModuleType(name)
        made.__spec__ = types.SimpleNamespace(name=name)
        made.__path__ = []
        for key, value in contents.items():
            setattr(made, key, value)
        monkeypatch.setitem(sys.modules, name, made)

    keys = types.SimpleNamespace(
        PRNGKey=lambda seed: seed, split=lambda key: (key * 3 + 1, key * 7 + 2)
    )
    module("jax", jit=lambda function: function, random=keys)
    module("craftax")
    module("craftax.craftax_env", make_craftax_env_from_name=make)
    for game in ("craftax", "craftax_classic"):
        module(f"craftax.{game}")
        module(f"craftax.{game}.constants", Achievement=Achievement)
    craftax._compile_game.cache_clear()
    return names


def step(env: Any, action: int = 0) -> Any:
    return env.step({"action": np.int32(action)})


@pytest.mark.parametrize(("name", "full"), craftax.ENV_IDS.items())
def test_every_task_has_an_environment_id(
    name: str, full: str, simulator: list[str]
) -> None:
    env = envs.make(f"craftax_{name}")
    assert simulator == [full]
    row = env.reset()
    if "pixels" in name:
        assert row["image"].shape == (64, 64, 3)
        assert row["image"].dtype == np.uint8
    else:
        assert row["vector"].shape == (9,)
        assert row["vector"].dtype == np.float32
    assert env.act_space["action"].classes == 17


def test_environments_of_a_process_share_compiled_code(
    simulator: list[str],
) -> None:
    Craftax("symbolic")
    Craftax("symbolic")
    assert len(simulator) == 1


def test_only_death_is_terminal() -> None:
    env = Craftax("symbolic")
    env.reset(seed=0)
    rows = [step(env) for _ in range(10)]
    assert [bool(row["is_last"]) for row in rows] == [False] * 9 + [True]
    assert not rows[-1]["is_terminal"]
    env.reset()
    row = step(env, 5)
    assert row["is_last"]
    assert row["is_terminal"]
    env.reset()
    for _ in range(9):
        step(env)
    assert step(env, 5)["is_terminal"]  # death in the last step


def test_achievements_are_logged() -> None:
    env = Craftax("symbolic")
    row = env.reset(seed=0)
    assert {k for k in row if k[:4] == "log/"} == {
        "log/achievement_collect_wood",
        "log/achievement_eat_cow",
    }
    row = step(env, 1)
    assert row["reward"] == 1
    assert row["log/achievement_collect_wood"] == 1
    assert row["log/achievement_eat_cow"] == 0
    assert step(env)["log/achievement_collect_wood"] == 1
    assert env.reset()["log/achievement_collect_wood"] == 0


def test_images_are_resized_to_bytes() -> None:
    env = Craftax("pixels", ImageConfig(size=(32, 48)))
    image = env.reset(seed=0)["image"]
    assert image.shape == (32, 48, 3)
    value = round((env._state.seed % 7) / 20 * 255)
    assert (image == value).all()


def test_seeds_reproduce_episodes_and_episodes_differ() -> None:
    env = Craftax("symbolic")
    env.reset(seed=3)
    first = env._state.seed
    env.reset()
    second = env._state.seed
    env.reset(seed=3)
    assert env._state.seed == first
    assert first != second
    env.close()
    assert env._state is None


def test_unknown_tasks_suggest_the_closest_name() -> None:
    with pytest.raises(UserError, match="craftax_symbolic"):
        envs.make("craftax_symbolik")
