"""The decoder on coarse grids against the plain one."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reverie.nets.blocks import initialize
from reverie.nets.conv import Decoder, DecoderConfig
from reverie.spaces import Space

pytest.importorskip("triton")

from reverie.kernels.conv.decoder import Canvas, FastDecoder, Picture
from reverie.kernels.conv.last_layer import last_layer_loss
from reverie.kernels.conv.space_to_depth import upsampled_kernel
from reverie.kernels.norm.rms_norm import rms_norm_silu_depth_to_space

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = DecoderConfig(depth=2, mults=(2, 4), layers=1, units=8)
DETER, STOCH = 16, 12


def unfold(x: Tensor) -> Tensor:
    """The fine (b, h, w, c) map whose four phases, phase first, are `x`."""
    b, h, w, c = x.shape
    x = x.reshape(b, h, w, 2, 2, c // 4).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(b, 2 * h, 2 * w, c // 4)


def image(*shape: int) -> Space:
    return Space(np.dtype(np.uint8), shape, 0, 256)


def twins(
    spaces: dict[str, Space], config: DecoderConfig, deter: int = DETER
) -> tuple[Decoder, Decoder]:
    plain, fast = (Decoder(spaces, deter, STOCH, config) for _ in range(2))
    initialize(plain, torch.Generator().manual_seed(1))
    for name, parameter in plain.named_parameters():
        if name.endswith(("bias", "scale", "shift")):
            torch.nn.init.normal_(parameter, 0.5, 0.3)
    fast.load_state_dict(plain.state_dict())
    fast.__class__ = FastDecoder
    return plain.to(DEVICE), fast.to(DEVICE)


def recorded(spaces: dict[str, Space], *batch: int) -> dict[str, Tensor]:
    return {
        key: torch.randint(0, 256, (*batch, *space.shape)).to(torch.uint8).to(DEVICE)
        if space.is_image
        else torch.randn(*batch, *space.shape, device=DEVICE)
        for key, space in spaces.items()
    }


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
    for mine, theirs in pairs:
        size = theirs.abs().mean().item()
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=rtol * size)


def latents(deter: int, *batch: int) -> list[Tensor]:
    return [torch.randn(*batch, width, device=DEVICE) for width in (deter, STOCH)]


def test_repeating_pixels_before_a_convolution_is_a_coarse_one():
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64, device=DEVICE)
    weight = torch.randn(6, 3, 5, 5, dtype=torch.float64, device=DEVICE)
    weight.requires_grad_()
    fine = F.conv2d(F.interpolate(x, scale_factor=2.0), weight, padding=2)
    coarse = F.conv2d(x, upsampled_kernel(weight, 24), padding=1)
    mine, theirs = unfold(coarse.permute(0, 2, 3, 1)), fine.permute(0, 2, 3, 1)
    torch.testing.assert_close(mine, theirs)
    grad = torch.randn_like(mine)
    grads = (torch.autograd.grad(y, weight, grad)[0] for y in (mine, theirs))
    torch.testing.assert_close(*grads)


def test_unfolding_is_a_matter_of_layout():
    x = torch.randn(2, 3, 5, 24, device=DEVICE, requires_grad=True)
    scale, bias = torch.randn(2, 6, device=DEVICE)
    mine = rms_norm_silu_depth_to_space(x, scale, 1e-3, bias)
    theirs = F.silu(F.rms_norm(unfold(x) + bias, (6,), scale, 1e-3))
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(mine)
    grads = (torch.autograd.grad(y, x, grad)[0] for y in (mine, theirs))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bspace", [2, 0])
@pytest.mark.parametrize(
    "spaces",
    [
        {"image": image(16, 16, 3)},
        {"image": image(12, 24, 1)},
        {"image": image(13, 14, 3)},
        {"a": image(16, 16, 3), "b": image(9, 12, 1), "v": Space(np.float32, (5,))},
    ],
    ids=["square", "oblong grey", "padded", "two and a vector"],
)
def test_a_fast_decoder_is_the_plain_one(spaces, bspace):
    plain, fast = twins(spaces, DecoderConfig(**{**vars(SMALL), "bspace": bspace}))
    compare(plain, fast, *latents(DETER, 2, 3), recorded(spaces, 2, 3))


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": 4},
        {"kernel": 3},
        {"outer": True},
        {"strided": True},
        {"norm": "layer"},
        {"norm": "none"},
        {"act": "gelu"},
    ],
    ids=str,
)
def test_other_decoders_take_the_plain_way(change):
    config = DecoderConfig(**{**vars(SMALL), **change, "bspace": 2})
    spaces = {"image": image(16, 16, 3), "vector": Space(np.float32, (5,))}
    plain, fast = twins(spaces, config)
    compare(plain, fast, *latents(DETER, 2), recorded(spaces, 2))


def test_a_picture_compares_with_floats_too():
    x, bias = torch.randn(2, 3, 3, 4, device=DEVICE), torch.randn(3, device=DEVICE)
    canvas = Canvas(x, torch.randn(16, 4, 3, 3, device=DEVICE), bias)
    picture = Picture(canvas, torch.Size([2]), (5, 6, 3), 0)
    target = torch.randint(0, 256, (2, 5, 6, 3), dtype=torch.uint8, device=DEVICE)
    torch.testing.assert_close(picture.loss(target), picture.loss(target.float()))


@pytest.mark.parametrize(("channels", "colors"), [(8, 3), (20, 1), (3, 4)])
def test_the_last_layer_is_the_same_together_with_its_loss(channels, colors):
    """In float16, the half precision that the interpreter multiplies correctly."""
    x = torch.randn(3, 12, 13, channels, device=DEVICE).half()
    weight = torch.randn(colors, channels, 5, 5, device=DEVICE).half() / 5
    bias = torch.randn(colors, device=DEVICE)
    target = torch.randint(0, 256, (3, 23, 26, colors)).to(torch.uint8).to(DEVICE)

    def apart(x, weight, bias):
        fine = F.interpolate(x.float().permute(0, 3, 1, 2), scale_factor=2.0)
        y = F.conv2d(fine, weight.float(), bias, padding=2).permute(0, 2, 3, 1)
        error = torch.sigmoid(y)[:, :23] - target / 255
        return error.square().flatten(1).sum(1)

    def together(x, weight, bias):
        return last_layer_loss(x, upsampled_kernel(weight, 16), bias, target)

    outs = []
    for function in (apart, together):
        leaves = [leaf.clone().requires_grad_() for leaf in (x, weight, bias)]
        loss = function(*leaves)
        total = (loss * torch.tensor([1.0, -0.5, 2.0], device=DEVICE)).sum()
        outs.append([loss.detach(), *torch.autograd.grad(total, leaves)])
    for theirs, mine in zip(*outs, strict=True):
        error = (theirs.float() - mine.float()).norm() / theirs.float().norm()
        assert error < 1e-2


def test_in_half_precision_the_last_layer_is_one_kernel():
    spaces = {"image": image(16, 16, 3)}
    plain, fast = twins(spaces, DecoderConfig(**{**vars(SMALL), "bspace": 2}))
    inputs, target = latents(DETER, 4), recorded(spaces, 4)
    mine = results(fast, *(x.half() for x in inputs), target)
    assert max(apart(results(plain, *inputs, target), mine)) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [16, 32, 64])
def test_a_fast_decoder_at_real_sizes(depth, monkeypatch):
    """In half precision the twin must be as close to the truth as the plain part is.

    On average: biases have a few entries only, and which of the two is closer to them
    in a single batch is a matter of chance.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    spaces = {"image": image(64, 64, 3)}
    plain, fast = twins(spaces, DecoderConfig(depth=depth, units=256), 2048)
    losses, gains = defaultdict(list), defaultdict(list)
    for _ in range(3):
        inputs, target = latents(2048, 32), recorded(spaces, 32)
        exact, same = (results(net, *inputs, target) for net in (plain, fast))
        assert max(apart(exact, same)) < 1e-4
        for dtype in (torch.bfloat16, torch.float16):
            halves = [x.to(dtype) for x in inputs]
            theirs, mine = (results(net, *halves, target) for net in (plain, fast))
            losses[dtype].append(apart(exact, mine))
            gains[dtype].append(apart(exact, theirs))
    for dtype, slack in ((torch.bfloat16, 1e-3), (torch.float16, 4.8e-4)):
        mean = torch.tensor(losses[dtype]).mean(0), torch.tensor(gains[dtype]).mean(0)
        assert (mean[0] < 1.3 * mean[1] + slack).all()


def apart(truth: list[Tensor], guess: list[Tensor]) -> list[float]:
    """Relative distances."""
    pairs = zip(truth, guess, strict=True)
    return [((a.float() - b.float()).norm() / a.norm()).item() for a, b in pairs]
