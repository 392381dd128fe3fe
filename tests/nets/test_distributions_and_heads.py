"""Distributions, heads, norms, and random numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.nets.blocks import (
    MLP,
    MLPConfig,
    ModulesByKey,
    Norm,
    activation,
    initialize,
)
from reverie.nets.distributions import (
    Categorical,
    OneHot,
    SymlogTwoHot,
    TwoHot,
    symexp_bins,
    symlog_bins,
)
from reverie.nets.heads import Head, HeadConfig, PolicyConfig, PolicyHead, check_actions
from reverie.nets.rng import Rng
from reverie.spaces import Space

I32, F32 = np.dtype("int32"), np.dtype("float32")
CPU = torch.device("cpu")


def policy(spaces, config=None):
    config = config or PolicyConfig(1, 8)
    head = PolicyHead(4, spaces, config)
    initialize(head, torch.Generator().manual_seed(0))
    return head


def test_the_discrete_policy_is_mixed_with_a_uniform_one_only_by_unimix():
    head = policy({"action": Space(I32, (), 0, 5)})
    head.head["action"]["logits"].bias.data[2] = 100
    probs = head(torch.zeros(4))["action"].probs
    assert float(probs[0]) < 1e-30
    mixed = policy({"action": Space(I32, (), 0, 5)}, PolicyConfig(1, 8, unimix=0.01))
    mixed.load_state_dict(head.state_dict())
    probs = mixed(torch.zeros(4))["action"].probs
    assert float(probs[0]) == pytest.approx(0.002)


def test_a_policy_for_actions_of_all_kinds():
    spaces = {
        "move": Space(I32, (), 0, 4),
        "switches": Space(np.dtype(bool), (3,)),
        "arm": Space(F32, (2,), -1, 1),
        "throttle": Space(F32, (), -1, 1),
    }
    distributions = policy(spaces)(torch.randn(7, 4))
    rng = Rng(0, "test", CPU)
    for key, out in distributions.items():
        sample = out.sample(rng)
        assert sample.shape == (7, *spaces[key].shape)
        assert out.logp(sample).shape == out.entropy().shape == (7,)
    assert distributions["move"].maxent == pytest.approx(math.log(4))
    assert (
        distributions["switches"].maxent is None
    )  # as in DreamerV3, only for a single class


def test_masked_classes_are_never_sampled():
    head = policy({"action": Space(I32, (2,), [0, 0], [2, 5])})
    out = head(torch.randn(500, 4))["action"]
    sample = out.sample(Rng(0, "test", CPU))
    assert int(sample[:, 0].max()) == 1
    assert int(sample[:, 1].max()) == 4
    entropy = out.entropy()
    assert torch.isfinite(entropy).all()
    assert float(entropy.max()) <= math.log(2) + math.log(5) + 1e-5
    assert torch.isfinite(out.logp(sample)).all()


def test_parameters_of_a_continuous_policy_are_bounded_but_not_its_samples():
    head = policy({"arm": Space(F32, (1,), -1, 1)}, PolicyConfig(1, 8, outscale=50.0))
    out = head(torch.randn(2000, 4))["arm"]
    assert out.mean.abs().max() <= 1
    assert out.std.min() >= 0.1
    assert out.std.max() <= 1
    assert out.sample(Rng(0, "test", CPU)).abs().max() > 1


@pytest.mark.parametrize(
    "space",
    [Space(np.dtype("uint8"), (8, 8, 3)), Space(np.dtype("complex64"), (), 0, 1)],
)
def test_unsupported_actions_are_refused(space):
    with pytest.raises(UserError, match="no policy supports"):
        check_actions({"action": space})


def test_empty_action_spaces_and_unbounded_integers_are_refused():
    with pytest.raises(UserError, match="empty"):
        check_actions({})
    with pytest.raises(UserError, match="`low` and `high`"):
        check_actions({"action": Space(I32)})


@pytest.mark.parametrize("output", ["symexp_twohot", "symlog_mse", "mse", "binary"])
def test_every_head_output_learns_its_target(output):
    head = Head(4, HeadConfig(1, 16, output=output, outscale=0.0))
    initialize(head, torch.Generator().manual_seed(0))
    opt = torch.optim.Adam(head.parameters(), 3e-2)
    x, target = torch.randn(16, 4), torch.full((16,), 1.0)
    for _ in range(300):
        loss = head(x).loss(target).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
    pred = head(x).prob() if output == "binary" else head(x).pred()
    torch.testing.assert_close(pred, target, atol=0.1, rtol=0)


def test_unknown_outputs_norms_and_activations_are_refused():
    with pytest.raises(UserError, match="symexp_twohot"):
        Head(4, HeadConfig(output="guess"))
    with pytest.raises(UserError, match="rms"):
        Norm("batch", 3)
    with pytest.raises(UserError, match="silu"):
        MLP(3, MLPConfig(1, 3, "swish"))


def test_epsilon_in_the_name_of_a_norm():
    x = torch.randn(4, 8) * 3 + 1
    layer = Norm("layer1em6", 8)
    initialize(layer, torch.Generator())
    assert layer.eps == 1e-6
    y = layer(x)
    torch.testing.assert_close(y.mean(-1), torch.zeros(4), atol=1e-5, rtol=0)
    torch.testing.assert_close(
        y.var(-1, correction=0), torch.ones(4), atol=1e-4, rtol=0
    )
    assert torch.equal(Norm("none", 8)(x), x)


def test_layers_compute_in_the_dtype_of_their_input():
    mlp = MLP(4, MLPConfig(2, 8))
    initialize(mlp, torch.Generator().manual_seed(0))
    assert mlp(torch.randn(3, 4).bfloat16()).dtype == torch.bfloat16
    assert next(mlp.parameters()).dtype == torch.float32


def test_two_hot_targets_out_of_range_use_the_outermost_bins():
    bins = symexp_bins(41)
    logits = torch.zeros(2, 41, requires_grad=True)
    TwoHot(logits, bins).loss(torch.tensor([1e30, -1e30])).sum().backward()
    assert logits.grad.argmin(-1).tolist() == [40, 0]


@pytest.mark.parametrize("count", [255, 64, 5])
def test_predictions_near_zero_of_bins_spaced_by_symexp_are_precise(count):
    """Rounding errors of probabilities are not multiplied by bins of up to 5e8."""
    bins, generator = symexp_bins(count), torch.Generator().manual_seed(0)
    assert float(TwoHot(torch.zeros(count), bins).pred()) == 0
    logits = 0.001 * torch.randn(50, count, generator=generator)
    logits = (logits + logits.flip(-1)) * (1 + 1e-7 * (bins > 0))
    expected = logits.double().softmax(-1) @ bins.double()
    error = (TwoHot(logits, bins).pred() - expected).norm() / expected.norm()
    assert error < 1e-5


@pytest.mark.parametrize("count", [255, 127, 64])
def test_predictions_near_zero_of_bins_in_symlog_space_are_precise(count):
    """Positive and negative bins cancel, which must not leave rounding errors."""
    bins, generator = symlog_bins(count), torch.Generator().manual_seed(0)
    assert float(SymlogTwoHot(torch.zeros(count), bins).pred()) == 0
    logits = 0.02 * torch.randn(50, count, generator=generator)
    mean = logits.double().softmax(-1) @ bins.double()
    expected = mean.sign() * mean.abs().expm1()
    error = (SymlogTwoHot(logits, bins).pred() - expected).norm() / expected.norm()
    assert error < 5e-6


@pytest.mark.parametrize(
    "name",
    ["SiLU", "ELU", "GELU", "LeakyReLU", "SELU", "Mish", "Softplus", "Identity"],
)
def test_activations_are_those_of_torch(name):
    x = torch.linspace(-5, 5, 21)
    assert torch.equal(activation(name.lower())(x), getattr(torch.nn, name)()(x))


def test_unimix_gives_every_class_a_probability():
    out = OneHot(torch.tensor([[[100.0, 0, 0, 0], [0, 0, 0, 0]]]), 0.01)
    torch.testing.assert_close(out.probs[0, 0, 1:], torch.full((3,), 0.0025))
    assert float(out.kl(OneHot(torch.zeros(1, 2, 4), 0.01))) > 0


def test_samples_follow_their_probabilities():
    probs = torch.tensor([0.1, 0.2, 0.7]).expand(20000, 3)
    index = Rng(0, "test", CPU).categorical(probs)
    frequency = torch.bincount(index, minlength=3) / 20000
    torch.testing.assert_close(frequency, probs[0], atol=0.02, rtol=0)


def test_random_numbers_depend_on_seed_and_purpose_and_can_be_restored():
    probs = torch.full((50, 4), 0.25)
    one, same = Rng(1, "train", CPU), Rng(1, "train", CPU)
    other, purpose = Rng(2, "train", CPU), Rng(1, "policy", CPU)
    first = one.categorical(probs)
    assert torch.equal(first, same.categorical(probs))
    assert not torch.equal(first, other.categorical(probs))
    assert not torch.equal(first, purpose.categorical(probs))
    other.load_state_dict(one.state_dict())
    assert torch.equal(one.categorical(probs), other.categorical(probs))


@pytest.mark.parametrize("key", ["keys", "forward", "a.b", "a/b", "weight", "train"])
def test_any_key_can_name_a_module(key):
    module = ModulesByKey({key: Norm("rms", 3)})
    assert isinstance(module[key], Norm)
    (name,) = module.state_dict()
    assert ModulesByKey.key(name.removesuffix(".scale")) == key


def test_categorical_loss_is_cross_entropy_summed_over_entries():
    logits = torch.randn(6, 2, 5)
    target = torch.randint(5, (6, 2))
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), reduction="none"
    )
    loss = Categorical(logits, 1).loss(target)
    torch.testing.assert_close(loss, expected.reshape(6, 2).sum(1))


def test_with_zero_outscale_initial_predictions_are_exactly_zero():
    head = Head(4, replace(HeadConfig(1, 8), outscale=0.0))
    initialize(head, torch.Generator().manual_seed(0))
    assert torch.equal(head(torch.randn(9, 4)).pred(), torch.zeros(9))


def test_the_entropy_of_a_deterministic_class_is_finite():
    logits = torch.tensor([[[200.0, 0.0]]], requires_grad=True)
    sure, other = OneHot(logits, 0.0), OneHot(torch.zeros(1, 1, 2), 0.0)
    assert sure.entropy().detach().abs() < 1e-6
    assert float(sure.kl(other).detach()) == pytest.approx(np.log(2))
    other.kl(sure).sum().backward()
    assert torch.isfinite(logits.grad).all()
