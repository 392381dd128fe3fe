"""The optimizer in two passes does what the plain one does."""

from __future__ import annotations

import pytest
import torch

from reverie.nets.blocks import Linear, initialize
from reverie.nets.conv import Conv
from reverie.nets.optim.laprop import OptConfig, Optimizer

pytest.importorskip("triton")

from reverie.kernels.optim.laprop import FusedOptimizer
from reverie.kernels.optim.low_precision_weights import Shadows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGS = {
    "default": OptConfig(warmup=0, lr=1e-2),
    "nesterov": OptConfig(warmup=2, lr=1e-2, nesterov=True),
    "decay": OptConfig(warmup=0, lr=1e-2, wd=0.1, agc=0.0),
}


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    conv = Conv(3, 5, 5)
    initialize(conv, generator)
    shapes = {"a.weight": (70, 65), "a.bias": (1,), "b.scale": ()}
    made = {
        name: torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()
        for name, shape in shapes.items()
    }
    made["conv.weight"] = conv.weight.detach().to(DEVICE).requires_grad_()
    return made


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_equal_those_of_the_plain_optimizer(name):
    plain, fused = parameters(), parameters()
    ours = FusedOptimizer(fused, CONFIGS[name])
    theirs = Optimizer(plain, CONFIGS[name])
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
            if key != "opt/param_count":
                torch.testing.assert_close(
                    metrics[key], expected[key], rtol=1e-5, atol=1e-8, equal_nan=True
                )
    for left, right in ((ours.mu, theirs.mu), (ours.nu, theirs.nu)):
        for a, b in zip(left, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-8)


def test_the_copies_layers_compute_with_follow_their_parameters():
    layer = Linear(8, 6).to(DEVICE)
    initialize(layer, torch.Generator().manual_seed(0)) if DEVICE == "cpu" else None
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    shadows = Shadows([layer], torch.bfloat16)
    named = {"weight": layer.weight, "bias": layer.bias}
    opt = FusedOptimizer(named, OptConfig(warmup=0, lr=0.1), shadows=shadows)
    x = torch.randn(4, 8, device=DEVICE, dtype=torch.bfloat16)
    before = layer.weight.detach().clone()
    ok, _ = opt.update(layer(x).float().square().mean())
    assert ok
    assert not torch.equal(before, layer.weight)
    for parameter, copy in shadows.pairs:
        torch.testing.assert_close(copy, parameter.to(torch.bfloat16))
    with torch.no_grad():
        layer.bias.add_(1)
    shadows.refresh()
    assert layer.shadow is not None
    torch.testing.assert_close(layer.shadow[1], layer.bias.to(torch.bfloat16))
