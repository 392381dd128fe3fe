"""Plan2Explore of Δ-IRIS: its losses, its rewards, its policy and what it trains."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from iris_helpers import (
    changed,
    collected_feed,
    frames,
    in_second_epoch,
    make_agent,
    observations,
    settings,
    weights,
)

from reverie.agents.explore import ExploreConfig
from reverie.agents.iris.agent import Iris
from reverie.agents.iris.config import COMPONENTS
from reverie.api import UserError
from reverie.nets.ensemble import TokenHeadsConfig

SMALL = {
    "iris.tokenizer.tokens": 4,
    "iris.training.world_model.batch": 4,
    "iris.training.actor_critic.batch": 4,
}
EXPLORER = ("ensemble", "explore_actor_critic")
PARTNER = {"world_model": "ensemble", "actor_critic": "explore_actor_critic"}


def make(seed=0, flags=None, **explore) -> Iris:
    explore = {"heads": TokenHeadsConfig(3, 1, 8), **explore}
    config = ExploreConfig("plan2explore", **explore)
    return make_agent(settings(**SMALL, **(flags or {})), seed, explore=config)


def head_logits(agent, inputs):
    """The logits of all heads, one after the other."""
    heads, (layer,) = agent.explorer.heads, agent.explorer.heads.hidden
    logits = []
    for i in range(len(layer.weight)):
        x = inputs @ layer.weight[i].T
        x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(
            x.var(-1, correction=0, keepdim=True) + 1e-3
        )
        x = torch.nn.functional.silu(x * layer.scale[i] + layer.shift[i])
        logits.append(x @ heads.out.weight[i].T + heads.out.bias[i])
    return torch.stack(logits)


def divergence(logits):
    """The Jensen-Shannon divergence over heads, averaged over tokens."""
    probs = logits.double().softmax(-1)
    mean = probs.mean(0)
    each = (probs * (probs / mean).log()).sum(-1)  # KL from every head to the mean
    return each.mean(0).mean(-1).float()


def test_the_heads_predict_the_tokens_from_the_outputs_of_the_transformer():
    agent = make()
    world = agent.world
    segment = agent._to_segment(collected_feed(agent)("world_model"))
    segment.real[0, 2:] = False
    tokens = world.tokenizer.tokenize(segment.image, segment.action)
    outputs = world.dynamics_loss(segment).states
    losses, metrics = agent.explorer.head_loss(outputs, tokens, segment)
    rows, length = segment.real.shape
    blocks = outputs.reshape(rows, length, 6, -1)  # I-token, action and four tokens
    logits = head_logits(agent, blocks[:, :-1, 1:5])
    chosen = torch.nn.functional.one_hot(tokens, logits.shape[-1])
    expected = -(logits.log_softmax(-1) * chosen).sum(-1).mean((0, -1))
    real = segment.real[:, :-1]
    torch.testing.assert_close(losses["tokens"].mean(), expected[real].mean())
    assert not losses["tokens"][0, 2:].any()
    disagreement = divergence(logits)[real].mean()
    torch.testing.assert_close(metrics["disagreement"], disagreement)
    world_grads = torch.autograd.grad(
        losses["tokens"].sum(), list(world.dynamics.parameters()), allow_unused=True
    )
    assert all(grad is None for grad in world_grads)


def test_rewards_of_imagined_steps():
    agent = make(intrinsic=2.0, extrinsic=3.0)
    world, rng = agent.world, agent.rng["train"]
    segment = agent._to_segment(collected_feed(agent)("actor_critic"))
    state = world.state_from_frames(segment.image, segment.action[:, :-1])
    step = world.step(state, segment.action[:, -1], rng)
    outputs = torch.stack(step.outputs, 1)
    assert outputs.shape[:2] == step.tokens.shape
    torch.testing.assert_close(world.dynamics.latents(outputs), step.latent_logits)
    expected = divergence(head_logits(agent, outputs))
    assert expected.min() > 0
    seen = []
    reward = agent.explorer.reward_fn(seen)(step)
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(reward, 2 * expected + 3 * step.state.reward)


def test_the_explorer_is_trained_on_its_own_rollouts_and_rewards(monkeypatch):
    agent = make()
    nets, seen = agent.explorer.actor_critic, []
    loss = nets.loss
    monkeypatch.setattr(nets, "loss", lambda *x: seen.append(x) or loss(*x))
    segment = agent._to_segment(collected_feed(agent)("actor_critic"))
    losses = agent.losses("actor_critic", segment)
    assert list(losses) == ["actor_critic", "explore_actor_critic"]
    ((_, frames, *_),) = seen
    reward = frames.reward
    assert reward[:, 1:].min() > 0  # divergences; those of the task are near zero
    assert reward[:, 1:].max() <= math.log(3)
    intrinsic = losses["explore_actor_critic"].metrics["intrinsic_reward"]
    torch.testing.assert_close(intrinsic, reward[:, 1:].mean())


@pytest.mark.parametrize("name", COMPONENTS)
def test_an_update_leaves_the_agent_as_without_exploration(name):
    agent, plain = make(), make_agent(settings(**SMALL))
    feed = collected_feed(plain)
    batch = feed(name)
    before = {key: weights(agent, key) for key in EXPLORER}
    metrics, other = agent.update(name, [batch]), plain.update(name, [batch])
    for key, value in other.items():
        assert float(metrics[key]) == float(value), key
    for key in COMPONENTS:
        assert not changed(weights(plain, key), weights(agent, key))
    for key in EXPLORER:
        is_trained = key == PARTNER.get(name)
        assert changed(before[key], weights(agent, key)) == is_trained
        assert (f"{key}/opt/loss" in metrics) == is_trained
    assert agent.parameter_count() > plain.parameter_count()


def test_accumulated_gradients_are_the_mean_over_batches():
    flags = {"iris.training.world_model.accumulate": 2}
    agent = make(flags=flags)
    batches = [collected_feed(agent, seed=seed)("world_model") for seed in (0, 1)]
    losses = []
    for batch in batches:
        heads = agent.losses("world_model", agent._to_segment(batch))["ensemble"]
        losses.append(float(heads.losses["tokens"].detach().mean()))
    metrics = agent.update("world_model", batches)
    assert float(metrics["loss/ensemble/tokens"]) == pytest.approx(np.mean(losses))


def test_a_nonfinite_ensemble_is_named_and_does_not_stop_the_task_policy():
    agent = make()
    feed = collected_feed(agent)
    agent.explorer.heads.out.bias.data.fill_(torch.inf)
    before = {key: weights(agent, key) for key in agent.components()}
    stats = [x.clone() for x in agent.explorer.running_stats("actor_critic")]
    for name in ("world_model", "actor_critic"):
        metrics = agent.update(name, [feed(name)])
        assert float(metrics["opt/consecutive_skips"]) == 1
        assert changed(before[name], weights(agent, name))
    assert "loss/ensemble/tokens" in agent.nonfinite()
    assert not changed(before["ensemble"], weights(agent, "ensemble"))
    online = agent.explorer.actor_critic.online.state_dict()
    for key, value in online.items():
        assert torch.equal(before["explore_actor_critic"][f"online.{key}"], value)
    after = agent.explorer.running_stats("actor_critic")
    assert stats
    assert all(torch.equal(*pair) for pair in zip(stats, after, strict=True))


def choose(net, action):
    """Let a network always choose this action."""
    net.actor.weight.data.zero_()
    net.actor.bias.data.fill_(-100.0)
    net.actor.bias.data[action] = 100.0


def test_only_the_mode_explore_uses_the_exploration_policy():
    agent = in_second_epoch(make(flags={"iris.acting.epsilon": 0.0}))
    choose(agent.actor_critic.online, 1)
    choose(agent.explorer.actor_critic.online, 2)
    for mode, expected in (("explore", 2), ("train", 1), ("eval", 1), ("greedy", 1)):
        obs = observations(frames(0), first=True)
        _, action, _ = agent.policy(agent.initial(2), obs, mode)
        assert np.array_equal(action["action"], [expected] * 2)


def test_the_first_epoch_is_random_with_an_exploration_policy():
    agent = make()
    choose(agent.explorer.actor_critic.online, 2)
    carry, obs = agent.initial(50), observations(frames(0, 50), first=True)
    carry, action, _ = agent.policy(carry, obs, "explore")
    assert set(action["action"]) == {0, 1, 2}
    assert set(carry.burn_in_id.tolist()) == {-1}


def test_the_lstm_state_is_computed_again_if_another_policy_continues():
    agent = in_second_epoch(make())
    carry = agent.initial(2)
    for t in range(2):
        obs = observations(frames(t), first=t == 0)
        carry, _, _ = agent.policy(carry, obs, "explore")
    last = observations(frames(2))
    switched, _, _ = agent.policy(carry, last, "train")
    fresh = carry._replace(burn_in_id=torch.full((2,), -1))  # no burn-in so far
    expected, _, _ = agent.policy(fresh, last, "train")
    for one, two in zip(switched.lstm, expected.lstm, strict=True):
        assert torch.equal(one, two)
    continued, _, _ = agent.policy(carry, last, "explore")
    assert not torch.equal(continued.lstm.hidden, switched.lstm.hidden)
    assert torch.equal(continued.burn_in_id, carry.burn_in_id)
    assert not torch.equal(switched.burn_in_id, carry.burn_in_id)


def test_without_an_exploration_policy_the_mode_explore_is_refused():
    with pytest.raises(UserError, match="--configs plan2explore"):
        make_agent().policy(None, {}, "explore")


def test_reports_have_the_metrics_of_the_heads():
    agent = make()
    metrics = agent.report(collected_feed(agent))
    assert {"loss/ensemble/tokens", "ensemble/disagreement"} <= metrics.keys()


def test_tensors_that_the_losses_change_can_be_restored():
    agent = make()
    feed = collected_feed(agent)
    agent.schedule.add_env_steps(10_000)
    while agent.schedule.component != "actor_critic":
        agent.schedule.add_update()
    segment = agent._to_segment(feed("actor_critic"))
    tensors, (rng,) = agent.state_changed_by_loss()
    saved, state = [x.clone() for x in tensors], rng.state_dict()
    before = {key: weights(agent, key) for key in agent.components()}
    agent.update("actor_critic", [feed("actor_critic")])  # the target differs after it
    for tensor, old in zip(tensors, saved, strict=True):
        tensor.copy_(old)
    rng.load_state_dict(state)
    first = agent.losses("actor_critic", segment)
    assert any(not torch.equal(*x) for x in zip(tensors, saved, strict=True))
    for tensor, old in zip(tensors, saved, strict=True):
        tensor.copy_(old)
    rng.load_state_dict(state)
    second = agent.losses("actor_critic", segment)
    for name, (losses, _) in first.items():
        for key, loss in losses.items():
            assert torch.equal(loss, second[name].losses[key])
    assert before.keys() == agent.components().keys()


def test_weights_of_an_agent_without_explorer_can_be_loaded_by_component():
    plain, agent = make_agent(settings(**SMALL), seed=1), make()
    with pytest.raises(UserError, match="no component 'ensemble'") as error:
        agent.load_weights(plain.state_dict())
    pattern = str(error.value).split("--run.from_components ")[1].split("'")[1]
    assert agent.load_weights(plain.state_dict(), pattern) == list(COMPONENTS)
    names = agent.load_weights(plain.state_dict(), "(?!ensemble|explore).*")
    assert names == list(COMPONENTS)
    assert not changed(weights(plain, "world_model"), weights(agent, "world_model"))


@pytest.mark.slow
def test_the_heads_agree_more_about_frames_that_they_were_trained_on():
    agent = make()
    feed = collected_feed(agent)
    segment = agent._to_segment(feed("world_model"))

    def disagreement():
        tokens = agent.world.tokenizer.tokenize(segment.image, segment.action)
        outputs = agent.world.dynamics_loss(segment).states
        metrics = agent.explorer.head_loss(outputs, tokens, segment)[1]
        return float(metrics["disagreement"])

    before = disagreement()
    for _ in range(120):
        agent.update("world_model", [feed("world_model")])
    assert disagreement() < 0.5 * before


@pytest.mark.slow
@pytest.mark.parametrize("target", [0, 2])
def test_the_exploration_policy_learns_to_choose_uncertain_actions(monkeypatch, target):
    """The heads disagree only about the frames after one of the three actions."""
    flags = {"iris.actor_critic.entropy_scale": 0.001, "iris.acting.epsilon": 0.0}
    agent = in_second_epoch(make(flags=flags))
    feed, actions, step = collected_feed(agent), [], agent.world.step

    def record(state, action, *rest, **options):
        actions.append(action)
        return step(state, action, *rest, **options)

    monkeypatch.setattr(agent.world, "step", record)
    monkeypatch.setattr(
        agent.explorer, "intrinsic_reward", lambda step: (actions[-1] == target).float()
    )
    for _ in range(60):
        agent.update("actor_critic", [feed("actor_critic")])
    obs = observations(frames(0, 200), first=True)
    _, action, _ = agent.policy(agent.initial(200), obs, "explore")
    assert np.mean(action["action"] == target) > 0.8
