"""Outputs, choices and gates as single kernels against the plain ones."""

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
NEAR = {"rtol": 1e-4, "atol": 1e-5}


# Two-hot


@pytest.mark.parametrize("count", [255, 7, 8, 2])
def test_two_hot_loss_and_gradient_are_the_plain_ones(count):
    bins = symexp_bins(count).to(DEVICE)
    inside = torch.tensor([-1e9, -5.3, -1.0, 0.0, 0.2, 0.9, 1e4, 1e9])
    target = torch.cat([inside.to(DEVICE), bins[:3], bins[-2:]])[None]
    logits = 3 * torch.randn(2, target.numel(), count, device=DEVICE)
    target = target.expand(2, -1)
    results = []
    for kind in (TwoHot, FastTwoHot):
        leaf = logits.clone().requires_grad_()
        loss = kind(leaf, bins).loss(target)
        weight = torch.linspace(-1, 1, loss.numel(), device=DEVICE).view_as(loss)
        (grad,) = torch.autograd.grad((loss * weight).sum(), leaf)
        results.append((loss.detach(), grad))
    for mine, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, theirs, **NEAR)


@pytest.mark.parametrize("count", [255, 8])
def test_two_hot_means_are_the_plain_ones(count):
    bins = symexp_bins(count).to(DEVICE)
    logits = torch.randn(3, 4, count, device=DEVICE)
    mine, theirs = (kind(logits, bins).pred() for kind in (FastTwoHot, TwoHot))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=50)  # of bins up to 5e8


def test_equal_probabilities_mean_exactly_zero():
    out = FastTwoHot(torch.zeros(5, 255, device=DEVICE), symexp_bins(255).to(DEVICE))
    assert torch.equal(out.pred(), torch.zeros(5, device=DEVICE))


def test_a_mean_that_is_trained_takes_the_plain_way():
    logits = torch.randn(3, 255, device=DEVICE, requires_grad=True)
    pred = FastTwoHot(logits, symexp_bins(255).to(DEVICE)).pred()
    assert torch.autograd.grad(pred.sum(), logits)[0].any()


def test_a_target_that_is_no_number_gives_a_loss_that_is_none():
    out = FastTwoHot(torch.zeros(2, 255, device=DEVICE), symexp_bins(255).to(DEVICE))
    loss = out.loss(torch.tensor([torch.nan, 1.0], device=DEVICE))
    assert loss.isnan().tolist() == [True, False]


@pytest.mark.parametrize("output", ["symexp_twohot", "binary", "mse", "symlog_mse"])
def test_a_fast_head_is_the_plain_one(output):
    config = HeadConfig(layers=1, units=16, output=output, outscale=1.0, bins=9)
    head = Head(6, config)
    initialize(head, torch.Generator().manual_seed(1))
    head.to(DEVICE)
    feat, target = torch.randn(4, 6, device=DEVICE), torch.rand(4, device=DEVICE)
    results = []
    for kind in (Head, FastHead):
        head.__class__ = kind
        out = head(feat)
        loss = out.loss(target)
        grads = torch.autograd.grad((loss * target).sum(), list(head.parameters()))
        results.append([out.pred().detach().float(), loss.detach(), *grads])
    for mine, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, theirs, **NEAR)


# Choices


@pytest.mark.parametrize(("groups", "classes"), [(4, 8), (3, 5), (1, 2), (32, 16)])
def test_prior_and_posterior_agree_as_the_plain_ones_do(groups, classes):
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
    for mine, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, theirs, **NEAR)


@pytest.mark.parametrize(("groups", "classes"), [(4, 8), (3, 5)])
def test_the_first_clock_to_ring_is_drawn(groups, classes):
    logits = 2 * torch.randn(64, groups, classes, device=DEVICE)
    clocks = torch.empty_like(logits).exponential_()
    onehot = sample_onehot(logits, clocks, 0.01)
    index = torch.argmax(OneHot(logits, 0.01).probs / clocks, -1)
    assert torch.equal(onehot.sum(-1), torch.ones_like(onehot[..., 0]))
    assert torch.equal(onehot.argmax(-1), index)


def test_unimix_lets_impossible_classes_be_drawn():
    logits = torch.tensor([[100.0, 0.0]], device=DEVICE).expand(5000, 1, 2)
    rng = Rng(0, "train", logits.device)
    clocks = torch.empty(logits.shape, device=DEVICE)
    clocks.exponential_(generator=rng.generator)
    share = sample_onehot(logits, clocks, 0.2)[..., 1].mean().item()
    assert share == pytest.approx(0.1, abs=0.03)


