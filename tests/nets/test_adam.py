"""Adam with decoupled decay and a limit on all gradients together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reverie.nets.blocks import Linear, Norm
from reverie.nets.optim.adam import Adam, AdamConfig, decaying
from reverie.nets.residual import Conv
from reverie.nets.transformer import Dense, Embedding


def parameters():
    torch.manual_seed(3)
    return {"a": torch.randn(4, 3), "b": torch.randn(5), "c": torch.randn(2, 2)}


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_it_equals_pytorch(clip):
    ours, theirs = parameters(), [nn.Parameter(p) for p in parameters().values()]
    config = AdamConfig(lr=1e-2, clip=clip, wd=0.1)
    opt = Adam(ours, config, ["a", "c"])
    groups = [
        {"params": [theirs[0], theirs[2]], "weight_decay": 0.1},
        {"params": [theirs[1]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(5):
        grads = [torch.randn_like(p) for p in theirs]
        for parameter, grad in zip(theirs, grads, strict=True):
            parameter.grad = grad.clone()
        norm = nn.utils.clip_grad_norm_(theirs, clip or torch.inf)
        reference.step()
        ok, metrics = opt.apply(torch.tensor(1.0), grads)
        assert bool(ok)
        torch.testing.assert_close(metrics["opt/grad_norm"], norm)
        for mine, wanted in zip(ours.values(), theirs, strict=True):
            torch.testing.assert_close(mine, wanted.detach(), rtol=1e-5, atol=1e-6)
    assert metrics["opt/updates"] == 5


def test_a_broken_gradient_changes_nothing():
    ours = parameters()
    opt = Adam(ours, AdamConfig(), ["a"])
    good = [torch.ones_like(p) for p in ours.values()]
    opt.apply(torch.tensor(1.0), good)
    before = {k: p.clone() for k, p in ours.items()}
    moments = [m.clone() for m in (*opt.nu, *opt.mu)]
    bad = [g.clone() for g in good]
    bad[1][2] = float("nan")
    ok, metrics = opt.apply(torch.tensor(1.0), bad)
    assert not ok
    assert opt.nonfinite() == ["b"]
    assert metrics["opt/skipped"] == metrics["opt/nonfinite_in_row"] == 1
    assert opt.step == 1
    for key, parameter in ours.items():
        assert torch.equal(parameter, before[key])
    for new, old in zip((*opt.nu, *opt.mu), moments, strict=True):
        assert torch.equal(new, old)
    ok, metrics = opt.apply(torch.tensor(float("inf")), good)
    assert not ok
    assert metrics["opt/nonfinite_in_row"] == 2
    _, metrics = opt.apply(torch.tensor(0.0), good)
    assert metrics["opt/nonfinite_in_row"] == 0
    assert metrics["opt/skipped"] == 2


def test_a_saved_optimizer_goes_on_the_same():
    one, two = parameters(), parameters()
    first, second = Adam(one, AdamConfig()), Adam(two, AdamConfig())
    grads = [[torch.randn_like(p) for p in one.values()] for _ in range(4)]
    for i in range(2):
        first.apply(torch.tensor(0.0), grads[i])
    second.load_state_dict(first.state_dict())
    for key, parameter in one.items():
        two[key].copy_(parameter)
    for i in range(2, 4):
        first.apply(torch.tensor(0.0), grads[i])
        second.apply(torch.tensor(0.0), grads[i])
    for key, parameter in one.items():
        assert torch.equal(parameter, two[key])


def test_a_loss_is_followed_downhill():
    x = torch.tensor([3.0, -2.0], requires_grad=True)
    unused = torch.ones(2, requires_grad=True)
    opt = Adam({"x": x, "unused": unused}, AdamConfig(lr=0.1))
    for _ in range(100):
        opt.update(x.square().sum())
    assert x.detach().abs().max() < 0.1
    assert torch.equal(unused.detach(), torch.ones(2))


def test_only_dense_weights_decay():
    net = nn.Module()
    net.dense, net.plain, net.conv = Dense(3, 4), Linear(3, 4), Conv(3, 4)
    net.norm, net.table = Norm("layer", 4), Embedding(5, 4)
    assert decaying(net) == ["dense.weight", "plain.weight"]
    assert decaying(Dense(2, 2)) == ["weight"]


@pytest.mark.parametrize("sizes", [{"lr": -1.0}, {"beta1": 1.0}, {"clip": -0.1}])
def test_settings_that_cannot_work(sizes):
    with pytest.raises(ValueError, match="must"):
        AdamConfig(**sizes)
