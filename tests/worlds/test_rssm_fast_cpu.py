"""The CPU version of the RSSM dynamics equals the plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from reverie.kernels.scan import cpu
from reverie.nets.blocks import initialize
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.rssm import fast_cpu
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics, RSSMState
from reverie.worlds.rssm.fast_cpu import CpuRSSMDynamics

CPU = torch.device("cpu")
BATCH, LENGTH, TOKENS = 6, 5, 9
SIZES: dict[str, Any] = {"deter": 16, "hidden": 12, "stoch": 5, "classes": 4}
INDEX = {"action": Space(np.int32, (), 0, 3)}
MIXED = {"axes": Space(np.float32, (2,), -1, 1), "keys": Space(np.int32, (2,), 1, 3)}
ONE_BASED = {"action": Space(np.int32, (), 1, 4)}

OTHER_CONFIGS: list[dict[str, Any]] = [
    {"dynlayers": 2},
    {"obslayers": 2},
    {"absolute": True},
    {"unimix": 0.0},
    {"norm": "layer"},
    {"act": "relu"},
]
"""Configs without a CPU version."""


def make(spaces: Any = INDEX, **options: Any) -> RSSMDynamics:
    config = RSSMConfig(**{**SIZES, "blocks": 4, "imglayers": 2, **options})
    dyn = RSSMDynamics(TOKENS, spaces, config)
    generator = torch.Generator().manual_seed(0)
    initialize(dyn, generator)
    for parameter in dyn.parameters():  # biases other than zero, scales other than one
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return dyn


def make_state(dtype: torch.dtype = torch.float32) -> RSSMState:
    generator = torch.Generator().manual_seed(1)
    deter = torch.randn(BATCH, SIZES["deter"], generator=generator)
    shape = (BATCH, SIZES["stoch"])
    index = torch.randint(SIZES["classes"], shape, generator=generator)
    stoch = torch.nn.functional.one_hot(index, SIZES["classes"])
    return RSSMState(deter.to(dtype), stoch.to(dtype))


def observe(dyn: RSSMDynamics, first: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return outputs and gradients of parameters and inputs."""
    generator = torch.Generator().manual_seed(2)
    shape = (BATCH, LENGTH, TOKENS)
    tokens = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
    actions = {"action": torch.randint(3, shape[:2], generator=generator)}
    state = RSSMState(*(x.requires_grad_() for x in make_state(dtype)))
    rng = Rng(0, "test", CPU)
    states, logits = dyn.observe(state, tokens, actions, first, rng)
    outputs = (*states, logits)
    grads = [torch.randn(x.shape, generator=generator).to(dtype) for x in outputs]
    named = dyn.named_parameters()
    inputs = {k: x for k, x in named if not k.startswith("prior")}
    inputs |= {"tokens": tokens, "deter": state.deter, "stoch": state.stoch}
    result = torch.autograd.grad(outputs, list(inputs.values()), grads)
    return outputs, dict(zip(inputs, result, strict=True)), rng.state_dict()


@pytest.mark.parametrize("resets", ["none", "some", "all"])
def test_outputs_and_gradients_of_a_sequence_equal_the_plain_ones(resets):
    first = torch.full((BATCH, LENGTH), resets == "all")
    if resets == "some":
        first[:, 0] = first[2, 3] = True
    dyn = make().double()
    outputs, grads, state = observe(dyn, first, torch.float64)
    dyn.__class__ = CpuRSSMDynamics
    fast_outputs, fast_grads, fast_state = observe(dyn, first, torch.float64)
    for fast, plain in zip(fast_outputs, outputs, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-10, atol=1e-12)
    for key, plain in grads.items():  # probabilities are computed in float32
        torch.testing.assert_close(
            fast_grads[key],
            plain,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda m, k=key: f"{k}: {m}",
        )
    assert torch.equal(state["state"], fast_state["state"])


def test_a_sequence_in_float32_is_computed_by_the_cpu_scan(monkeypatch):
    calls, scan = [], cpu.posterior_scan
    monkeypatch.setattr(cpu, "posterior_scan", lambda *x: calls.append(x) or scan(*x))
    dyn, first = make(), torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    outputs, grads, _ = observe(dyn, first, torch.float32)
    assert not calls
    dyn.__class__ = CpuRSSMDynamics
    fast_outputs, fast_grads, _ = observe(dyn, first, torch.float32)
    assert len(calls) == 1
    for fast, plain in zip(fast_outputs, outputs, strict=True):
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-5)
    for key, plain in grads.items():
        torch.testing.assert_close(fast_grads[key], plain, rtol=1e-4, atol=1e-4)


