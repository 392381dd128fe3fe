"""Fused upsampling and convolution on the CPU equals the two steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.kernels import accelerate
from reverie.kernels.conv import upsample_cpu
from reverie.kernels.conv.upsample_cpu import FusedUpsampleConv
from reverie.nets.blocks import initialize
from reverie.nets.conv import SameConv
from reverie.nets.decoder import Decoder, DecoderConfig
from reverie.spaces import Space


@pytest.mark.parametrize("size", [(1, 1), (4, 4), (3, 6)])
@pytest.mark.parametrize(("kernel", "stride"), [(5, 1), (3, 1), (4, 1)])
def test_output_and_gradients_equal_the_plain_ones(monkeypatch, size, kernel, stride):
    monkeypatch.setattr(upsample_cpu, "MIN_PIXELS", 0)
    conv = SameConv(3, 4, kernel, stride).double()
    initialize(conv, torch.Generator().manual_seed(0))
    conv.bias.data.normal_()
    x = torch.randn(2, *size, 3, dtype=torch.float64, requires_grad=True)
    inputs = (x, conv.weight, conv.bias)
    plain = conv.upsample_and_conv(x)
    grad = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, inputs, grad)
    conv.__class__ = FusedUpsampleConv
    fused = conv.upsample_and_conv(x)
    torch.testing.assert_close(fused, plain, rtol=1e-12, atol=1e-12)
    for a, b in zip(torch.autograd.grad(fused, inputs, grad), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"outer": True}, {"strided": True}])
def test_a_decoder_predicts_the_same_images(monkeypatch, options):
    monkeypatch.setattr(upsample_cpu, "MIN_PIXELS", 0)
    spaces = {"image": Space(np.uint8, (16, 16, 3))}
    config = DecoderConfig(depth=4, mults=(1, 2), bspace=0, units=8, **options)
    decoder = Decoder(spaces, 6, 8, config)
    initialize(decoder, torch.Generator().manual_seed(0))
    deter, stoch = torch.randn(2, 3, 6), torch.randn(2, 3, 8)
    plain = decoder(deter, stoch)["image"].pred()
    accelerate.use_fast_versions(decoder, "fast_cpu_version")
    assert isinstance(decoder.imgout, FusedUpsampleConv)
    torch.testing.assert_close(decoder(deter, stoch)["image"].pred(), plain)


def test_a_3x3_convolution_with_many_outputs_uses_the_plain_code(monkeypatch):
    monkeypatch.setattr(upsample_cpu, "MIN_PIXELS", 0)
    for outputs in (upsample_cpu.MAX_OUTPUTS, upsample_cpu.MAX_OUTPUTS + 1):
        conv = SameConv(3, outputs, 3)
        initialize(conv, torch.Generator().manual_seed(0))
        x = torch.randn(2, 4, 4, 3)
        plain = conv.upsample_and_conv(x)
        conv.__class__ = FusedUpsampleConv
        is_plain = torch.equal(conv.upsample_and_conv(x), plain)
        assert is_plain == (outputs > upsample_cpu.MAX_OUTPUTS)


def test_small_maps_use_the_plain_code(monkeypatch):
    conv = SameConv(3, 4, 5)
    initialize(conv, torch.Generator().manual_seed(0))
    x = torch.randn(2, 4, 4, 3)
    plain = conv.upsample_and_conv(x)
    conv.__class__ = FusedUpsampleConv
    assert torch.equal(conv.upsample_and_conv(x), plain)
    monkeypatch.setattr(upsample_cpu, "MIN_PIXELS", 32)
    assert not torch.equal(conv.upsample_and_conv(x), plain)
