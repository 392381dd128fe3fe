"""The fast image decoder equals the plain one."""

from __future__ import annotations

import copy
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reverie.nets.decoder import Decoder, DecoderConfig
from reverie.spaces import Space

pytest.importorskip("triton")

from image_nets import (
    DEVICE,
    VECTOR,
    each_kind_of_spaces,
    each_unsupported_setting,
    image,
    make_pair,
    outputs_and_gradients,
    random_obs,
    relative_errors,
)

from reverie.kernels.conv.decoder import FastDecoder, FusedImageMSE, LazyLastLayer
from reverie.kernels.conv.last_layer import last_layer_loss
from reverie.kernels.conv.space_to_depth import upsample_kernel
from reverie.kernels.norm.rms_norm import rms_norm_silu_depth_to_space

SMALL = DecoderConfig(depth=2, mults=(2, 4), layers=1, units=8)
DETER, STOCH = 16, 12


def depth_to_space(x: Tensor) -> Tensor:
    """Return the full-resolution map of a space-to-depth map, sub-pixel first."""
    b, h, w, c = x.shape
    x = x.reshape(b, h, w, 2, 2, c // 4).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(b, 2 * h, 2 * w, c // 4)


def make_decoders(
    spaces: dict[str, Space], config: DecoderConfig, deter: int = DETER
) -> tuple[Decoder, Decoder]:
    return make_pair(lambda: Decoder(spaces, deter, STOCH, config), FastDecoder, 0.5)


def results(
    net: Decoder, deter: Tensor, stoch: Tensor, target: dict[str, Tensor]
) -> list[Tensor]:
    leaves = [deter.clone().requires_grad_(), stoch.clone().requires_grad_()]
    outs = net(*leaves)
    preds = [outs[key].pred().detach() for key in target]
    losses = [outs[key].loss(value) for key, value in target.items()]
    weight = torch.linspace(0, 1, losses[0].numel(), device=DEVICE)
    total = sum((loss.flatten() * weight).sum() for loss in losses)
    grads = torch.autograd.grad(total, [*leaves, *net.parameters()])
    return [*preds, *(loss.detach() for loss in losses), *grads]


def compare(plain, fast, *inputs, rtol=1e-4) -> None:
    pairs = zip(results(fast, *inputs), results(plain, *inputs), strict=True)
    for actual, expected in pairs:
        size = expected.abs().mean().item()
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=rtol * size)


def latents(deter: int, *batch: int) -> list[Tensor]:
    return [torch.randn(*batch, width, device=DEVICE) for width in (deter, STOCH)]


def test_upsampling_and_convolving_equals_the_half_resolution_kernel():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, device=DEVICE)
    weight = torch.randn(6, 3, 5, 5, dtype=torch.float64, device=DEVICE)
    weight.requires_grad_()
    full = F.conv2d(F.interpolate(x, scale_factor=2.0), weight, padding=2)
    half = F.conv2d(x, upsample_kernel(weight, 24), padding=1)
    actual, expected = (
        depth_to_space(half.permute(0, 2, 3, 1)),
        full.permute(0, 2, 3, 1),
    )
    torch.testing.assert_close(actual, expected)
    grad = torch.randn_like(actual)
    grads = (torch.autograd.grad(y, weight, grad)[0] for y in (actual, expected))
    torch.testing.assert_close(*grads)


def test_norm_with_depth_to_space_equals_the_norm_of_the_full_map():
    x = torch.randn(2, 3, 5, 24, device=DEVICE, requires_grad=True)
    scale, bias = torch.randn(2, 6, device=DEVICE)
    actual = rms_norm_silu_depth_to_space(x, scale, 1e-3, bias)
    expected = F.silu(F.rms_norm(depth_to_space(x) + bias, (6,), scale, 1e-3))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(actual)
    grads = (torch.autograd.grad(y, x, grad)[0] for y in (actual, expected))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.extended_except("square-0", "two and a vector-2")
@pytest.mark.parametrize("bspace", [2, 0])
@each_kind_of_spaces
def test_a_fast_decoder_equals_the_plain_one(spaces, bspace):
    config = DecoderConfig(**{**vars(SMALL), "bspace": bspace})
    plain, fast = make_decoders(spaces, config)
    compare(plain, fast, *latents(DETER, 2, 3), random_obs(spaces, 2, 3))


@each_unsupported_setting
def test_unsupported_decoders_use_the_plain_code(change):
    config = DecoderConfig(**{**vars(SMALL), **change, "bspace": 2})
    spaces = {"image": image(16, 16, 3), "vector": VECTOR}
    plain, fast = make_decoders(spaces, config)
    compare(plain, fast, *latents(DETER, 2), random_obs(spaces, 2))


