"""Adapter for Gymnasium environments, with every type of space."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from reverie import envs
from reverie.api import UserError
from reverie.envs import from_gymnasium


class Toy(gymnasium.Env):
    """Returns samples of its space; records actions and seeds."""

    def __init__(self, obs: Any = None, act: Any = None, info: Any = None):
        self.observation_space = spaces.Box(-1, 1, (3,)) if obs is None else obs
        self.action_space = act or spaces.Discrete(2)
        self.info = info or {}
        self.end = (False, False)
        self.actions: list[Any] = []
        self.seeds: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.seeds.append(seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        self.actions.append(action)
        return self.observation_space.sample(), 1.5, *self.end, self.info


KINDS = {
    "box": (spaces.Box(-1, 1, (3,), np.float32), {"vector": ("float32", (3,))}),
    "double": (spaces.Box(-1, 1, (2, 3), np.float64), {"vector": ("float32", (2, 3))}),
    "image": (
        spaces.Box(0, 255, (30, 41, 3), np.uint8),
        {"image": ("uint8", (30, 41, 3))},
    ),
    "gray": (spaces.Box(0, 255, (9, 8), np.uint8), {"image": ("uint8", (9, 8, 1))}),
    "bytes": (spaces.Box(0, 9, (4,), np.uint8), {"vector": ("uint8", (4,))}),
    "integers": (spaces.Box(-5, 5, (4,), np.int64), {"vector": ("int32", (4,))}),
    "discrete": (spaces.Discrete(4), {"vector": ("int32", ())}),
    "shifted": (spaces.Discrete(4, start=-2), {"vector": ("int32", ())}),
    "multidiscrete": (spaces.MultiDiscrete([3, 5]), {"vector": ("int32", (2,))}),
    "multibinary": (spaces.MultiBinary(4), {"vector": ("int32", (4,))}),
    "dict": (
        spaces.Dict(
            camera=spaces.Box(0, 255, (8, 8, 3), np.uint8),
            arm=spaces.Dict(joints=spaces.Box(-1, 1, (2,)), grip=spaces.Discrete(2)),
        ),
        {
            "camera": ("uint8", (8, 8, 3)),
            "arm/joints": ("float32", (2,)),
            "arm/grip": ("int32", ()),
        },
    ),
    "tuple": (
        spaces.Tuple((spaces.Discrete(2), spaces.Box(-1, 1, (2,)))),
        {"0": ("int32", ()), "1": ("float32", (2,))},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_observation_spaces(kind: str) -> None:
    space, expected = KINDS[kind]
    env = envs.make(Toy(obs=space))
    rows = [env.reset()] + [env.step({"action": np.int32(0)}) for _ in range(20)]
    for key, (dtype, shape) in expected.items():
        assert env.obs_space[key].dtype == np.dtype(dtype)
        assert env.obs_space[key].shape == shape
        assert all(env.obs_space[key].problem(row[key]) is None for row in rows)
    assert len(env.obs_space) == len(expected) + 4


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("image", "gray")])
def test_action_spaces(kind: str) -> None:
    toy = Toy(act=KINDS[kind][0])
    env = envs.make(toy)
    env.reset()
    rng = np.random.default_rng(0)
    for _ in range(20):
        env.step({key: space.sample(rng) for key, space in env.act_space.items()})
    assert len(toy.actions) == 20  # Toy asserts that its space contains them


def test_a_single_action_is_named_action() -> None:
    assert list(envs.make(Toy()).act_space) == ["action"]


def test_integer_bounds() -> None:
    env = from_gymnasium(Toy(act=spaces.Discrete(4, start=-2)))
    assert (env.act_space["action"].low, env.act_space["action"].high) == (-2, 2)
    env = from_gymnasium(Toy(obs=spaces.Box(-5, 5, (4,), np.int64)))
    assert env.obs_space["vector"].classes == 11


@pytest.mark.parametrize(
    ("end", "info", "flags"),
    [
        ((False, False), {}, (False, False)),
        ((True, False), {}, (True, True)),
        ((False, True), {}, (True, False)),
        ((True, False), {"is_terminal": False}, (True, False)),
        ((False, False), {"is_terminal": True}, (True, True)),
    ],
)
def test_the_end_of_an_episode(end: Any, info: Any, flags: Any) -> None:
    toy = Toy(info=info)
    env = from_gymnasium(toy)
    env.reset()
    toy.end = end
    row = env.step({"action": np.int32(0)})
    assert (bool(row["is_last"]), bool(row["is_terminal"])) == flags


class OldToy:
    """The API before Gymnasium: `step` returns four values."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, info: Any):
        self.info = info
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reset(self) -> Any:
        return np.zeros(3, np.float32)

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), 1, True, self.info

    def close(self) -> None:
        pass


@pytest.mark.parametrize("truncated", [False, True])
def test_the_older_gym_api(truncated: bool) -> None:
    toy = OldToy({"TimeLimit.truncated": truncated})
    env = envs.make(toy)
    assert env.reset()["is_first"]
    assert len(toy.seeds) == 1
    row = env.step({"action": np.int32(0)})
    assert row["is_last"]
    assert row["is_terminal"] != truncated


def test_only_the_first_reset_is_seeded() -> None:
    toy = Toy()
    env = envs.make(toy, seed=3)
    env.reset()
    env.reset()
    assert toy.seeds[0] is not None
    assert toy.seeds[1] is None


def test_arrays_that_the_environment_reuses_are_copied() -> None:
    class Reusing(Toy):
        array = np.zeros(3, np.float32)

        def reset(self, **kwargs: Any) -> Any:
            return self.array, {}

        def step(self, action: Any) -> Any:
            self.array += 0.1
            return self.array, 0.0, False, False, {}

    env = from_gymnasium(Reusing())
    first = env.reset()["vector"]
    env.step({"action": 0})
    assert not first.any()


@pytest.mark.parametrize("where", ["obs", "act"])
def test_unsupported_spaces_are_refused(where: str) -> None:
    for space in (spaces.Text(5), spaces.Dict(a=spaces.Sequence(spaces.Discrete(2)))):
        with pytest.raises(UserError, match="which is not supported"):
            from_gymnasium(Toy(**{where: space}))


def test_reserved_names_and_empty_spaces_are_refused() -> None:
    with pytest.raises(UserError, match=r"'reward'.*reserved"):
        from_gymnasium(Toy(obs=spaces.Dict(reward=spaces.Discrete(2))))
    with pytest.raises(UserError, match="observation space is empty"):
        from_gymnasium(Toy(obs=spaces.Dict()))
