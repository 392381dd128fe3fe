"""Adapter for dm_env environments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reverie.envs import make
from reverie.envs.adapters.dm_env import DmEnv
from reverie.spaces import agent_obs_space


def spec(shape: tuple[int, ...], dtype: Any = np.float64, **kwargs: Any) -> Any:
    return SimpleNamespace(shape=shape, dtype=np.dtype(dtype), **kwargs)


class FakeTimeStep(SimpleNamespace):
    def first(self) -> bool:
        return bool(self.kind == "first")

    def last(self) -> bool:
        return bool(self.kind == "last")


class Counter:
    """A dm_env environment that counts its steps."""

    def __init__(self, discount: float = 1.0, length: int = 5, single: bool = False):
        self.discount, self.length, self.single = discount, length, single
        self.actions: list[Any] = []
        self.state = np.zeros((1, 3))
        self.seeds: list[int] = []
        self.is_closed = False

    def observation_spec(self) -> Any:
        if self.single:
            return spec((8, 8, 3), np.uint8)
        return {
            "count": spec((1, 3)),
            "height": spec((1,)),
            "nothing": spec((1, 0)),
            "side": spec((), np.int64, num_values=2),
        }

    def action_spec(self) -> Any:
        return spec((2,), np.float64, minimum=-2.0, maximum=np.array([2.0, 4.0]))

    def reset(self) -> FakeTimeStep:
        self.state[:] = 0
        return self._timestep("first", None, None)

    def step(self, action: Any) -> FakeTimeStep:
        self.actions.append(np.array(action))
        self.state += 1
        last = self.state[0, 0] >= self.length
        if last:
            return self._timestep("last", 1.5, self.discount)
        return self._timestep("mid", 1, 1)

    def close(self) -> None:
        self.is_closed = True

    def _timestep(self, kind: str, reward: Any, discount: Any) -> FakeTimeStep:
        obs: Any = {"count": self.state, "height": self.state[:, 0], "side": 1}
        obs["nothing"] = np.zeros((1, 0))
        if self.single:
            obs = np.full((8, 8, 3), 7, np.uint8)
        return FakeTimeStep(
            kind=kind, reward=reward, discount=discount, observation=obs
        )


def test_observations_keep_their_names_and_are_squeezed() -> None:
    env = make(DmEnv(Counter(), squeeze=True))
    spaces = agent_obs_space(env.obs_space)
    assert {key: space.shape for key, space in spaces.items()} == {
        "count": (3,),
        "height": (),
        "side": (),
    }
    assert spaces["side"].classes == 2
    first = env.reset()
    env.step({"action": np.zeros(2, np.float32)})
    assert first["count"].tolist() == [0, 0, 0]  # a copy


def test_a_single_image_is_named_image() -> None:
    env = make(DmEnv(Counter(single=True)))
    assert list(agent_obs_space(env.obs_space)) == ["image"]
    assert env.reset()["image"].shape == (8, 8, 3)


@pytest.mark.parametrize(("discount", "terminal"), [(1.0, False), (0.0, True)])
def test_only_a_discount_of_zero_is_terminal(discount: float, terminal: bool) -> None:
    env = make(DmEnv(Counter(discount, length=1), squeeze=True))
    first = env.reset()
    assert first["is_first"]
    assert first["reward"] == 0
    last = env.step({"action": np.zeros(2, np.float32)})
    assert last["is_last"]
    assert bool(last["is_terminal"]) is terminal


def test_action_repeat_sums_rewards_until_the_end() -> None:
    counter = Counter(length=5)
    env = make(DmEnv(counter, repeat=3, squeeze=True))
    env.reset()
    zero = {"action": np.zeros(2, np.float32)}
    assert env.step(zero)["reward"] == 3
    last = env.step(zero)
    assert last["reward"] == 2.5
    assert last["is_last"]
    assert len(counter.actions) == 5


def test_actions_are_scaled_to_the_simulator_bounds() -> None:
    counter = Counter()
    env = make(DmEnv(counter))
    env.reset()
    env.step({"action": np.array([1.0, -1.0], np.float32)})
    assert counter.actions[0].tolist() == [2.0, -2.0]


def test_seeding_and_closing() -> None:
    counter = Counter()
    env = make(DmEnv(counter, set_seed=counter.seeds.append))
    env.reset(5)
    env.reset()
    assert counter.seeds == [5]
    env.close()
    assert counter.is_closed
