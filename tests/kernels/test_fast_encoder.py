"""The encoder on coarse grids against the plain one."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reverie.nets.blocks import initialize
from reverie.nets.conv import Encoder, EncoderConfig
from reverie.spaces import Space

pytest.importorskip("triton")

from reverie.kernels.conv import encoder
from reverie.kernels.conv.encoder import FastEncoder, see
from reverie.kernels.conv.first_layer import first_layer
from reverie.kernels.conv.max_pool import max_pool_rms_norm_silu
from reverie.kernels.conv.space_to_depth import phase_kernel

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = EncoderConfig(depth=2, mults=(2, 3), layers=2, units=8)


def fold(x: Tensor) -> Tensor:
    """The four phases of a (b, h, w, c) map, phase first."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h // 2, w // 2, 4 * c)


def image(*shape: int) -> Space:
    return Space(np.dtype(np.uint8), shape, 0, 256)


def twins(spaces: dict[str, Space], config: EncoderConfig) -> tuple[Encoder, Encoder]:
    plain, fast = (Encoder(spaces, config) for _ in range(2))
    initialize(plain, torch.Generator().manual_seed(1))
    for name, parameter in plain.named_parameters():
        if name.endswith(("bias", "scale", "shift")):
            torch.nn.init.normal_(parameter, 1, 0.3)
    fast.load_state_dict(plain.state_dict())
    fast.__class__ = FastEncoder
    return plain.to(DEVICE), fast.to(DEVICE)


def look(spaces: dict[str, Space], *batch: int) -> dict[str, Tensor]:
    return {
        key: torch.randint(0, 256, (*batch, *space.shape)).to(torch.uint8).to(DEVICE)
        if space.is_image
        else torch.randn(*batch, *space.shape, device=DEVICE)
        for key, space in spaces.items()
    }