def test_the_image_loss_accepts_float_targets():
    x, bias = torch.randn(2, 3, 3, 4, device=DEVICE), torch.randn(3, device=DEVICE)
    layer = LazyLastLayer(x, torch.randn(16, 4, 3, 3, device=DEVICE), bias)
    output = FusedImageMSE(layer, torch.Size([2]), (5, 6, 3), 0)
    target = torch.randint(0, 256, (2, 5, 6, 3), dtype=torch.uint8, device=DEVICE)
    torch.testing.assert_close(output.loss(target), output.loss(target.float()))


@pytest.mark.extended_except("3-4")
@pytest.mark.parametrize(("channels", "colors"), [(8, 3), (20, 1), (3, 4)])
def test_the_fused_last_layer_equals_convolution_and_loss(channels, colors):
    """In float16, the half precision that the interpreter multiplies correctly."""
    x = torch.randn(3, 12, 13, channels, device=DEVICE).half()
    weight = torch.randn(colors, channels, 5, 5, device=DEVICE).half() / 5
    bias = torch.randn(colors, device=DEVICE)
    target = torch.randint(0, 256, (3, 23, 26, colors)).to(torch.uint8).to(DEVICE)

    def separate(x, weight, bias):
        full = F.interpolate(x.float().permute(0, 3, 1, 2), scale_factor=2.0)
        y = F.conv2d(full, weight.float(), bias, padding=2).permute(0, 2, 3, 1)
        error = torch.sigmoid(y)[:, :23] - target / 255
        return error.square().flatten(1).sum(1)

    def fused(x, weight, bias):
        return last_layer_loss(x, upsample_kernel(weight, 16), bias, target)

    def weights(loss):
        return torch.tensor([1.0, -0.5, 2.0], device=DEVICE)

    inputs = (x, weight, bias)
    expected = outputs_and_gradients(separate, inputs, weights)
    actual = outputs_and_gradients(fused, inputs, weights)
    for a, b in zip(expected, actual, strict=True):
        assert (a.float() - b.float()).norm() / a.float().norm() < 1e-2


@pytest.mark.extended
def test_half_precision_uses_the_fused_last_layer():
    spaces = {"image": image(16, 16, 3)}
    plain, fast = make_decoders(spaces, DecoderConfig(**{**vars(SMALL), "bspace": 2}))
    inputs, target = latents(DETER, 4), random_obs(spaces, 4)
    actual = results(fast, *(x.half() for x in inputs), target)
    assert max(relative_errors(results(plain, *inputs, target), actual)) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [16, 32, 64])
def test_a_fast_decoder_at_full_size(depth, monkeypatch):
    """In half precision, the errors of the fast version are rounding errors.

    It rounds its weights once more than the plain version: `upsample_kernel` adds up
    weights, and the sums are rounded. So its errors are compared with those of the
    plain version with weights that are rounded once more, too. Both are means over
    batches: biases have only a few entries, so which of the two is closer in a single
    batch is random.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    spaces = {"image": image(64, 64, 3)}
    plain, fast = make_decoders(spaces, DecoderConfig(depth=depth, units=256), 2048)
    fast_errors, plain_errors = defaultdict(list), defaultdict(list)
    for _ in range(3):
        inputs, target = latents(2048, 32), random_obs(spaces, 32)
        exact, same = (results(net, *inputs, target) for net in (plain, fast))
        assert max(relative_errors(exact, same)) < 1e-4
        for dtype in (torch.bfloat16, torch.float16):
            halves = [x.to(dtype) for x in inputs]
            rounded = with_rounded_weights(plain, dtype)
            expected, actual = (
                results(net, *halves, target) for net in (rounded, fast)
            )
            fast_errors[dtype].append(relative_errors(exact, actual))
            plain_errors[dtype].append(relative_errors(exact, expected))
    for dtype, slack in ((torch.bfloat16, 1e-3), (torch.float16, 4.8e-4)):
        errors = torch.tensor(fast_errors[dtype]).mean(0)
        assert (errors < 1.3 * torch.tensor(plain_errors[dtype]).mean(0) + slack).all()


def with_rounded_weights(net: Decoder, dtype: torch.dtype) -> Decoder:
    """Return a copy whose weights are rounded to `dtype` at a random scale."""
    net = copy.deepcopy(net)
    for weight in net.parameters():
        scale = 1 + torch.rand_like(weight)
        weight.data = (weight * scale).to(dtype).float() / scale
    return net


def test_rounded_weights_have_the_error_of_one_rounding():
    plain, _ = make_decoders({"image": image(16, 16, 3)}, SMALL)
    rounded = with_rounded_weights(plain, torch.bfloat16)
    (error,) = relative_errors([plain.imgout.weight], [rounded.imgout.weight])
    unit = torch.finfo(torch.bfloat16).eps / 2
    assert 0.2 * unit < error < unit
