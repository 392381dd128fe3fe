"""The convolutional networks of Δ-IRIS."""

from __future__ import annotations

import pytest
import torch

from reverie.api import UserError
from reverie.nets.blocks import initialize
from reverie.nets.residual import (
    Conv,
    FrameConfig,
    FrameDecoder,
    FrameEncoder,
    NormSilu,
    Residual,
    recompute,
)

SMALL = FrameConfig(32, 6, (1, 2), (1, 1))


def make(net):
    initialize(net, torch.Generator().manual_seed(0))
    return net


def test_shapes():
    encoder = make(FrameEncoder(5, SMALL))
    assert encoder(torch.rand(2, 8, 12, 5)).shape == (2, 2, 3, 6)
    decoder = make(FrameDecoder(9, 3, SMALL))
    assert decoder(torch.rand(2, 2, 3, 9)).shape == (2, 8, 12, 3)
    assert SMALL.shrink == 4
    assert SMALL.side(64) == 16


def test_the_default_encoder_has_the_layers_of_the_original():
    names = [type(layer).__name__ for layer in FrameEncoder(3, FrameConfig()).layers]
    blocks = "Residual Halve Residual Residual Halve Residual Halve Residual"
    assert names == ["Conv", *blocks.split(), "NormSilu", "Conv"]
    names = [type(x).__name__ for x in FrameDecoder(3, 3, FrameConfig()).layers]
    blocks = "Residual Double Residual Double Residual Residual Double Residual"
    assert names == ["Conv", *blocks.split(), "NormSilu", "Conv"]


def test_remembering_less_changes_nothing_but_memory():
    net, x = make(FrameEncoder(5, SMALL)), torch.rand(2, 8, 8, 5)
    kept: dict[bool, int] = {}
    grads = {}
    for frugal in (False, True):
        recompute(net, frugal)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            loss = net(x).square().sum()
        kept[frugal] = sum(sizes)
        grads[frugal] = torch.autograd.grad(loss, list(net.parameters()))
    for one, two in zip(*grads.values(), strict=True):
        torch.testing.assert_close(one, two)
    assert kept[True] < kept[False] / 2


def test_norm_is_over_the_whole_map_of_each_group():
    norm = NormSilu(64)
    x = torch.randn(1, 4, 4, 64)
    groups = x.view(1, 16, 32, 2)
    mean = groups.mean((1, 3), keepdim=True)
    var = groups.var((1, 3), correction=0, keepdim=True)
    z = ((groups - mean) / torch.sqrt(var + 1e-5)).view(x.shape)
    torch.testing.assert_close(norm(x), z * torch.sigmoid(z))


def test_a_map_without_contrast_stays_without():
    """Black frames are such maps, and rounding must not draw anything on them."""
    x = torch.full((1, 16, 16, 32), 0.123)
    assert NormSilu(32)(x).abs().max() < 1e-3


def test_convolutions_begin_as_in_pytorch():
    conv = make(Conv(16, 64))
    bound = (16 * 9) ** -0.5
    weight = conv.weight.detach()
    assert float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    assert conv.bias.abs().max() > 0.5 * bound


def test_half_precision_goes_through():
    block = make(Residual(32, 64))
    with torch.backends.mkldnn.flags(enabled=False, deterministic=False):
        assert block(torch.rand(1, 2, 2, 32).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "sizes",
    [
        {"channels": 48},
        {"channels": 0},
        {"mults": (1, 2)},
        {"mults": (), "halve": ()},
        {"halve": (2, 0, 0, 0, 0)},
        {"latent": 0},
    ],
)
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match="must be"):
        FrameConfig(**sizes)


def test_a_side_that_cannot_be_halved_is_named():
    with pytest.raises(
        UserError, match=r"Images of side 84 .*\n  Fix: .*multiple of 8"
    ):
        FrameConfig().side(84)
