"""Standardized images: statistics of the dataset or the batch, and the inverse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.agents.bc.agent import BC, BCConfig
from reverie.agents.options import BuildOptions
from reverie.capabilities import KeyStatistics
from reverie.nets.blocks import initialize
from reverie.nets.decoder import Decoder, DecoderConfig
from reverie.nets.encoder import Encoder, EncoderConfig
from reverie.nets.standardize import (
    Standardize,
    frozen_statistics,
    set_statistics,
    standardizers,
)
from reverie.spaces import Space

SHAPE = (8, 8, 3)
SPACES = {"image": Space(np.uint8, SHAPE)}
SMALL = {"depth": 2, "mults": (1,), "standard": "dataset"}


def frames(count, seed=0):
    rng = np.random.default_rng(seed)
    return torch.as_tensor(rng.integers(0, 256, (count, *SHAPE), np.uint8))


def moments(images):
    x = images.numpy().astype(np.float64) / 255
    return {"image": KeyStatistics(x.mean(0), x.std(0), x.min(0), x.max(0))}


def test_a_dataset_is_standardized_to_zero_mean_and_unit_deviation():
    images = frames(50)
    part = Standardize("image", SHAPE, "dataset", 1e-3)
    set_statistics(part, moments(images))
    x = images.float() / 255
    out = part(x)
    expected = (x.numpy() - x.numpy().mean(0)) / x.numpy().std(0)
    np.testing.assert_allclose(out.numpy(), expected, atol=1e-4)
    torch.testing.assert_close(part.inverse(out), x)


def test_constant_pixels_are_divided_by_the_minimum_deviation():
    part = Standardize("image", SHAPE, "dataset", 1e-3)
    part.get_buffer("std").zero_()
    x = torch.full((2, *SHAPE), 0.5)
    assert part(x).max() == pytest.approx(500)


def test_batch_statistics_are_used_in_training_and_averages_in_evaluation():
    part = Standardize("image", SHAPE, "batch", 1e-3).train()
    x = frames(30).float() / 255
    assert abs(float(part(x).mean())) < 1e-5
    torch.testing.assert_close(part.get_buffer("mean"), x.mean(0))
    part(1 - x)  # updates the moving average
    expected = x.mean(0).lerp((1 - x).mean(0), 0.01)
    torch.testing.assert_close(part.get_buffer("mean"), expected)
    alone = part.eval()(x[:1])
    assert float(alone.abs().mean()) > 0.5
    torch.testing.assert_close(part(x)[:1], alone)


def test_statistics_are_saved_with_the_weights():
    encoders = [Encoder(SPACES, EncoderConfig(**SMALL)) for _ in range(2)]
    for seed, encoder in enumerate(encoders):
        initialize(encoder, torch.Generator().manual_seed(seed))
    assert standardizers(encoders[0], "dataset")
    set_statistics(encoders[0], moments(frames(20)))
    encoders[1].load_state_dict(encoders[0].state_dict())
    obs = {"image": frames(3, 1)}
    assert torch.equal(*(encoder(obs, torch.float32) for encoder in encoders))


def test_a_single_frame_is_standardized_with_frozen_averages():
    part = Standardize("image", (2, 2, 3), "batch", 0.01)
    part(torch.rand(50, 2, 2, 3))
    before = part.get_buffer("mean").clone()
    frame = torch.rand(1, 2, 2, 3)
    with frozen_statistics([part]):
        standardized = part(frame)
    assert part.training
    assert torch.equal(part.get_buffer("mean"), before)
    assert standardized.abs().min() > 0  # not standardized with its own mean
    assert not part(frame).any()


def test_losses_are_standardized_and_predictions_are_images():
    decoder = Decoder(SPACES, 8, 4, DecoderConfig(**SMALL, bspace=0, units=4))
    initialize(decoder, torch.Generator().manual_seed(0))
    images = frames(20)
    set_statistics(decoder, moments(images))
    out = decoder(torch.zeros(20, 8), torch.zeros(20, 4))["image"]
    part = decoder.standardizers["image"]
    raw = (out.pred() - part.get_buffer("mean")) / part.get_buffer("std")
    expected = (raw - part(images.float() / 255)).square().sum((1, 2, 3))
    torch.testing.assert_close(out.loss(images), expected, rtol=1e-4, atol=1e-3)
    # zeros are the mean image, and their loss is the variance
    out.mean = torch.zeros_like(out.mean)
    torch.testing.assert_close(out.pred()[0], part.get_buffer("mean"))
    assert float(out.loss(images).mean()) == pytest.approx(8 * 8 * 3, rel=1e-3)


def test_behavior_cloning_sets_the_statistics_of_its_encoder():
    config = BCConfig(enc=EncoderConfig(**SMALL, layers=1, units=4))
    action = {"action": Space(np.float32, (2,), -1, 1)}
    agent = BC(SPACES, action, config, BuildOptions(torch.device("cpu")))
    assert agent.needs_statistics
    zeros = np.zeros(2)
    agent.set_statistics(
        {**moments(frames(9)), "action": KeyStatistics(zeros, zeros, zeros, zeros)}
    )
    part = agent.feature_extractor.encoder.standardizers["image"]
    torch.testing.assert_close(part.get_buffer("mean"), frames(9).float().mean(0) / 255)
