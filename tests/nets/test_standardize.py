"""Standardised images: whose statistics, when, and back again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.agents.bc.agent import BC, BCConfig
from reverie.capabilities import Moments
from reverie.nets.blocks import initialize
from reverie.nets.conv import Decoder, DecoderConfig, Encoder, EncoderConfig
from reverie.nets.standardize import Standard, needs_statistics, set_statistics, steady
from reverie.spaces import Space

SHAPE = (8, 8, 3)
SPACES = {"image": Space(np.uint8, SHAPE)}
SMALL = {"depth": 2, "mults": (1,), "standard": "dataset"}


def frames(count, seed=0):
    rng = np.random.default_rng(seed)
    return torch.as_tensor(rng.integers(0, 256, (count, *SHAPE), np.uint8))


def moments(images):
    x = images.numpy().astype(np.float64) / 255
    return {"image": Moments(x.mean(0), x.std(0), x.min(0), x.max(0))}


def test_a_dataset_comes_out_with_no_mean_and_unit_deviation():
    images = frames(50)
    part = Standard("image", SHAPE, "dataset", 1e-3)
    set_statistics(part, moments(images))
    x = images.float() / 255
    out = part(x)
    wanted = (x.numpy() - x.numpy().mean(0)) / x.numpy().std(0)
    np.testing.assert_allclose(out.numpy(), wanted, atol=1e-4)
    torch.testing.assert_close(part.undo(out), x)


def test_pixels_that_never_change_are_not_blown_up():
    part = Standard("image", SHAPE, "dataset", 1e-3)
    part.get_buffer("std").zero_()
    x = torch.full((2, *SHAPE), 0.5)
    assert part(x).max() == pytest.approx(500)


def test_a_batch_is_its_own_measure_in_training_and_a_single_frame_never():
    part = Standard("image", SHAPE, "batch", 1e-3).train()
    x = frames(30).float() / 255
    assert abs(float(part(x).mean())) < 1e-5
    torch.testing.assert_close(part.get_buffer("mean"), x.mean(0))
    part(1 - x)  # the average follows slowly
    expected = x.mean(0).lerp((1 - x).mean(0), 0.01)
    torch.testing.assert_close(part.get_buffer("mean"), expected)
    alone = part.eval()(x[:1])
    assert float(alone.abs().mean()) > 0.5
    torch.testing.assert_close(part(x)[:1], alone)


def test_statistics_travel_with_the_weights():
    made = [Encoder(SPACES, EncoderConfig(**SMALL)) for _ in range(2)]
    for seed, encoder in enumerate(made):
        initialize(encoder, torch.Generator().manual_seed(seed))
    assert needs_statistics(made[0])
    set_statistics(made[0], moments(frames(20)))
    made[1].load_state_dict(made[0].state_dict())
    obs = {"image": frames(3, 1)}
    ours, theirs = (encoder(obs, torch.float32) for encoder in made)
    assert torch.equal(ours, theirs)


def test_one_frame_is_seen_by_the_slow_average_while_acting():
    part = Standard("image", (2, 2, 3), "batch", 0.01)
    part(torch.rand(50, 2, 2, 3))
    before = part.get_buffer("mean").clone()
    frame = torch.rand(1, 2, 2, 3)
    with steady([part]):
        found = part(frame)
    assert part.training
    assert torch.equal(part.get_buffer("mean"), before)
    assert found.abs().min() > 0  # and is not its own mean
    assert not part(frame).any()


def test_drawings_are_compared_standardised_and_shown_as_images():
    decoder = Decoder(SPACES, 8, 4, DecoderConfig(**SMALL, bspace=0, units=4))
    initialize(decoder, torch.Generator().manual_seed(0))
    images = frames(20)
    set_statistics(decoder, moments(images))
    out = decoder(torch.zeros(20, 8), torch.zeros(20, 4))["image"]
    part = decoder.standards["image"]
    raw = (out.pred() - part.get_buffer("mean")) / part.get_buffer("std")
    wanted = (raw - part(images.float() / 255)).square().sum((1, 2, 3))
    torch.testing.assert_close(out.loss(images), wanted, rtol=1e-4, atol=1e-3)
    # a black drawing is the mean picture, and its error that of the deviations
    out.mean = torch.zeros_like(out.mean)
    torch.testing.assert_close(out.pred()[0], part.get_buffer("mean"))
    assert float(out.loss(images).mean()) == pytest.approx(8 * 8 * 3, rel=1e-3)


def test_a_clone_with_eyes_of_its_own_is_told():
    config = BCConfig(enc=EncoderConfig(**SMALL, layers=1, units=4))
    action = {"action": Space(np.float32, (2,), -1, 1)}
    agent = BC(SPACES, action, config, device=torch.device("cpu"))
    assert agent.needs_statistics
    zeros = np.zeros(2)
    agent.set_statistics(
        {**moments(frames(9)), "action": Moments(zeros, zeros, zeros, zeros)}
    )
    part = agent.eyes.encoder.standards["image"]
    torch.testing.assert_close(part.get_buffer("mean"), frames(9).float().mean(0) / 255)
