"""Adam in two passes does what the plain one does."""

from __future__ import annotations

import pytest
import torch
from test_fast_optimizer import DEVICE, parameters

from reverie.nets.blocks import Linear
from reverie.nets.optim.adam import Adam, AdamConfig

pytest.importorskip("triton")

from reverie.kernels.optim.adam import FusedAdam
from reverie.kernels.optim.low_precision_weights import Shadows

CONFIGS = {
    "default": AdamConfig(lr=1e-2),
    "decay": AdamConfig(lr=1e-2, wd=0.3, clip=0.5),
    "unlimited": AdamConfig(lr=1e-2, wd=0.0, clip=0.0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_equal_those_of_plain_adam(name):
    plain, fused = parameters(), parameters()
    decays = ["a.weight"]
    ours = FusedAdam(fused, CONFIGS[name], decays)
    theirs = Adam(plain, CONFIGS[name], decays)
    generator = torch.Generator().manual_seed(1)
    for turn in range(4):
        size = 10.0 ** (2 * turn - 4)
        grads = [size * torch.randn(x.shape, generator=generator) for x in ours.tensors]
        grads = [grad.to(DEVICE) for grad in grads]
        if turn == 2:  # an update that must change nothing
            grads[1] = grads[1] * torch.inf
        loss = torch.ones((), device=DEVICE)
        _, expected = theirs.apply(loss, [grad.clone() for grad in grads])
        _, metrics = ours.apply(loss, grads)
        for key in fused:
            torch.testing.assert_close(fused[key], plain[key], rtol=1e-5, atol=1e-6)
        assert metrics.keys() == expected.keys()
        for key in metrics:
            torch.testing.assert_close(
                metrics[key], expected[key], rtol=1e-5, atol=1e-8, equal_nan=True
            )
        assert ours.nonfinite() == theirs.nonfinite()
    for left, right in ((ours.mu, theirs.mu), (ours.nu, theirs.nu)):
        for a, b in zip(left, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("full", [False, True])
def test_copies_follow_and_gradients_may_be_theirs(full):
    layer = Linear(8, 6).to(DEVICE)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    shadows = Shadows([layer], torch.bfloat16)
    named = {"weight": layer.weight, "bias": layer.bias}
    opt = FusedAdam(named, AdamConfig(lr=0.1), ["weight"], shadows, full)
    before = layer.weight.detach().clone()
    x = torch.randn(4, 8, device=DEVICE, dtype=torch.bfloat16)
    grads = opt.gradients(layer(x).float().square().mean())
    assert {g.dtype for g in grads} == {torch.float32 if full else torch.bfloat16}
    ok, _ = opt.apply(torch.ones((), device=DEVICE), grads)
    assert ok
    assert not torch.equal(before, layer.weight)
    for parameter, copy in shadows.pairs:
        torch.testing.assert_close(copy, parameter.to(torch.bfloat16))
