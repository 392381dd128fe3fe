"""Encoder and decoder: which keys, which sizes, and what is missing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from reverie.api import UserError
from reverie.nets.blocks import initialize, symlog
from reverie.nets.conv import (
    Decoder,
    DecoderConfig,
    Encoder,
    EncoderConfig,
    canvas,
    halve,
)
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
def test_any_image_size_is_drawn_back_at_its_own_size(shape):
    spaces = {"image": image(*shape)}
    encoder, decoder = build(spaces)
    tokens = encoder(sample(spaces, 2, 3), torch.float32)
    assert tokens.shape == (2, 3, encoder.width)
    out = decoder(torch.randn(2, 3, 16), torch.randn(2, 3, 8))["image"]
    assert out.pred().shape == (2, 3, *shape)
    target = sample(spaces, 2, 3)["image"]
    by_hand = torch.square(out.pred() - target / 255).sum((-3, -2, -1))
    torch.testing.assert_close(out.loss(target), by_hand)  # a sum, not a mean


@pytest.mark.parametrize(
    ("side", "padded"), [(64, 64), (78, 80), (84, 96), (96, 96), (33, 48), (256, 256)]
)
def test_only_sizes_that_need_it_are_padded(side, padded):
    assert canvas({"image": image(side, 64, 3)}, (2, 3, 4, 4), False) == (padded, 64)


def test_padding_is_mid_grey_at_the_bottom_and_right():
    encoder, _ = build({"image": image(13, 18, 1)})
    full, _ = build({"image": image(16, 20, 1)})
    full.load_state_dict(encoder.state_dict())
    small = sample({"image": image(13, 18, 1)}, 2)["image"]
    big = torch.full((2, 16, 20, 1), 127.5)  # not an integer, so zero once centred
    big[:, :13, :18] = small
    ours = encoder({"image": small}, torch.float32)
    torch.testing.assert_close(ours, full({"image": big}, torch.float32))


@pytest.mark.parametrize("shape", [(32, 48, 3), (64, 20, 3), (300, 300, 3)])
def test_an_image_that_does_not_fit_says_what_would(shape):
    with pytest.raises(
        UserError, match=r"(?s)sides of 33 to 256.*dreamer.enc.mults \d"
    ):
        canvas({"image": image(*shape)}, (2, 3, 4, 4), False)


def test_the_advice_for_an_image_that_does_not_fit_works():
    with pytest.raises(UserError) as error:
        canvas({"image": image(10, 10, 1)}, (2, 3, 4, 4), False)
    mults = str(error.value).split("enc.mults ")[1].split(" and")[0]
    assert canvas({"image": image(10, 10, 1)}, tuple(map(int, mults.split())), False)


def test_no_stage_count_fits_an_extreme_ratio():
    with pytest.raises(UserError, match="resize"):
        canvas({"image": image(512, 16, 3)}, (2, 3, 4, 4), False)


def test_several_images_share_a_canvas_and_keep_their_order():
    spaces = {"wrist": image(12, 16, 1), "front": image(16, 16, 3)}
    encoder, decoder = build(spaces)
    assert encoder.imgkeys == ["front", "wrist"]  # sorted
    outs = decoder(torch.randn(2, 16), torch.randn(2, 8))
    assert list(outs) == ["wrist", "front"]  # as the environment has them
    assert outs["wrist"].pred().shape == (2, 12, 16, 1)
    assert outs["front"].pred().shape == (2, 16, 16, 3)


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


def test_bspace_zero_is_one_dense_layer():
    _, decoder = build({"image": image(16, 16, 3)}, dec=replace(DEC, bspace=0))
    assert decoder.space.weight.shape == (4 * 4 * 16, 8 + 16)
    assert not hasattr(decoder, "sp0")
    out = decoder(torch.randn(2, 16), torch.randn(2, 8))["image"]
    assert out.pred().shape == (2, 16, 16, 3)


def test_blocks_that_do_not_divide_the_widths_are_refused():
    with pytest.raises(UserError, match="bspace 0"):
        build({"image": image(16, 16, 3)}, deter=12)


def test_encoder_pools_before_it_normalizes_and_centres_pixels():
    spaces = {"image": image(8, 8, 1)}
    encoder, _ = build(spaces, replace(ENC, mults=(1,)), replace(DEC, mults=(1,)))
    obs = sample(spaces, 2)
    x = (obs["image"].float() / 255 - 0.5).permute(0, 3, 1, 2)
    x = F.conv2d(x, encoder.cnn0.weight, encoder.cnn0.bias, padding=2)
    x = F.max_pool2d(x, 2).permute(0, 2, 3, 1)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-4)
    torch.testing.assert_close(encoder(obs, torch.float32), F.silu(x).flatten(1))


def test_pooling_shares_the_gradient_of_a_tie_only_once():
    x = torch.zeros(1, 2, 2, 1, requires_grad=True)
    halve(x).sum().backward()
    assert x.grad.sum() == 1


def test_keys_are_chosen_by_whole_names():
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
    outs = decoder(torch.randn(2, 16), torch.randn(2, 8))
    assert list(outs) == ["state", "state.goal"]
    assert "vec.state%2egoal.pred.weight" in decoder.state_dict()


@pytest.mark.parametrize("config", [ENC, replace(ENC, mlp_keys="velocity")])
def test_nothing_to_see_is_refused(config):
    spaces = {"reward": Space(F32), "is_first": Space(np.dtype(bool))}
    if config is not ENC:
        spaces["position"] = Space(F32, (2,))
    with pytest.raises(UserError, match="nothing to see"):
        Encoder(spaces, config)


def test_float_images_are_refused():
    with pytest.raises(UserError, match="uint8"):
        Encoder({"image": Space(F32, (16, 16, 3))}, ENC)


def test_integers_without_bounds_are_refused():
    with pytest.raises(UserError, match="low"):
        Encoder({"count": Space(I32)}, ENC)


def test_concat_sorts_keys_squashes_numbers_and_counts_from_low():
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


def test_a_missing_entry_blanks_its_whole_key_in_that_row():
    spaces = {"x": Space(F32, (2,)), "n": Space(I32, (2,), 0, 3)}
    values = {
        "x": torch.tensor([[1.0, -torch.inf], [1.0, 2.0]]),
        "n": torch.tensor([[0, 1], [2, -1]]),
    }
    out = Concat(spaces)(values, torch.float32)
    numbers, floats = out[:, :6], out[:, 6:]
    assert floats.tolist() == [[0, 0], [1, 2]]
    assert numbers.tolist() == [[1, 0, 0, 0, 1, 0], [0] * 6]


def test_minus_one_is_a_number_like_any_other_if_the_space_says_so():
    out = Concat({"n": Space(I32, (), -1, 2)})({"n": torch.tensor([-1])}, torch.float32)
    assert out.tolist() == [[1, 0, 0]]


def test_a_missing_target_costs_nothing_and_teaches_nothing():
    spaces = {"x": Space(F32, (2,)), "n": Space(I32, (), 0, 3)}
    _, decoder = build(spaces)
    deter = torch.randn(2, 16, requires_grad=True)
    outs = decoder(deter, torch.randn(2, 8))
    gone = {"x": torch.tensor([[-torch.inf, 1.0]] * 2), "n": torch.tensor([-1, -1])}
    loss = sum(outs[key].loss(gone[key]).sum() for key in outs)
    assert loss.item() == 0
    (grad,) = torch.autograd.grad(loss, deter)
    assert not grad.any()


def test_vectors_are_compared_in_symlog_space_and_drawn_in_their_own():
    spaces = {"x": Space(F32, (3,)), "height": Space(F32)}
    _, decoder = build(spaces)
    outs = decoder(torch.randn(4, 16), torch.randn(4, 8))
    target = torch.randn(4, 3) * 10
    by_hand = torch.square(symlog(outs["x"].pred()) - symlog(target)).sum(-1)
    torch.testing.assert_close(outs["x"].loss(target), by_hand)
    assert outs["height"].pred().shape == (4,)


def test_the_decoder_puts_the_stochastic_half_first():
    _, decoder = build({"x": Space(F32, (3,))})
    seen = []
    decoder.mlp.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    decoder(torch.zeros(1, 16), torch.ones(1, 8))
    assert seen[0][0, :8].all()
    assert not seen[0][0, 8:].any()


@pytest.mark.parametrize(
    ("low", "high"), [(5, 8), (-3, 2), (np.array([0, 5]), np.array([3, 9]))]
)
def test_classes_may_count_from_any_number(low, high):
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
