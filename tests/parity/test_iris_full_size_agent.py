"""The actor-critic of Δ-IRIS in the original's own sizes, as the presets make it."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from iris_world_recording import as_bytes, by_rule, has, load, under

from reverie.agents.iris.actor_critic import PixelActorCritic
from reverie.convert.delta_iris.names import copy_weights, find_targets
from reverie.convert.delta_iris.weights import ACTOR_CRITIC
from reverie.nets.optim.optimizer import Optimizer
from reverie.run.config import resolve
from reverie.worlds.iris.world import IrisFrames

SIZES = [size for size in ("crafter", "atari") if has(f"fullsize_{size}")]


@pytest.fixture(scope="module", params=SIZES)
def case(request):
    """Networks of a preset, filled by the rule of the recording, and the recording."""
    data = load(f"fullsize_{request.param}")
    filled = {}
    for name, shape in zip(
        data["actor_critic/state_dict_names"],
        data["actor_critic/state_dict_shapes"],
        strict=True,
    ):
        dims = tuple(int(n) for n in re.findall(r"\d+", str(shape)))
        value = by_rule("actor_critic", str(name), dims, int(data["rule_seed"]))
        filled[str(name)] = torch.tensor(value)
    agent_config = resolve([f"iris_{request.param}"]).iris
    low, high = data["imagine/context_slice"]
    config = replace(
        agent_config.actor_critic,
        burn_in=int(high - low) - 1,
        horizon=data["imagine/actions"].shape[1],
    )
    colours, height, width = data["in/observations_uint8"].shape[2:]
    actions = len(filled["model.actor_linear.bias"])
    nets = PixelActorCritic((height, width, colours), actions, config)
    for net, prefix in ((nets.online, "model."), (nets.target, "target_model.")):
        state = copy_weights(under(filled, prefix), ACTOR_CRITIC, net.state_dict())
        net.load_state_dict(state)
    return nets, data, agent_config.training.actor_critic.opt


def close(ours, theirs, tolerance=2e-4, name=""):
    scale = max(np.abs(theirs).max(), 1e-3)
    worst = np.abs(np.asarray(ours.detach()) - theirs).max()
    assert worst <= tolerance * scale, f"{name}: off by {worst}, of {scale}"


def test_it_has_as_many_parameters(case):
    nets, data, _ = case
    count = sum(p.numel() for p in nets.online.parameters())
    assert count == int(data["param_count/actor_critic_online"])


@pytest.mark.parametrize("which", ["online", "target"])
def test_outputs(case, which):
    nets, data, _ = case
    wanted, net = under(data, f"actor_critic/{which}/"), getattr(nets, which)
    frames = as_bytes(data["in/observations_uint8"])[
        :, : wanted["logits_actions"].shape[1]
    ]
    with torch.no_grad():
        state, output = net(net.initial(len(frames)), frames)
    close(output.policy, wanted["logits_actions"], name="policy")
    close(output.value, wanted["logits_values"], name="value")
    close(state.hidden, wanted["hx_last"], name="hidden")


def test_losses_of_imagined_rollouts(case):
    nets, data, opt = case
    low, high = data["imagine/context_slice"]
    context = as_bytes(data["in/observations_uint8"])[:, low:high]
    frames = as_bytes(data["imagine/frames_uint8"])
    none = torch.zeros(len(context), 1)
    imagined = IrisFrames(
        torch.cat([context[:, -1:], frames], 1),
        torch.cat([none, torch.tensor(data["imagine/rewards"])], 1),
        torch.cat([none, torch.tensor(data["imagine/ends"])], 1).bool(),
    )
    actions = torch.tensor(data["imagine/actions"])
    loss = nets.loss(context[:, :-1], imagined, actions)
    close(loss.output.policy, data["imagine/logits_actions"], name="policy")
    wanted = data["imagine/logits_values"]
    close(loss.output.value.reshape(wanted.shape), wanted, name="value")
    close(loss.values[:, :-1], data["imagine/target_values"], name="values")
    close(loss.values[:, -1], data["imagine/value_bootstrap"], name="bootstrap")
    for name, x in loss.losses.items():
        close(x.mean(), data[f"actor_critic/loss/loss_{name}"], name=name)
    total = torch.stack([x.mean() for x in loss.losses.values()]).sum()
    learner = Optimizer(dict(nets.online.named_parameters()), opt)
    ours = dict(zip(learner.names, learner.gradients(total), strict=True))
    wanted = under(data, "actor_critic/model/grad_norm/")
    largest = max(float(norm) for norm in wanted.values())
    for name, target in find_targets(wanted, ACTOR_CRITIC).items():
        grad, norm = target.view(ours), float(wanted[name])
        if norm > 1e-4 * largest:
            assert float(grad.norm()) == pytest.approx(norm, rel=2e-3), name
            flat, n = grad.contiguous().flatten(), grad.numel()
            some = flat[[0, n // 3, 2 * n // 3, n - 1]]
            at = data[f"actor_critic/model/grad_at/{name}"]
            limit = 5e-3 * float(flat.abs().max())
            assert np.abs(np.asarray(some) - at).max() <= limit, name
        else:
            assert float(grad.norm()) <= 2e-4 * largest, name
