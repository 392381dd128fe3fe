"""Adapter for Gymnasium environments, with every type of space."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from reverie import envs
from reverie.api import UserError
from reverie.envs import TaskFactory, from_gymnasium
from reverie.envs.vector.vec_env import VecEnvConfig, make_vec_env
from reverie.spaces import SUCCESS, Space, step_spaces


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
    assert len(env.obs_space) == len(expected) + 5  # with flags and log/success


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


@pytest.mark.parametrize("shape", [(3, 84, 84), (1, 210, 160), (12, 64, 64)])
def test_images_with_the_channels_first_are_refused(shape: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    for obs in (space, spaces.Dict(camera=space)):
        with pytest.raises(UserError, match=r"channels first(.|\n)*moveaxis"):
            from_gymnasium(Toy(obs=obs))
    from_gymnasium(Toy(obs=spaces.Box(0, 255, (*shape[1:], shape[0]), np.uint8)))


def test_reserved_names_and_empty_spaces_are_refused() -> None:
    with pytest.raises(UserError, match=r"'reward'.*reserved"):
        from_gymnasium(Toy(obs=spaces.Dict(reward=spaces.Discrete(2))))
    with pytest.raises(UserError, match="observation space is empty"):
        from_gymnasium(Toy(obs=spaces.Dict()))


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({}, -1),
        ({"success": True}, 1),
        ({"is_success": np.bool_(False)}, 0),
        ({"success": 0.0, "is_success": True}, 0),
        ({"success": np.array([1.0])}, 1),
        ({"success": None}, -1),
        ({"success": "yes"}, -1),
    ],
)
def test_success_in_info_is_logged(info: Any, expected: float) -> None:
    env = envs.make(Toy(info=info))
    assert env.reset()[SUCCESS] == -1
    assert env.step({"action": np.int32(0)})[SUCCESS] == expected


class Painter(Toy):
    """Renders the number of its steps."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}

    def __init__(self, shape: tuple[int, ...] = (30, 40, 3), **options: Any):
        super().__init__(**options)
        self.shape, self.render_mode = shape, "rgb_array"
        self.metadata = {"render_fps": 40}

    def render(self) -> Any:
        return np.full(self.shape, len(self.actions), np.uint8)


RENDER = envs.EnvConfig(render=True)


def test_frames_are_rendered_where_observations_have_no_image() -> None:
    env = envs.make(Painter(), RENDER)
    rows = [env.reset(), *(env.step({"action": np.int32(0)}) for _ in range(2))]
    assert [int(row["log/image"].max()) for row in rows] == [0, 1, 2]
    assert rows[0]["log/image"].shape == (30, 40, 3)
    large = envs.make(Painter(shape=(400, 600, 3)), RENDER)
    assert large.reset()["log/image"].shape == (171, 256, 3)
    image = spaces.Box(0, 255, (8, 8, 3), np.uint8)
    for other in (
        envs.make(Painter(obs=image), RENDER),
        envs.make(Painter()),
    ):
        assert "log/image" not in other.obs_space
        assert "log/image" not in other.reset()


def test_a_gymnasium_id_is_made_with_rendering() -> None:
    env = envs.make("gym_CartPole-v1", RENDER)
    assert env.reset(seed=0)["log/image"].shape == (171, 256, 3)
    plain = envs.make("gym_CartPole-v1").reset(seed=0)
    np.testing.assert_array_equal(env.reset(seed=0)["vector"], plain["vector"])


class Unrendered:
    """A Reverie environment without images."""

    def __init__(self) -> None:
        self.obs_space = {"vector": Space(np.float32, (2,)), **step_spaces()}
        self.act_space = {"action": Space(np.int32, (), 0, 2)}
        self.reset = self.step = self.close = print


def test_environments_that_cannot_be_rendered_are_refused() -> None:
    with pytest.raises(UserError, match='Fix: make it with render_mode="rgb_array"'):
        envs.make(Toy(), RENDER)
    with pytest.raises(UserError, match="cannot be rendered"):
        envs.make(Unrendered(), RENDER)
    with pytest.raises(UserError, match=r"returned uint8 of shape \(5, 5\)"):
        envs.make(Painter(shape=(5, 5)), RENDER)


@pytest.mark.parametrize("workers", [0, 1])
def test_vectorized_environments_have_the_speed_of_rendering(workers: int) -> None:
    for repeat, expected in ((1, 50), (2, 25)):
        factory = TaskFactory("gym_CartPole-v1", envs.EnvConfig(repeat=repeat), 0)
        vec_env = make_vec_env(factory, 1, VecEnvConfig(workers=workers))
        with contextlib.closing(vec_env):
            assert vec_env.render_fps == expected
    assert make_vec_env(TaskFactory("catch", envs.EnvConfig(), 0), 1).render_fps == 0
