"""The Δ-IRIS world at its default sizes compared with the original."""

from __future__ import annotations

import copy
import unittest.mock

import numpy as np
import pytest
import torch
from iris_comparisons import before_a_norm, by_original_name, close
from iris_world_recording import (
    SIZES,
    TOKENIZER,
    WORLD_MODEL,
    RecordedSamples,
    as_recorded,
    full_world,
    has,
    segment,
    under,
)

from reverie.nets.residual import set_recompute

LOSSES = {
    "tokenizer": {
        "l1": "reconstruction_loss_l1",
        "l2": "reconstruction_loss_l2",
        "worst": "reconstruction_loss_l2_worst_pixel",
        "commit": "commitment_loss",
    },
    "world_model": {
        "latents": "loss_latents",
        "rewards": "loss_rewards",
        "ends": "loss_ends",
    },
}


@pytest.fixture(scope="module", params=[s for s in SIZES if has(f"fullsize_{s}")])
def recorded(request):
    return full_world(request.param)


def test_sizes(recorded):
    world, data = recorded
    modules = {"tokenizer": world.tokenizer, "world_model": world.dynamics}
    for name, module in modules.items():
        count = sum(parameter.numel() for parameter in module.parameters())
        assert count == data[f"param_count/{name}"]


@pytest.mark.parametrize("save_memory", [False, True])
def test_tokenizer(recorded, save_memory):
    world, data = recorded
    batch = segment(data)
    set_recompute(world, save_memory)
    if not save_memory:
        decoded = as_recorded(world.reconstruct(batch.image, batch.action)) / 255
        wanted = data["tokenizer/encode_decode_subsampled"]
        off = np.abs(decoded[:, 1:, :, ::4, ::4] - wanted)
        assert off.max() < 1.5 / 255
        assert (off > 0.5 / 255).mean() <= 1e-3
        features = world.tokenizer.encode(
            batch.image[:, :-1].flatten(0, 1),
            batch.action[:, :-1].flatten(),
            batch.image[:, 1:].flatten(0, 1),
        )
        vectors = world.tokenizer.quantizer(features).vectors
        wanted = data["tokenizer/unit_vectors"]
        close(vectors.view(wanted.shape), wanted)

    def losses(world):
        out = world.tokenizer.loss(batch, RecordedSamples(), update_codebook=False)
        assert np.array_equal(out.states, data["tokenizer/tokens"])
        return out.losses

    compare(world, "tokenizer", losses, TOKENIZER, data)


def test_dynamics(recorded):
    world, data = recorded
    out = world.dynamics_loss(segment(data))
    outputs = out.states
    close(outputs[..., :16], data["world_model/output_sequence_first16"])
    logits = world.dynamics.predict(outputs)
    close(logits.latents[..., ::8], data["world_model/logits_latents_every8"])
    close(logits.rewards, data["world_model/logits_rewards"])
    close(logits.ends, data["world_model/logits_ends"])

    def losses(world):
        return world.dynamics_loss(segment(data)).losses

    compare(world, "world_model", losses, WORLD_MODEL, data)


BOUND = 2e-3
"""Relative error allowed for float32 gradients."""
ROUNDING = 4
"""Times our own float32 error by which a recorded gradient may differ from float64."""


def gradients(world, part, losses, rules, like):
    """Return the losses and the gradients of a component by their original names."""
    module = world.tokenizer if part == "tokenizer" else world.dynamics
    values = losses(world)
    total = torch.stack([loss.mean() for loss in values.values()]).sum()
    grads = torch.autograd.grad(total, list(module.parameters()))
    return values, by_original_name(module, list(grads), rules, like)


def gradients_in_float64(world, part, losses, rules, like):
    """Return the gradients of a copy of the world that computes in float64."""
    world = copy.deepcopy(world).double()
    for network in (world, world.tokenizer, world.dynamics):
        network.dtype = torch.float64
    # Norms and losses convert to float32; here they must not.
    with unittest.mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        return gradients(world, part, losses, rules, like)[1]


def measurements(grad):
    """Return what is recorded of a gradient: its norm, four entries, and its sum."""
    grad = grad.double().flatten()
    places = [0, len(grad) // 3, 2 * len(grad) // 3, len(grad) - 1]
    return float(grad.norm()), grad[places].numpy(), float(grad.sum())


def compare(world, part, losses, rules, data):
    """Compare the losses, and of each gradient its norm, its sum and four entries.

    Biases before a norm are compared with the norm of all gradients where that allows
    more: black frames are constant maps, whose rounding a norm makes 300 times larger.
    Where a float32 gradient leaves its bound, a float64 run tells rounding from error:
    the recording must then agree with float64 up to a few times our float32 rounding.
    """
    norms = under(data, f"{part}/grad_norm/")
    values, ours = gradients(world, part, losses, rules, norms)
    for name, original in LOSSES[part].items():
        close(values[name].mean(), data[f"{part}/loss/{original}"])
    whole = np.linalg.norm(list(norms.values()))
    exact = None
    for name, wanted in norms.items():
        scale = float(wanted)
        if before_a_norm(name, norms):
            scale = max(scale, 0.1 * whole)
        recorded = (
            float(wanted),
            data[f"{part}/grad_at/{name}"],
            float(data[f"{part}/grad_sum/{name}"]),
        )
        reach = (scale, scale, scale * np.sqrt(ours[name].numel()))
        for index, single in enumerate(measurements(ours[name])):
            off = np.abs(single - recorded[index]).max()
            if off <= BOUND * reach[index]:
                continue
            if exact is None:
                exact = gradients_in_float64(world, part, losses, rules, norms)
            double = measurements(exact[name])[index]
            rounding = np.abs(single - double).max()
            assert rounding <= 5 * BOUND * reach[index], name
            distance = np.abs(double - recorded[index]).max()
            assert distance <= ROUNDING * rounding, (name, off, distance, rounding)


def test_the_first_imagined_step(recorded):
    """Later steps depend on sampled tokens that were not recorded."""
    world, data = recorded
    start, stop = data["imagine/context_slice"]
    batch = segment(data)
    state = world.state_from_frames(
        batch.image[:, start:stop], batch.action[:, start : stop - 1]
    )
    signs = data["imagine/rewards"][:, 0] + 1
    two_hot = world.dynamics.config.two_hot_rewards
    tokens = np.zeros((world.dynamics.tokens, len(signs)), int)
    draws = [*([] if two_hot else [signs]), data["imagine/ends"][:, 0], *tokens]
    action = torch.tensor(data["imagine/actions"][:, 0])
    step = world.step(state, action, RecordedSamples(draws))
    wanted = data["imagine/rewards"][:, 0]
    np.testing.assert_allclose(step.state.reward, wanted, rtol=1e-3, atol=1e-5)
    assert np.array_equal(step.state.end, data["imagine/ends"][:, 0])
    assert step.state.image.shape == state.image.shape
