"""Learned scales of the losses (HarmonyDream)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from dreamer_helpers import TINY, RandomFeed, changed, flatten, make

from reverie.agents.dreamer.config import DreamerConfig
from reverie.agents.dreamer.harmony import Harmony
from reverie.nets.optim.optimizer import Optimizer

LOSSES = {"image": 8.0, "vector": 2.0, "rew": 0.5, "con": 0.3, "dyn": 3.0, "rep": 0.2}
HARMONY = replace(TINY, harmony=True)


def tensors():
    return {k: torch.tensor(x, requires_grad=True) for k, x in LOSSES.items()}


def make_harmony(*sigma: float) -> Harmony:
    harmony = Harmony(["image", "vector"])
    harmony.sigma.data.copy_(torch.tensor(sigma))
    return harmony


def test_losses_are_divided_by_their_scales():
    harmony, losses = make_harmony(math.log(4), math.log(0.5), math.log(2)), tensors()
    total = harmony.scale_losses(losses)
    logs = math.log(5) + math.log(1.5) + math.log(3)  # one for both KL losses
    expected = (8 + 2) / 4 + 0.5 / 0.5 + 0.3 + (3 + 0.2) / 2 + logs
    assert total.item() == pytest.approx(expected)
    gradients = torch.autograd.grad(total, list(losses.values()))
    assert [float(x) for x in gradients] == pytest.approx(
        [1 / 4, 1 / 4, 2, 1, 0.5, 0.5]
    )


def test_gradients_of_the_scales():
    harmony, losses = make_harmony(math.log(4), math.log(0.5), math.log(2)), tensors()
    loss = harmony.loss(losses)
    assert loss.item() == pytest.approx(harmony.scale_losses(losses).item() - 0.3)
    (gradient,) = torch.autograd.grad(loss, [harmony.sigma])
    expected = [-10 / 4 + 4 / 5, -0.5 / 0.5 + 0.5 / 1.5, -3.2 / 2 + 2 / 3]
    assert gradient.tolist() == pytest.approx(expected)


@pytest.mark.extended
def test_scales_settle_within_an_atari_100k_run():
    harmony = make_harmony(0.0, 0.0, 0.0)
    config = DreamerConfig().harmony_opt
    opt = Optimizer({"sigma": harmony.sigma}, config, ())
    losses = {"image": 0.02, "rew": 1.0, "dyn": 2000.0}
    best = [math.log((x + math.sqrt(x**2 + 4 * x)) / 2) for x in losses.values()]
    constants = {name: torch.tensor(x) for name, x in losses.items()}
    for _ in range(4000):  # of 27,500
        opt.update(harmony.loss(constants))
    assert harmony.sigma.tolist() == pytest.approx(best, abs=0.05)


@pytest.mark.parametrize("optimizers", ["joint", "separate"])
def test_an_update_trains_the_scales(optimizers):
    agent = make(replace(HARMONY, optimizers=optimizers))
    feed = RandomFeed(agent)
    before = flatten(agent.state_dict())
    metrics = agent.train(feed)
    after = flatten(agent.state_dict())
    assert {"harmony", "harmony_opt", "dec", "pol"} <= changed(before, after)
    assert metrics["harmony/observation"] == 1  # of this update
    lr = HARMONY.harmony_opt.lr
    # the first step of Adam has the size of the learning rate: no clipping
    assert agent.harmony.sigma.abs().tolist() == pytest.approx([lr] * 3, rel=1e-4)
    assert not any("harmony" in name for name in agent.opt.names)
    feed.change["vector"] = lambda x: x * torch.nan
    sigma = agent.harmony.sigma.clone()
    agent.train(feed)  # is skipped
    assert torch.equal(agent.harmony.sigma, sigma)
    assert torch.isfinite(agent.harmony_opt.moments["mu"][0]).all()


def test_scales_of_one_change_nothing_but_the_logarithms():
    plain, harmony = make(), make(HARMONY)
    losses = {k: torch.full((3, 6), x) for k, x in LOSSES.items()}
    difference = harmony.total_loss(losses) - plain.total_loss(losses)
    assert difference.item() == pytest.approx(3 * math.log(2), rel=1e-4)
    actor = {"policy": torch.ones(3, 6)}
    assert harmony.total_loss(actor) == plain.total_loss(actor)