def results(
    net: Encoder, obs: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    y = net(obs, dtype)
    weight = torch.linspace(-1, 1, y.numel(), device=DEVICE).reshape(y.shape).sin()
    grads = torch.autograd.grad((y.float() * weight).sum(), list(net.parameters()))
    return [y.detach(), *grads]


def compare(net, twin, obs, rtol=1e-4) -> None:
    names = ["tokens", *(name for name, _ in net.named_parameters())]
    pairs = zip(names, results(twin, obs), results(net, obs), strict=True)
    for name, mine, theirs in pairs:
        size = theirs.abs().mean().item()
        torch.testing.assert_close(
            mine, theirs, rtol=rtol, atol=rtol * size, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_fine_convolution_is_a_coarse_one_of_phases():
    x = torch.randn(2, 6, 8, 3, dtype=torch.float64, device=DEVICE)
    weight = torch.randn(4, 3, 5, 5, dtype=torch.float64, device=DEVICE)
    weight.requires_grad_()
    fine = F.conv2d(x.permute(0, 3, 1, 2), weight, padding=2).permute(0, 2, 3, 1)
    kernel = phase_kernel(weight, 16, 12)
    coarse = F.conv2d(fold(x).permute(0, 3, 1, 2), kernel, padding=1)
    coarse = coarse.permute(0, 2, 3, 1)
    torch.testing.assert_close(coarse, fold(fine))
    grad = torch.randn_like(coarse)
    (mine,) = torch.autograd.grad(coarse, weight, grad)
    (theirs,) = torch.autograd.grad(fold(fine), weight, grad)
    torch.testing.assert_close(mine, theirs)


def test_padding_of_the_kernel_is_zero():
    kernel = phase_kernel(torch.ones(2, 3, 5, 5, device=DEVICE), 10, 16)
    assert kernel.shape == (10, 16, 3, 3)
    assert not kernel[8:].any()
    assert not kernel[:, 12:].any()
    assert kernel.sum() == 4 * 2 * 3 * 25


def test_images_are_centred_side_by_side_on_the_canvas():
    images = [
        torch.randint(0, 256, (2, 5, 7, c), dtype=torch.uint8, device=DEVICE)
        for c in (3, 1)
    ]
    x = torch.cat([F.pad(i / 255 - 0.5, (0, 0, 0, 1, 0, 3)) for i in images], -1)
    torch.testing.assert_close(see(images, 8, 8, torch.float32)[..., :16], fold(x))


@pytest.mark.parametrize("from_phases", [True, False])
@pytest.mark.parametrize("to_phases", [True, False])
def test_pooling_is_the_same_in_every_layout(from_phases, to_phases):
    def plain(x, scale, bias):
        y = F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1) + bias
        y = F.silu(F.rms_norm(y, (5,), scale, 1e-3))
        return fold(y) if to_phases else y

    def fast(x, scale, bias):
        x = fold(x) if from_phases else x
        flags = {"from_phases": from_phases, "to_phases": to_phases}
        return max_pool_rms_norm_silu(x, scale, 1e-3, bias, **flags)

    x, leaves = torch.randn(3, 8, 12, 5).round(decimals=1).to(DEVICE), []
    parameters = [x, *torch.randn(2, 5, device=DEVICE)]
    outs = []
    for function in (plain, fast):
        leaves = [leaf.clone().requires_grad_() for leaf in parameters]
        y = function(*leaves)
        weight = torch.linspace(-1, 1, y.numel(), device=DEVICE).reshape(y.shape)
        outs.append([y.detach(), *torch.autograd.grad((y * weight).sum(), leaves)])
    for mine, theirs in zip(*reversed(outs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("colors", "units"), [(3, 8), (1, 5)])
@pytest.mark.parametrize("to_phases", [True, False])
def test_the_first_layer_is_the_same_in_one_kernel(colors, units, to_phases):
    """In float16, the half precision that the interpreter multiplies correctly."""
    half = torch.float16
    pixels = torch.randint(0, 256, (2, 14, 15, colors), dtype=torch.uint8).to(DEVICE)
    weight = torch.randn(units, colors, 5, 5, device=DEVICE).to(half) / 4
    scale, bias = torch.randn(2, units, device=DEVICE)

    def apart(weight, scale, bias):
        x = see([pixels], 16, 20, half).float()
        kernel = phase_kernel(weight.float(), 4 * units, x.shape[-1])
        y = F.conv2d(x.permute(0, 3, 1, 2), kernel, padding=1).permute(0, 2, 3, 1)
        flags = {"from_phases": True, "to_phases": to_phases}
        return max_pool_rms_norm_silu(y, scale, 1e-3, bias, **flags)

    def fused(weight, scale, bias):
        kernel = phase_kernel(weight, 4 * units, 16)
        inputs = (see([pixels], 16, 20, half), kernel, scale, 1e-3, bias)
        return first_layer(*inputs, to_phases=to_phases).float()

    outs = []
    for function in (apart, fused):
        leaves = [x.clone().requires_grad_() for x in (weight, scale, bias)]
        y = function(*leaves)
        grad = torch.linspace(-1, 1, y.numel(), device=DEVICE).reshape(y.shape)
        outs.append([y.detach(), *torch.autograd.grad((y * grad).sum(), leaves)])
    for theirs, mine in zip(*outs, strict=True):
        error = (theirs.float() - mine.float()).norm() / theirs.float().norm()
        assert error < 3e-3


def test_a_number_that_is_none_does_not_vanish_in_the_pool():
    x = torch.zeros(1, 2, 2, 4, device=DEVICE)
    x[0, 1, 0, 2] = torch.nan
    ones = torch.ones(4, device=DEVICE)
    y = max_pool_rms_norm_silu(x, ones, 1e-3, ones, from_phases=False, to_phases=False)
    assert y.isnan().all()


@pytest.mark.parametrize("many", [0, 5, 999])
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
def test_a_fast_encoder_is_the_plain_one(spaces, many, monkeypatch):
    monkeypatch.setattr(encoder, "MANY", many)  # fine, mixed and coarse layers
    monkeypatch.setattr(encoder, "WHOLE", 1)
    plain, fast = twins(spaces, SMALL)
    compare(plain, fast, look(spaces, 2, 3))


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
def test_other_encoders_take_the_plain_way(change):
    config = EncoderConfig(**{**vars(SMALL), **change})
    spaces = {"image": image(16, 16, 3), "vector": Space(np.float32, (5,))}
    plain, fast = twins(spaces, config)
    compare(plain, fast, look(spaces, 2))


def test_an_encoder_of_vectors_alone():
    spaces = {"vector": Space(np.float32, (5,))}
    plain, fast = twins(spaces, SMALL)
    compare(plain, fast, look(spaces, 4))


def test_in_half_precision_the_first_layer_is_one_kernel():
    spaces = {"image": image(16, 16, 3)}
    plain, fast = twins(spaces, SMALL)
    obs = look(spaces, 4)
    exact, mine = results(plain, obs), results(fast, obs, torch.float16)
    assert apart(exact[:1], mine[:1])[0] < 1e-2
    assert max(apart(exact, mine)) < 0.1  # where another pixel has won its pool


@pytest.mark.parametrize(
    ("depth", "coarse"), [(16, "cccc"), (24, "cccf"), (32, "ccff"), (48, "cccf")]
)
def test_convolutions_stay_on_fine_grids_where_their_channels_fill_tiles(depth, coarse):
    net = FastEncoder({"image": image(64, 64, 3)}, EncoderConfig(depth=depth))
    assert "".join("fc"[net._is_coarse(i)] for i in range(4)) == coarse


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [16, 32, 48, 64])
def test_a_fast_encoder_at_real_sizes(depth, monkeypatch):
    """In half precision the twin must be as close to the truth as the plain part is.

    Where two pixels are equal but for rounding, another one may win its pool. That is
    rare, but a single one in a late layer moves the gradients of all layers before it
    by a percent, also those of the plain part in float32, so float64 is the truth.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    spaces = {"image": image(64, 64, 3)}
    plain, fast = twins(spaces, EncoderConfig(depth=depth))
    truth = copy.deepcopy(plain).double()
    for _ in range(3):
        obs = look(spaces, 32)
        exact = results(truth, obs, torch.float64)
        tokens, *grads = apart(exact, results(fast, obs))
        assert tokens < 1e-5
        assert max(grads) < 1e-2
    for dtype in (torch.bfloat16, torch.float16):
        theirs, mine = (results(net, obs, dtype) for net in (plain, fast))
        for loss, gain in zip(apart(exact, mine), apart(exact, theirs), strict=True):
            assert loss < 1.3 * gain + 1e-3


def apart(truth: list[Tensor], guess: list[Tensor]) -> list[float]:
    """Relative distances."""
    pairs = zip(truth, guess, strict=True)
    return [((a.float() - b.float()).norm() / a.norm()).item() for a, b in pairs]


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [16, 64])
def test_the_gradients_of_a_fast_encoder_repeat_to_the_bit(depth):
    spaces = {"image": image(64, 64, 3)}
    _, fast = twins(spaces, EncoderConfig(depth=depth))
    obs = look(spaces, 256)
    torch.backends.cudnn.deterministic = True
    first, second = (results(fast, obs, torch.bfloat16) for _ in range(2))
    torch.backends.cudnn.deterministic = False
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
