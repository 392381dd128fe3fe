"""The world of Δ-IRIS on a GPU: fused as plain, recorded as run, never waited for."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from reverie.kernels import accelerate as fast
from reverie.nets.optim.adam import Adam, AdamConfig, decaying
from reverie.nets.residual import FrameConfig
from reverie.nets.rng import Rng
from reverie.nets.transformer import TransformerConfig
from reverie.spaces import Space
from reverie.worlds.iris.quantizer import QuantizerConfig
from reverie.worlds.iris.world import (
    DynamicsConfig,
    IrisWorld,
    Segment,
    TokenizerConfig,
)

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
    world.initialize(torch.Generator().manual_seed(0))
    return world.cuda()


def batch(rows=ROWS, length=LENGTH, side=16):
    g = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (rows, length, side, side, 3), generator=g)
    segment = Segment(
        image.to(torch.uint8),
        torch.randint(0, ACTIONS, (rows, length), generator=g),
        torch.randn(rows, length, generator=g),
        torch.zeros(rows, length, dtype=torch.bool),
        torch.ones(rows, length, dtype=torch.bool),
    )
    return Segment(*(x.cuda() for x in segment))


def rng():
    return Rng(0, "test", torch.device("cuda"))


def updater(world, part, throw):
    module = getattr(world, part)
    opt = Adam(dict(module.named_parameters()), AdamConfig(lr=1e-3), decaying(module))

    def update(segment):
        if part == "tokenizer":
            losses = world.tokenizer_loss(segment, throw).losses
        else:
            losses = world.dynamics_loss(segment).losses
        loss = torch.stack([x.mean() for x in losses.values()]).sum()
        opt.update(loss)
        return {"loss": loss.detach()}

    return update


@pytest.fixture
def _exactly():
    """Full float32 in libraries, so that orders of summation are all that differs."""
    precision = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = precision


@pytest.mark.usefixtures("_exactly")
@pytest.mark.parametrize("part", ["tokenizer", "dynamics"])
def test_fused_kernels_give_the_same_gradients(part):
    world = make()
    quick = copy.deepcopy(world)
    fast.accelerate(quick)
    found = []
    for w in (world, quick):
        if part == "tokenizer":
            losses = w.tokenizer_loss(batch(), rng(), learn=False).losses
        else:
            losses = w.dynamics_loss(batch()).losses
        loss = torch.stack([x.mean() for x in losses.values()]).sum()
        grads = torch.autograd.grad(loss, list(getattr(w, part).parameters()))
        found.append([loss.detach(), *grads])
    whole = torch.stack([x.norm() for x in found[0][1:]]).norm()
    for plain, other in zip(*found, strict=True):
        limit = max(2e-3 * float(plain.abs().max()), 3e-5 * float(whole))
        assert float((plain - other).abs().max()) <= limit


@pytest.mark.usefixtures("_exactly")
@torch.no_grad()
def test_fused_dreams_are_the_same_dreams():
    world, segment = make(), batch()
    quick = copy.deepcopy(world)
    fast.accelerate(quick)
    steps = []
    for w in (world, quick):
        state = w.begin(segment.image[:, :3], segment.action[:, :2])
        throw, found = rng(), []
        for t in range(2):
            step = w.step(state, segment.action[:, t], throw)
            state = step.state
            found.append(step)
        steps.append(found)
    for plain, other in zip(*steps, strict=True):
        assert torch.equal(plain.tokens, other.tokens)
        torch.testing.assert_close(
            plain.latent_logits, other.latent_logits, rtol=1e-3, atol=1e-4
        )
        off = (plain.image.int() - other.image.int()).abs()
        assert off.max() <= 1


@pytest.mark.parametrize("part", ["tokenizer", "dynamics"])
def test_a_recorded_update_is_the_update(part):
    from reverie.kernels.graphs.graph import Replayed

    losses = []
    for recorded in (False, True):
        world, throw = make(torch.bfloat16), rng()
        fast.accelerate(world)
        update = updater(world, part, throw)
        if recorded:
            device = torch.device("cuda")
            update = Replayed(update, part, device, [throw.generator])
        losses.append([float(update(batch())["loss"]) for _ in range(6)])
        if recorded:
            assert update.works
    assert losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert losses[0][-1] < losses[0][0]


def test_a_recorded_dream_is_the_dream():
    from reverie.kernels.graphs.graph import Replayed

    segment, found = batch(), []
    for recorded in (False, True):
        world, throw = make(torch.bfloat16), rng()
        fast.accelerate(world)

        @torch.no_grad()
        def dream(image, action, world=world, throw=throw):
            state = world.begin(image[:, :3], action[:, :2])
            policy = lambda view: view.image[:, 0, 0, 0].long() % ACTIONS  # noqa: E731
            return world.imagine(state, policy, 8, throw).states  # through a flush

        if recorded:
            device = torch.device("cuda")
            dream = Replayed(dream, "dream", device, [throw.generator])
        for _ in range(5):
            states = dream(segment.image, segment.action)
        found.append(states)
        if recorded:
            assert dream.works
            assert any(not isinstance(x, int) for x in dream.recordings.values())
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(plain, other)


def test_nobody_waits_for_the_device():
    world, segment, throw = make(torch.bfloat16), batch(), rng()
    fast.accelerate(world)
    tokenizer = updater(world, "tokenizer", throw)
    dynamics = updater(world, "dynamics", throw)

    def everything():
        tokenizer(segment)
        dynamics(segment)
        state = world.begin(segment.image[:, :2], segment.action[:, :1])
        for _ in range(9):  # through a flush
            state = world.step(state, segment.action[:, 0], throw).state

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
    world.initialize(torch.Generator().manual_seed(0))
    world.cuda()
    fast.accelerate(world)
    update = updater(world, "tokenizer", rng())
    weights = sum(x.nbytes for x in world.parameters())
    others = torch.cuda.memory_allocated() - 3 * weights  # of other tests
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        update(batch(rows=32, length=21, side=64))
    assert torch.cuda.max_memory_allocated() - others <= 8e9
