"""`Player`: observations and actions in the form that the environment itself uses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from player_helpers import Toy, make_player

import reverie
from reverie import envs
from reverie.api import UserError
from reverie.run.player import Player

FLAT = {
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "discrete from -2": spaces.Discrete(4, start=-2),
    "multidiscrete": spaces.MultiDiscrete([3, 5]),
    "multidiscrete from": spaces.MultiDiscrete([3, 2], start=[1, -4]),
    "multidiscrete matrix": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multibinary": spaces.MultiBinary(4),
    "multibinary matrix": spaces.MultiBinary([2, 3]),
    "box": spaces.Box(-1, 1, (3,), np.float32),
    "box scalar": spaces.Box(-2, 2, (), np.float32),
    "box scaled": spaces.Box(np.float32([10, -0.1]), np.float32([30, 0.3])),
    "box matrix": spaces.Box(0, 5, (2, 3), np.float32),
    "box float64": spaces.Box(0.1, 0.7, (2,), np.float64),
    "box float16": spaces.Box(-3, 3, (2,), np.float16),
    "box without bounds": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "box with one bound": spaces.Box(0.1, np.inf, (2,), np.float64),
    "box of integers": spaces.Box(-5, 5, (4,), np.int64),
    "box of bytes": spaces.Box(2, 9, (4,), np.uint8),
}
NESTED = {
    "dict": spaces.Dict(FLAT),
    "tuple": spaces.Tuple(FLAT.values()),
    "dict in dict": spaces.Dict(
        arm=spaces.Dict(joint=FLAT["box scaled"], grip=spaces.Discrete(2)),
        leg=FLAT["multidiscrete"],
    ),
    "tuple in dict": spaces.Dict(
        a=spaces.Tuple((spaces.Discrete(2), FLAT["box float64"])), b=FLAT["multibinary"]
    ),
    "dict in tuple": spaces.Tuple(
        (spaces.Dict(x=FLAT["box"], y=spaces.Tuple((spaces.Discrete(4),))), FLAT["box"])
    ),
}
IMAGES = {
    "image": spaces.Box(0, 255, (48, 48, 3), np.uint8),
    "gray image": spaces.Box(0, 255, (48, 48), np.uint8),
    "image in dict": spaces.Dict(
        camera=spaces.Box(0, 255, (48, 48), np.uint8), arm=FLAT["box"]
    ),
}


def play(player: Player, env: Any, steps: int = 12) -> list[Any]:
    obs, _ = env.reset(seed=0)
    player.reset()
    actions = []
    for _ in range(steps):
        actions.append(player.act(obs))
        assert env.action_space.contains(actions[-1]), actions[-1]
        obs, *_ = env.step(actions[-1])
    return actions


@pytest.mark.parametrize("kind", [*FLAT, *NESTED])
def test_actions_are_elements_of_the_action_space(tmp_path, kind):
    space = {**FLAT, **NESTED}[kind]
    player = make_player(tmp_path, Toy(act=space))
    actions = play(player, Toy(act=space))
    sample = space.sample()
    assert same_types(actions[0], sample)
    vector = SyncVectorEnv([lambda: Toy(act=space)] * 3)
    play(player, vector)


def same_types(value: Any, other: Any) -> bool:
    if isinstance(other, dict):
        keys = value.keys() == other.keys()
        return keys and all(same_types(value[k], other[k]) for k in other)
    if isinstance(other, tuple):
        pairs = zip(value, other, strict=True)
        return isinstance(value, tuple) and all(same_types(a, b) for a, b in pairs)
    if isinstance(other, np.ndarray):
        return isinstance(value, np.ndarray) and value.dtype == other.dtype
    return isinstance(value, int)


@pytest.mark.parametrize("kind", [*FLAT, *NESTED, *IMAGES])
def test_observations_are_taken_as_the_environment_returns_them(tmp_path, kind):
    space = {**FLAT, **NESTED, **IMAGES}[kind]
    player = make_player(tmp_path, Toy(obs=space))
    play(player, Toy(obs=space))
    play(player, SyncVectorEnv([lambda: Toy(obs=space)] * 2))
    row = envs.make(Toy(obs=space)).reset()  # by flat key, with flags
    assert player.act({**row, "is_first": [True] * 2, **stacked(row, 2)}).shape == (2,)


def stacked(row: dict[str, Any], count: int) -> dict[str, Any]:
    return {key: np.stack([value] * count) for key, value in row.items()}


@pytest.mark.extended_except("dict in tuple")
@pytest.mark.parametrize("kind", ["tuple", "dict", "dict in tuple"])
def test_the_same_names_of_observations_and_actions_train(tmp_path, kind):
    env = Toy(obs=NESTED[kind], act=NESTED[kind])
    path = reverie.train(
        env=env,
        configs="debug",
        logdir=str(tmp_path / "run"),
        run__steps=80,
        logger__outputs=(),
    )
    play(reverie.load(path), env)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),
    ],
    ids=lambda space: type(space).__name__,
)
def test_unsupported_spaces_are_refused_by_name(space):
    name = type(space).__name__
    with pytest.raises(UserError, match=f"action space is a {name}, .*\n  Fix"):
        envs.make(Toy(act=space))
    nested = spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), space)))
    with pytest.raises(UserError, match=f"observation space a/1 is a {name}"):
        envs.make(Toy(obs=nested))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Dict({"a/b": FLAT["box"], "a": spaces.Dict(b=FLAT["box"])}), "Two ent"),
        (spaces.Dict(a=spaces.Tuple(())), "space a is empty"),
        (spaces.Dict({0: FLAT["box"]}), "not a string"),
    ],
)
def test_ambiguous_nested_spaces_are_refused(space, message):
    with pytest.raises(UserError, match=message):
        envs.make(Toy(obs=space))


def test_a_greedy_action_is_the_most_probable_one(tmp_path):
    player = make_player(tmp_path, Toy(act=FLAT["box"]))
    actor_critic, chosen = player.agent.actor_critic, []
    obs = np.zeros(3, np.float32)
    for _ in range(5):
        action = player.act(obs, greedy=True)
        feat = player.agent.world.features(player._carry.state)
        chosen.append((action, actor_critic.pol(feat)["action"].mean[0]))
    for action, mean in chosen:
        np.testing.assert_allclose(action, mean.detach(), rtol=1e-5)
    sampled = np.std([player.act(obs) for _ in range(20)])
    assert sampled > 10 * np.std([player.act(obs, greedy=True) for _ in range(20)])


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (np.array([0, np.nan, 0], np.float32), "has NaN entries"),
        (np.array([0, 5, 0], np.float32), r"values in \[0.0, 5.0\], expected \[-1.0"),
        ("text", "is a str, which is not an array of numbers"),
        (None, "is a NoneType, which is not an array of numbers"),
        ([[0.0], [0.0, 1.0]], "not an array of numbers"),
        (np.array([True, False, True]), "has dtype bool, expected float32"),
        (np.zeros(4, np.float32), r"shape \(4,\), expected \(3,\), or a batch of it"),
        ({"pixels": np.zeros(3)}, "a dict without vector"),
    ],
)
def test_invalid_observations_are_refused(tmp_path, obs, message):
    player = make_player(tmp_path, Toy())
    with pytest.raises(UserError, match=message):
        player.act(obs)


def test_infinite_and_float_images_are_refused(tmp_path):
    free = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    with pytest.raises(UserError, match="infinite"):
        make_player(tmp_path, Toy(obs=free)).act(np.float32([np.inf, 0]))
    player = make_player(tmp_path, Toy(obs=IMAGES["image"]))
    with pytest.raises(UserError, match="has dtype float64, expected uint8"):
        player.act(np.zeros((48, 48, 3)))
    with pytest.raises(UserError, match="are obs, greedy, reward"):
        player.act(np.zeros((48, 48, 3), np.uint8), deterministic=True)


def test_observations_of_one_batch_have_one_size(tmp_path):
    space = spaces.Dict(a=FLAT["box"], b=FLAT["box"])
    player = make_player(tmp_path, Toy(obs=space))
    one, two, three = (np.zeros((n, 3), np.float32) for n in (1, 2, 3))
    for obs in ({"a": two, "b": three}, {"a": two, "b": two[0]}):
        with pytest.raises(UserError, match="same batch size"):
            player.act(obs)
    player.act({"a": two, "b": two})
    with pytest.raises(UserError, match="got 3 observations after 2"):
        player.act({"a": three, "b": three})
    with pytest.raises(UserError, match="mask of shape"):
        player.reset([True])
    player.reset()
    assert player.act({"a": three, "b": three}).shape == (3,)
    player.reset()
    assert player.act({"a": one, "b": one}).shape == (1,)


def test_reset_starts_episodes_where_the_mask_is_true(tmp_path):
    player = make_player(tmp_path, Toy())
    obs = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    for _ in range(3):
        player.act(obs, greedy=True)
    player.reset([False, True])
    seen = spy_on_policy(player)
    player.act(obs)
    player.act(obs)
    assert [rows["is_first"].tolist() for rows in seen] == [
        [False, True],
        [False, False],
    ]
    player.reset()
    player.act(obs)
    assert seen[-1]["is_first"].tolist() == [True, True]


def spy_on_policy(player: Player) -> list[dict[str, np.ndarray]]:
    seen: list[dict[str, np.ndarray]] = []
    policy = player.agent.policy

    def spying(carry, rows, mode):
        seen.append(rows)
        return policy(carry, rows, mode)

    player.agent.policy = spying
    return seen


def test_the_loop_of_a_vector_environment(tmp_path):
    player = make_player(tmp_path, Toy())
    seen = spy_on_policy(player)
    vector = SyncVectorEnv([Toy] * 2, autoreset_mode=AutoresetMode.SAME_STEP)
    obs, _ = vector.reset(seed=0)
    for _ in range(7):
        obs, _, terminated, truncated, _ = vector.step(player.act(obs))
        player.reset(terminated | truncated)
    first = [rows["is_first"].tolist() for rows in seen]
    assert first == [[True] * 2] + [[False] * 2] * 4 + [[True] * 2] + [[False] * 2]


def pickled(player: Player) -> Player:
    return pickle.loads(pickle.dumps(player))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_acts_like_the_original(tmp_path, copied):
    space = spaces.Dict(a=FLAT["box scaled"], b=FLAT["discrete"])
    player = make_player(tmp_path, Toy(act=space))
    obs = np.float32([0.1, 0.2, 0.3])
    assert copied(player).act(obs).keys() == {"a", "b"}
    for _ in range(3):
        player.act(obs)
    other = copied(player)
    for _ in range(3):
        mine, theirs = player.act(obs), other.act(obs)
        np.testing.assert_array_equal(mine["a"], theirs["a"])
        assert mine["b"] == theirs["b"]
    with torch.no_grad():
        for parameter in player.agent.world.parameters():
            parameter.zero_()
    assert any(parameter.any() for parameter in other.agent.world.parameters())


def test_images_are_resized_as_in_training(tmp_path):
    for shape in ((60, 50, 3), (60, 50)):
        toy = Toy(obs=spaces.Dict(camera=spaces.Box(0, 255, shape, np.uint8)))
        player = make_player(tmp_path, toy, **{"env.resize": (48, 48)})
        seen = spy_on_policy(player)
        image = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
        player.act({"camera": image})
        toy.observation_space.sample = lambda image=image: {"camera": image}
        config = player.source.config
        row = envs.make(toy, config.env).reset()
        np.testing.assert_array_equal(seen[0]["camera"][0], row["camera"])
