"""Plan2Explore of Dreamer: its losses, its rewards and what its update trains."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dreamer_helpers import (
    ACT,
    CPU,
    OBS,
    TINY,
    RandomFeed,
    changed,
    flatten,
    observations,
)
from dreamerv3_torch_helpers import settings as torch_settings

from reverie.agents.dreamer.actor_critic import ActorCritic
from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.dreamer.explorer import Explorer
from reverie.agents.explore import ExploreConfig
from reverie.agents.options import BuildOptions
from reverie.api import UserError
from reverie.nets.ensemble import EnsembleConfig
from reverie.nets.tree import tree_map

SMALL = EnsembleConfig(models=3, layers=1, units=8)
CONFIGS = {
    "dreamerv3": TINY,
    "dreamerv3_torch": torch_settings(),
    "dreamerv3_torch_dynamics": torch_settings("dynamics"),
    "separate": replace(TINY, optimizers="separate", repval_loss=False),
}
OWN = {"ensemble", "explore_pol", "explore_val", "explore_retnorm", "explore_opt"}


def make(config=TINY, seed=0, **explore) -> Dreamer:
    explore = {"policy": "plan2explore", "ensemble": SMALL, **explore}
    return Dreamer(
        OBS, ACT, config, BuildOptions(CPU, seed=seed, explore=ExploreConfig(**explore))
    )


def states_and_batch(agent):
    _, state, batch = agent.prepare_batch("train", RandomFeed(agent)("train"))
    with torch.no_grad():
        states = agent.world.loss(state, batch, agent.rng["train"]).states
    return states, batch


def members(agent, inputs):
    """The predictions of all members, one after the other."""
    ensemble = agent.explorer.ensemble
    predictions = []
    for i in range(len(ensemble.out.weight)):
        x = inputs
        for layer in ensemble.hidden:
            x = x @ layer.weight[i].T
            x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(
                x.var(-1, correction=0, keepdim=True) + 1e-3
            )
            x = torch.nn.functional.silu(x * layer.scale[i] + layer.shift[i])
        predictions.append(x @ ensemble.out.weight[i].T + ensemble.out.bias[i])
    return predictions


@pytest.mark.parametrize("target", ["stoch", "deter", "embed", "feat"])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_the_ensemble_predicts_the_target_some_steps_ahead(target, offset):
    agent = make(target=target, offset=offset)
    states, batch = states_and_batch(agent)
    targets = {
        "stoch": states.stoch.flatten(-2),
        "deter": states.deter,
        "embed": agent.world.enc(batch, torch.float32),
        "feat": torch.cat([states.deter, states.stoch.flatten(-2)], -1),
    }
    steps = TINY.batch_length - offset
    expected = torch.zeros(TINY.batch_size, steps)
    goal = targets[target][:, offset:]
    for prediction in members(agent, targets["feat"][:, :steps]):
        error = 0.5 * (prediction - goal).square() + 0.5 * math.log(2 * math.pi)
        expected += error.sum(-1) / 3
    loss = agent.explorer.ensemble_loss(agent.world, states, batch)
    torch.testing.assert_close(loss, expected.detach(), check_stride=False)


def test_the_loss_of_dreamerv3_torch():
    sizes = replace(SMALL, output="tanh", std=0.9)
    agent = make(torch_settings(), ensemble=sizes)
    states, batch = states_and_batch(agent)
    feat = agent.world.features(states)
    goal = states.stoch.flatten(-2)[:, 1:]
    losses = []
    for prediction in members(agent, feat[:, :-1]):
        dist = torch.distributions.Normal(torch.tanh(prediction), 0.9)
        losses.append(-dist.log_prob(goal).sum(-1))
    loss = agent.explorer.ensemble_loss(agent.world, states, batch)
    torch.testing.assert_close(loss, torch.stack(losses).mean(0))


def test_an_ensemble_with_actions_gets_the_action_chosen_in_the_row():
    agent = make(action_conditioned=True)
    states, batch = states_and_batch(agent)
    action = torch.nn.functional.one_hot(batch["prevact"]["action"].long(), 4).float()
    inputs = torch.cat([agent.world.features(states)[:, :-1], action[:, 1:]], -1)
    goal, expected = states.stoch.flatten(-2)[:, 1:], 0.0
    for prediction in members(agent, inputs):
        error = 0.5 * (prediction - goal).square() + 0.5 * math.log(2 * math.pi)
        expected = expected + error.sum(-1) / 3
    loss = agent.explorer.ensemble_loss(agent.world, states, batch)
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("conditioned", [False, True])
def test_rewards_of_imagined_states(conditioned):
    agent = make(
        action_conditioned=conditioned, log=False, intrinsic=2.0, extrinsic=3.0
    )
    generator = torch.manual_seed(0)
    feat = torch.randn(2, 4, agent.world.width, generator=generator)
    actions = {"action": torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])}
    inputs = feat
    if conditioned:
        onehot = torch.nn.functional.one_hot(actions["action"], 4).float()
        inputs = torch.cat([feat, onehot], -1)
    deviation = torch.stack(members(agent, inputs)).std(0).mean(-1)
    metrics = {}
    reward, cont = agent.explorer.reward_fn(agent.world, metrics)(feat, actions)
    task_reward, task_cont = agent.world.reward_and_cont(feat)
    torch.testing.assert_close(cont, task_cont)
    intrinsic = deviation[:, :-1] if conditioned else deviation[:, 1:]
    expected = 2 * intrinsic + 3 * task_reward[:, 1:]
    torch.testing.assert_close(reward[:, 1:], expected)
    torch.testing.assert_close(metrics["disagreement"], deviation.mean().detach())
    torch.testing.assert_close(metrics["intrinsic_reward"], intrinsic.mean().detach())


def test_the_reward_is_the_logarithm_of_the_disagreement():
    agent = make()
    feat = torch.randn(2, 3, agent.world.width, generator=torch.manual_seed(0))
    reward, disagreed = agent.explorer.intrinsic_reward(feat, {})
    torch.testing.assert_close(reward, torch.log(disagreed))


@pytest.mark.parametrize("name", CONFIGS)
def test_an_update_trains_the_explorer_and_leaves_the_agent_as_without_it(name):
    agent = make(CONFIGS[name])
    plain = Dreamer(OBS, ACT, CONFIGS[name], BuildOptions(CPU))
    before = flatten(agent.state_dict())
    metrics = agent.train(RandomFeed(agent))
    other = plain.train(RandomFeed(plain))
    after = flatten(agent.state_dict())
    assert changed(before, after) >= OWN
    expected = flatten(plain.state_dict())
    for key in expected:
        if not key.startswith("rng/train"):  # the explorer draws after the update
            assert torch.equal(after[key], expected[key]), key
    totals = ("opt/loss", "opt/skipped", "opt/consecutive_skips")
    assert {k: float(metrics[k]) for k in other if k not in totals} == {
        k: float(x) for k, x in other.items() if k not in totals
    }
    parts = [f"opt/explore_{k}/loss" for k in ("ensemble", "actor", "critic")]
    own = sum(float(metrics[key]) for key in parts)
    assert float(metrics["opt/loss"]) == pytest.approx(float(other["opt/loss"]) + own)
    for key in ("disagreement", "intrinsic_reward", "ret", "adv"):
        assert torch.isfinite(metrics[f"explore/{key}"])
    assert agent.parameter_count() > plain.parameter_count()


@pytest.mark.parametrize("name", ["dreamerv3", "dreamerv3_torch"])
def test_the_explorer_is_trained_on_intrinsic_rewards(name):
    agent = make(CONFIGS[name], log=False)
    seen = []
    losses = agent.explorer.actor_critic.imag_loss
    agent.explorer.actor_critic.imag_loss = lambda imagined, update: (
        seen.append(imagined) or losses(imagined, update)
    )
    ensemble = {k: v.clone() for k, v in agent.explorer.ensemble.state_dict().items()}
    agent.train(RandomFeed(agent))
    ((_, feat, reward, _),) = seen
    assert any(
        not torch.equal(value, ensemble[key])
        for key, value in agent.explorer.ensemble.state_dict().items()
    )
    # with the ensemble after its own step
    deviation = torch.stack(members(agent, feat)).std(0).mean(-1)
    torch.testing.assert_close(reward, deviation)


@pytest.mark.parametrize("name", ["dreamerv3", "dreamerv3_torch"])
def test_embeddings_are_predicted_as_they_were_before_the_update(name, monkeypatch):
    agent = make(CONFIGS[name], target="embed")
    seen, loss = [], agent.explorer.ensemble_loss
    monkeypatch.setattr(
        agent.explorer, "ensemble_loss", lambda *x: seen.append(x) or loss(*x)
    )
    feed = RandomFeed(agent)
    encoder = copy.deepcopy(agent.world.enc)
    agent.train(feed)
    ((world, _, batch, embed),) = seen
    torch.testing.assert_close(embed, encoder(batch, torch.float32).detach())
    assert not torch.equal(embed, world.target("embed", None, batch))


@pytest.mark.parametrize("name", ["dreamerv3", "dreamerv3_torch"])
def test_a_skipped_update_does_not_change_the_explorer(name):
    agent = make(CONFIGS[name])
    feed = RandomFeed(agent)
    agent.train(feed)
    feed.change["reward"] = lambda x: torch.full_like(x, torch.nan)
    before = flatten(agent.state_dict())
    metrics = agent.train(feed)
    assert float(metrics["opt/consecutive_skips"]) == 1
    after = flatten(agent.state_dict())
    counters = {key for key in before if key.endswith(("skipped/", "skips/"))}
    rng = {key for key in before if key.startswith("rng/")}
    different = {k for k in before if not torch.equal(before[k], after[k])}
    assert different <= counters | rng


def test_a_nonfinite_ensemble_is_named_and_does_not_stop_the_task_policy():
    agent = make()
    agent.explorer.ensemble.out.bias.data.fill_(torch.inf)
    before = flatten(agent.state_dict())
    metrics = agent.train(RandomFeed(agent))
    assert float(metrics["opt/consecutive_skips"]) == 1
    assert "loss/explore_ensemble" in agent.nonfinite()
    parts = changed(before, flatten(agent.state_dict()))
    assert {"enc", "pol", "val"} <= parts
    assert not parts & {"ensemble", "explore_pol", "explore_val", "explore_retnorm"}


def test_only_the_mode_explore_uses_the_exploration_policy():
    agent = make()
    logits = agent.explorer.actor_critic.pol.head["action"]["logits"]
    logits.weight.data.zero_()
    logits.bias.data.copy_(torch.tensor([0.0, 0.0, 100.0, 0.0]))
    task = agent.actor_critic.pol.head["action"]["logits"]
    task.weight.data.zero_()
    task.bias.data.copy_(torch.tensor([0.0, 100.0, 0.0, 0.0]))
    for mode, expected in (("explore", 2), ("train", 1), ("eval", 1), ("greedy", 1)):
        _, action, _ = agent.policy(agent.initial(2), observations(), mode)
        assert np.array_equal(action["action"], [expected] * 2)


def test_reports_have_the_metrics_of_the_explorer_and_train_nothing():
    agent = make()
    before = flatten(agent.state_dict())
    metrics = agent.report(RandomFeed(agent))
    after = flatten(agent.state_dict())
    assert {"loss/explore_ensemble", "explore/disagreement"} <= metrics.keys()
    assert changed(before, after) <= {"rng", "carry"}


def test_weights_of_an_agent_without_explorer_can_be_loaded_by_component():
    plain = Dreamer(OBS, ACT, TINY, BuildOptions(CPU, seed=1))
    agent = make()
    with pytest.raises(UserError, match="no component 'ensemble'"):
        agent.load_weights(plain.state_dict())
    names = agent.load_weights(plain.state_dict(), "(?!ensemble|explore).*")
    assert set(names) == set(plain.components())


def test_a_world_without_targets_and_too_short_sequences_are_refused():
    with pytest.raises(UserError, match=r"--explore\.offset 1"):
        make(offset=5)
    world, settings = SimpleNamespace(width=3), ExploreConfig("plan2explore")
    with pytest.raises(UserError, match=r"--dreamer\.world rssm"):
        Explorer(world, ACT, TINY, settings, ActorCritic)


def test_gradients_of_dynamics_go_through_the_ensemble():
    agent = make(torch_settings("dynamics"), log=False)
    states, _ = states_and_batch(agent)
    start = tree_map(lambda x: x[:, :1].flatten(0, 1), states)
    actor_critic = agent.explorer.actor_critic
    rollout = actor_critic.imagine(agent.world, start, agent.rng["train"])
    feat = agent.world.features(rollout.states)
    reward, _ = agent.explorer.reward_fn(agent.world, {})(feat, rollout.actions)
    grads = torch.autograd.grad(
        reward[:, 1:].sum(), list(actor_critic.pol.parameters())
    )
    assert any(grad.abs().sum() > 0 for grad in grads)
