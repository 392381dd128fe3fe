"""RMS norm and SiLU in one function equal the two functions of PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reverie.kernels.accelerate import use_fast_versions
from reverie.kernels.norm import rms_norm_cpu
from reverie.kernels.norm.rms_norm_cpu import CpuNorm
from reverie.nets.blocks import MLP, MLPConfig, Norm, initialize


def make(name: str = "rms", width: int = 6) -> Norm:
    norm = Norm(name, width).double()
    initialize(norm, torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.scale.normal_(1, generator=torch.Generator().manual_seed(1))
    return norm


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 3, 6), (0, 6)])
@pytest.mark.parametrize("name", ["rms", "rms1em6"])
def test_output_and_gradients_equal_the_plain_ones(shape, name):
    norm = make(name)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    plain = norm.activate(x, F.silu)
    grad = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, (x, norm.scale), grad)
    norm.__class__ = CpuNorm
    fast = norm.activate(x, F.silu)
    assert "RMSNormSiLU" in type(fast.grad_fn).__name__
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(fast, (x, norm.scale), grad), expected, strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_rows_that_are_not_contiguous():
    norm = make()
    x = torch.randn(2, 6, 3, 3, dtype=torch.float64).permute(0, 2, 3, 1)
    plain = norm.activate(x, F.silu)
    norm.__class__ = CpuNorm
    fast = norm.activate(x, F.silu)
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    grad = torch.randn(2, 6, 3, 3, dtype=torch.float64).permute(0, 2, 3, 1)
    (expected,) = torch.autograd.grad(plain, norm.scale, grad)
    (result,) = torch.autograd.grad(fast, norm.scale, grad)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "act", "dtype"),
    [
        ("layer", F.silu, torch.float64),
        ("rms", F.relu, torch.float64),
        ("rms", F.silu, torch.bfloat16),
    ],
)
def test_other_norms_activations_and_dtypes_use_the_plain_code(
    monkeypatch, name, act, dtype
):
    monkeypatch.setattr(rms_norm_cpu, "_RMSNormSiLU", None)
    norm, x = make(name).float(), torch.randn(4, 6).to(dtype)
    if dtype == torch.float64:
        norm.double()
    plain = norm.activate(x, act)
    norm.__class__ = CpuNorm
    assert torch.equal(norm.activate(x, act), plain)


def test_without_gradients_the_plain_code_is_used(monkeypatch):
    monkeypatch.setattr(rms_norm_cpu, "_RMSNormSiLU", None)
    mlp = MLP(3, MLPConfig(2, 8))
    initialize(mlp, torch.Generator().manual_seed(0))
    x = torch.randn(4, 3)
    plain = mlp(x)
    use_fast_versions(mlp, "fast_cpu_version")
    assert type(mlp.norm0) is CpuNorm
    with torch.no_grad():
        assert torch.equal(mlp(x), plain)
