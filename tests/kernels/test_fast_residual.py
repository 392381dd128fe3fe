"""The fused residual blocks against the plain ones."""

from __future__ import annotations

import copy

import pytest
import torch

from reverie.nets.blocks import initialize
from reverie.nets.residual import (
    Double,
    FrameConfig,
    FrameDecoder,
    FrameEncoder,
    Residual,
)

pytest.importorskip("triton")

from reverie.kernels.accelerate import use_fast_versions
from reverie.kernels.conv import few_channels
from reverie.kernels.norm import group_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """So that small maps take several programs, and some are cut in the middle."""

    def num_programs(device, tiles, per_sm):
        return min(tiles, 4)

    monkeypatch.setattr(group_norm, "TILE", 512)
    monkeypatch.setattr(few_channels, "TALL", 16)
    monkeypatch.setattr(few_channels, "SHORT", 16)
    for module in (group_norm, few_channels):
        monkeypatch.setattr(module, "num_programs", num_programs)


WAYS = {"shared": (1, 0), "at once": (8192, 256), "one after the other": (64, 256)}
"""How programs share a map: `WHOLE` and `FEW_ROWS`."""


@pytest.fixture(params=WAYS)
def _each_way(request, monkeypatch):
    for name, value in zip(("WHOLE", "FEW_ROWS"), WAYS[request.param], strict=True):
        monkeypatch.setattr(group_norm, name, value)


@pytest.fixture(autouse=True)
def _no_tensor_floats():
    """Libraries round to them unless told not to, and these kernels do not."""
    precision = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = precision


def twins(net):
    initialize(net, torch.Generator().manual_seed(0))
    for name, parameter in net.named_parameters():
        if name.endswith(("scale", "shift", "bias")):
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    net.to(DEVICE)
    quick = copy.deepcopy(net)
    use_fast_versions(quick)
    assert type(quick) is not type(net)
    return net, quick


def compare(net, quick, x):
    plain, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, z = net(plain), quick(other)
    torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-4)
    slope = torch.randn_like(y)
    names = ["input", *dict(net.named_parameters())]
    wanted = torch.autograd.grad((y * slope).sum(), [plain, *net.parameters()])
    got = torch.autograd.grad((z * slope).sum(), [other, *quick.parameters()])
    for name, mine, theirs in zip(names, got, wanted, strict=True):
        # a bias before a norm of single channels has no influence, but for rounding
        atol = 1e-3 * max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(
            mine, theirs, rtol=1e-3, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.usefixtures("_each_way")
@pytest.mark.parametrize("inputs", [64, 32])
def test_a_block_and_its_gradients(inputs):
    compare(*twins(Residual(inputs, 64)), torch.randn(1, 5, 3, inputs, device=DEVICE))


@pytest.mark.parametrize("inputs", [64, 32])
def test_a_block_adds_the_bias_of_what_comes_in(inputs):
    net, quick = twins(Residual(inputs, 64))
    first = torch.randn(inputs, device=DEVICE, requires_grad=True)
    x = torch.randn(1, 5, 3, inputs, device=DEVICE)
    y, z = net(x + first), quick(x, first)
    torch.testing.assert_close(z, y, rtol=1e-4, atol=1e-4)
    slope = torch.randn_like(y)
    wanted, got = (torch.autograd.grad((out * slope).sum(), first) for out in (y, z))
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)


def test_almost_constant_maps():
    net, quick = twins(Residual(64, 64))
    x = 3 + 1e-3 * torch.randn(1, 4, 5, 64, device=DEVICE)
    torch.testing.assert_close(quick(x), net(x), rtol=1e-3, atol=1e-3)
    level = torch.full((1, 4, 5, 64), 0.7, device=DEVICE)
    torch.testing.assert_close(quick(level), net(level), rtol=1e-4, atol=1e-4)


def test_doubling_and_its_gradients():
    compare(*twins(Double(32)), torch.randn(2, 3, 5, 32, device=DEVICE))


@torch.no_grad()
def test_a_kernel_made_beforehand_is_made_again_when_weights_moved():
    net, quick = twins(Double(32))
    x = torch.randn(2, 3, 3, 32, device=DEVICE)
    quick.prepare()
    place = quick.ready.data_ptr()
    for layer in (net, quick):
        layer.conv.weight.add_(1)
    assert not torch.allclose(quick(x), net(x), rtol=1e-3, atol=1e-3)
    quick.prepare()
    assert quick.ready.data_ptr() == place
    torch.testing.assert_close(quick(x), net(x), rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", [FrameEncoder, FrameDecoder])
def test_biases_summed_beforehand_are_summed_again_when_they_moved(kind):
    config = FrameConfig(32, 6, (1, 2), (1, 1))
    ends = (5,) if kind is FrameEncoder else (9, 3)
    net, quick = twins(kind(*ends, config))
    x = torch.rand(1, 4, 4, ends[0], device=DEVICE)
    quick.prepare()
    blocks = [layer for layer in quick.layers if isinstance(layer, Residual)]
    places = [block.ready.data_ptr() for block in blocks]
    torch.testing.assert_close(quick(x), net(x), rtol=1e-4, atol=1e-4)
    for layers in (net.layers, quick.layers):
        for layer in layers:
            if isinstance(layer, Residual):
                layer.conv1.bias.add_(1)
    assert not torch.allclose(quick(x), net(x), rtol=1e-3, atol=1e-3)
    quick.prepare()
    assert [block.ready.data_ptr() for block in blocks] == places
    torch.testing.assert_close(quick(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("net", [FrameEncoder, FrameDecoder])
def test_whole_networks(net):
    config = FrameConfig(32, 6, (1, 2), (1, 0))
    if net is FrameEncoder:
        compare(*twins(net(5, config)), torch.rand(1, 4, 6, 5, device=DEVICE))
    else:
        compare(*twins(net(9, 3, config)), torch.rand(1, 2, 3, 9, device=DEVICE))


def test_widths_without_kernels_take_the_plain_way():
    net, quick = twins(Residual(96, 96))
    x = torch.randn(2, 4, 4, 96, device=DEVICE)
    torch.testing.assert_close(quick(x), net(x))


def test_half_precision_stays_half():
    _, quick = twins(Residual(32, 64))
    x = torch.randn(2, 4, 4, 32, device=DEVICE).bfloat16()
    assert quick(x).dtype == torch.bfloat16
