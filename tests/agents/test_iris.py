"""Δ-IRIS: construction, acting, reports and checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iris_helpers import (
    changed,
    collected_feed,
    frames,
    in_second_epoch,
    make_agent,
    make_env,
    observations,
    settings,
    weights,
    with_burn_in,
)

from reverie.agents.iris.config import COMPONENTS
from reverie.agents.iris.report import align_to_first_frame
from reverie.api import Agent, UserError
from reverie.capabilities import HasEpisodeLosses
from reverie.rows import Rows

# Construction


def test_each_component_has_its_own_window():
    agent = make_agent()
    assert isinstance(agent, Agent)
    assert set(agent.windows) == {*COMPONENTS, "report"}
    training = agent.config.training
    tokenizer, actor = agent.windows["tokenizer"], agent.windows["actor_critic"]
    # one row more than frames, with the reward and end of the last action
    assert tokenizer.length == training.tokenizer.length + 1
    assert actor.length == agent.config.actor_critic.burn_in + 2
    assert (tokenizer.pad, actor.pad) == ("both", "left")
    assert (tokenizer.batch, actor.batch) == (
        training.tokenizer.batch,
        training.actor_critic.batch,
    )


def test_weights_depend_on_the_seed():
    a, b, c = make_agent(), make_agent(), make_agent(seed=1)
    for name in COMPONENTS:
        assert not changed(weights(a, name), weights(b, name))
        assert changed(weights(a, name), weights(c, name))
    critic = a.actor_critic.online.critic
    assert not critic.weight.any()
    assert not critic.bias.any()
    assert not changed(
        a.actor_critic.online.state_dict(), a.actor_critic.target.state_dict()
    )


def test_initial_weights_of_the_actor_critic():
    nets = make_agent().actor_critic
    bound = nets.config.width**-0.5
    for module in (nets.online.lstm, nets.online.actor):
        for name, values in module.named_parameters():
            largest = float(values.detach().abs().max())
            assert 0.3 * bound < largest <= bound, name
    assert not any(x.any() for x in nets.online.critic.parameters())
    assert not changed(nets.online.state_dict(), nets.target.state_dict())


def test_weight_decay_of_dense_weights_only():
    agent = make_agent()
    for name in COMPONENTS:
        decayed = agent.opt[name].decayed
        assert all(n.endswith(".weight") for n in decayed)
        assert not [n for n in decayed if ".layers." in n and "frame" in n]
    assert agent.opt["actor_critic"].config.wd == 0
    assert agent.opt["tokenizer"].decayed


# Acting


def test_actions_of_the_first_epoch_are_random():
    agent = make_agent(settings(**{"iris.schedule.first_steps": 40}))
    agent.actor_critic.online.actor.bias.data[:] = torch.tensor([99.0, 0.0, 0.0])
    obs, carry = observations(frames(0, 10)), agent.initial(10)
    actions = []
    while agent.schedule.epoch == 1 and agent.schedule.should_collect:
        carry, action, _ = agent.policy(carry, obs)
        actions += action["action"].tolist()
        agent.schedule.add_env_steps(10)
    assert len(actions) == 40
    assert len(set(actions)) == 3
    assert not agent.schedule.should_collect


def test_policy_and_train_do_not_advance_the_schedule():
    agent = make_agent(settings(**{"iris.schedule.first_steps": 30}))
    feed = collected_feed(agent, steps=16)
    before = agent.schedule.state_dict()
    agent.policy(agent.initial(10), observations(frames(0, 10)))
    agent.train(feed)
    assert agent.schedule.state_dict() == before


def test_the_last_row_of_an_episode_is_not_an_environment_step():
    obs = observations(frames(0, 10), last=True)
    assert Rows(obs).env_steps == 0
    assert Rows(observations(frames(0, 10))).env_steps == 10


NO_EPSILON = {"iris.acting.epsilon": 0.0, "iris.acting.eval_epsilon": 0.0}


@pytest.mark.parametrize("draw", ["shared", "per_env"])
def test_random_actions_in_all_or_single_environments(draw):
    flags = {"iris.acting.epsilon": 0.5, "iris.acting.epsilon_draw": draw}
    agent = in_second_epoch(make_agent(settings(**flags)))
    agent.actor_critic.online.actor.bias.data[:] = torch.tensor([99.0, 0.0, 0.0])
    obs, carry = observations(frames(0, 16)), agent.initial(16)
    mixed = 0
    for _ in range(40):
        carry, action, _ = agent.policy(carry, obs)
        explored = (action["action"] != 0).sum()
        mixed += 0 < explored < 5  # of 16, about 11 are not 0 when all explore
    assert (mixed > 5) == (draw == "per_env")


def test_the_most_probable_action_without_sampling():
    agent = make_agent(settings(**{"iris.acting.eval_sample": False}))
    obs, carry = observations(frames(3, 5)), agent.initial(5)
    first = agent.policy(carry, obs, mode="eval")[1]["action"]
    for _ in range(5):
        again = agent.policy(carry, obs, mode="eval")[1]["action"]
        np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(
    ("name", "low", "high"), [("epsilon", 0.0, 1.0), ("temperature", 1e-3, 1e3)]
)
def test_training_and_evaluation_explore_separately(name, low, high):
    obs = observations(frames(0, 64))
    for explores in ("train", "eval"):
        values = (high, low) if explores == "train" else (low, high)
        names = (f"iris.acting.{name}", f"iris.acting.eval_{name}")
        flags = dict(zip(names, values, strict=True))
        agent = in_second_epoch(make_agent(settings(**{**NO_EPSILON, **flags})))
        agent.actor_critic.online.actor.bias.data[:] = torch.tensor([20.0, 0.0, 0.0])
        for mode in ("train", "eval"):
            action = agent.policy(agent.initial(64), obs, mode)[1]["action"]
            assert action.any() == (mode == explores)


def test_burn_in_at_the_start_of_every_epoch():
    agent = in_second_epoch(make_agent())
    net, burn_in = agent.actor_critic, agent.config.actor_critic.burn_in
    a, b, c = frames(0), frames(1), frames(2)
    carry, *_ = agent.policy(agent.initial(2), observations(a, first=True))
    with torch.no_grad():
        state = net.burn_in(torch.zeros(2, burn_in, 4, 4, 3, dtype=torch.uint8))
        expected, _ = net.online(state, torch.tensor(a)[:, None])
    torch.testing.assert_close(carry.lstm.hidden, expected.hidden)
    carry, *_ = agent.policy(carry, observations(b))
    with torch.no_grad():
        expected, _ = net.online(expected, torch.tensor(b)[:, None])
    torch.testing.assert_close(carry.lstm.hidden, expected.hidden)
    # in the next epoch, burn-in on the last frames
    agent.schedule.epoch += 1
    carry, *_ = agent.policy(carry, observations(c))
    last_frames = torch.stack([torch.tensor(x) for x in (a, b)], 1)[:, -burn_in:]
    with torch.no_grad():
        expected, _ = net.online(net.burn_in(last_frames), torch.tensor(c)[:, None])
    torch.testing.assert_close(carry.lstm.hidden, expected.hidden)


def test_burn_in_on_frames_of_random_actions():
    agent = make_agent(with_burn_in(3))
    a, b, c = frames(0), frames(1), frames(2)
    carry, *_ = agent.policy(agent.initial(2), observations(a, first=True))
    carry, *_ = agent.policy(carry, observations(b))
    carry, *_ = in_second_epoch(agent).policy(carry, observations(c))
    last_frames = torch.stack([torch.tensor(x) for x in (np.zeros_like(a), a, b)], 1)
    net = agent.actor_critic
    with torch.no_grad():
        expected, _ = net.online(net.burn_in(last_frames), torch.tensor(c)[:, None])
    torch.testing.assert_close(carry.lstm.hidden, expected.hidden)


def test_episodes_within_an_epoch_start_without_burn_in():
    agent = in_second_epoch(make_agent())
    carry, *_ = agent.policy(agent.initial(2), observations(frames(0), first=True))
    carry, *_ = agent.policy(carry, observations(frames(1), last=True))
    carry, *_ = agent.policy(carry, observations(frames(2), first=True))
    with torch.no_grad():
        net = agent.actor_critic.online
        expected, _ = net(net.initial(2), torch.tensor(frames(2))[:, None])
    torch.testing.assert_close(carry.lstm.hidden, expected.hidden)
    assert torch.equal(carry.frames[:, -1], torch.tensor(frames(2)))
    assert not carry.frames[:, :-1].any()


def test_environments_are_independent():
    agent = in_second_epoch(make_agent())
    both, _, _ = agent.policy(agent.initial(2), observations(frames(0), first=True))
    alone, _, _ = agent.policy(
        agent.initial(1), observations(frames(0)[1:], first=True)
    )
    torch.testing.assert_close(both.lstm.hidden[1:], alone.lstm.hidden)


# Reports, episode losses and checkpoints


def test_reports_have_videos_and_change_nothing():
    agent = make_agent()
    feed = collected_feed(agent)
    before = {key: weights(agent, key) for key in COMPONENTS}
    report = agent.report(feed)
    for key in ("reconstruction/image", "openloop/image", "imagined/image"):
        assert report[key].ndim == 4
        assert report[key].dtype == np.uint8
    assert report["tokens/usage"].ndim == 3
    assert 0 <= report["codebook/entropy"] <= 5.01  # of 32 codes
    assert report["codebook/perplexity"] <= 32.1
    assert {f"loss/tokenizer/{k}" for k in ("l1", "l2", "worst", "commit")} <= set(
        report
    )
    for key in COMPONENTS:
        assert not changed(before[key], weights(agent, key))


def test_videos_start_with_a_real_frame():
    agent = make_agent()
    feed = collected_feed(agent)
    segment = agent._to_segment(feed("report"))
    assert not segment.real[:, 0].all()  # some start with padding
    aligned = align_to_first_frame(segment)
    assert aligned.real[:, 0].all()
    counts = aligned.real.sum(1)
    assert (counts == segment.real.sum(1).sort(descending=True).values).all()
    for image, real in zip(aligned.image, aligned.real, strict=True):
        assert image[real].flatten(1).any(1).all()
        assert not image[~real].any()
    assert segment.reward.sum() == aligned.reward.sum()
    assert segment.end.sum() == aligned.end.sum()
    first = agent.report(feed)["imagined/image"][0]  # no frame of catch is black
    side = first.shape[0]
    assert all(first[:, i : i + side].any() for i in range(0, first.shape[1], side + 2))


def full_episodes(count=4, seed=0):
    """Episodes of catch; the last one is cut short by its mask."""
    episodes = []
    for i in range(count):
        env, rng = make_env(i), np.random.default_rng(seed + i)
        obs, episode = env.reset(i), []
        while True:
            action = env.act_space["action"].sample(rng)
            episode.append({**obs, "action": action, "mask": np.bool_(True)})
            if obs["is_last"]:
                break
            obs = env.step({"action": action})
        keys = episode[0]
        episodes.append({key: np.stack([row[key] for row in episode]) for key in keys})
    batch = {k: torch.tensor(np.stack([x[k] for x in episodes])) for k in episodes[0]}
    batch["mask"][-1, 3:] = False
    return batch


def test_episode_losses_are_the_training_losses():
    agent = make_agent()
    batch = full_episodes()
    losses, mask = agent.episode_losses(batch)
    assert isinstance(agent, HasEpisodeLosses)
    assert mask.tolist() == [[False, True, True, True]] * 3 + [
        [False, True, True, False]
    ]
    segment = agent._to_segment(batch)
    both = segment.real[:, :-1] & segment.real[:, 1:]
    trained = {
        "tokenizer": agent.world.tokenizer.loss(segment, agent.rng["report"], False),
        "world_model": agent.world.dynamics_loss(segment),
    }
    for component, name, valid in (
        ("tokenizer", "l2", both),
        ("tokenizer", "worst", both),
        ("world_model", "rewards", segment.real),
        ("world_model", "ends", segment.real),
    ):
        loss = losses[f"{component}/{name}"][:, 1:]
        expected = trained[component].losses[name].mean()
        torch.testing.assert_close(loss[:, : valid.shape[1]][valid].mean(), expected)
    commit = losses["tokenizer/commit"][:, 1 : 1 + both.shape[1]]  # includes padding
    torch.testing.assert_close(
        commit[both], trained["tokenizer"].losses["commit"][both]
    )
    # the transition to the last row has no loss: the mean of those before it
    l2 = losses["tokenizer/l2"]
    torch.testing.assert_close(l2[:3, 3], l2[:3, 1:3].mean(1))


def test_episode_losses_do_not_depend_on_later_rows():
    agent = make_agent()
    batch, other = full_episodes(), full_episodes(seed=9)
    changed_later = {
        key: torch.cat([value[:, :3], other[key][:, 3:]], 1)
        for key, value in batch.items()
    }
    changed_later["image"][:, 3] = 255 - changed_later["image"][:, 3]
    first, second = (
        agent.episode_losses(batch)[0],
        agent.episode_losses(changed_later)[0],
    )
    for key, loss in first.items():
        torch.testing.assert_close(loss[:, :3], second[key][:, :3], msg=key)
    # all losses are present for short episodes, too
    for length in (1, 2):
        short = {key: value[:, :length] for key, value in batch.items()}
        losses, mask = agent.episode_losses(short)
        assert losses.keys() == first.keys()
        assert mask.shape == (4, length)


def test_a_restored_agent_continues_identically():
    agent = make_agent()
    feed = collected_feed(agent)
    for name in COMPONENTS:
        agent.update(name, [feed(name)])
    state = agent.state_dict()
    state = torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state
    )
    restored = make_agent(seed=5)
    restored.load_state_dict(state)
    batches = {name: feed(name) for name in COMPONENTS}
    for name in COMPONENTS:
        agent.update(name, [batches[name]])
        restored.update(name, [batches[name]])
        assert not changed(weights(agent, name), weights(restored, name))


@pytest.mark.parametrize("name", COMPONENTS)
def test_loading_single_components(name):
    source, target = make_agent(seed=1), make_agent(seed=2)
    before = {key: weights(target, key) for key in COMPONENTS}
    assert target.load_weights(source.state_dict(), name) == [name]
    for key in COMPONENTS:
        assert changed(before[key], weights(target, key)) == (key == name)
    assert not changed(weights(source, name), weights(target, name))


def test_components_of_another_config_are_an_error():
    other = make_agent(settings(**{"iris.actor_critic.width": 32}), seed=1)
    agent = make_agent()
    with pytest.raises(UserError, match=r"(?s)actor_critic\..*Fix:"):
        agent.load_weights(other.state_dict())
    assert agent.load_weights(other.state_dict(), "tokenizer|world_model") == [
        "tokenizer",
        "world_model",
    ]
    with pytest.raises(UserError, match="No component"):
        agent.load_weights(other.state_dict(), "encoder")
