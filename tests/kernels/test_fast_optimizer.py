"""The fused optimizer equals the plain one, for every update rule."""

from __future__ import annotations

import pytest
import torch

from reverie.nets.blocks import Linear, initialize
from reverie.nets.conv import SameConv
from reverie.nets.optim.adam import AdamConfig, AMSGradConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.nets.optim.optimizer import Optimizer

pytest.importorskip("triton")

from reverie.kernels.optim.low_precision_weights import LowPrecisionWeights
from reverie.kernels.optim.optimizer import FusedOptimizer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIGS = {
    "laprop": LaPropConfig(warmup=0, lr=1e-2),
    "laprop, nesterov": LaPropConfig(warmup=2, lr=1e-2, nesterov=True),
    "laprop, decay": LaPropConfig(warmup=0, lr=1e-2, wd=0.1, agc=0.0),
    "laprop, linear": LaPropConfig(warmup=1, lr=1e-2, schedule="linear", anneal=3),
    "laprop, cosine": LaPropConfig(warmup=2, lr=1e-2, schedule="cosine", anneal=9),
    "laprop, no momentum": LaPropConfig(warmup=0, lr=1e-2, beta1=0.0),
    "adam": AdamConfig(lr=1e-2),
    "adam, decay": AdamConfig(lr=1e-2, wd=0.3, clip=0.5),
    "adam, no clip": AdamConfig(lr=1e-2, wd=0.0, clip=0.0),
    "amsgrad": AMSGradConfig(lr=1e-2),
    "amsgrad, no clip": AMSGradConfig(lr=1e-2, clip=0.0),
}
ADAM, LAPROP = AdamConfig(lr=0.1), LaPropConfig(warmup=0, lr=0.1)


def make_parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    conv = SameConv(3, 5, 5)
    initialize(conv, generator)
    shapes = {"a.weight": (70, 65), "a.bias": (1,), "b.scale": ()}
    parameters = {
        name: torch.randn(shape, generator=generator).to(DEVICE).requires_grad_()
        for name, shape in shapes.items()
    }
    parameters["conv.weight"] = conv.weight.detach().to(DEVICE).requires_grad_()
    return parameters


def make_layer():
    layer = Linear(8, 6).to(DEVICE)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    return layer, LowPrecisionWeights([layer], torch.bfloat16)


@pytest.mark.parametrize("name", CONFIGS)
def test_updates_equal_those_of_the_plain_optimizer(name):
    expected, parameters = make_parameters(), make_parameters()
    decayed = ["a.weight"] if name.startswith("adam") else None
    plain = Optimizer(expected, CONFIGS[name], decayed)
    fused = FusedOptimizer(parameters, CONFIGS[name], decayed)
    generator = torch.Generator().manual_seed(1)
    # AMSGrad differs from Adam if gradients become smaller again.
    skipped, sizes = 2, (1e-4, 1e-2, 1.0, 1e2)
    if "amsgrad" in name:
        skipped, sizes = 3, (1e-3, 1.0, 1e2, 1.0, 1e-2)
    for i, size in enumerate(sizes):
        grads = [
            size * torch.randn(x.shape, generator=generator) for x in plain.tensors
        ]
        grads = [grad.to(DEVICE) for grad in grads]
        if i == skipped:
            grads[1] = grads[1] * (torch.nan if "amsgrad" in name else torch.inf)
        loss = torch.ones((), device=DEVICE)
        ok, expected_metrics = plain.apply(loss, [grad.clone() for grad in grads])
        assert bool(ok) == (i != skipped)
        _, metrics = fused.apply(loss, grads)
        for key in parameters:
            torch.testing.assert_close(
                parameters[key], expected[key], rtol=1e-5, atol=1e-6
            )
        assert metrics.keys() == expected_metrics.keys()
        for key, value in metrics.items():
            torch.testing.assert_close(
                value, expected_metrics[key], rtol=1e-5, atol=1e-8, equal_nan=True
            )
        assert fused.nonfinite() == plain.nonfinite()
        assert plain.nonfinite() == (["a.bias"] if i == skipped else [])
    assert list(fused.moments) == list(plain.moments)
    for key, moments in fused.moments.items():
        for moment, other in zip(moments, plain.moments[key], strict=True):
            torch.testing.assert_close(moment, other, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("config", [ADAM, LAPROP], ids=["adam", "laprop"])
def test_low_precision_weights_follow_their_parameters(config):
    layer, low_precision = make_layer()
    named = {"weight": layer.weight, "bias": layer.bias}
    opt = FusedOptimizer(named, config, low_precision=low_precision)
    x = torch.randn(4, 8, device=DEVICE, dtype=torch.bfloat16)
    before = layer.weight.detach().clone()
    ok, _ = opt.update(layer(x).float().square().mean())
    assert ok
    assert not torch.equal(before, layer.weight)
    for parameter, copy in low_precision.pairs:
        torch.testing.assert_close(copy, parameter.to(torch.bfloat16))
    with torch.no_grad():
        layer.bias.add_(1)
    low_precision.refresh()
    torch.testing.assert_close(layer.low_precision[1], layer.bias.to(torch.bfloat16))


@pytest.mark.parametrize("float32", [False, True])
def test_gradients_have_the_dtype_of_the_weights_or_float32(float32):
    layer, low_precision = make_layer()
    named = {"weight": layer.weight, "bias": layer.bias}
    opt = FusedOptimizer(
        named, ADAM, ["weight"], low_precision=low_precision, float32_grads=float32
    )
    before = layer.weight.detach().clone()
    x = torch.randn(4, 8, device=DEVICE, dtype=torch.bfloat16)
    grads = opt.gradients(layer(x).float().square().mean())
    assert {g.dtype for g in grads} == {torch.float32 if float32 else torch.bfloat16}
    ok, _ = opt.apply(torch.ones((), device=DEVICE), grads)
    assert ok
    assert not torch.equal(before, layer.weight)
    for parameter, copy in low_precision.pairs:
        torch.testing.assert_close(copy, parameter.to(torch.bfloat16))


def test_a_gradient_may_have_other_strides_than_its_parameter():
    results = []
    for cls in (Optimizer, FusedOptimizer):
        weight = torch.zeros(4, 3, 2, 2, device=DEVICE)
        weight = weight.to(memory_format=torch.channels_last)
        opt = cls({"weight": weight}, AMSGradConfig(lr=0.1, clip=0))
        grad = torch.arange(48.0, device=DEVICE).reshape(4, 3, 2, 2) - 20
        opt.apply(torch.ones((), device=DEVICE), [grad])
        results.append(opt.moments["mu"][0])
    torch.testing.assert_close(*results)
