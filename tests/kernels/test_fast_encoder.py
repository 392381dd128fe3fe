"""The fast image encoder equals the plain one."""

from __future__ import annotations

import copy
from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reverie.nets import encoder as plain_encoder
from reverie.nets.conv import max_pool_2x2
from reverie.nets.encoder import Encoder, EncoderConfig
from reverie.spaces import Space

pytest.importorskip("triton")

import image_nets

from reverie.kernels.conv import encoder
from reverie.kernels.conv.encoder import FastEncoder, space_to_depth_images
from reverie.kernels.conv.first_layer import first_layer
from reverie.kernels.conv.max_pool import max_pool_rms_norm_silu
from reverie.kernels.conv.space_to_depth import space_to_depth_kernel

SMALL = EncoderConfig(depth=2, mults=(2, 3), layers=2, units=8)


def space_to_depth(x: Tensor) -> Tensor:
    """Return the space-to-depth map of a (b, h, w, c) map, sub-pixel first."""
    b, h, w, c = x.shape
    x = x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5)
    return x.reshape(b, h // 2, w // 2, 4 * c)


def make_encoders(
    spaces: dict[str, Space], config: EncoderConfig
) -> tuple[Encoder, Encoder]:
    return image_nets.make_pair(lambda: Encoder(spaces, config), FastEncoder, 1)


def results(
    net: Encoder, obs: dict[str, Tensor], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    y = net(obs, dtype)
    exact = y if dtype == torch.float64 else y.float()
    total = (exact * image_nets.ramp(y).sin()).sum()
    return [y.detach(), *torch.autograd.grad(total, list(net.parameters()))]


def compare(plain, fast, obs, rtol=1e-4) -> None:
    names = ["tokens", *(name for name, _ in plain.named_parameters())]
    pairs = zip(names, results(fast, obs), results(plain, obs), strict=True)
    for name, actual, expected in pairs:
        atol = rtol * expected.abs().mean().item()
        torch.testing.assert_close(
            actual, expected, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_a_convolution_equals_that_of_space_to_depth_maps():
    x = torch.randn(2, 6, 8, 3, dtype=torch.float64, device=image_nets.DEVICE)
    weight = torch.randn(4, 3, 5, 5, dtype=torch.float64, device=image_nets.DEVICE)
    weight.requires_grad_()
    full = F.conv2d(x.permute(0, 3, 1, 2), weight, padding=2).permute(0, 2, 3, 1)
    kernel = space_to_depth_kernel(weight, 16, 12)
    half = F.conv2d(space_to_depth(x).permute(0, 3, 1, 2), kernel, padding=1)
    half = half.permute(0, 2, 3, 1)
    torch.testing.assert_close(half, space_to_depth(full))
    grad = torch.randn_like(half)
    (actual,) = torch.autograd.grad(half, weight, grad)
    (expected,) = torch.autograd.grad(space_to_depth(full), weight, grad)
    torch.testing.assert_close(actual, expected)


def test_padding_of_the_kernel_is_zero():
    kernel = space_to_depth_kernel(
        torch.ones(2, 3, 5, 5, device=image_nets.DEVICE), 10, 16
    )
    assert kernel.shape == (10, 16, 3, 3)
    assert not kernel[8:].any()
    assert not kernel[:, 12:].any()
    assert kernel.sum() == 4 * 2 * 3 * 25


def test_images_are_scaled_padded_and_concatenated():
    images = [
        torch.randint(0, 256, (2, 5, 7, c), dtype=torch.uint8, device=image_nets.DEVICE)
        for c in (3, 1)
    ]
    x = torch.cat([F.pad(i / 255 - 0.5, (0, 0, 0, 1, 0, 3)) for i in images], -1)
    actual = space_to_depth_images(images, 8, 8, torch.float32)
    torch.testing.assert_close(actual[..., :16], space_to_depth(x))


@pytest.mark.parametrize("from_depth", [True, False])
@pytest.mark.parametrize("to_depth", [True, False])
def test_pooling_is_the_same_in_every_layout(from_depth, to_depth):
    def plain(x, scale, bias):
        y = F.max_pool2d(x.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1) + bias
        y = F.silu(F.rms_norm(y, (5,), scale, 1e-3))
        return space_to_depth(y) if to_depth else y

    def fast(x, scale, bias):
        x = space_to_depth(x) if from_depth else x
        flags = {"from_depth": from_depth, "to_depth": to_depth}
        return max_pool_rms_norm_silu(x, scale, 1e-3, bias, **flags)

    x = (
        torch.randn(3, 8, 12, 5).round(decimals=1).to(image_nets.DEVICE)
    )  # with equal values
    inputs = [x, *torch.randn(2, 5, device=image_nets.DEVICE)]
    expected = image_nets.outputs_and_gradients(plain, inputs, image_nets.ramp)
    for a, b in zip(
        image_nets.outputs_and_gradients(fast, inputs, image_nets.ramp),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("colors", "units"), [(3, 8), (1, 5)])
@pytest.mark.parametrize("to_depth", [True, False])
def test_the_fused_first_layer_equals_convolution_and_pool(colors, units, to_depth):
    """In float16, the half precision that the interpreter multiplies correctly."""
    half = torch.float16
    pixels = torch.randint(0, 256, (2, 14, 15, colors), dtype=torch.uint8).to(
        image_nets.DEVICE
    )
    weight = torch.randn(units, colors, 5, 5, device=image_nets.DEVICE).to(half) / 4
    scale, bias = torch.randn(2, units, device=image_nets.DEVICE)

    def separate(weight, scale, bias):
        x = space_to_depth_images([pixels], 16, 20, half).float()
        kernel = space_to_depth_kernel(weight.float(), 4 * units, x.shape[-1])
        y = F.conv2d(x.permute(0, 3, 1, 2), kernel, padding=1).permute(0, 2, 3, 1)
        flags = {"from_depth": True, "to_depth": to_depth}
        return max_pool_rms_norm_silu(y, scale, 1e-3, bias, **flags)

    def fused(weight, scale, bias):
        kernel = space_to_depth_kernel(weight, 4 * units, 16)
        x = space_to_depth_images([pixels], 16, 20, half)
        return first_layer(x, kernel, scale, 1e-3, bias, to_depth=to_depth).float()

    inputs = (weight, scale, bias)
    expected = image_nets.outputs_and_gradients(separate, inputs, image_nets.ramp)
    for a, b in zip(
        expected,
        image_nets.outputs_and_gradients(fused, inputs, image_nets.ramp),
        strict=True,
    ):
        assert (a.float() - b.float()).norm() / a.float().norm() < 3e-3


def test_pooling_propagates_nan():
    x = torch.zeros(1, 2, 2, 4, device=image_nets.DEVICE)
    x[0, 1, 0, 2] = torch.nan
    ones = torch.ones(4, device=image_nets.DEVICE)
    y = max_pool_rms_norm_silu(x, ones, 1e-3, ones, from_depth=False, to_depth=False)
    assert y.isnan().all()


@pytest.mark.parametrize("min_channels", [0, 5, 999])
@image_nets.each_kind_of_spaces
def test_a_fast_encoder_equals_the_plain_one(spaces, min_channels, monkeypatch):
    # all layers at full resolution, some of them, or none
    monkeypatch.setattr(encoder, "MIN_FULL_CHANNELS", min_channels)
    monkeypatch.setattr(encoder, "CHANNEL_MULTIPLE", 1)
    plain, fast = make_encoders(spaces, SMALL)
    compare(plain, fast, image_nets.random_obs(spaces, 2, 3))


@image_nets.each_unsupported_setting
def test_unsupported_encoders_use_the_plain_code(change):
    config = EncoderConfig(**{**vars(SMALL), **change})
    spaces = {
        "image_nets.image": image_nets.image(16, 16, 3),
        "vector": image_nets.VECTOR,
    }
    plain, fast = make_encoders(spaces, config)
    compare(plain, fast, image_nets.random_obs(spaces, 2))


def test_an_encoder_of_vectors_only():
    spaces = {"vector": image_nets.VECTOR}
    plain, fast = make_encoders(spaces, SMALL)
    compare(plain, fast, image_nets.random_obs(spaces, 4))


def test_half_precision_uses_the_fused_first_layer():
    spaces = {"image_nets.image": image_nets.image(16, 16, 3)}
    plain, fast = make_encoders(spaces, SMALL)
    obs = image_nets.random_obs(spaces, 4)
    exact, actual = results(plain, obs), results(fast, obs, torch.float16)
    assert image_nets.relative_errors(exact[:1], actual[:1])[0] < 1e-2
    # larger where rounding changed which pixel is the maximum
    assert max(image_nets.relative_errors(exact, actual)) < 0.1


@pytest.mark.parametrize(
    ("depth", "layers"), [(16, "dddd"), (24, "dddf"), (32, "ddff"), (48, "dddf")]
)
def test_layers_with_aligned_channels_stay_at_full_resolution(depth, layers):
    net = FastEncoder(
        {"image_nets.image": image_nets.image(64, 64, 3)}, EncoderConfig(depth=depth)
    )
    assert "".join("fd"[net._uses_depth(i)] for i in range(4)) == layers


def smallest_gaps(net: Encoder, obs: dict[str, Tensor]) -> Tensor:
    """Return how far the largest pixel of a pool is above the second, at least.

    One value per image: the minimum over its pools, in standard deviations of the map.
    """
    gaps = []

    def pool(x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        pixels = x.reshape(b, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 5, 2, 4)
        first, second = pixels.reshape(b, -1, 4).topk(2).values.unbind(-1)
        gaps.append((first - second).amin(1) / x.std())
        return max_pool_2x2(x)

    with mock.patch.object(plain_encoder, "max_pool_2x2", pool), torch.no_grad():
        net(obs, torch.float64)
    return torch.stack(gaps).amin(0)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [16, 32, 48, 64])
def test_a_fast_encoder_at_full_size(depth, monkeypatch):
    """In half precision the fast version is as close to float64 as the plain one.

    Rounding can change which pixel is the maximum of its pool, and a single one in a
    late layer changes the gradients of all layers before it by a percent. Float32
    rounds these maps by about 1e-6 standard deviations, so images whose smallest gap is
    below 5e-6 are left out there. In half precision every image has such pools: the
    errors of both versions are averages over batches.
    """
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    spaces = {"image": image_nets.image(64, 64, 3)}
    plain, fast = make_encoders(spaces, EncoderConfig(depth=depth))
    reference = copy.deepcopy(plain).double()
    errors: dict[str, list[list[float]]] = defaultdict(list)
    for _ in range(4):
        obs = image_nets.random_obs(spaces, 512)
        clear = obs["image"][smallest_gaps(reference, obs) > 5e-6][:32]
        assert len(clear) >= 2
        exact = results(reference, {"image": clear}, torch.float64)
        same = results(fast, {"image": clear})
        tokens, *grads = image_nets.relative_errors(exact, same)
        assert tokens < 1e-5
        assert max(grads) < 1e-3  # of biases, whose gradients nearly cancel out
        some = {"image": obs["image"][:32]}
        exact = results(reference, some, torch.float64)
        for dtype in (torch.bfloat16, torch.float16):
            for name, net in (("plain", plain), ("fast", fast)):
                values = results(net, some, dtype)
                errors[f"{name} {dtype}"].append(
                    image_nets.relative_errors(exact, values)
                )
    for dtype in (torch.bfloat16, torch.float16):
        mine, theirs = (
            torch.tensor(errors[f"{name} {dtype}"]).mean(0)
            for name in ("fast", "plain")
        )
        assert (mine < 1.3 * theirs + 1e-3).all()


@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-3])
def test_smallest_gaps_of_pools_are_found(gap):
    net = mock.Mock(side_effect=lambda obs, dtype: plain_encoder.max_pool_2x2(obs["x"]))
    x = torch.arange(64, dtype=torch.float64).reshape(2, 4, 4, 2).square()
    x[1, 2, 2, 0] = x[1, 3, 3, 0] - gap * x.std()
    actual = smallest_gaps(net, {"x": x})
    assert actual[0] > 1e-2
    assert actual[1].item() == pytest.approx(gap, rel=0.05, abs=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [16, 64])
def test_gradients_of_a_fast_encoder_are_bitwise_reproducible(depth):
    spaces = {"image_nets.image": image_nets.image(64, 64, 3)}
    _, fast = make_encoders(spaces, EncoderConfig(depth=depth))
    obs = image_nets.random_obs(spaces, 256)
    torch.backends.cudnn.deterministic = True
    first, second = (results(fast, obs, torch.bfloat16) for _ in range(2))
    torch.backends.cudnn.deterministic = False
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
