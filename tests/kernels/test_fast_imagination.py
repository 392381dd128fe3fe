"""Kernels of imagination against the plain code, with the same random numbers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reverie.nets.blocks import Linear, Norm, initialize
from reverie.nets.heads import PolicyConfig, PolicyHead
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics, RSSMState

pytest.importorskip("triton")

from reverie.kernels.accelerate import use_fast_versions
from reverie.kernels.heads.categorical import FastCategorical, LazyCategorical
from reverie.kernels.heads.sample_layer import sample_layer
from reverie.kernels.norm.norm_linear import norm_silu_linear
from reverie.kernels.scan.imagination import embed_deter_stoch, norm_silu_actions

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
SMALL = {"deter": 24, "hidden": 20, "stoch": 5, "classes": 3, "blocks": 4}
SIZE12M = {"deter": 2048, "hidden": 256, "classes": 16}


class ExponentialRng(Rng):
    """Samples classes with exponential noise, on a CPU as on a GPU."""

    def __init__(self, seed: int = 0):
        super().__init__(seed, "test", DEVICE)

    def categorical(self, probs):
        return torch.argmax(probs / self.exponential(probs), -1)

    def exponential(self, like):  # the same noise for every dtype
        return super().exponential(like.float()).to(torch.float32)


def random_layer(width, units, scale=1.0):
    layer, norm = Linear(width, units, scale), Norm("rms", width)
    initialize(layer, torch.Generator().manual_seed(width))
    layer.bias.data.normal_()
    norm.scale.data.uniform_(0.5, 1.5)
    return layer.to(DEVICE), norm.to(DEVICE)


def normalized(x, bias, norm):
    return F.silu(norm(x.float() + bias.float())).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("rows", "width", "units"), [(5, 20, 7), (17, 256, 65), (40, 384, 9), (0, 8, 8)]
)
@torch.no_grad()
def test_norm_and_linear_layer(rows, width, units, dtype):
    layer, norm = random_layer(width, units)
    storage = torch.randn(rows, 2 * width, device=DEVICE, dtype=dtype)
    x, bias = storage[:, :width], torch.randn(width, device=DEVICE, dtype=dtype)
    actual = norm_silu_linear(x, bias, norm, layer)
    expected = F.linear(normalized(x, bias, norm), layer.weight.to(dtype))
    # float16: rounding of the activations, in sums of `width` products
    bounds = TOLERANCE if dtype == torch.float32 else {"rtol": 4e-3, "atol": 4e-3}
    torch.testing.assert_close(actual, expected, **bounds)


@pytest.mark.parametrize("unimix", [0.0, 0.01])
@pytest.mark.parametrize(
    ("rows", "width", "groups", "classes"),
    [(5, 20, 5, 3), (17, 384, 3, 24), (20, 64, 1, 100)],
)
@torch.no_grad()
def test_samples_of_a_layer(rows, width, groups, classes, unimix):
    layer, norm = random_layer(width, (groups, classes), 3.0)
    x, bias = torch.randn(rows, width, device=DEVICE), torch.randn(width, device=DEVICE)
    noise = torch.empty(rows, groups, classes, device=DEVICE).exponential_()
    onehot = torch.full((rows, 2, groups, classes), 7.0, device=DEVICE)
    args = (x, bias, norm, layer, noise, unimix, torch.int32, onehot[:, 1])
    index = sample_layer(*args)
    probs = layer(normalized(x, bias, norm)).softmax(-1)
    expected = (((1 - unimix) * probs + unimix / classes) / noise).argmax(-1)
    assert index.dtype == torch.int32
    assert torch.equal(index.long(), expected)
    assert torch.equal(onehot[:, 1], F.one_hot(expected, classes).float())
    assert torch.equal(onehot[:, 0], torch.full_like(probs, 7.0))


@torch.no_grad()
def test_samples_of_values_that_are_not_finite_are_valid_classes():
    layer, norm = random_layer(8, (3, 5))
    x = torch.full((2, 8), torch.nan, device=DEVICE)
    noise = torch.ones(2, 3, 5, device=DEVICE)
    index = sample_layer(x, layer.bias[:8], norm, layer, noise, 0.01)
    assert ((index >= 0) & (index < 5)).all()


@pytest.mark.parametrize(("groups", "classes", "width"), [(5, 3, 20), (40, 4, 384)])
@torch.no_grad()
def test_embedded_classes(groups, classes, width):
    layer, norm = random_layer(groups * classes, width)[0], random_layer(width, 1)[1]
    other = random_layer(width, 1)[1]
    x, bias = torch.randn(3, width, device=DEVICE), torch.randn(width, device=DEVICE)
    index = torch.randint(classes, (3, groups), device=DEVICE, dtype=torch.int32)
    weight = layer.weight.T.contiguous()
    actual = embed_deter_stoch(x, bias, other, index, weight, layer.bias, norm)
    onehot = F.one_hot(index.long(), classes).flatten(1).float()
    first, second = normalized(x, bias, other), F.silu(norm(layer(onehot)))
    torch.testing.assert_close(actual, torch.cat([first, second], 1), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@torch.no_grad()
def test_norm_with_a_table_of_actions(dtype):
    blocks, rows, width, actions = 3, 5, 10, 7
    x = torch.randn(blocks, rows, width, device=DEVICE)
    table = torch.randn(blocks, actions, width, device=DEVICE)
    action = torch.tensor([0, 6, 3, 3, 1], device=DEVICE, dtype=dtype)
    _, norm = random_layer(blocks * width, 1)
    bias = torch.randn(blocks * width, device=DEVICE)
    actual = norm_silu_actions(x, bias, norm, table, action)
    total = (x + table[:, action.long()]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(actual, normalized(total, bias, norm), **TOLERANCE)


def discrete(classes, low=0, dtype="int32"):
    return {"action": Space(np.dtype(dtype), (), low, low + classes)}


def make_nets(config, spaces, policy, dtype=torch.float32):
    """Return dynamics and policy head."""
    dynamics = RSSMDynamics(8, spaces, config)
    features = config.deter + config.stoch * config.classes
    head = PolicyHead(features, spaces, policy)
    for seed, module in enumerate((dynamics, head)):
        initialize(module, torch.Generator().manual_seed(seed))
    return dynamics.to(DEVICE, dtype), head.to(DEVICE, dtype)


@torch.no_grad()
def imagine(nets, spaces, start, horizon, fast):
    """Return a rollout with samples of the policy."""
    dynamics, head = copy.deepcopy(nets)
    rng = ExponentialRng()
    if fast:
        use_fast_versions(dynamics)
        use_fast_versions(head)

    def policy(state):
        samples = {k: d.sample(rng) for k, d in head(dynamics.features(state)).items()}
        return {
            k: x.to(getattr(torch, spaces[k].dtype.name)) for k, x in samples.items()
        }

    return dynamics.imagine(start, policy, horizon, rng)


def random_state(rows, config, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    deter = torch.randn(rows, config.deter, generator=generator).tanh()
    shape = (rows, config.stoch)
    classes = torch.randint(config.classes, shape, generator=generator)
    stoch = F.one_hot(classes, config.classes)
    return RSSMState(deter.to(DEVICE, dtype), stoch.to(DEVICE, dtype))


VARIANTS = {
    "small": ({}, discrete(3)),
    "int64": ({}, discrete(17, dtype="int64")),
    "low": ({}, discrete(4, low=2)),
    "many": ({}, discrete(300)),
    "size25m": ({"hidden": 384, "stoch": 2, "classes": 24}, discrete(18)),
    "wide": ({"hidden": 520, "stoch": 2}, discrete(3)),
    "one_layer": ({"imglayers": 1}, discrete(3)),
    "no_layers": ({"imglayers": 0}, discrete(3)),
    "continuous": ({}, {"arm": Space(np.dtype("float32"), (2,), -1, 1)}),
    "two": ({}, {**discrete(3), "b": Space(np.dtype("int32"), (2,), 0, 4)}),
}


@pytest.mark.extended_except("small", "two")
@pytest.mark.parametrize("name", VARIANTS)
def test_fast_imagination_equals_the_plain_one(name):
    changes, spaces = VARIANTS[name]
    config = RSSMConfig(**{**SMALL, **changes})
    policy = PolicyConfig(layers=2, units=config.hidden, outscale=1.0, unimix=0.01)
    nets = make_nets(config, spaces, policy)
    start = random_state(6, config)
    plain, fast = (imagine(nets, spaces, start, 2, fast) for fast in (False, True))
    for key in spaces:
        torch.testing.assert_close(fast.actions[key], plain.actions[key], **TOLERANCE)
    assert torch.equal(fast.states.stoch, plain.states.stoch)
    torch.testing.assert_close(fast.states.deter, plain.states.deter, **TOLERANCE)


def test_imagination_from_an_initial_state_with_a_zero_sample():
    config, spaces = RSSMConfig(**SMALL), discrete(3)
    nets = make_nets(config, spaces, PolicyConfig(layers=1, units=8, outscale=1.0))
    start = nets[0].to(DEVICE).initial(4, torch.float32)
    plain, fast = (imagine(nets, spaces, start, 2, fast) for fast in (False, True))
    assert torch.equal(fast.states.stoch, plain.states.stoch)
    torch.testing.assert_close(fast.states.deter, plain.states.deter, **TOLERANCE)


def test_a_policy_without_gradients_computes_logits_only_if_needed():
    spaces = discrete(5)
    head = make_nets(RSSMConfig(**SMALL), spaces, PolicyConfig(2, 16, outscale=1.0))[1]
    fast = copy.deepcopy(head)
    use_fast_versions(fast)
    feat = torch.randn(2, 3, 39, device=DEVICE)
    with torch.no_grad():
        plain, lazy = head(feat)["action"], fast(feat)["action"]
        assert isinstance(lazy, LazyCategorical)
        sample = lazy.sample(ExponentialRng())
        assert "padded_logits" not in vars(lazy)
        assert sample.dtype == torch.int32
        assert torch.equal(sample.long(), plain.sample(ExponentialRng()))
        assert torch.equal(lazy.pred(), plain.pred())
        torch.testing.assert_close(lazy.logp(sample), plain.logp(sample), **TOLERANCE)
        torch.testing.assert_close(lazy.entropy(), plain.entropy(), **TOLERANCE)
        assert lazy.maxent == plain.maxent
    assert type(fast(feat)["action"]) is FastCategorical


@pytest.mark.gpu
@torch.no_grad()
def test_imagination_at_size12m_against_float64():
    """In float32, almost all trajectories have the same samples as in float64."""
    config, spaces = RSSMConfig(**SIZE12M), discrete(18)
    policy = PolicyConfig(layers=3, units=256, outscale=1.0)
    nets = make_nets(config, spaces, policy)
    start = random_state(1024, config)
    fast = imagine(nets, spaces, start, 15, fast=True)
    exact = copy.deepcopy(nets)[0].double(), copy.deepcopy(nets)[1].double()
    start = RSSMState(*(x.double() for x in start))
    exact = imagine(exact, spaces, start, 15, fast=False)
    same = (fast.states.stoch == exact.states.stoch).flatten(1).all(1)
    same &= (fast.actions["action"] == exact.actions["action"]).all(1)
    assert same.float().mean() > 0.99
    actual, expected = fast.states.deter[same], exact.states.deter[same].float()
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [256, 384, 512])
@torch.no_grad()
def test_rounding_of_a_step_in_bfloat16(width):
    """The error is at most that of the plain code, which rounds the sum of a layer's
    inputs once and here three times, so its variance is at most three times as large.
    """
    config = RSSMConfig(deter=8 * width, hidden=width, classes=width // 16)
    spaces, policy = discrete(18), PolicyConfig(layers=3, units=width, outscale=1.0)
    nets = make_nets(config, spaces, policy)
    low = tuple(copy.deepcopy(net).bfloat16() for net in nets)
    for net in low:  # norms compute in float32
        for module in net.modules():
            if isinstance(module, Norm):
                module.float()
    exact = tuple(copy.deepcopy(net).double() for net in low)
    start = random_state(1024, config, torch.bfloat16)
    precise = RSSMState(*(x.double() for x in start))
    expected = imagine(exact, spaces, precise, 1, fast=False)
    errors = []
    for is_fast in (False, True):
        actual = imagine(low, spaces, start, 1, is_fast)
        same = actual.actions["action"][:, 0] == expected.actions["action"][:, 0]
        assert same.float().mean() > 0.9
        gap = actual.states.deter[same, 1].double() - expected.states.deter[same, 1]
        errors.append(gap.square().mean().sqrt())
        agree = actual.states.stoch[same] == expected.states.stoch[same]
        assert agree.float().mean() > 0.99
    assert errors[1] < 3**0.5 * errors[0]
