"""Fast residual blocks and networks equal the plain ones."""

from __future__ import annotations

import copy

import pytest
import torch

from reverie.nets.blocks import initialize
from reverie.nets.residual import (
    FrameConfig,
    FrameDecoder,
    FrameEncoder,
    Residual,
    Upsample,
)

pytest.importorskip("triton")

from reverie.kernels.accelerate import use_fast_versions
from reverie.kernels.conv import few_channels
from reverie.kernels.norm import group_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Make small maps need several programs, some of them with partial tiles."""

    def num_programs(device, tiles, per_sm):
        return min(tiles, 4)

    monkeypatch.setattr(group_norm, "TILE", 512)
    monkeypatch.setattr(few_channels, "ROWS", 16)
    monkeypatch.setattr(few_channels, "BACKWARD_ROWS", 16)
    for module in (group_norm, few_channels):
        monkeypatch.setattr(module, "num_programs", num_programs)


SHARING = {"by pixels": (1, 0), "by groups": (8192, 256), "in steps": (64, 256)}
"""How programs share a map: `GROUP_TILE` and `MAX_BATCH_BY_GROUPS`."""


@pytest.fixture(params=SHARING)
def _each_sharing(request, monkeypatch):
    names = ("GROUP_TILE", "MAX_BATCH_BY_GROUPS")
    for name, value in zip(names, SHARING[request.param], strict=True):
        monkeypatch.setattr(group_norm, name, value)


@pytest.fixture(autouse=True)
def _no_tf32():
    """cuDNN uses TF32 by default; these kernels do not."""
    precision = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = precision


def make_pair(net):
    """Return a network with random norm parameters, and the fast version of it."""
    initialize(net, torch.Generator().manual_seed(0))
    for name, parameter in net.named_parameters():
        if name.endswith(("scale", "shift", "bias")):
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    net.to(DEVICE)
    fast = copy.deepcopy(net)
    use_fast_versions(fast)
    assert type(fast) is not type(net)
    return net, fast


def compare(plain, fast, x):
    plain_x, fast_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, fast_y = plain(plain_x), fast(fast_x)
    torch.testing.assert_close(fast_y, y, rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(y)
    names = ["input", *dict(plain.named_parameters())]
    expected = torch.autograd.grad((y * grad).sum(), [plain_x, *plain.parameters()])
    actual = torch.autograd.grad((fast_y * grad).sum(), [fast_x, *fast.parameters()])
    for name, a, b in zip(names, actual, expected, strict=True):
        # a bias before a norm of single channels has no influence except rounding
        atol = 1e-3 * max(1.0, float(b.abs().max()))
        torch.testing.assert_close(
            a, b, rtol=1e-3, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.usefixtures("_each_sharing")
@pytest.mark.parametrize("inputs", [64, 32])
def test_a_block_and_its_gradients(inputs):
    compare(
        *make_pair(Residual(inputs, 64)), torch.randn(1, 5, 3, inputs, device=DEVICE)
    )


@pytest.mark.parametrize("inputs", [64, 32])
def test_a_block_adds_the_input_bias(inputs):
    net, fast = make_pair(Residual(inputs, 64))
    bias = torch.randn(inputs, device=DEVICE, requires_grad=True)
    x = torch.randn(1, 5, 3, inputs, device=DEVICE)
    outputs = net(x + bias), fast(x, bias)
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-4, atol=1e-4)
    grad = torch.randn_like(outputs[0])
    expected, actual = (torch.autograd.grad((y * grad).sum(), bias) for y in outputs)
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3)


def test_almost_constant_maps():
    net, fast = make_pair(Residual(64, 64))
    x = 3 + 1e-3 * torch.randn(1, 4, 5, 64, device=DEVICE)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-3, atol=1e-3)
    level = torch.full((1, 4, 5, 64), 0.7, device=DEVICE)
    torch.testing.assert_close(fast(level), net(level), rtol=1e-4, atol=1e-4)


def test_upsampling_and_its_gradients():
    compare(*make_pair(Upsample(32)), torch.randn(2, 3, 5, 32, device=DEVICE))


@torch.no_grad()
def test_the_cached_kernel_is_updated_in_place():
    net, fast = make_pair(Upsample(32))
    x = torch.randn(2, 3, 3, 32, device=DEVICE)
    fast.prepare()
    address = fast.cached_kernel.data_ptr()
    for layer in (net, fast):
        layer.conv.weight.add_(1)
    assert not torch.allclose(fast(x), net(x), rtol=1e-3, atol=1e-3)
    fast.prepare()
    assert fast.cached_kernel.data_ptr() == address
    torch.testing.assert_close(fast(x), net(x), rtol=1e-3, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("kind", [FrameEncoder, FrameDecoder])
def test_the_cached_bias_is_updated_in_place(kind):
    config = FrameConfig(32, 6, (1, 2), (1, 1))
    channels = (5,) if kind is FrameEncoder else (9, 3)
    net, fast = make_pair(kind(*channels, config))
    x = torch.rand(1, 4, 4, channels[0], device=DEVICE)
    fast.prepare()
    blocks = [layer for layer in fast.layers if isinstance(layer, Residual)]
    addresses = [block.cached_bias.data_ptr() for block in blocks]
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)
    for layers in (net.layers, fast.layers):
        for layer in layers:
            if isinstance(layer, Residual):
                layer.conv1.bias.add_(1)
    assert not torch.allclose(fast(x), net(x), rtol=1e-3, atol=1e-3)
    fast.prepare()
    assert [block.cached_bias.data_ptr() for block in blocks] == addresses
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("net", [FrameEncoder, FrameDecoder])
def test_whole_networks(net):
    config = FrameConfig(32, 6, (1, 2), (1, 0))
    if net is FrameEncoder:
        compare(*make_pair(net(5, config)), torch.rand(1, 4, 6, 5, device=DEVICE))
    else:
        compare(*make_pair(net(9, 3, config)), torch.rand(1, 2, 3, 9, device=DEVICE))


def test_unsupported_widths_use_the_plain_code():
    net, fast = make_pair(Residual(96, 96))
    x = torch.randn(2, 4, 4, 96, device=DEVICE)
    torch.testing.assert_close(fast(x), net(x))


def test_the_output_has_the_dtype_of_the_input_map():
    _, fast = make_pair(Residual(32, 64))
    x = torch.randn(2, 4, 4, 32, device=DEVICE).bfloat16()
    assert fast(x).dtype == torch.bfloat16
