"""The Δ-IRIS world on a GPU: fused kernels, CUDA graphs and memory."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from reverie.kernels import accelerate
from reverie.nets.blocks import initialize
from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.optimizer import Optimizer, dense_weights
from reverie.nets.residual import FrameConfig
from reverie.nets.rng import Rng
from reverie.nets.transformer import TransformerConfig
from reverie.spaces import Space
from reverie.worlds.iris.config import (
    DynamicsConfig,
    QuantizerConfig,
    TokenizerConfig,
)
from reverie.worlds.iris.segment import EpisodeSegment
from reverie.worlds.iris.world import IrisWorld

pytestmark = pytest.mark.gpu
ROWS, LENGTH, ACTIONS = 4, 5, 6


def make(dtype=torch.float32):
    def frame(latent):
        return FrameConfig(32, latent, (1, 2), (1, 1))

    world = IrisWorld(
        Space(np.uint8, (16, 16, 3)),
        ACTIONS,
        tokenizer=TokenizerConfig(
            encoder=frame(8),
            frame=frame(4),
            decoder=frame(1),
            quantizer=QuantizerConfig(64, 16, None),
        ),
        dynamics=DynamicsConfig(TransformerConfig(2, 4, 128, 8), frame(8)),
        dtype=dtype,
    )
    initialize(world, torch.Generator().manual_seed(0))
    return world.cuda()


def batch(rows=ROWS, length=LENGTH, side=16):
    g = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (rows, length, side, side, 3), generator=g)
    segment = EpisodeSegment(
        image.to(torch.uint8),
        torch.randint(0, ACTIONS, (rows, length), generator=g),
        torch.randn(rows, length, generator=g),
        torch.zeros(rows, length, dtype=torch.bool),
        torch.ones(rows, length, dtype=torch.bool),
    )
    return EpisodeSegment(*(x.cuda() for x in segment))


def rng():
    return Rng(0, "test", torch.device("cuda"))


def policy(state):
    return {"action": state.image[:, 0, 0, 0].long() % ACTIONS}


def updater(world, part, generator):
    module = getattr(world, part)
    opt = Optimizer(
        dict(module.named_parameters()), AdamConfig(lr=1e-3), dense_weights(module)
    )

    def update(segment):
        if part == "tokenizer":
            losses = world.tokenizer.loss(segment, generator).losses
        else:
            losses = world.dynamics_loss(segment).losses
        loss = torch.stack([x.mean() for x in losses.values()]).sum()
        opt.update(loss)
        return {"loss": loss.detach()}

    return update


@pytest.fixture
def _full_float32():
    """Disable TF32, so that results differ by the order of summation only."""
    precision = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = precision


@pytest.mark.usefixtures("_full_float32")
@pytest.mark.parametrize("part", ["tokenizer", "dynamics"])
def test_fused_kernels_give_the_same_gradients(part):
    world = make()
    quick = copy.deepcopy(world)
    accelerate.use_fast_versions(quick)
    results = []
    for w in (world, quick):
        if part == "tokenizer":
            losses = w.tokenizer.loss(batch(), rng(), update_codebook=False).losses
        else:
            losses = w.dynamics_loss(batch()).losses
        loss = torch.stack([x.mean() for x in losses.values()]).sum()
        grads = torch.autograd.grad(loss, list(getattr(w, part).parameters()))
        results.append([loss.detach(), *grads])
    total_norm = torch.stack([x.norm() for x in results[0][1:]]).norm()
    for plain, other in zip(*results, strict=True):
        limit = max(2e-3 * float(plain.abs().max()), 3e-5 * float(total_norm))
        assert float((plain - other).abs().max()) <= limit


@pytest.mark.usefixtures("_full_float32")
@torch.no_grad()
def test_fused_kernels_give_the_same_rollout():
    world, segment = make(), batch()
    quick = copy.deepcopy(world)
    accelerate.use_fast_versions(quick)
    steps = []
    for w in (world, quick):
        state = w.state_from_frames(segment.image[:, :3], segment.action[:, :2])
        generator, results = rng(), []
        for t in range(2):
            step = w.step(state, segment.action[:, t], generator)
            state = step.state
            results.append(step)
        steps.append(results)
    for plain, other in zip(*steps, strict=True):
        assert torch.equal(plain.tokens, other.tokens)
        torch.testing.assert_close(
            plain.latent_logits, other.latent_logits, rtol=1e-3, atol=1e-4
        )
        off = (plain.state.image.int() - other.state.image.int()).abs()
        assert off.max() <= 1


@pytest.mark.parametrize("part", ["tokenizer", "dynamics"])
def test_a_captured_update_equals_the_eager_one(part):
    from reverie.kernels.graphs.runner import CudaGraphRunner

    losses = []
    for captured in (False, True):
        world, generator = make(torch.bfloat16), rng()
        accelerate.use_fast_versions(world)
        update = updater(world, part, generator)
        if captured:
            device = torch.device("cuda")
            update = CudaGraphRunner(update, part, device, [generator.generator])
        losses.append([float(update(batch())["loss"]) for _ in range(6)])
        if captured:
            assert update.can_capture
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[0][-1] < losses[0][0]


def test_a_captured_rollout_equals_the_eager_one():
    from reverie.kernels.graphs.runner import CudaGraphRunner

    segment, results = batch(), []
    for captured in (False, True):
        world, generator = make(torch.bfloat16), rng()
        accelerate.use_fast_versions(world)

        @torch.no_grad()
        def imagine(image, action, world=world, generator=generator):
            state = world.state_from_frames(image[:, :3], action[:, :2])
            rollout = world.imagine(state, policy, 8, generator)
            return rollout.states  # long enough that the cache is cleared

        if captured:
            device = torch.device("cuda")
            imagine = CudaGraphRunner(imagine, "imagine", device, [generator.generator])
        for _ in range(5):
            states = imagine(segment.image, segment.action)
        results.append(states)
        if captured:
            assert imagine.can_capture
            assert any(not isinstance(x, int) for x in imagine.graphs.values())
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(plain, other)


def test_updates_and_imagination_do_not_synchronize_with_the_device():
    world, segment, generator = make(torch.bfloat16), batch(), rng()
    accelerate.use_fast_versions(world)
    tokenizer = updater(world, "tokenizer", generator)
    dynamics = updater(world, "dynamics", generator)

    def everything():
        tokenizer(segment)
        dynamics(segment)
        state = world.state_from_frames(segment.image[:, :2], segment.action[:, :1])
        for _ in range(9):  # long enough that the cache is cleared
            state = world.step(state, segment.action[:, 0], generator).state

    everything()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_tokenizer_for_crafter_trains_within_eight_gigabytes():
    world = IrisWorld(
        Space(np.uint8, (64, 64, 3)),
        ACTIONS,
        tokenizer=TokenizerConfig(),
        dynamics=DynamicsConfig(),
        dtype=torch.bfloat16,
    )
    initialize(world, torch.Generator().manual_seed(0))
    world.cuda()
    accelerate.use_fast_versions(world)
    update = updater(world, "tokenizer", rng())
    weights = sum(x.nbytes for x in world.parameters())
    others = torch.cuda.memory_allocated() - 3 * weights  # of other tests
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        update(batch(rows=32, length=21, side=64))
    assert torch.cuda.max_memory_allocated() - others <= 8e9
