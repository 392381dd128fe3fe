"""Encoder and decoder: selection of keys, image sizes, missing entries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reverie.api import UserError
from reverie.nets.blocks import initialize, symlog
from reverie.nets.conv import max_pool_2x2
from reverie.nets.decoder import Decoder, DecoderConfig
from reverie.nets.encoder import Encoder, EncoderConfig, padded_size
from reverie.nets.inputs import Concat
from reverie.spaces import Space

ENC = EncoderConfig(depth=8, mults=(1, 2), units=16, layers=1)
DEC = DecoderConfig(depth=8, mults=(1, 2), units=16, layers=1)
F32, I32, U8 = np.dtype("float32"), np.dtype("int32"), np.dtype("uint8")


def image(*shape: int) -> Space:
    return Space(U8, shape)


def build(spaces, enc=ENC, dec=DEC, deter=16, stoch=8):
    encoder, decoder = Encoder(spaces, enc), Decoder(spaces, deter, stoch, dec)
    generator = torch.Generator().manual_seed(0)
    initialize(encoder, generator)
    initialize(decoder, generator)
    return encoder, decoder


def sample(spaces, *batch):
    rng = np.random.default_rng(0)
    return {k: torch.tensor(s.sample(rng, *batch)) for k, s in spaces.items()}


@pytest.mark.parametrize(
    "shape", [(16, 16, 3), (13, 18, 1), (16, 40, 3), (39, 12, 2), (15, 15, 4)]
)
def test_images_of_any_size_are_decoded_at_that_size(shape):
    spaces = {"image": image(*shape)}
    encoder, decoder = build(spaces)
    tokens = encoder(sample(spaces, 2, 3), torch.float32)
    assert tokens.shape == (2, 3, encoder.width)
    out = decoder(torch.randn(2, 3, 16), torch.randn(2, 3, 8))["image"]
    assert out.pred().shape == (2, 3, *shape)
    target = sample(spaces, 2, 3)["image"]
    expected = torch.square(out.pred() - target / 255).sum((-3, -2, -1))
    torch.testing.assert_close(out.loss(target), expected)  # a sum, not a mean


@pytest.mark.parametrize(
    ("side", "padded"), [(64, 64), (78, 80), (84, 96), (96, 96), (33, 48), (256, 256)]
)
def test_images_are_padded_to_the_next_divisible_size(side, padded):
    assert padded_size({"image": image(side, 64, 3)}, (2, 3, 4, 4), False) == (
        padded,
        64,
    )


def test_padding_is_mid_gray_at_the_bottom_and_right():
    encoder, _ = build({"image": image(13, 18, 1)})
    full, _ = build({"image": image(16, 20, 1)})
    full.load_state_dict(encoder.state_dict())
    small = sample({"image": image(13, 18, 1)}, 2)["image"]
    big = torch.full((2, 16, 20, 1), 127.5)  # zero after centering
    big[:, :13, :18] = small
    features = encoder({"image": small}, torch.float32)
    torch.testing.assert_close(features, full({"image": big}, torch.float32))


@pytest.mark.parametrize("shape", [(32, 48, 3), (64, 20, 3), (300, 300, 3)])
def test_the_error_for_an_unsupported_size_suggests_more_or_fewer_mults(shape):
    advice = "more" if max(shape) > 256 else "fewer"
    with pytest.raises(UserError, match=rf"(?s)sides of 33 to 256.*{advice} mults"):
        padded_size({"image": image(*shape)}, (2, 3, 4, 4), False)


@pytest.mark.parametrize("mults", [(2, 3, 4, 4), (2, 3, 4, 4, 4), (2, 3)])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 1), (600, 2, 3), (2, 600, 3)])
def test_the_suggested_size_is_supported(shape, mults, outer):
    with pytest.raises(UserError) as error:
        padded_size({"image": image(*shape)}, mults, outer)
    height, width = str(error.value).split("resize ")[1].split()[:2]
    assert padded_size({"image": image(int(height), int(width), 3)}, mults, outer)


def test_several_images_are_padded_to_one_size():
    spaces = {"wrist": image(12, 16, 1), "front": image(16, 16, 3)}
    encoder, decoder = build(spaces)
    assert encoder.imgkeys == ["front", "wrist"]  # sorted
    distributions = decoder(torch.randn(2, 16), torch.randn(2, 8))
    assert list(distributions) == ["wrist", "front"]  # in the order of the environment
    assert distributions["wrist"].pred().shape == (2, 12, 16, 1)
    assert distributions["front"].pred().shape == (2, 16, 16, 3)


@pytest.mark.parametrize(
    "options",
    [{"outer": True}, {"strided": True}, {"outer": True, "strided": True}],
)
def test_outer_and_strided_stages(options):
    shape = (16, 12, 3)
    spaces = {"image": image(*shape)}
    encoder, decoder = build(spaces, replace(ENC, **options), replace(DEC, **options))
    factor = 2 if "outer" in options else 4
    assert encoder.width == (16 // factor) * (12 // factor) * 16
    assert encoder(sample(spaces, 2), torch.float32).shape == (2, encoder.width)
    out = decoder(torch.randn(2, 16), torch.randn(2, 8))["image"]
    assert out.pred().shape == (2, *shape)


def test_bspace_zero_uses_a_dense_layer():
    _, decoder = build({"image": image(16, 16, 3)}, dec=replace(DEC, bspace=0))
    assert decoder.space.weight.shape == (4 * 4 * 16, 8 + 16)
    assert not hasattr(decoder, "sp0")
    out = decoder(torch.randn(2, 16), torch.randn(2, 8))["image"]
    assert out.pred().shape == (2, 16, 16, 3)


def test_widths_that_are_not_divisible_by_bspace_are_refused():
    with pytest.raises(UserError, match="bspace of the decoder to 0"):
        build({"image": image(16, 16, 3)}, deter=12)


def test_the_encoder_centers_pixels_and_pools_before_the_norm():
    spaces = {"image": image(8, 8, 1)}
    encoder, _ = build(spaces, replace(ENC, mults=(1,)), replace(DEC, mults=(1,)))
    obs = sample(spaces, 2)
    x = (obs["image"].float() / 255 - 0.5).permute(0, 3, 1, 2)
    x = F.conv2d(x, encoder.cnn0.weight, encoder.cnn0.bias, padding=2)
    x = F.max_pool2d(x, 2).permute(0, 2, 3, 1)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4)
    torch.testing.assert_close(encoder(obs, torch.float32), F.silu(x).flatten(1))


def test_the_gradient_of_a_tie_goes_to_one_pixel():
    x = torch.zeros(1, 2, 2, 1, requires_grad=True)
    max_pool_2x2(x).sum().backward()
    assert x.grad.sum() == 1


def test_keys_are_selected_by_regular_expressions_for_whole_names():
    spaces = {
        "image": image(16, 16, 3),
        "image_wrist": image(16, 16, 3),
        "state": Space(F32, (3,)),
        "state.goal": Space(F32, (3,)),
        "reward": Space(F32),
        "log/speed": Space(F32),
    }
    config = replace(ENC, cnn_keys="image", mlp_keys=r"state\.goal")
    encoder, decoder = build(spaces, config, replace(DEC, cnn_keys="$^"))
    assert encoder.imgkeys == ["image"]
    assert encoder.veckeys == ["state.goal"]
    distributions = decoder(torch.randn(2, 16), torch.randn(2, 8))
    assert list(distributions) == ["state", "state.goal"]
    assert "vec.state%2egoal.pred.weight" in decoder.state_dict()


@pytest.mark.parametrize("config", [ENC, replace(ENC, mlp_keys="velocity")])
def test_an_encoder_without_inputs_is_refused(config):
    spaces = {"reward": Space(F32), "is_first": Space(np.dtype(bool))}
    if config is not ENC:
        spaces["position"] = Space(F32, (2,))
    with pytest.raises(UserError, match="encoder has no inputs"):
        Encoder(spaces, config)


def test_float_images_are_refused():
    with pytest.raises(UserError, match="uint8"):
        Encoder({"image": Space(F32, (16, 16, 3))}, ENC)


def test_integers_without_bounds_are_refused():
    with pytest.raises(UserError, match="low"):
        Encoder({"count": Space(I32)}, ENC)


def test_concat_sorts_keys_squashes_floats_and_encodes_classes():
    spaces = {
        "b": Space(F32, (2,)),
        "a": Space(I32, (), 3, 6),
        "c": Space(np.dtype(bool), (2,)),
    }
    concat = Concat(spaces, symlog)
    values = {
        "a": torch.tensor([4]),
        "b": torch.tensor([[0.0, torch.e - 1]]),
        "c": torch.tensor([[True, False]]),
    }
    row = concat(values, torch.float32)[0]
    expected = torch.tensor([0, 1, 0, 0, 1, 0, 1, 1, 0.0])
    torch.testing.assert_close(row, expected)
    assert concat.width == 9


def test_a_missing_entry_zeroes_all_features_of_its_key():
    spaces = {"x": Space(F32, (2,)), "n": Space(I32, (2,), 0, 3)}
    values = {
        "x": torch.tensor([[1.0, -torch.inf], [1.0, 2.0]]),
        "n": torch.tensor([[0, 1], [2, -1]]),
    }
    out = Concat(spaces)(values, torch.float32)
    numbers, floats = out[:, :6], out[:, 6:]
    assert floats.tolist() == [[0, 0], [1, 2]]
    assert numbers.tolist() == [[1, 0, 0, 0, 1, 0], [0] * 6]


def test_minus_one_is_a_class_if_the_space_contains_it():
    out = Concat({"n": Space(I32, (), -1, 2)})({"n": torch.tensor([-1])}, torch.float32)
    assert out.tolist() == [[1, 0, 0]]


def test_a_missing_target_has_zero_loss_and_gradient():
    spaces = {"x": Space(F32, (2,)), "n": Space(I32, (), 0, 3)}
    _, decoder = build(spaces)
    deter = torch.randn(2, 16, requires_grad=True)
    distributions = decoder(deter, torch.randn(2, 8))
    missing = {"x": torch.tensor([[-torch.inf, 1.0]] * 2), "n": torch.tensor([-1, -1])}
    loss = sum(distributions[key].loss(missing[key]).sum() for key in distributions)
    assert loss.item() == 0
    (grad,) = torch.autograd.grad(loss, deter)
    assert not grad.any()


def test_losses_of_vectors_are_in_symlog_space_but_predictions_are_not():
    spaces = {"x": Space(F32, (3,)), "height": Space(F32)}
    _, decoder = build(spaces)
    distributions = decoder(torch.randn(4, 16), torch.randn(4, 8))
    target = torch.randn(4, 3) * 10
    expected = torch.square(symlog(distributions["x"].pred()) - symlog(target)).sum(-1)
    torch.testing.assert_close(distributions["x"].loss(target), expected)
    assert distributions["height"].pred().shape == (4,)


def test_the_input_of_the_decoder_starts_with_stoch():
    _, decoder = build({"x": Space(F32, (3,))})
    inputs = []
    decoder.mlp.register_forward_pre_hook(lambda m, args: inputs.append(args[0]))
    decoder(torch.zeros(1, 16), torch.ones(1, 8))
    assert inputs[0][0, :8].all()
    assert not inputs[0][0, 8:].any()


@pytest.mark.parametrize(
    ("low", "high"), [(5, 8), (-3, 2), (np.array([0, 5]), np.array([3, 9]))]
)
def test_classes_may_start_at_any_integer(low, high):
    space = Space(np.dtype(np.int32), np.shape(low), low, high)
    decoder = Decoder({"v": space}, 8, 8, DecoderConfig(units=8, layers=1))
    initialize(decoder, torch.Generator().manual_seed(0))
    out = decoder(torch.zeros(4, 8), torch.zeros(4, 8))["v"]
    for shift in range(3):
        target = torch.tensor(space.low + shift, dtype=torch.int32).expand(
            4, *space.shape
        )
        assert torch.isfinite(out.loss(target)).all()
    pred = out.pred().numpy()
    assert ((pred >= space.low) & (pred < space.high + 1)).all()
