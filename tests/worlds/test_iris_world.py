"""The world of Δ-IRIS: what must stay true whatever its weights are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.nets.optim.adam import Adam, AdamConfig, decaying
from reverie.nets.residual import FrameConfig
from reverie.nets.rng import Rng
from reverie.nets.transformer import TransformerConfig
from reverie.spaces import Space
from reverie.worlds.iris.quantizer import Quantizer, QuantizerConfig, entropy
from reverie.worlds.iris.segment import mean_where, pixels, to_bytes
from reverie.worlds.iris.world import (
    DynamicsConfig,
    IrisWorld,
    Segment,
    TokenizerConfig,
)

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
    world.initialize(torch.Generator().manual_seed(0))
    return world


def batch(rows=2, length=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (rows, length, *IMAGE), generator=g)
    return Segment(
        image.to(torch.uint8),
        torch.randint(0, ACTIONS, (rows, length), generator=g),
        torch.randn(rows, length, generator=g),
        torch.zeros(rows, length, dtype=torch.bool),
        torch.ones(rows, length, dtype=torch.bool),
    )


def rng(seed=0):
    return Rng(seed, "test", torch.device("cpu"))


def idle(view):
    return torch.zeros(view.image.shape[:1], dtype=torch.int64)


def test_bytes_come_back_from_numbers():
    image = torch.arange(256, dtype=torch.uint8)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(to_bytes(pixels(image, dtype).float()), image)
    assert to_bytes(torch.tensor([-1.0, 2.0])).tolist() == [0, 255]


def test_the_mean_of_a_masked_loss_is_the_mean_over_the_mask():
    loss = torch.tensor([[1.0, 2.0, float("inf")], [5.0, 7.0, 8.0]])
    where = torch.tensor([[True, True, False], [False, False, True]])
    assert float(mean_where(loss, where).mean()) == pytest.approx(11 / 3)
    assert not mean_where(loss, torch.zeros_like(where)).any()


def test_what_is_not_real_teaches_the_decoder_nothing():
    world, one = make(), batch()
    real = one.real.clone()
    real[0, -1] = False
    image = one.image.clone()
    image[0, -1] = 0
    losses = []
    for last in (0, 200):
        image = image.clone()
        image[0, -1] = last
        out = world.tokenizer_loss(one._replace(image=image, real=real), rng(), False)
        losses.append(out.losses)
        assert not out.losses["l2"][0, -1]
    torch.testing.assert_close(losses[0]["l2"], losses[1]["l2"])
    torch.testing.assert_close(losses[0]["worst"], losses[1]["worst"])
    assert not torch.equal(losses[0]["commit"], losses[1]["commit"])  # it counts there


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


def test_both_parts_learn_a_batch_by_heart():
    world, one = make(), batch(rows=1, length=3)
    for module, loss in (
        (world.tokenizer, lambda: world.tokenizer_loss(one, rng())),
        (world.dynamics, lambda: world.dynamics_loss(one)),
    ):
        config = AdamConfig(lr=3e-3)
        opt = Adam(dict(module.named_parameters()), config, decaying(module))
        totals = []
        for _ in range(25):
            losses = loss().losses
            total = torch.stack([x.mean() for x in losses.values()]).sum()
            opt.update(total)
            totals.append(float(total.detach()))
        assert totals[-1] < 0.6 * totals[0]


def test_training_one_part_leaves_the_other_without_gradient():
    world, one = make(), batch()
    world.dynamics_loss(one).losses["latents"].sum().backward()
    assert all(p.grad is None for p in world.tokenizer.parameters())
    assert any(p.grad is not None for p in world.dynamics.parameters())


@pytest.mark.parametrize("two_hot", [True, False])
def test_a_dream_is_the_same_from_the_same_dice(two_hot):
    world, one = make(two_hot), batch()
    dreams = []
    for seed in (1, 1, 2):
        state = world.begin(one.image[:, :2], one.action[:, :1])
        dreams.append(world.imagine(state, idle, 9, rng(seed)))
    first, again, other = (dream.states.image for dream in dreams)
    assert first.shape == (2, 10, *IMAGE)
    assert first.dtype == torch.uint8
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first[:, 0], one.image[:, 1])
    view = dreams[0].states
    assert not view.reward[:, 0].any()
    if not two_hot:
        assert set(view.reward.unique().tolist()) <= {-1.0, 0.0, 1.0}
    assert dreams[0].actions["action"].shape == (2, 10)


def test_dreams_have_no_gradient():
    world, one = make(), batch()
    state = world.begin(one.image[:, :1], one.action[:, :0])
    step = world.step(state, one.action[:, 0], rng())
    assert not step.reward.requires_grad
    assert not step.latent_logits.requires_grad


def test_the_memory_is_flushed_only_when_it_is_full():
    world, one = make(), batch()
    state = world.begin(one.image[:, :1], one.action[:, :0])
    sizes = [state.cache.size]
    for _ in range(2 * BLOCKS):
        state = world.step(state, one.action[:, 0], rng()).state
        sizes.append(state.cache.size)
    block = TOKENS + 2
    rise = [block - 1 + block * i for i in range(BLOCKS)]
    assert sizes == [1, *rise, *rise]


def test_a_context_that_fills_the_memory_is_flushed_at_once():
    """The newest frame is then all that is known, as if the dream began with it."""
    world, one = make(), batch(length=BLOCKS)
    full = world.begin(one.image, one.action[:, :-1])
    fresh = world.begin(one.image[:, -1:], one.action[:, :0])
    first = world.step(full, one.action[:, -1], rng())
    second = world.step(fresh, one.action[:, -1], rng())
    torch.testing.assert_close(first.reward, second.reward)
    torch.testing.assert_close(first.latent_logits, second.latent_logits)


def test_a_forked_state_can_go_on_twice():
    world, one = make(), batch()
    state = world.begin(one.image[:, :2], one.action[:, :1])
    fork = state.fork()
    zero, other = torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.int64)
    first = world.step(state, zero, rng())
    world.step(fork, other, rng())
    onward = world.step(first.state, zero, rng())
    state = world.begin(one.image[:, :2], one.action[:, :1])
    alone = world.step(world.step(state, zero, rng()).state, zero, rng())
    assert torch.equal(onward.image, alone.image)


def test_dreaming_equals_the_full_forward():
    """Cached steps see what training sees when it is given the dreamt frames."""
    world, one = make(), batch(length=3)
    state = world.begin(one.image[:, :1], one.action[:, :0])
    steps = []
    for t in range(3):
        steps.append(world.step(state, one.action[:, t], rng(t)))
        state = steps[-1].state
    images = [one.image[:, 0], *(step.image for step in steps[:-1])]
    tokens = torch.stack([step.tokens for step in steps], 1)
    dynamics = world.dynamics
    sequence = dynamics.sequence(
        torch.stack(images, 1), one.action, tokens, torch.float32
    )
    outputs, _ = dynamics(sequence)
    seen = dynamics.foresee(outputs)
    logits = torch.cat([step.latent_logits for step in steps], 1)
    torch.testing.assert_close(logits, seen.latents, rtol=1e-4, atol=1e-5)
    ends = torch.stack([step.end_logits for step in steps], 1)
    torch.testing.assert_close(ends, seen.ends, rtol=1e-4, atol=1e-5)


def test_a_frozen_copy_follows_when_told_to():
    world, one = make(), batch()
    twin = world.frozen_copy(torch.float32)
    with torch.no_grad():
        for parameter in world.parameters():
            parameter.add_(0.05)
        world.tokenizer.quantizer.codebook.add_(0.1)

    def dream(w):
        state = w.begin(one.image[:, :2], one.action[:, :1])
        return w.imagine(state, idle, 3, rng()).states.reward

    assert not torch.equal(dream(twin), dream(world))
    world.refresh(twin)
    assert torch.equal(dream(twin), dream(world))
    assert not any(p.requires_grad for p in twin.parameters())


def test_a_copy_in_half_precision_keeps_norms_whole():
    twin = make().frozen_copy(torch.bfloat16)
    assert twin.dynamics.frame_norm.scale.dtype == torch.float32
    assert twin.dynamics.latents.out.weight.dtype == torch.bfloat16
    one = batch()
    with torch.backends.mkldnn.flags(enabled=False, deterministic=False):
        state = twin.begin(one.image[:, :2], one.action[:, :1])
        step = twin.step(state, one.action[:, 1], rng())
    assert state.cache.keys.dtype == torch.bfloat16
    assert torch.isfinite(step.reward).all()


def test_looking_at_dreams():
    world, one = make(), batch()
    state = world.begin(one.image[:, :2], one.action[:, :1])
    view = world.imagine(state, idle, 2, rng()).states
    assert world.features(view).shape == (2, 3, world.width)
    (key,) = world.image_keys
    torch.testing.assert_close(world.decode(view)[key], view.image / 255)


def test_reconstruction_begins_with_the_truth():
    world, one = make(), batch()
    drawn = world.reconstruct(one.image, one.action)
    assert drawn.shape == one.image.shape
    assert torch.equal(drawn[:, 0], one.image[:, 0])


# The codebook


def quantizer(revive_until=None, codes=8):
    made = Quantizer(6, QuantizerConfig(codes, 4, revive_until))
    made.initialize(torch.Generator().manual_seed(0))
    made.down.initialize(torch.Generator().manual_seed(0))
    made.up.initialize(torch.Generator().manual_seed(0))
    return made


def unit(*shape):
    return torch.nn.functional.normalize(torch.randn(*shape), dim=-1)


def test_codes_follow_the_vectors_that_chose_them():
    q = quantizer()
    q.codebook.copy_(unit(8, 4))
    vectors = unit(1, 4).repeat(5, 1)
    tokens = torch.full((5,), 3)
    before = q.codebook.clone()
    q.follow(vectors, tokens, rng())
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
    metrics = q.follow(vectors, torch.zeros(20, dtype=torch.int64), rng())
    assert metrics["codes_revived"] == 7
    alike = (q.codebook[1:] @ vectors.T).max(-1)
    torch.testing.assert_close(alike.values, torch.ones(7))
    assert len(alike.indices.unique()) == 7
    torch.testing.assert_close(q.usage[1:], torch.full((7,), 1 / 8))


@pytest.mark.parametrize(("used", "revived"), [(15, 0), (5, 0), (3, 13)])
def test_codes_are_revived_only_where_few_are_used(used, revived):
    """Sixteen codes can hold four bits; they are healthy down to two."""
    q = quantizer(codes=16)
    q.usage.zero_()
    q.usage[:used] = 1 / used
    tokens = torch.arange(60) % used
    assert q.follow(unit(60, 4), tokens, rng())["codes_revived"] == revived


def test_a_broken_batch_leaves_the_codebook_alone():
    q = quantizer()
    before = {k: v.clone() for k, v in q.state_dict().items()}
    vectors = unit(5, 4)
    vectors[2, 1] = float("nan")
    q.follow(vectors, torch.zeros(5, dtype=torch.int64), rng())
    for key, value in q.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_gradients_pass_straight_through_the_choice():
    q, features = quantizer(), torch.randn(3, 6, requires_grad=True)
    out = q(features)
    assert out.features.shape == features.shape
    (grad,) = torch.autograd.grad(out.features.sum(), features)
    assert grad.abs().max() > 0
    torch.testing.assert_close(out.features, q.embed(out.tokens, torch.float32))


def test_entropy_in_bits():
    assert float(entropy(torch.full((8,), 1 / 8))) == pytest.approx(3)
    assert float(entropy(torch.tensor([1.0, 0.0]))) == 0


# What cannot be


def test_sizes_that_cannot_be():
    for wrong in (
        lambda: QuantizerConfig(codes=12),
        lambda: QuantizerConfig(width=0),
        lambda: TokenizerConfig(tokens=5),
        lambda: TokenizerConfig(frame=frame(3)),
    ):
        with pytest.raises(ValueError, match="must"):
            wrong()


def test_images_of_other_sizes_are_refused_with_a_way_out():
    with pytest.raises(UserError, match=r"7x8 cannot be halved.*\n  Fix: .*of 4"):
        make(image=(7, 8, 3))
    with pytest.raises(UserError, match=r"into 2x2 tokens.*\n  Fix: .*resize 8 8"):
        make(image=(8, 6, 3))
    with pytest.raises(UserError, match=r"width 32.*\n  Fix: --env.resize 8 8 .*, or"):
        make(image=(8, 16, 3))
    with pytest.raises(UserError, match=r"sees one image.*\n  Fix"):
        IrisWorld(
            Space(np.float32, (4,)),
            ACTIONS,
            tokenizer=TokenizerConfig(),
            dynamics=DynamicsConfig(),
        )


def test_a_policy_is_shown_every_frame_of_a_dream():
    world, one, shown = make(), batch(rows=3), []

    def policy(view):
        shown.append(view)
        return torch.full((3,), len(shown) % ACTIONS)

    state = world.begin(one.image, one.action[:, :-1])
    dream = world.imagine(state, policy, 4, rng())
    for part, seen in zip(dream.states, zip(*shown, strict=True), strict=True):
        assert torch.equal(part, torch.stack(seen, 1))
    assert dream.actions["action"].tolist() == [[1, 2, 0, 1, 2]] * 3
    assert torch.equal(dream.states.image[:, 0], one.image[:, -1])


def test_images_need_not_be_square_nor_coloured():
    world = IrisWorld(
        Space(np.uint8, (8, 16, 1)),
        ACTIONS,
        tokenizer=make().tokenizer.config,
        dynamics=DynamicsConfig(TransformerConfig(1, 2, 32, BLOCKS), frame(1)),
    )
    world.initialize(torch.Generator().manual_seed(0))
    image = torch.zeros(1, 2, 8, 16, 1, dtype=torch.uint8)
    state = world.begin(image, torch.zeros(1, 1, dtype=torch.int64))
    assert world.imagine(state, idle, 1, rng()).states.image.shape[2:] == (8, 16, 1)
