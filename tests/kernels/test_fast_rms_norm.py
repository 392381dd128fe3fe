"""Fused bias, RMS norm and SiLU equal the plain layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reverie.nets.blocks import (
    MLP,
    BlockLinear,
    Linear,
    MLPConfig,
    Norm,
    activation,
    initialize,
)

pytest.importorskip("triton")

from reverie.kernels.norm.rms_norm import FastMLP, linear_norm_act, rms_norm_silu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def plain(x: Tensor, scale: Tensor, eps: float, bias: Tensor | None) -> Tensor:
    v = x if bias is None else x + bias
    root = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
    return torch.nn.functional.silu(v * root * scale)


def outputs_and_gradients(function, x, scale, bias, weight) -> list[Tensor]:
    leaves = [x.clone().requires_grad_(), scale.clone().requires_grad_()]
    if bias is not None:
        leaves.append(bias.clone().requires_grad_())
    y = function(leaves[0], leaves[1], 1e-3, *leaves[2:] or [None])
    return [y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)]


@pytest.mark.parametrize("shape", [(5, 16), (2, 3, 24), (37, 100), (3, 1), (1, 2048)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_output_and_gradients_equal_the_formula(shape, has_bias):
    x, weight = torch.randn(2, *shape, device=DEVICE)
    scale, bias = torch.randn(2, shape[-1], device=DEVICE)
    bias = bias if has_bias else None
    actual = outputs_and_gradients(rms_norm_silu, x, scale, bias, weight)
    double = [t if t is None else t.double() for t in (x, scale, bias, weight)]
    for a, b in zip(actual, outputs_and_gradients(plain, *double), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=2e-5)


def test_zero_rows_are_allowed():
    x = torch.zeros(0, 8, device=DEVICE)
    assert rms_norm_silu(x, torch.ones(8, device=DEVICE), 1e-4).shape == (0, 8)


def test_the_output_has_the_dtype_of_the_input():
    x = torch.randn(4, 16, device=DEVICE).bfloat16()
    y = rms_norm_silu(x, torch.ones(16, device=DEVICE), 1e-4)
    assert y.dtype == torch.bfloat16


def make_mlps(act: str, norm: str) -> tuple[MLP, MLP]:
    nets = []
    for _ in range(2):
        net = MLP(6, MLPConfig(2, 20, act, norm))
        initialize(net, torch.Generator().manual_seed(1))
        for i in range(2):
            torch.nn.init.normal_(net.get_submodule(f"linear{i}").bias, std=0.1)
        nets.append(net.to(DEVICE))
    nets[1].load_state_dict(nets[0].state_dict())
    nets[1].__class__ = FastMLP
    return nets[0], nets[1]


@pytest.mark.parametrize(
    ("act", "norm"),
    [("silu", "rms"), ("silu", "layer"), ("gelu", "rms"), ("silu", "none")],
)
def test_a_fast_mlp_equals_the_plain_one(act, norm):
    x, results = torch.randn(4, 3, 6, device=DEVICE), []
    for net in make_mlps(act, norm):
        leaf = x.clone().requires_grad_()
        y = net(leaf)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *net.parameters()])
        results.append([y.detach(), *grads])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [lambda: Linear(8, 12), lambda: BlockLinear(8, 12, 4)])
def test_linear_and_block_linear_layers_with_norm(kind):
    layer, norm = kind(), Norm("rms", 12)
    for module in (layer, norm):
        initialize(module, torch.Generator().manual_seed(1))
        module.to(DEVICE)
    torch.nn.init.normal_(layer.bias)
    x, act = torch.randn(5, 8, device=DEVICE), activation("silu")
    results, weight = [], torch.randn(5, 12, device=DEVICE)
    for fast in (True, False):
        leaves = [x.clone().requires_grad_(), *layer.parameters(), norm.scale]
        y = linear_norm_act(layer, norm, act, leaves[0]) if fast else None
        y = act(norm(layer(leaves[0]))) if y is None else y
        results.append([y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 96, 256, 1024, 4096, 8192])
def test_accuracy_and_reproducibility_at_full_size(width, dtype):
    rows = 16384 if width <= 1024 else 2048
    x, weight = torch.randn(2, rows, width, device="cuda").to(dtype)
    scale, bias = torch.randn(2, width, device="cuda")
    actual = outputs_and_gradients(rms_norm_silu, x, scale, bias, weight)
    again = outputs_and_gradients(rms_norm_silu, x, scale, bias, weight)
    double = [t.double() for t in (x, scale, bias, weight)]
    rtol = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for a, same, b in zip(
        actual, again, outputs_and_gradients(plain, *double), strict=True
    ):
        assert torch.equal(a, same)
        size = b.abs().mean().item()
        torch.testing.assert_close(a.double(), b, rtol=rtol, atol=rtol * size)
