"""A learned world is an environment, whichever world it is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie import agents
from reverie.api import UserError
from reverie.capabilities import HasWorldModelEnv
from reverie.envs.adapters.world_model import ImaginedEnv, StartInEnv, StartInEpisodes
from reverie.envs.checker import check_env
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.envs.vector.vec_env import SyncVecEnv, VecEnvConfig
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
        config.of_agent,
        device=torch.device("cpu"),
        precision="float32",
        seed=0,
    )


def catch(size, seed=0):
    return Catch(CatchConfig(4, 4, (size, size)), seed)


def of(agent):
    return catch(agent.obs_space["image"].shape[0])


def make_dream(agent, steps=1, length=7, seed=0):
    return ImaginedEnv(
        agent.world_model_env(seed), StartInEnv(of(agent), steps), length, seed
    )


def test_a_dream_keeps_the_rules_of_environments(agent):
    assert isinstance(agent, HasWorldModelEnv)
    findings = check_env(make_dream(agent), steps=40)
    assert not [str(finding) for finding in findings if finding.severity == "error"]


def test_it_begins_with_the_last_real_row(agent):
    real = StartInEnv(of(agent), 2)
    rows = real(np.random.default_rng(5))
    assert len(rows["image"]) == 3
    assert rows["is_first"].tolist() == [True, False, False]
    dream = ImaginedEnv(agent.world_model_env(), lambda rng: rows)
    obs = dream.reset()
    np.testing.assert_array_equal(obs["image"], rows["image"][-1])
    assert obs["is_first"]
    assert obs["reward"] == 0


def test_what_is_done_decides_what_is_dreamt(agent):
    """The same rng, the same start: only the actions differ."""

    def film(action):
        dream = make_dream(agent, length=0)
        dream.reset(seed=1)
        steps = [dream.step({"action": np.int32(action)}) for _ in range(6)]
        return np.stack([obs["image"] for obs in steps]), [o["reward"] for o in steps]

    same, left, right = film(0), film(0), film(2)
    np.testing.assert_array_equal(same[0], left[0])
    assert same[1] == left[1]
    assert (left[0] != right[0]).any()


def test_the_last_action_of_a_context_does_not_count_but_those_before_do(agent):
    rows = StartInEnv(of(agent), 2)(np.random.default_rng(0))

    def outcome(at, action):
        changed = {**rows, "action": rows["action"].copy()}
        changed["action"][at] = action
        dreams = agent.world_model_env(0)
        state = dreams.begin({key: value[None] for key, value in changed.items()})
        _, row = dreams.step(state, {"action": np.ones(1, np.int32)})
        return row["image"].astype(np.float64).sum() + row["reward"][0]

    for at in range(3):
        assert (outcome(at, 0) == outcome(at, 2)) == (at == 2)


def test_it_is_cut_at_its_length_without_an_end(agent):
    dream = make_dream(agent, length=3)
    for _ in range(5):
        dream.reset()
        for t in range(3):
            obs = dream.step({"action": np.int32(1)})
            assert obs["is_last"] == (obs["is_terminal"] or t == 2)
            if obs["is_last"]:
                break


def test_an_agent_plays_in_its_own_dream(agent):
    pool = SyncVecEnv(lambda index: make_dream(agent, seed=index), 2, VecEnvConfig())
    played = play_episodes(agent, pool, 4)
    assert len(played) == 4
    assert all(1 <= episode.length <= 7 for episode in played)


def test_a_dream_outlasts_what_the_world_looks_at(agent):
    dream = make_dream(agent, length=0)
    dream.reset()
    for _ in range(30):  # far beyond the transformer's 10 time steps
        obs = dream.step({"action": np.int32(0)})
    assert obs["image"].shape == agent.obs_space["image"].shape


def test_recorded_episodes_are_a_start_too(agent):
    episode = StartInEnv(of(agent), 2)(np.random.default_rng(0))
    ImaginedEnv(agent.world_model_env(), StartInEpisodes([episode], steps=2)).reset()


def test_dreams_begin_anywhere_in_an_episode_but_at_its_end():
    rng, place = np.random.default_rng(0), np.arange(5)
    episode = {"is_first": place == 0, "is_last": place == 4, "place": place}
    alone = {key: value[-1:] for key, value in episode.items()}
    start = StartInEpisodes([alone, episode], steps=2)
    found = {tuple(start(rng)["place"].tolist()) for _ in range(100)}
    assert found == {(0,), (0, 1), (0, 1, 2), (1, 2, 3)}


def test_mistakes_are_said(agent):
    with pytest.raises(UserError, match="no recorded episode"):
        StartInEpisodes([])
    with pytest.raises(UserError, match="-1 steps"):
        ImaginedEnv(agent.world_model_env(), StartInEnv(of(agent)), length=-1)
    with pytest.raises(UserError, match=r"None of .* lasted for 51 steps"):
        ImaginedEnv(agent.world_model_env(), StartInEnv(of(agent), steps=50)).reset()
    with pytest.raises(UserError, match=r"shape \(8, 8, 3\).*\n  Fix"):
        ImaginedEnv(agent.world_model_env(), StartInEnv(catch(8))).reset()
    blind = ImaginedEnv(
        agent.world_model_env(), lambda rng: {"action": np.zeros(1, np.int32)}
    )
    with pytest.raises(UserError, match="no such key"):
        blind.reset()
