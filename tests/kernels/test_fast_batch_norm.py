"""Batch norm and ELU in one, and the networks made of them, against the plain ones."""

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


def results(function, x: Tensor, norm: nn.BatchNorm2d, bias: Tensor) -> list[Tensor]:
    x, bias = x.clone().requires_grad_(), bias.clone().requires_grad_()
    y = function(x, norm, bias)
    # numbers of a few bits, so that they are the same in every precision
    weight = (torch.arange(y.numel()) % 61 / 32 - 1).reshape(y.shape).to(y)
    grads = torch.autograd.grad((y * weight).sum(), [x, norm.weight, norm.bias, bias])
    averages = [norm.running_mean, norm.running_var, norm.num_batches_tracked]
    return [y.detach(), *grads, *averages]


def plain(x: Tensor, norm: nn.BatchNorm2d, bias: Tensor) -> Tensor:
    return F.elu(norm(x + bias[:, None, None]))


@pytest.mark.parametrize("shape", [(5, 16, 6, 6), (40, 16, 1, 1), (3, 128, 4, 4)])
def test_values_gradients_and_running_averages_are_those_of_the_plain_layers(shape):
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(shape, generator=generator) + 30  # far from 0
    bias = torch.randn(shape[1], generator=generator)
    ours = results(
        batch_norm_elu, x.to(DEVICE), make_norm(shape[1]).to(DEVICE), bias.to(DEVICE)
    )
    exact = make_norm(shape[1]).double()
    theirs = results(plain, x.double(), exact, bias.double())
    for mine, his in zip(ours, theirs, strict=True):
        torch.testing.assert_close(
            mine.cpu().double(), his.double(), rtol=1e-4, atol=3e-5
        )


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
def test_a_fast_network_is_the_plain_one(kind, shape, bias, monkeypatch):
    if DEVICE == "cpu":  # the interpreter takes its time for each program
        monkeypatch.setattr(batch_norm, "TILE", 1 << 14)
        monkeypatch.setattr(im2col, "ENTRIES", 1 << 14)
    x, found = torch.randn(shape, device=DEVICE), []
    nets = make_nets(kind, 16, bias)
    for net in nets:
        leaf = x.clone().requires_grad_()
        y = net.train()(leaf)
        grads = torch.autograd.grad(y.square().sum(), [leaf, *net.parameters()])
        found.append([y.detach(), *grads, *net.buffers()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-4)
    plainly, fast = (net.eval()(x).detach() for net in nets)
    torch.testing.assert_close(plainly, fast, rtol=1e-3, atol=2e-4)


def test_a_width_that_is_no_power_of_two_takes_the_plain_way():
    x = torch.randn(6, 3, 16, 16, device=DEVICE)
    plainly, fast = (net.train()(x) for net in make_nets(ImageEncoder, 12, True))
    assert torch.equal(plainly, fast)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_map_is_normalized_as_exactly_as_its_precision_allows(dtype):
    x = torch.randn(512, 128, 16, 16, device="cuda").to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    bias = torch.randn(128, device="cuda")
    ours = results(batch_norm_elu, x, make_norm(128).cuda(), bias)
    theirs = results(plain, x.double(), make_norm(128).cuda().double(), bias.double())
    allowed = 1e-4 if dtype == torch.float32 else 1e-2
    for mine, his in zip(ours, theirs, strict=True):
        error = torch.linalg.vector_norm((mine - his).double())
        assert error <= allowed * torch.linalg.vector_norm(his.double()) + 1e-3
