"""`Player.latent` and `Player.imagine`."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from player_helpers import Toy, make_player
from torch.utils._pytree import tree_map

from reverie.api import UserError
from reverie.nets.rng import Rng

OBS = spaces.Dict(
    camera=spaces.Box(0, 255, (48, 48), np.uint8),
    arm=spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.Discrete(3))),
)
ACT = spaces.Dict(
    valve=spaces.Box(10, 30, (2,), np.float64), gear=spaces.Discrete(3, start=1)
)
CONFIGS = {"dreamer": "debug", "iris": "iris_tiny"}


@pytest.fixture(scope="module", params=CONFIGS)
def setup(request, tmp_path_factory):
    """A player that has acted three times, and its environment."""
    env = Toy(obs=OBS, act=ACT)
    if request.param == "iris":
        env = Toy(spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.Discrete(3, start=1))
    player = make_player(tmp_path_factory.mktemp("run"), env, CONFIGS[request.param])
    obs, _ = env.reset(seed=0)
    for _ in range(3):
        obs, *_ = env.step(player.act(obs))
    player.act(obs)
    return player, env


def plan(env: Toy, steps: int, seed: int = 0) -> list[Any]:
    env.action_space.seed(seed)
    return [env.action_space.sample() for _ in range(steps)]


def test_a_rollout_has_the_shapes_of_the_horizon(setup):
    player, env = setup
    rollout = player.imagine(plan(env, 4))
    assert rollout.reward.shape == rollout.cont.shape == (4,)
    assert ((rollout.cont >= 0) & (rollout.cont <= 1)).all()
    for key, frames in rollout.obs.items():
        space = player.obs_space[key]
        assert (frames.shape, frames.dtype) == ((4, *space.shape), space.dtype)
    assert any(space.is_image for space in map(player.obs_space.get, rollout.obs))
    latent = player.latent()
    for key, value in rollout.latent.items():
        assert value.shape == (4, *latent[key].shape)
    assert player.imagine(plan(env, 4), horizon=2).reward.shape == (2,)
    assert player.imagine().reward.shape == (15,)


def test_rollouts_depend_on_actions_and_seed_only(setup):
    player, env = setup
    first = player.imagine(plan(env, 5))
    player.imagine(plan(env, 5, seed=1))
    again = player.imagine(plan(env, 5))
    other = player.imagine(plan(env, 5, seed=3))
    for key, value in first.obs.items():
        np.testing.assert_array_equal(value, again.obs[key])
    same = [np.array_equal(first.latent[k], other.latent[k]) for k in first.latent]
    assert not all(same)


def test_given_actions_are_returned_in_their_own_form(setup):
    player, env = setup
    actions = plan(env, 3)
    taken = player.imagine(actions).actions
    if isinstance(actions[0], dict):
        np.testing.assert_allclose(taken["valve"], [a["valve"] for a in actions], 1e-5)
        taken, actions = taken["gear"], [a["gear"] for a in actions]
    np.testing.assert_array_equal(taken, actions)


def test_actions_of_the_policy_are_elements_of_the_action_space(setup):
    player, env = setup
    taken = player.imagine(horizon=6).actions
    for step in range(6):
        assert env.action_space.contains(tree_map(lambda x, h=step: x[h], taken))
    greedy = [player.imagine(horizon=1, greedy=True, seed=s).actions for s in range(4)]
    assert all(np.array_equal(value_of(x), value_of(greedy[0])) for x in greedy)


def value_of(actions: Any) -> np.ndarray:
    return actions["gear"] if isinstance(actions, dict) else actions


def test_a_function_gets_observations_of_the_environment(setup):
    player, env = setup
    seen: list[Any] = []

    def policy(obs):
        seen.append(obs)
        return plan(env, 1)[0]

    rollout = player.imagine(policy, horizon=3)
    assert len(seen) == 3
    for obs in seen[1:]:
        assert env.observation_space.contains(obs)
    image = seen[1]["camera"] if isinstance(seen[1], dict) else seen[1]
    key = "camera" if isinstance(seen[1], dict) else "image"
    frame = rollout.obs[key][0]
    np.testing.assert_array_equal(image.reshape(frame.shape), frame)
    fixed = player.imagine(plan(env, 1) * 3)
    np.testing.assert_array_equal(fixed.reward, rollout.reward)


def test_imagining_does_not_change_what_the_agent_does(setup):
    player, env = setup
    player, other = copy.deepcopy(player), copy.deepcopy(player)
    player.imagine(horizon=4)
    player.latent()
    obs, _ = env.reset(seed=5)
    for _ in range(4):
        mine, theirs = player.act(obs), other.act(obs)
        np.testing.assert_equal(mine, theirs)


def test_a_batch_has_an_axis_of_its_own(setup):
    player, env = copy.deepcopy(setup[0]), setup[1]
    obs = env.reset(seed=0)[0]
    player.reset()
    batch = tree_map(lambda x: np.stack([x] * 2), obs)
    player.act(batch)
    rollout = player.imagine(horizon=3)
    assert rollout.reward.shape == (2, 3)
    assert all(value.shape[:2] == (2, 3) for value in rollout.obs.values())
    assert all(len(value) == 2 for value in player.latent().values())
    actions = rollout.actions
    steps = [tree_map(lambda x, h=h: x[:, h], actions) for h in range(3)]
    again = player.imagine(steps)
    np.testing.assert_array_equal(value_of(again.actions), value_of(actions))


def test_the_latent_state_of_dreamer_and_its_rollout(tmp_path):
    env = Toy(obs=OBS, act=ACT)
    player = make_player(tmp_path, env)
    obs, _ = env.reset(seed=0)
    player.act(obs)
    world, state = player.agent.world, player._carry.state
    latent = player.latent()
    np.testing.assert_array_equal(latent["deter"], state.deter[0])
    np.testing.assert_array_equal(latent["feat"], world.features(state)[0].detach())
    actions, step = plan(env, 4), iter(range(10))

    def policy(_):
        action = actions[min(next(step), 3)]
        return {
            "valve": torch.tensor((action["valve"] - 20) / 10)[None].float(),
            "gear": torch.tensor([action["gear"]], dtype=torch.int32),
        }

    with torch.no_grad():
        expected = world.imagine(
            state, policy, 4, Rng(7, "dreams", torch.device("cpu"))
        )
        states = tree_map(lambda x: x[:, 1:], expected.states)
        reward, cont = world.reward_and_cont(world.features(states))
    rollout = player.imagine(actions, seed=7)
    np.testing.assert_allclose(rollout.latent["deter"], states.deter[0], atol=1e-5)
    np.testing.assert_allclose(rollout.reward, reward[0], atol=1e-5)
    np.testing.assert_allclose(rollout.cont, cont[0], atol=1e-5)


def test_context_starts_with_the_episode(tmp_path):
    env = Toy(spaces.Box(0, 255, (4, 4, 3), np.uint8), spaces.Discrete(3))
    player = make_player(tmp_path, env, "iris_tiny")
    image = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    player.act(image, greedy=True)
    expected = player.imagine([0, 1, 2])
    for _ in range(3):
        player.act(image[::-1])
    player.act(image, greedy=True, is_first=True)
    np.testing.assert_array_equal(
        player.imagine([0, 1, 2]).obs["image"], expected.obs["image"]
    )


def test_actions_outside_of_the_space_are_refused(tmp_path):
    act = spaces.Tuple([spaces.Discrete(3), spaces.Box(-1, 2, (), np.float32)])
    env = Toy(spaces.Box(-1, 1, (2,), np.float32), act)
    player = make_player(tmp_path, env, "debug")
    player.act(env.reset(seed=0)[0])
    player.imagine([(2, 2.0), (0, -1.0)])
    for action in [(3, 0.0), (-1, 0.0), (0.5, 0.0), (0, 2.1)]:
        with pytest.raises(UserError, match="outside of the action space"):
            player.imagine([action])


def test_what_cannot_be_imagined_is_refused(setup, tmp_path):
    player, env = copy.deepcopy(setup[0]), setup[1]
    with pytest.raises(UserError, match="a horizon of 5 and 2 actions"):
        player.imagine(plan(env, 2), horizon=5)
    with pytest.raises(UserError, match="is a NoneType"):
        player.imagine([None])
    with pytest.raises(UserError, match="a horizon of 0"):
        player.imagine(horizon=0)
    with pytest.raises(UserError, match="horizon=N"):
        player.imagine(3)
    player.reset()
    with pytest.raises(UserError, match=r"Fix: call act\(obs\) first"):
        player.latent()
    random = make_player(tmp_path, env, agent="random")
    random.act(env.reset(seed=0)[0])
    with pytest.raises(UserError, match="'random' has no world model"):
        random.imagine(horizon=2)
