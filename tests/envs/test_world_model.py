"""World models of different agents as environments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie import agents, envs
from reverie.agents.options import BuildOptions
from reverie.api import UserError
from reverie.capabilities import HasWorldModelEnv
from reverie.envs.adapters.world_model import ImaginedEnv, StartInEnv, StartInEpisodes
from reverie.envs.checker import check_env
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.envs.vector.vec_env import make_vec_env
from reverie.evaluation.episodes import play_episodes
from reverie.run.config import resolve
from reverie.spaces import Space, step_spaces, step_values

PRESETS = {"iris": "iris_tiny", "dreamer": "debug"}
SIZES = {"iris": 4, "dreamer": 12}


@pytest.fixture(scope="module", params=PRESETS)
def agent(request):
    config = resolve([PRESETS[request.param]], flags={"task": "catch"})
    env = catch(SIZES[request.param])
    return agents.make(
        request.param,
        env.obs_space,
        env.act_space,
        config.agent_config,
        BuildOptions(torch.device("cpu")),
    )


def catch(size, seed=0):
    return Catch(CatchConfig(4, 4, (size, size)), seed)


def make_real(agent):
    return catch(agent.obs_space["image"].shape[0])


def make_imagined(agent, steps=1, length=7, seed=0):
    return ImaginedEnv(
        agent.world_model_env(seed), StartInEnv(make_real(agent), steps), length, seed
    )


def test_it_passes_the_environment_checker(agent):
    assert isinstance(agent, HasWorldModelEnv)
    findings = check_env(make_imagined(agent), steps=40)
    assert not [str(finding) for finding in findings if finding.severity == "error"]


def test_the_first_observation_is_the_last_real_row(agent):
    real = StartInEnv(make_real(agent), 2)
    rows = real(np.random.default_rng(5))
    assert len(rows["image"]) == 3
    assert rows["is_first"].tolist() == [True, False, False]
    env = ImaginedEnv(agent.world_model_env(), lambda rng: rows)
    obs = env.reset()
    np.testing.assert_array_equal(obs["image"], rows["image"][-1])
    assert obs["is_first"]
    assert obs["reward"] == 0


def test_actions_affect_the_rollout(agent):

    def rollout(action):
        env = make_imagined(agent, length=0)
        env.reset(seed=1)
        steps = [env.step({"action": np.int32(action)}) for _ in range(6)]
        return np.stack([obs["image"] for obs in steps]), [o["reward"] for o in steps]

    repeated, left, right = rollout(0), rollout(0), rollout(2)
    np.testing.assert_array_equal(repeated[0], left[0])
    assert repeated[1] == left[1]
    assert (left[0] != right[0]).any()


def test_the_last_action_of_the_context_is_ignored(agent):
    rows = StartInEnv(make_real(agent), 2)(np.random.default_rng(0))

    def next_row_sum(index, action):
        changed = {**rows, "action": rows["action"].copy()}
        changed["action"][index] = action
        model = agent.world_model_env(0)
        state = model.begin({key: value[None] for key, value in changed.items()})
        _, row = model.step(state, {"action": np.ones(1, np.int32)})
        return row["image"].astype(np.float64).sum() + row["reward"][0]

    for index in range(3):
        is_equal = next_row_sum(index, 0) == next_row_sum(index, 2)
        assert is_equal == (index == 2)


def test_episodes_are_truncated_at_their_length(agent):
    env = make_imagined(agent, length=3)
    for _ in range(5):
        env.reset()
        for t in range(3):
            obs = env.step({"action": np.int32(1)})
            assert obs["is_last"] == (obs["is_terminal"] or t == 2)
            if obs["is_last"]:
                break


def test_an_agent_acts_in_its_own_world_model(agent):
    vec_env = make_vec_env(lambda index: make_imagined(agent, seed=index), 2)
    episodes = play_episodes(agent, vec_env, 4)
    assert len(episodes) == 4
    assert all(1 <= episode.length <= 7 for episode in episodes)


def test_episodes_can_exceed_the_context_length(agent):
    env = make_imagined(agent, length=0)
    env.reset()
    for _ in range(30):  # the transformer has a context of 10 steps
        obs = env.step({"action": np.int32(0)})
    assert obs["image"].shape == agent.obs_space["image"].shape


def test_starting_in_a_recorded_episode(agent):
    episode = StartInEnv(make_real(agent), 2)(np.random.default_rng(0))
    ImaginedEnv(agent.world_model_env(), StartInEpisodes([episode], steps=2)).reset()


def test_every_row_but_the_last_of_an_episode_is_a_start():
    rng, row = np.random.default_rng(0), np.arange(5)
    episode = {"is_first": row == 0, "is_last": row == 4, "row": row}
    single_row = {key: value[-1:] for key, value in episode.items()}
    start = StartInEpisodes([single_row, episode], steps=2)
    starts = {tuple(start(rng)["row"].tolist()) for _ in range(100)}
    assert starts == {(0,), (0, 1), (0, 1, 2), (1, 2, 3)}


def test_invalid_arguments_are_refused(agent):
    with pytest.raises(UserError, match="no recorded episode"):
        StartInEpisodes([])
    with pytest.raises(UserError, match="cannot be -1"):
        ImaginedEnv(agent.world_model_env(), StartInEnv(make_real(agent)), length=-1)
    with pytest.raises(UserError, match=r"None of .* episodes had 51 rows"):
        ImaginedEnv(
            agent.world_model_env(), StartInEnv(make_real(agent), steps=50)
        ).reset()
    with pytest.raises(UserError, match=r"shape \(8, 8, 3\).*\n  Fix"):
        ImaginedEnv(agent.world_model_env(), StartInEnv(catch(8))).reset()
    without_image = ImaginedEnv(
        agent.world_model_env(), lambda rng: {"action": np.zeros(1, np.int32)}
    )
    with pytest.raises(UserError, match="no such key"):
        without_image.reset()


class Valve:
    """An environment with a scaled continuous action, and a free one."""

    def __init__(self):
        self.actions = []
        self.obs_space = {"vector": Space(np.float32, (2,), -1, 1), **step_spaces()}
        low, high = np.float32([10, -0.5]), np.float32([30, 0.5])
        self.act_space = {
            "open": Space(np.float32, (2,), low, high),
            "free": Space(np.float32, (1,)),
        }

    def reset(self, seed=None):
        return {"vector": np.zeros(2, np.float32), **step_values(0.0, first=True)}

    def step(self, action):
        self.actions.append(action)
        return {"vector": np.zeros(2, np.float32), **step_values(0.0)}

    def close(self):
        pass


def make_valve_model():
    env = envs.make(Valve)
    config = resolve(["debug"], flags={"task": "catch"})
    options = BuildOptions(torch.device("cpu"))
    spaces = env.obs_space, env.act_space
    agent = agents.make("dreamer", *spaces, config.agent_config, options)
    model, given = agent.world_model_env(), []
    step = model.step

    def spying(state, action):
        given.append(action)
        return step(state, action)

    model.step = spying
    return model, given


def test_actions_are_in_the_units_of_the_task():
    model, given = make_valve_model()
    env = ImaginedEnv(model, StartInEnv(Valve(), 2))
    assert {k: (s.low.min(), s.high.max()) for k, s in env.act_space.items()} == {
        "open": (-0.5, 30),
        "free": (-np.inf, np.inf),
    }
    env.reset(seed=0)
    env.step({"open": [10, 0.25], "free": [3]})
    np.testing.assert_allclose(given[-1]["open"], [[-1, 0.5]], atol=1e-6)
    np.testing.assert_allclose(given[-1]["free"], [[3]])
    scaled = envs.make(env)  # like every other environment
    scaled.reset()
    scaled.step({"open": np.float32([-1, 0.5]), "free": np.float32([3])})
    np.testing.assert_allclose(given[-1]["open"], [[-1, 0.5]], atol=1e-6)
    with pytest.raises(UserError, match="needs the action 'free'"):
        env.step({"open": [10, 0.25]})


@pytest.mark.parametrize("make", [lambda env: env, envs.make])
def test_real_rows_to_start_from_have_scaled_actions(make):
    env = Valve()
    rows = StartInEnv(make(env), 3)(np.random.default_rng(0))
    taken = np.stack([action["open"] for action in env.actions])
    assert taken[:, 0].min() >= 10
    expected = 2 * (taken - [10, -0.5]) / [20, 1] - 1
    np.testing.assert_allclose(rows["open"][:3], expected, atol=1e-5)


def test_a_single_action_needs_no_key(agent):
    rows = [make_imagined(agent) for _ in range(2)]
    for env in rows:
        env.reset(seed=3)
    by_key, alone = rows[0].step({"action": np.int32(2)}), rows[1].step(np.int32(2))
    np.testing.assert_array_equal(by_key["image"], alone["image"])