def test_gradients_can_be_computed_twice():
    dyn = make()
    dyn.__class__ = CpuRSSMDynamics
    tokens = torch.randn(BATCH, LENGTH, TOKENS)
    actions = {"action": torch.zeros(BATCH, LENGTH, dtype=torch.int32)}
    first = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    rng = Rng(0, "test", CPU)
    states, logits = dyn.observe(make_state(), tokens, actions, first, rng)
    loss = (states.deter.sum() + logits.square().sum()) * states.stoch.sum()
    weights = [dyn.dynin0.weight, dyn.dyngru.weight, dyn.obs0norm.scale]
    once = torch.autograd.grad(loss, weights, retain_graph=True)
    for a, b in zip(torch.autograd.grad(loss, weights), once, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("spaces", [INDEX, MIXED, ONE_BASED])
@pytest.mark.parametrize("horizon", [0, 1, 4])
def test_imagined_states_and_actions_equal_the_plain_ones(spaces, horizon):
    def policy(state: RSSMState) -> dict[str, torch.Tensor]:
        logits = state.deter[:, :4].unflatten(-1, (2, 2))
        keys = rng.categorical(logits.softmax(-1)).int()
        if spaces is MIXED:
            return {"axes": 2 * state.deter[:, :2], "keys": keys + 1}
        return {"action": keys[:, 0] + keys[:, 1] + spaces["action"].low.min()}

    dyn, rollouts = make(spaces), []
    for cls in (RSSMDynamics, CpuRSSMDynamics):
        dyn.__class__, rng = cls, Rng(0, "test", CPU)
        with torch.no_grad():
            rollouts.append(dyn.imagine(make_state(), policy, horizon, rng))
    plain, fast = rollouts
    for a, b in zip(fast.states, plain.states, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    for key, actions in plain.actions.items():
        torch.testing.assert_close(fast.actions[key], actions, rtol=1e-5, atol=1e-5)
    features = dyn.features(fast.states)
    if horizon > 1:
        assert features.data_ptr() == fast.states.deter.data_ptr()  # no copy
    assert torch.equal(features, RSSMDynamics.features(dyn, fast.states))


@pytest.mark.parametrize("kind", ["index", "missing", "one-hot"])
@pytest.mark.parametrize("limit", [2, 256])
def test_discrete_actions_are_given_as_indices_or_one_hot(monkeypatch, kind, limit):
    monkeypatch.setattr(fast_cpu, "MAX_TABLE_CLASSES", limit)
    index = torch.tensor([0, 1, 2, 2, 1, 0], dtype=torch.int32)
    if kind == "missing":
        index[1] = -1
    action = torch.eye(3)[index] if kind == "one-hot" else index
    dyn, states = make(), []
    for cls in (RSSMDynamics, CpuRSSMDynamics):
        dyn.__class__, rng = cls, Rng(0, "test", CPU)
        with torch.no_grad():
            rollout = dyn.imagine(make_state(), lambda _: {"action": action}, 3, rng)
        states.append(tuple(rollout.states))
    torch.testing.assert_close(states[1], states[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [*OTHER_CONFIGS, {"deter": 2 * cpu.MAX_DETER}])
def test_other_configs_use_the_plain_code(monkeypatch, options):
    monkeypatch.setattr(cpu, "posterior_scan", None)
    monkeypatch.setattr(cpu, "embed_state", None)
    dyn = make(**options)
    dyn.__class__ = CpuRSSMDynamics
    state, rng = dyn.initial(BATCH, torch.float32), Rng(0, "test", CPU)
    tokens = torch.randn(BATCH, LENGTH, TOKENS)
    actions = {"action": torch.zeros(BATCH, LENGTH, dtype=torch.int32)}
    first = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    states, _ = dyn.observe(state, tokens, actions, first, rng)
    assert states.deter.shape == (BATCH, LENGTH, dyn.config.deter)
    with torch.no_grad():
        action = {"action": torch.zeros(BATCH, dtype=torch.int32)}
        rollout = dyn.imagine(state, lambda _: action, 2, rng)
    assert rollout.states.deter.shape == (BATCH, 3, dyn.config.deter)
