"""World models of different agents as environments."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie import agents
from reverie.agents.options import BuildOptions
from reverie.api import UserError
from reverie.capabilities import HasWorldModelEnv
from reverie.envs.adapters.world_model import ImaginedEnv, StartInEnv, StartInEpisodes
from reverie.envs.checker import check_env
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.envs.vector.vec_env import make_vec_env
from reverie.evaluation.episodes import play_episodes
from reverie.run.config import resolve

BLOCKS = {"iris": "iris_tiny", "dreamer": "debug"}
SIZES = {"iris": 4, "dreamer": 12}


@pytest.fixture(scope="module", params=BLOCKS)
def agent(request):
    config = resolve([BLOCKS[request.param]], flags={"task": "catch"})
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
    with pytest.raises(UserError, match=r"None of .* episodes had 51 steps"):
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
