"""The Δ-IRIS world: losses, imagination and codebook."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.api import UserError
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
from reverie.worlds.iris.quantizer import Quantizer, entropy_bits
from reverie.worlds.iris.segment import (
    EpisodeSegment,
    scale_by_mask,
    to_float,
    to_uint8,
)
from reverie.worlds.iris.world import IrisWorld

IMAGE, ACTIONS, TOKENS, BLOCKS = (8, 8, 3), 3, 4, 5


def frame(latent):
    return FrameConfig(32, latent, (1,), (1,))


def make(two_hot=True, image=IMAGE, dtype=torch.float32, **tokenizer):
    world = IrisWorld(
        Space(np.uint8, image),
        ACTIONS,
        tokenizer=TokenizerConfig(
            tokens=TOKENS,
            action_planes=2,
            encoder=frame(4),
            frame=frame(3),
            decoder=frame(1),
            quantizer=QuantizerConfig(8, 4, None),
            **tokenizer,
        ),
        dynamics=DynamicsConfig(
            TransformerConfig(1, 2, 32, BLOCKS), frame(2), two_hot_rewards=two_hot
        ),
        dtype=dtype,
    )
    initialize(world, torch.Generator().manual_seed(0))
    return world


def batch(rows=2, length=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (rows, length, *IMAGE), generator=g)
    return EpisodeSegment(
        image.to(torch.uint8),
        torch.randint(0, ACTIONS, (rows, length), generator=g),
        torch.randn(rows, length, generator=g),
        torch.zeros(rows, length, dtype=torch.bool),
        torch.ones(rows, length, dtype=torch.bool),
    )


def rng(seed=0):
    return Rng(seed, "test", torch.device("cpu"))


def noop_policy(state):
    return {"action": torch.zeros(len(state.image), dtype=torch.int64)}


def test_pixels_survive_conversion_to_float_and_back():
    image = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(to_uint8(to_float(image, dtype).float()), image)
    assert to_uint8(torch.tensor([-1.0, 2.0])).tolist() == [0, 255]


def test_the_mean_of_a_masked_loss_is_the_mean_over_the_mask():
    loss = torch.tensor([[1.0, 2.0, float("inf")], [5.0, 7.0, 8.0]])
    mask = torch.tensor([[True, True, False], [False, False, True]])
    assert float(scale_by_mask(loss, mask).mean()) == pytest.approx(11 / 3)
    assert not scale_by_mask(loss, torch.zeros_like(mask)).any()


def test_padding_frames_do_not_affect_pixel_losses():
    world, one = make(), batch()
    real = one.real.clone()
    real[0, -1] = False
    image = one.image.clone()
    image[0, -1] = 0
    losses = []
    for last in (0, 200):
        image = image.clone()
        image[0, -1] = last
        out = world.tokenizer.loss(one._replace(image=image, real=real), rng(), False)
        losses.append(out.losses)
        assert not out.losses["l2"][0, -1]
    torch.testing.assert_close(losses[0]["l2"], losses[1]["l2"])
    torch.testing.assert_close(losses[0]["worst"], losses[1]["worst"])
    assert not torch.equal(
        losses[0]["commit"], losses[1]["commit"]
    )  # padding counts for the commitment loss


def test_the_last_real_row_counts_for_tokens_but_not_padding():
    world, one = make(), batch()
    real = one.real.clone()
    real[0, 2:] = False
    losses = world.dynamics_loss(one._replace(real=real)).losses
    assert losses["latents"][0, 1] > 0
    assert not losses["latents"][0, 2]
    assert losses["rewards"].shape == (2, 4)
    assert not losses["rewards"][0, 2:].any()
    assert (losses["ends"][1] > 0).all()


def test_both_networks_overfit_one_batch():
    world, one = make(), batch(rows=1, length=3)
    for module, loss in (
        (world.tokenizer, lambda: world.tokenizer.loss(one, rng())),
        (world.dynamics, lambda: world.dynamics_loss(one)),
    ):
        config = AdamConfig(lr=3e-3)
        opt = Optimizer(dict(module.named_parameters()), config, dense_weights(module))
        totals = []
        for _ in range(25):
            losses = loss().losses
            total = torch.stack([x.mean() for x in losses.values()]).sum()
            opt.update(total)
            totals.append(float(total.detach()))
        assert totals[-1] < 0.6 * totals[0]


def test_the_dynamics_loss_has_no_gradient_to_the_tokenizer():
    world, one = make(), batch()
    world.dynamics_loss(one).losses["latents"].sum().backward()
    assert all(p.grad is None for p in world.tokenizer.parameters())
    assert any(p.grad is not None for p in world.dynamics.parameters())


@pytest.mark.parametrize("two_hot", [True, False])
def test_the_same_seed_gives_the_same_rollout(two_hot):
    world, one = make(two_hot), batch()
    rollouts = []
    for seed in (1, 1, 2):
        state = world.state_from_frames(one.image[:, :2], one.action[:, :1])
        rollouts.append(world.imagine(state, noop_policy, 9, rng(seed)))
    first, again, other = (rollout.states.image for rollout in rollouts)
    assert first.shape == (2, 10, *IMAGE)
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first[:, 0], one.image[:, 1])
    frames = rollouts[0].states
    assert not frames.reward[:, 0].any()
    if not two_hot:
        assert set(frames.reward.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert rollouts[0].actions["action"].shape == (2, 10)


def test_imagination_has_no_gradient():
    world, one = make(), batch()
    state = world.state_from_frames(one.image[:, :1], one.action[:, :0])
    step = world.step(state, one.action[:, 0], rng())
    assert not step.state.reward.requires_grad
    assert not step.latent_logits.requires_grad


def test_the_cache_is_cleared_only_when_it_is_full():
    world, one = make(), batch()
    state = world.state_from_frames(one.image[:, :1], one.action[:, :0])
    sizes = [state.cache.size]
    for _ in range(2 * BLOCKS):
        state = world.step(state, one.action[:, 0], rng()).state
        sizes.append(state.cache.size)
    block = TOKENS + 2
    rise = [block - 1 + block * i for i in range(BLOCKS)]
    assert sizes == [1, *rise, *rise]


def test_a_context_that_fills_the_cache_is_cleared_at_once():
    """The context is then the newest frame alone, as if the rollout started there."""
    world, one = make(), batch(length=BLOCKS)
    full = world.state_from_frames(one.image, one.action[:, :-1])
    fresh = world.state_from_frames(one.image[:, -1:], one.action[:, :0])
    first = world.step(full, one.action[:, -1], rng())
    second = world.step(fresh, one.action[:, -1], rng())
    torch.testing.assert_close(first.state.reward, second.state.reward)
    torch.testing.assert_close(first.latent_logits, second.latent_logits)


def test_a_forked_state_can_be_continued_twice():
    world, one = make(), batch()
    state = world.state_from_frames(one.image[:, :2], one.action[:, :1])
    fork = state.fork()
    zero, other = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    first = world.step(state, zero, rng())
    world.step(fork, other, rng())
    onward = world.step(first.state, zero, rng())
    state = world.state_from_frames(one.image[:, :2], one.action[:, :1])
    alone = world.step(world.step(state, zero, rng()).state, zero, rng())
    assert torch.equal(onward.state.image, alone.state.image)


def test_cached_steps_equal_the_full_forward_pass():
    """Steps with the KV cache give the logits of one pass over the imagined frames."""
    world, one = make(), batch(length=3)
    state = world.state_from_frames(one.image[:, :1], one.action[:, :0])
    steps = []
    for t in range(3):
        steps.append(world.step(state, one.action[:, t], rng(t)))
        state = steps[-1].state
    images = [one.image[:, 0], *(step.state.image for step in steps[:-1])]
    tokens = torch.stack([step.tokens for step in steps], 1)
    dynamics = world.dynamics
    i_tokens = dynamics.embed_frames(torch.stack(images, 1))
    sequence = dynamics.embed_sequence(i_tokens, one.action, tokens)
    outputs, _ = dynamics(sequence)
    full = dynamics.predict(outputs)
    logits = torch.cat([step.latent_logits for step in steps], 1)
    torch.testing.assert_close(logits, full.latents, rtol=1e-4, atol=1e-5)
    ends = torch.stack([step.end_logits for step in steps], 1)
    torch.testing.assert_close(ends, full.ends, rtol=1e-4, atol=1e-5)


def test_weights_are_copied_to_a_frozen_copy():
    world, one = make(), batch()
    frozen = world.frozen_copy(torch.float32)
    with torch.no_grad():
        for parameter in world.parameters():
            parameter.add_(0.05)
        world.tokenizer.quantizer.codebook.add_(0.1)

    def rewards(w):
        state = w.state_from_frames(one.image[:, :2], one.action[:, :1])
        return w.imagine(state, noop_policy, 3, rng()).states.reward

    assert not torch.equal(rewards(frozen), rewards(world))
    world.copy_weights_to(frozen)
    assert torch.equal(rewards(frozen), rewards(world))
    assert not any(p.requires_grad for p in frozen.parameters())


def test_a_frozen_copy_in_bfloat16_keeps_norms_in_float32():
    frozen = make().frozen_copy(torch.bfloat16)
    assert frozen.dynamics.frame_norm.scale.dtype == torch.float32
    assert frozen.dynamics.latents.out.weight.dtype == torch.bfloat16
    one = batch()
    with torch.backends.mkldnn.flags(enabled=False, deterministic=False):
        state = frozen.state_from_frames(one.image[:, :2], one.action[:, :1])
        step = frozen.step(state, one.action[:, 1], rng())
    assert state.cache.keys.dtype == torch.bfloat16
    assert torch.isfinite(step.state.reward).all()


def test_decode_returns_the_imagined_frames_in_the_unit_range():
    world, one = make(), batch()
    state = world.state_from_frames(one.image[:, :2], one.action[:, :1])
    frames = world.imagine(state, noop_policy, 2, rng()).states
    (key,) = world.image_keys
    torch.testing.assert_close(world.decode(frames)[key], frames.image / 255)


def test_reconstruction_copies_the_first_frame():
    world, one = make(), batch()
    decoded = world.reconstruct(one.image, one.action)
    assert decoded.shape == one.image.shape
    assert torch.equal(decoded[:, 0], one.image[:, 0])


# The codebook


def quantizer(revive_until=None, codes=8):
    made = Quantizer(6, QuantizerConfig(codes, 4, revive_until))
    made.initialize(torch.Generator().manual_seed(0))
    made.down.initialize(torch.Generator().manual_seed(0))
    made.up.initialize(torch.Generator().manual_seed(0))
    return made


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def test_codes_move_towards_their_assigned_vectors():
    q = quantizer()
    q.codebook.copy_(unit(8, 4))
    vectors = unit(1, 4).repeat(5, 1)
    tokens = torch.full((5,), 3)
    before = q.codebook.clone()
    q.update_codebook(vectors, tokens, rng())
    nearer = q.codebook[3] @ vectors[0] - before[3] @ vectors[0]
    assert nearer > 0
    torch.testing.assert_close(q.codebook.norm(dim=-1), torch.ones(8))
    others = [i for i in range(8) if i != 3]
    torch.testing.assert_close(q.codebook[others], before[others])


def test_revived_codes_are_distinct_vectors_of_the_batch():
    torch.manual_seed(0)
    q = quantizer()
    q.codebook.copy_(unit(8, 4))
    q.usage.zero_()
    q.usage[0] = 1.0
    vectors = unit(20, 4)
    metrics = q.update_codebook(vectors, torch.zeros(20, dtype=torch.int64), rng())
    assert metrics["codes_revived"] == 7
    alike = (q.codebook[1:] @ vectors.T).max(-1)
    torch.testing.assert_close(alike.values, torch.ones(7))
    assert len(alike.indices.unique()) == 7
    torch.testing.assert_close(q.usage[1:], torch.full((7,), 1 / 8))


@pytest.mark.parametrize(("used", "revived"), [(15, 0), (5, 0), (3, 13)])
def test_codes_are_revived_only_where_few_are_used(used, revived):
    """Sixteen codes have at most four bits; codes are revived below two."""
    q = quantizer(codes=16)
    q.usage.zero_()
    q.usage[:used] = 1 / used
    tokens = torch.arange(60) % used
    assert q.update_codebook(unit(60, 4), tokens, rng())["codes_revived"] == revived


def test_a_batch_that_is_not_finite_leaves_the_codebook_unchanged():
    q = quantizer()
    before = {k: v.clone() for k, v in q.state_dict().items()}
    vectors = unit(5, 4)
    vectors[2, 1] = float("nan")
    q.update_codebook(vectors, torch.zeros(5, dtype=torch.int64), rng())
    for key, value in q.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_quantization_has_a_straight_through_gradient():
    q, features = quantizer(), torch.randn(3, 6, requires_grad=True)
    out = q(features)
    assert out.features.shape == features.shape
    (grad,) = torch.autograd.grad(out.features.sum(), features)
    assert grad.abs().max() > 0
    torch.testing.assert_close(out.features, q.embed(out.tokens, torch.float32))


def test_entropy_in_bits():
    assert float(entropy_bits(torch.full((8,), 1 / 8))) == pytest.approx(3)
    assert float(entropy_bits(torch.tensor([1.0, 0.0]))) == 0


# Invalid configs


def test_invalid_sizes_are_refused():
    for wrong in (
        lambda: QuantizerConfig(codes=12),
        lambda: QuantizerConfig(width=0),
        lambda: TokenizerConfig(tokens=5),
        lambda: TokenizerConfig(frame=frame(3)),
    ):
        with pytest.raises(ValueError, match="must"):
            wrong()


def test_images_that_do_not_fit_are_refused_with_a_fix():
    with pytest.raises(UserError, match=r"7x8 cannot be halved.*\n  Fix: .*of 4"):
        make(image=(7, 8, 3))
    with pytest.raises(UserError, match=r"into 2x2 tokens.*\n  Fix: .*resize 8 8"):
        make(image=(8, 6, 3))
    with pytest.raises(UserError, match=r"width 32.*\n  Fix: --env.resize 8 8 .*, or"):
        make(image=(8, 16, 3))
    with pytest.raises(UserError, match=r"needs an image.*\n  Fix"):
        IrisWorld(
            Space(np.float32, (4,)),
            ACTIONS,
            tokenizer=TokenizerConfig(),
            dynamics=DynamicsConfig(),
        )


def test_the_policy_is_called_with_every_frame_of_a_rollout():
    world, one, inputs = make(), batch(rows=3), []

    def policy(state):
        inputs.append((state.image, state.reward, state.end))
        return {"action": torch.full((3,), len(inputs) % ACTIONS)}

    state = world.state_from_frames(one.image, one.action[:, :-1])
    rollout = world.imagine(state, policy, 4, rng())
    for field, steps in zip(rollout.states, zip(*inputs, strict=True), strict=True):
        assert torch.equal(field, torch.stack(steps, 1))
    assert rollout.actions["action"].tolist() == [[1, 2, 0, 1, 2]] * 3
    assert torch.equal(rollout.states.image[:, 0], one.image[:, -1])


def test_images_may_be_rectangular_and_grayscale():
    world = IrisWorld(
        Space(np.uint8, (8, 16, 1)),
        ACTIONS,
        tokenizer=make().tokenizer.config,
        dynamics=DynamicsConfig(TransformerConfig(1, 2, 32, BLOCKS), frame(1)),
    )
    initialize(world, torch.Generator().manual_seed(0))
    image = torch.zeros(1, 2, 8, 16, 1, dtype=torch.uint8)
    state = world.state_from_frames(image, torch.zeros(1, 1, dtype=torch.int64))
    assert world.imagine(state, noop_policy, 1, rng()).states.image.shape[2:] == (
        8,
        16,
        1,
    )
