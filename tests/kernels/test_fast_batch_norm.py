"""Fused batch norm and ELU, and the networks that use it, equal the plain ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reverie.nets.strided import ImageDecoder, ImageEncoder, initialize_as_torch

pytest.importorskip("triton")

from reverie.kernels.accelerate import use_fast_versions
from reverie.kernels.conv import im2col
from reverie.kernels.norm import batch_norm
from reverie.kernels.norm.batch_norm import batch_norm_elu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    generator = torch.Generator().manual_seed(0)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor, generator=generator)
    return norm


def outputs_and_gradients(
    function, x: Tensor, norm: nn.BatchNorm2d, bias: Tensor
) -> list[Tensor]:
    x, bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
    y = function(x, norm, bias)
    # weights with few bits, which are exact in every precision
    weight = (torch.arange(y.numel()) % 61 / 32 - 1).reshape(y.shape).to(y)
    grads = torch.autograd.grad((y * weight).sum(), [x, norm.weight, norm.bias, bias])
    averages = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    return [y.detach(), *grads, *averages]


def plain(x: Tensor, norm: nn.BatchNorm2d, bias: Tensor) -> Tensor:
    return F.elu(norm(x + bias[:, None, None]))


@pytest.mark.parametrize("shape", [(5, 16, 6, 6), (40, 16, 1, 1), (3, 128, 4, 4)])
def test_outputs_gradients_and_running_statistics_equal_the_plain_ones(shape):
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(shape, generator=generator) + 30  # far from 0
    bias = torch.randn(shape[1], generator=generator)
    norm = make_norm(shape[1])
    expected = outputs_and_gradients(
        plain, x.double(), make_norm(shape[1]).double(), bias.double()
    )
    actual = outputs_and_gradients(
        batch_norm_elu, x.to(DEVICE), norm.to(DEVICE), bias.to(DEVICE)
    )
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.cpu().double(), b.double(), rtol=1e-4, atol=3e-5)


def make_nets(kind: type[nn.Module], width: int, bias: bool) -> list[nn.Module]:
    nets = [kind(16, 3, width, bias) for _ in range(2)]
    for net in nets:
        initialize_as_torch(net, torch.Generator().manual_seed(0))
    use_fast_versions(nets[1])
    assert type(nets[1]) is not type(nets[0])
    return [net.to(DEVICE) for net in nets]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "shape"), [(ImageEncoder, (6, 3, 16, 16)), (ImageDecoder, (6, 16))]
)
def test_a_fast_network_equals_the_plain_one(kind, shape, bias, monkeypatch):
    if DEVICE == "cpu":  # fewer programs, as the interpreter is slow
        monkeypatch.setattr(batch_norm, "TILE", 1 << 14)
        monkeypatch.setattr(im2col, "ELEMENTS", 1 << 14)
    x, results = torch.randn(shape, device=DEVICE), []
    nets = make_nets(kind, 16, bias)
    for net in nets:
        leaf = x.clone().requires_grad_()
        y = net.train()(leaf)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *net.parameters()])
        results.append([y.detach(), *grads, *net.buffers()])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-4)
    expected, actual = (net.eval()(x).detach() for net in nets)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=2e-4)


def test_a_width_that_is_no_power_of_two_uses_the_plain_code():
    x = torch.randn(6, 3, 16, 16, device=DEVICE)
    expected, actual = (net.train()(x) for net in make_nets(ImageEncoder, 12, True))
    assert torch.equal(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_maps_are_accurate_in_their_precision(dtype):
    x = torch.randn(512, 128, 16, 16, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(128, device="cuda")
    actual = outputs_and_gradients(batch_norm_elu, x, make_norm(128).cuda(), bias)
    exact = make_norm(128).cuda().double()
    expected = outputs_and_gradients(plain, x.double(), exact, bias.double())
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for a, b in zip(actual, expected, strict=True):
        error = torch.linalg.vector_norm((a - b).double())
        assert error <= tolerance * torch.linalg.vector_norm(b.double()) + 1e-3
