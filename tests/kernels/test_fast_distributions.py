"""Kernels of distributions, heads and GRU gates against the plain code."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from reverie.nets.blocks import initialize
from reverie.nets.distributions import Categorical, OneHot, TwoHot, symexp_bins
from reverie.nets.heads import Head, HeadConfig, PolicyConfig, PolicyHead
from reverie.nets.rng import Rng
from reverie.spaces import Space

pytest.importorskip("triton")

from reverie.kernels.heads.categorical import FastCategorical, FastPolicyHead
from reverie.kernels.heads.onehot import onehot_kl, sample_onehot
from reverie.kernels.heads.twohot import FastHead, FastTwoHot
from reverie.kernels.scan.block_gru import block_gru_gates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def assert_equal_results(results):
    """Compare two lists of tensors: those of the plain and the fast version."""
    plain, fast = results
    for actual, expected in zip(fast, plain, strict=True):
        torch.testing.assert_close(actual, expected, **TOLERANCE)


# Two-hot


@pytest.mark.parametrize("count", [255, 7, 8, 2])
def test_two_hot_loss_and_gradient(count):
    bins = symexp_bins(count).to(DEVICE)
    inside = torch.tensor([-1e9, -5.3, -1.0, 0.0, 0.2, 0.9, 1e4, 1e9])
    target = torch.cat([inside.to(DEVICE), bins[:3], bins[-2:]])[None]
    logits = 3 * torch.randn(2, target.numel(), count, device=DEVICE)
    target = target.expand(2, -1)
    results = []
    for cls in (TwoHot, FastTwoHot):
        leaf = logits.clone().requires_grad_()
        loss = cls(leaf, bins).loss(target)
        weight = torch.linspace(-1, 1, loss.numel(), device=DEVICE).view_as(loss)
        (grad,) = torch.autograd.grad((loss * weight).sum(), leaf)
        results.append((loss.detach(), grad))
    assert_equal_results(results)


@pytest.mark.parametrize("count", [255, 8])
def test_two_hot_mean(count):
    bins = symexp_bins(count).to(DEVICE)
    logits = torch.randn(3, 4, count, device=DEVICE)
    actual, expected = (cls(logits, bins).pred() for cls in (FastTwoHot, TwoHot))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=50)  # bins up to 5e8


@pytest.mark.parametrize("scale", [1e-7, 1e-3, 0.04, 0.1, 1, 30])
def test_two_hot_mean_of_logits_that_are_almost_symmetric(scale):
    bins = symexp_bins(255).to(DEVICE)
    logits = torch.randn(8, 255, device=DEVICE)
    logits = (logits + logits.flip(-1)) * (1 + scale * (bins > 0))
    actual, expected = (cls(logits, bins).pred() for cls in (FastTwoHot, TwoHot))
    assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_the_mean_of_uniform_probabilities_is_exactly_zero():
    out = FastTwoHot(torch.zeros(5, 255, device=DEVICE), symexp_bins(255).to(DEVICE))
    assert torch.equal(out.pred(), torch.zeros(5, device=DEVICE))


def test_a_mean_with_a_gradient_uses_the_plain_code():
    logits = torch.randn(3, 255, device=DEVICE, requires_grad=True)
    pred = FastTwoHot(logits, symexp_bins(255).to(DEVICE)).pred()
    assert torch.autograd.grad(pred.sum(), logits)[0].any()


def test_the_loss_of_a_nan_target_is_nan():
    out = FastTwoHot(torch.zeros(2, 255, device=DEVICE), symexp_bins(255).to(DEVICE))
    loss = out.loss(torch.tensor([torch.nan, 1.0], device=DEVICE))
    assert loss.isnan().tolist() == [True, False]


@pytest.mark.parametrize("output", ["symexp_twohot", "binary", "mse", "symlog_mse"])
def test_fast_heads(output):
    config = HeadConfig(layers=1, units=16, output=output, outscale=1.0, bins=9)
    head = Head(6, config)
    initialize(head, torch.Generator().manual_seed(1))
    head.to(DEVICE)
    feat, target = torch.randn(4, 6, device=DEVICE), torch.rand(4, device=DEVICE)
    results = []
    for cls in (Head, FastHead):
        head.__class__ = cls
        out = head(feat)
        loss = out.loss(target)
        grads = torch.autograd.grad((loss * target).sum(), list(head.parameters()))
        results.append([out.pred().detach().float(), loss.detach(), *grads])
    assert_equal_results(results)


# One-hot


@pytest.mark.parametrize(("groups", "classes"), [(4, 8), (3, 5), (1, 2), (32, 16)])
def test_kl_and_entropy_of_posterior_and_prior(groups, classes):
    shape, results = (2, 3, groups, classes), []
    logits = 2 * torch.randn(2, *shape, device=DEVICE)

    def plain(post: Tensor, prior: Tensor) -> tuple[Tensor, ...]:
        one, two = OneHot(post, 0.01), OneHot(prior, 0.01)
        dyn, rep = one.detach().kl(two), one.kl(two.detach())
        return dyn, rep, one.entropy(), two.entropy()

    for function in (plain, lambda post, prior: onehot_kl(post, prior, 0.01)):
        leaves = [x.clone().requires_grad_() for x in logits]
        dyn, rep, *entropies = function(*leaves)
        total = (dyn.clamp(min=0.8) * dyn.detach().sin()).sum() + rep.sum() * 0.3
        grads = torch.autograd.grad(total, leaves)
        entropies = [x.detach() for x in entropies]
        results.append([dyn.detach(), rep.detach(), *entropies, *grads])
    assert_equal_results(results)


@pytest.mark.parametrize(("groups", "classes"), [(4, 8), (3, 5)])
def test_the_sample_is_the_argmax_of_probabilities_over_noise(groups, classes):
    logits = 2 * torch.randn(64, groups, classes, device=DEVICE)
    noise = torch.empty_like(logits).exponential_()
    onehot = sample_onehot(logits, noise, 0.01)
    index = torch.argmax(OneHot(logits, 0.01).probs / noise, -1)
    assert torch.equal(onehot.sum(-1), torch.ones_like(onehot[..., 0]))
    assert torch.equal(onehot.argmax(-1), index)


@pytest.mark.extended
def test_unimix_gives_every_class_a_probability_in_samples():
    logits = torch.tensor([[100.0, 0.0]], device=DEVICE).expand(5000, 1, 2)
    rng = Rng(0, "train", logits.device)
    noise = rng.exponential(logits)
    frequency = sample_onehot(logits, noise, 0.2)[..., 1].mean().item()
    assert frequency == pytest.approx(0.1, abs=0.03)


# Actions


@pytest.mark.parametrize("unimix", [0.0, 0.1])
@pytest.mark.parametrize("dims", [0, 1])
def test_logp_and_entropy_of_categoricals(unimix, dims):
    logits = 3 * torch.randn(4, 5, 18, device=DEVICE)
    logits[0, 0, 1] = 200  # the other probabilities underflow
    event, results = torch.randint(0, 18, (4, 5), device=DEVICE), []
    for cls in (Categorical, FastCategorical):
        leaf = logits.clone().requires_grad_()
        out = cls(leaf, dims, unimix)
        logp, entropy = out.logp(event), out.entropy()
        total = (logp * logp.detach().sin()).sum() + (entropy * 0.3).sum()
        (grad,) = torch.autograd.grad(total, leaf)
        results.append([logp.detach(), entropy.detach(), grad])
        assert out.pred().shape == (4, 5)
        torch.testing.assert_close(out.entropy(), entropy)
    assert_equal_results(results)


def test_entropy_without_logp():
    logits = torch.randn(4, 18, device=DEVICE)
    expected = Categorical(logits).entropy()
    torch.testing.assert_close(FastCategorical(logits).entropy(), expected)


@pytest.mark.extended
@pytest.mark.parametrize("unimix", [0.0, 0.2])
def test_samples_follow_the_probabilities(unimix):
    logits = torch.tensor([1.0, 0.0, -1.0], device=DEVICE).expand(5000, 3)
    out = FastCategorical(logits, 0, unimix)
    index = out.sample(Rng(0, "train", logits.device))
    frequency = torch.bincount(index, minlength=3) / len(index)
    torch.testing.assert_close(frequency, out.probs[0], rtol=0, atol=0.03)


def test_fast_policy_heads():
    spaces = {
        "choice": Space(np.int32, (), 0, 5),
        "masked": Space(np.int32, (2,), 0, np.array([3, 4])),
        "many": Space(np.int32, (2,), 0, 4),
        "force": Space(np.float32, (3,), -1, 1),
    }
    head = PolicyHead(6, spaces, PolicyConfig(layers=1, units=8, outscale=1.0))
    initialize(head, torch.Generator().manual_seed(1))
    head.to(DEVICE)
    feat = torch.randn(7, 6, device=DEVICE)
    events = {k: v.sample(Rng(0, "train", feat.device)) for k, v in head(feat).items()}
    results = []
    for cls in (PolicyHead, FastPolicyHead):
        head.__class__ = cls
        outs = head(feat)
        parts = [outs[key].logp(event) for key, event in events.items()]
        parts += [out.entropy() for out in outs.values()]
        total = torch.stack(parts).cumsum(0).sum()
        grads = torch.autograd.grad(total, list(head.parameters()))
        results.append([*(part.detach() for part in parts), *grads])
        assert outs["choice"].maxent == pytest.approx(np.log(5))
        samples = outs["choice"].sample(Rng(0, "train", feat.device))
        assert samples.min() >= 0
        assert samples.max() < 5
    assert_equal_results(results)


# Gates of the block GRU


def test_block_gru_gates():
    blocks, rows, each = 3, 5, 4
    gates = torch.randn(blocks, rows, 3 * each, device=DEVICE)
    bias = torch.randn(3 * blocks * each, device=DEVICE)
    deter = torch.randn(rows, blocks * each, device=DEVICE)
    x = gates.transpose(0, 1).reshape(rows, -1) + bias
    x = x.reshape(rows, blocks, 3, each)
    reset, candidate, update = (gate.flatten(-2) for gate in x.unbind(-2))
    candidate = torch.tanh(torch.sigmoid(reset) * candidate)
    update = torch.sigmoid(update - 1)
    expected = update * candidate + (1 - update) * deter
    torch.testing.assert_close(
        block_gru_gates(gates, bias, deter), expected, **TOLERANCE
    )


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [16, 32, 64])
def test_bfloat16_at_real_sizes(classes):
    """As close to float32 as bfloat16 inputs allow, and deterministic."""
    bins, dtype = symexp_bins(255).cuda(), torch.bfloat16
    logits, target = torch.randn(16384, 255, device="cuda"), torch.randn(16384).cuda()
    results = []
    for cls, x in ((TwoHot, logits.to(dtype).float()), (FastTwoHot, logits.to(dtype))):
        leaf = x.requires_grad_()
        loss = cls(leaf, bins).loss(target)
        grad = torch.autograd.grad(loss.sum(), leaf)[0].float()
        results.append((loss.detach(), grad))
    for actual, expected in zip(*reversed(results), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-3)

    post, prior = torch.randn(2, 1024, 32, classes, device="cuda").to(dtype)
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (post, prior)]
        kl = onehot_kl(*leaves, 0.01)
        runs.append([*kl, *torch.autograd.grad((kl.dyn + kl.rep).sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    one, two = OneHot(post, 0.01), OneHot(prior, 0.01)
    torch.testing.assert_close(runs[0][0].detach(), one.kl(two), **TOLERANCE)
    torch.testing.assert_close(runs[0][2].detach(), one.entropy(), **TOLERANCE)
