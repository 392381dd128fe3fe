"""The convolutional networks of Δ-IRIS."""

from __future__ import annotations

import pytest
import torch

from reverie.api import UserError
from reverie.nets.blocks import initialize
from reverie.nets.residual import (
    FrameConfig,
    FrameConv,
    FrameDecoder,
    FrameEncoder,
    NormSilu,
    Residual,
    set_recompute,
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
    assert SMALL.downsampling == 4
    assert SMALL.side(64) == 16


def test_the_default_encoder_has_the_layers_of_the_original():
    names = [type(layer).__name__ for layer in FrameEncoder(3, FrameConfig()).layers]
    blocks = (
        "Residual Downsample Residual Residual Downsample Residual Downsample Residual"
    )
    assert names == ["FrameConv", *blocks.split(), "NormSilu", "FrameConv"]
    names = [type(x).__name__ for x in FrameDecoder(3, 3, FrameConfig()).layers]
    blocks = "Residual Upsample Residual Upsample Residual Residual Upsample Residual"
    assert names == ["FrameConv", *blocks.split(), "NormSilu", "FrameConv"]


def test_recomputing_activations_saves_memory_and_changes_no_gradient():
    net, x = make(FrameEncoder(5, SMALL)), torch.rand(2, 8, 8, 5)
    saved: dict[bool, int] = {}
    grads = {}
    for enabled in (False, True):
        set_recompute(net, enabled)
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, sizes=sizes: sizes.append(t.numel()) or t, lambda t: t
        ):
            loss = net(x).square().sum()
        saved[enabled] = sum(sizes)
        grads[enabled] = torch.autograd.grad(loss, list(net.parameters()))
    for one, two in zip(*grads.values(), strict=True):
        torch.testing.assert_close(one, two)
    assert saved[True] < saved[False] / 2


def test_group_norm_is_over_all_pixels():
    norm = NormSilu(64)
    x = torch.randn(1, 4, 4, 64)
    groups = x.view(1, 16, 32, 2)
    mean = groups.mean((1, 3), keepdim=True)
    var = groups.var((1, 3), correction=0, keepdim=True)
    z = ((groups - mean) / torch.sqrt(var + 1e-5)).view(x.shape)
    torch.testing.assert_close(norm(x), z * torch.sigmoid(z))


def test_a_constant_map_is_normalized_to_zero():
    """Black frames have constant maps; rounding errors must not be amplified."""
    x = torch.full((1, 16, 16, 32), 0.123)
    assert NormSilu(32)(x).abs().max() < 1e-3


def test_convolutions_are_initialized_as_in_pytorch():
    conv = make(FrameConv(16, 64))
    bound = (16 * 9) ** -0.5
    weight = conv.weight.detach()
    assert float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.05)
    assert conv.bias.abs().max() > 0.5 * bound


def test_the_output_has_the_dtype_of_the_input():
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
def test_invalid_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="must be"):
        FrameConfig(**sizes)


def test_a_side_that_cannot_be_downsampled_is_refused():
    with pytest.raises(
        UserError, match=r"Images of side 84 .*\n  Fix: .*multiple of 8"
    ):
        FrameConfig().side(84)