# Actions


@pytest.mark.parametrize("unimix", [0.0, 0.1])
@pytest.mark.parametrize("dims", [0, 1])
def test_a_fast_categorical_is_the_plain_one(unimix, dims):
    logits = 3 * torch.randn(4, 5, 18, device=DEVICE)
    logits[0, 0, 1] = 200  # whose rivals' probabilities underflow
    event, results = torch.randint(0, 18, (4, 5), device=DEVICE), []
    for kind in (Categorical, FastCategorical):
        leaf = logits.clone().requires_grad_()
        out = kind(leaf, dims, unimix)
        logp, entropy = out.logp(event), out.entropy()
        total = (logp * logp.detach().sin()).sum() + (entropy * 0.3).sum()
        (grad,) = torch.autograd.grad(total, leaf)
        results.append([logp.detach(), entropy.detach(), grad])
        assert out.pred().shape == (4, 5)
        torch.testing.assert_close(out.entropy(), entropy)
    for mine, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, theirs, **NEAR)


def test_entropy_may_be_asked_first():
    logits = torch.randn(4, 18, device=DEVICE)
    mine, theirs = FastCategorical(logits).entropy(), Categorical(logits).entropy()
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("unimix", [0.0, 0.2])
def test_draws_follow_the_probabilities(unimix):
    logits = torch.tensor([1.0, 0.0, -1.0], device=DEVICE).expand(5000, 3)
    out = FastCategorical(logits, 0, unimix)
    index = out.sample(Rng(0, "train", logits.device))
    share = torch.bincount(index, minlength=3) / len(index)
    torch.testing.assert_close(share, out.probs[0], rtol=0, atol=0.03)


def test_a_fast_policy_is_the_plain_one():
    spaces = {
        "choice": Space(np.int32, (), 0, 5),
        "uneven": Space(np.int32, (2,), 0, np.array([3, 4])),
        "many": Space(np.int32, (2,), 0, 4),
        "force": Space(np.float32, (3,), -1, 1),
    }
    head = PolicyHead(6, spaces, PolicyConfig(layers=1, units=8, outscale=1.0))
    initialize(head, torch.Generator().manual_seed(1))
    head.to(DEVICE)
    feat = torch.randn(7, 6, device=DEVICE)
    events = {k: v.sample(Rng(0, "train", feat.device)) for k, v in head(feat).items()}
    results = []
    for kind in (PolicyHead, FastPolicyHead):
        head.__class__ = kind
        outs = head(feat)
        parts = [outs[key].logp(event) for key, event in events.items()]
        parts += [out.entropy() for out in outs.values()]
        total = torch.stack(parts).cumsum(0).sum()
        grads = torch.autograd.grad(total, list(head.parameters()))
        results.append([*(part.detach() for part in parts), *grads])
        assert outs["choice"].maxent == pytest.approx(np.log(5))
        draws = outs["choice"].sample(Rng(0, "train", feat.device))
        assert draws.min() >= 0
        assert draws.max() < 5
    for mine, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(mine, theirs, **NEAR)


# Gates


def test_gates_are_those_of_the_block_gru():
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
    torch.testing.assert_close(block_gru_gates(gates, bias, deter), expected, **NEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [16, 32, 64])
def test_outputs_in_bfloat16_at_real_sizes(classes):
    """As close to float32 as bfloat16 inputs allow, and the same to the bit again."""
    bins, dtype = symexp_bins(255).cuda(), torch.bfloat16
    logits, target = torch.randn(16384, 255, device="cuda"), torch.randn(16384).cuda()
    both = []
    for kind, x in ((TwoHot, logits.to(dtype).float()), (FastTwoHot, logits.to(dtype))):
        leaf = x.requires_grad_()
        loss = kind(leaf, bins).loss(target)
        both.append((loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0].float()))
    for mine, theirs in zip(*reversed(both), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)

    post, prior = torch.randn(2, 1024, 32, classes, device="cuda").to(dtype)
    runs = []
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for x in (post, prior)]
        ours = onehot_kl(*leaves, 0.01)
        runs.append([*ours, *torch.autograd.grad((ours.dyn + ours.rep).sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    one, two = OneHot(post, 0.01), OneHot(prior, 0.01)
    torch.testing.assert_close(runs[0][0].detach(), one.kl(two), **NEAR)
    torch.testing.assert_close(runs[0][2].detach(), one.entropy(), **NEAR)
