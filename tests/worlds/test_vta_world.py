"""What stays true of a world with segments, beyond its recorded numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.nets.gru import GRU
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.vta.boundaries import (
    COPY,
    READ,
    draw_flags,
    entropy,
    segment_counts,
)
from reverie.worlds.vta.config import VTAConfig
from reverie.worlds.vta.world import VTA

IMAGE = {"image": Space(np.uint8, (32, 32, 3), 0, 256)}
ACTION = {"action": Space(np.int64, (), 0, 3)}
SMALL = {"context": 2, "length": 5, "belief": 8, "state": 3, "layers": 1}


def make_world(act_space=None, dtype=torch.float32, obs_space=None, **settings) -> VTA:
    config = VTAConfig(**{**SMALL, **settings})
    world = VTA(obs_space or IMAGE, act_space or {}, config, dtype)
    world.initialize(torch.Generator().manual_seed(0))
    return world


def make_batch(rows=3, frames=9, side=32) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (rows, frames, side, side, 3), np.uint8)
    action = rng.integers(0, 3, (rows, frames))
    return {"image": torch.tensor(image), "action": torch.tensor(action)}


def rng() -> Rng:
    return Rng(0, "test", torch.device("cpu"))


def test_units_side_by_side_are_those_of_torch():
    stack = GRU(4, 6, 2)
    stack.initialize(torch.Generator().manual_seed(0))
    x, state = torch.randn(3, 4), torch.randn(2, 3, 6)
    ours = stack.step(stack.gates(x), state)
    for i in range(2):
        cell = torch.nn.GRUCell(4, 6)
        cell.load_state_dict({k: v[i] for k, v in stack.state_dict().items()})
        torch.testing.assert_close(ours[i], cell(x, state[i]))


@pytest.mark.gpu
def test_the_unit_in_one_kernel_equals_the_plain_one():
    from reverie.nets.gru import combine

    stack = GRU(4, 6, 2)
    stack.initialize(torch.Generator().manual_seed(0))
    stack.cuda()
    state = torch.randn(2, 3, 6, device="cuda", requires_grad=True)
    gates = stack.gates(torch.randn(3, 4, device="cuda"))
    hidden = torch.baddbmm(stack.bias_hh[:, None], state, stack.weight_hh.mT)
    plain = combine(gates, hidden, state)
    fused = stack.step(gates, state)
    torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-3)
    ours, theirs = (
        torch.autograd.grad(y.square().sum(), state, retain_graph=True)[0]
        for y in (fused, plain)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_flags_are_exactly_zero_or_one_and_yet_have_a_gradient():
    logits = torch.randn(1000, 2, requires_grad=True)
    mask, _ = draw_flags(logits, 0.7, torch.rand(1000, 2) * 0.99 + 0.005)
    assert set(mask.detach().unique().tolist()) == {0.0, 1.0}
    mask[:, READ].sum().backward()
    assert (logits.grad != 0).all()


def test_a_tie_begins_a_segment():
    assert draw_flags(torch.zeros(1, 2), 1.0, None).mask.tolist() == [[1.0, 0.0]]


def test_segments_are_counted():
    read = torch.tensor([[0, 0, 1, 0, 1, 1]]).bool()
    length, count = segment_counts(read)
    assert length.tolist() == [[1, 2, 1, 2, 1, 1]]
    assert count.tolist() == [[0, 0, 1, 1, 2, 3]]


def test_a_fair_coin_has_the_entropy_of_a_bit():
    found = entropy(torch.tensor([0.5, 0.0, 1.0]))
    torch.testing.assert_close(found, torch.tensor([np.log(2), 0.0, 0.0]).float())


def test_the_first_modelled_frame_always_begins_a_segment():
    world = make_world().train()
    story = world.follow(world.pixels.prepare(make_batch()["image"], rng()), {}, rng())
    assert (story.mask[:, 0, READ] == 1).all()


def test_the_upper_level_moves_only_where_segments_begin():
    world = make_world(ACTION).train()
    story = world.follow(
        world.pixels.prepare(make_batch()["image"], rng()), make_batch(), rng()
    )
    held = story.mask[:, 1:, READ] == 0
    assert held.any()
    for name in ("abs_belief", "abs_state", "abs_feat"):
        value = getattr(story, name)
        moved = (value[:, 1:] - value[:, :-1]).abs().amax(-1)
        # the same product may be rounded in another way in another row
        assert moved[held].max() <= (1e-6 if name == "abs_feat" else 0)
        assert (moved[~held] > 1e-3).all()
    assert not held.all()


def test_a_flag_costs_at_the_frame_it_is_about():
    world, batch = make_world().eval(), make_batch()
    with torch.no_grad():  # a sure detector, to whom each beginning is a surprise
        world.foresee.weight.zero_()
        world.foresee.bias.copy_(torch.tensor([-5.0, 5.0]))
        world.detector.out.weight.mul_(100)
        read, copy = world.explain(batch, rng()).story.found.unbind(-1)
        world.detector.out.bias[READ] -= (read - copy).median()
    losses, _, read, chance, foreseen = world.watch(batch, rng())
    mask = world.explain(batch, rng()).losses["mask"]
    assert torch.equal(losses["mask"][:, 1:], mask[:, :-1])
    assert torch.allclose(losses["mask"].mean(), mask.mean())
    cost, found = losses["mask"][:, 1:], read[:, 1:]
    assert found.any()
    assert not found.all()
    assert cost[found].min() > cost[~found].max()
    assert (chance[:, 1:][found] > 0.5).all()
    assert (foreseen[:, 1:] < 0.5).all()


def test_actions_matter_only_at_the_segment_they_lead_to():
    world = make_world(ACTION).eval()
    batch = make_batch()
    other = {**batch, "action": batch["action"].clone()}
    context = world.config.context
    other["action"][:, :context] = 2 - other["action"][:, :context]
    before, after = (
        world.follow(world.pixels.prepare(b["image"], rng()), b, rng())
        for b in (batch, other)
    )
    assert torch.equal(before.abs_belief, after.abs_belief)  # those before do not count


def test_every_training_loss_cools_the_flags_and_evaluation_does_not():
    world = make_world(anneal=1.0).train()
    world.loss(world.initial(3), make_batch(), rng())
    first = float(world.temperature)
    world.loss(world.initial(3), make_batch(), rng())
    assert 1.0 > first > float(world.temperature)
    world.eval()
    world.loss(world.initial(3), make_batch(), rng())
    assert float(world.age) == 2
    again = make_world(anneal=1.0)
    again.load_state_dict(world.state_dict())
    assert float(again.temperature) == float(world.temperature) < first


def test_scales_weigh_losses_and_leave_the_bound_alone():
    batch, plain = make_batch(), make_world().eval()
    scaled = make_world(obs_scale=3.0, abs_scale=0.5, mask_scale=2.0).eval()
    one = plain.loss(plain.initial(3), batch, rng())
    two = scaled.loss(scaled.initial(3), batch, rng())
    for key, scale in {"image": 1, "obs": 3, "abs": 0.5, "mask": 2}.items():
        torch.testing.assert_close(two.losses[key], scale * one.losses[key])
    torch.testing.assert_close(one.metrics["elbo"], two.metrics["elbo"])


def test_the_detector_learns_what_a_segment_costs_only_if_reading_pays():
    gradients = []
    for pays in (False, True):
        world = make_world(kl_to_detector=pays).train()
        explained = world.explain(make_batch(), rng())
        mask, story = explained.story.mask, explained.story
        (grad,) = torch.autograd.grad(
            explained.losses["abs"].sum(), mask, retain_graph=True
        )
        gradients.append(grad[:, 1:, READ])
        cost = story.post_abs.kl(story.prior_abs).detach()[:, 1:]
    torch.testing.assert_close(gradients[1] - gradients[0], cost)


def test_within_a_segment_a_still_world_foresees_one_and_the_same():
    moving, still = make_world().train(), make_world(static_lower_belief=True).train()
    change = {}
    for name, world in {"moving": moving, "still": still}.items():
        story = world.explain(make_batch(), rng()).story
        copied = story.mask[:, 1:, COPY] > 0.5
        assert copied.any()
        apart = story.prior_obs.mean.detach().diff(dim=1).abs().amax(-1)
        change[name] = float(apart[copied].max())
        assert float(apart[~copied].min()) > 0
    assert change["still"] < 1e-6 < change["moving"]


def test_a_still_world_learns_and_dreams():
    world = make_world(static_lower_belief=True, kl_to_detector=True)
    found = world.train().loss(world.initial(3), make_batch(), rng())
    sum(x.mean() for x in found.losses.values()).backward()
    assert all(p.grad is not None for p in world.parameters())
    start = world.eval().begin(make_batch()["image"][:, :2], rng())
    dream = world.imagine(start, lambda _: {}, 6, rng()).states
    held = dream.read[:, 1:] < 0.5
    assert held.any()
    assert torch.equal(dream.obs_belief[:, 1:][held], dream.obs_belief[:, :-1][held])


def test_coins_decide_about_segments_until_the_detector_does():
    world = make_world(random_boundary_steps=2).train()
    for asked in (False, False, True):
        found = world.loss(world.initial(3), make_batch(), rng())
        chance = float(found.metrics["read_chance/post"])
        assert (chance == 0.5) != asked
        weights = list(world.detector.parameters())
        loss = sum(x.mean() for x in found.losses.values())
        grads = torch.autograd.grad(loss, weights)
        assert any(bool(grad.any()) for grad in grads) == asked


def test_without_coins_the_detector_is_asked_from_the_beginning():
    world = make_world().train()
    assert world.explain(make_batch(), rng()).story.found.all()


def test_what_is_watched_is_about_its_own_frame():
    world = make_world().eval()
    watched = world.watch(make_batch(), rng())
    assert watched.image.shape == (3, 5, 32, 32, 3)
    assert watched.read[:, 0].all()
    # Without noise a segment begins exactly where the chance is at least a half.
    assert torch.equal(watched.read, watched.chance >= 0.5)


@pytest.mark.parametrize("jumpy", [False, True])
def test_a_dream_begins_with_a_segment_and_a_jumpy_one_only_has_first_frames(jumpy):
    world = make_world(ACTION).eval()
    batch = make_batch()
    start = world.begin(batch["image"][:, :2], rng())
    action = {"action": batch["action"][:, 0]}
    dream = world.imagine(start, lambda _: action, 6, rng(), jumpy=jumpy).states
    assert dream.read.shape == (3, 7)
    assert (dream.read[:, 0] == 1).all()
    assert not jumpy or (dream.read == 1).all()
    image = world.decode(dream)["image"]
    assert image.shape == (3, 7, 32, 32, 3)
    assert 0 <= float(image.detach().min()) <= float(image.detach().max()) <= 1
    assert world.features(dream).shape == (3, 7, world.width)
    assert tuple(world.image_keys) == ("image",)


@pytest.mark.parametrize("levels", ["all", "floor", "spread"])
def test_levels_of_pixels(levels):
    world = make_world(levels=levels, loss="gaussian", bits=3)
    x = world.pixels.prepare(make_batch()["image"], rng())
    spread = levels == "spread"
    assert float(x.min()) >= (-1 if spread else 0)
    assert float(x.max()) <= 1
    if levels == "floor":
        assert len(x.unique()) <= 9
    watched = world.eval().watch(make_batch(), rng())
    assert 0 <= float(watched.image.min()) <= float(watched.image.max()) <= 1


def test_every_level_of_a_byte_keeps_its_bin():
    from reverie.nets.quantize import spread_levels, unspread_levels

    x = torch.arange(256) / 255
    spread = spread_levels(x, 5, torch.full((256,), 0.5))
    level = torch.round(unspread_levels(spread, 5) * 31).long()
    assert torch.equal(level, torch.arange(256) // 8)


def test_half_precision_computes_images_and_stays_close():
    batch = make_batch()
    whole, half = make_world().eval(), make_world(dtype=torch.bfloat16).eval()
    kinds = []
    for net in (whole.enc, whole.dec, half.enc, half.dec):
        net.register_forward_hook(lambda net, given, out: kinds.append(out.dtype))
    with torch.backends.mkldnn.flags(enabled=False):  # see run/device.py
        one, two = (w.loss(w.initial(3), batch, rng()).losses for w in (whole, half))
    assert kinds == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert all(loss.dtype == torch.float32 for loss in two.values())
    torch.testing.assert_close(
        one["image"].mean(), two["image"].mean(), rtol=0.02, atol=0
    )


def test_other_image_sizes_are_halved_as_often_as_they_need():
    world = make_world(obs_space={"image": Space(np.uint8, (64, 64, 3), 0, 256)})
    assert world.watch(make_batch(side=64), rng()).image.shape[2:] == (64, 64, 3)


@pytest.mark.parametrize(
    ("space", "complaint"),
    [
        ({"image": Space(np.uint8, (48, 48, 3))}, "halved"),
        ({"image": Space(np.uint8, (32, 64, 3))}, "square"),
        ({"vector": Space(np.float32, (3,))}, "exactly one image"),
        (
            {"a": Space(np.uint8, (32, 32, 3)), "b": Space(np.uint8, (32, 32, 3))},
            "a, b",
        ),
    ],
)
def test_what_cannot_be_watched_is_refused(space, complaint):
    with pytest.raises(UserError, match=complaint):
        make_world(obs_space=space)


def test_a_window_of_another_length_is_refused():
    world = make_world()
    with pytest.raises(UserError, match=r"2 \+ 5 \+ 2 are wanted"):
        world.watch(make_batch(frames=8), rng())


def test_the_smallest_world_has_losses_too():
    sizes = {"context": 1, "length": 2, "belief": 1, "state": 1, "layers": 0, "bits": 1}
    world = make_world(**sizes, levels="floor", max_segment=1, max_segments=1).train()
    losses = world.loss(world.initial(3), make_batch(frames=4), rng()).losses
    assert all(loss.shape == (3, 2) for loss in losses.values())
    assert all(loss.isfinite().all() for loss in losses.values())


@pytest.mark.parametrize(
    "settings",
    [
        {"context": 0},
        {"bits": 9},
        {"min_temperature": 2.0},
        {"max_segment": 0},
        {"obs_std": 0.0},
        {"random_boundary_steps": -1},
        {"layers": -1},
        {"length": 1},
        {"abs_scale": -1.0},
        {"anneal": float("inf")},
        {"loss": "bernoulli", "levels": "spread"},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        VTAConfig(**settings)


def test_the_default_world_has_as_many_weights_as_the_port():
    world = VTA(IMAGE, {}, VTAConfig())
    assert sum(p.numel() for p in world.parameters()) == 2_236_871
    plain = VTA(IMAGE, {}, VTAConfig(bias=False))
    assert sum(p.numel() for p in plain.parameters()) == 2_235_975
    acting = VTA(IMAGE, ACTION, VTAConfig())
    assert sum(p.numel() for p in acting.parameters()) == 2_238_023
