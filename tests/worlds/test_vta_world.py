"""The VTA world: boundaries, losses and generation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.nets.gru import GRU
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.vta.boundaries import (
    BOUNDARY,
    NO_BOUNDARY,
    bernoulli_entropy,
    sample_flags,
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


def test_a_stack_of_grus_equals_torch_gru_cells():
    stack = GRU(4, 6, 2)
    stack.initialize(torch.Generator().manual_seed(0))
    x, state = torch.randn(3, 4), torch.randn(2, 3, 6)
    stepped = stack.step(stack.gates(x), state)
    for i in range(2):
        cell = torch.nn.GRUCell(4, 6)
        cell.load_state_dict({k: v[i] for k, v in stack.state_dict().items()})
        torch.testing.assert_close(stepped[i], cell(x, state[i]))


@pytest.mark.gpu
def test_the_fused_gru_step_equals_the_plain_one():
    from reverie.nets.gru import gru_cell

    stack = GRU(4, 6, 2)
    stack.initialize(torch.Generator().manual_seed(0))
    stack.cuda()
    state = torch.randn(2, 3, 6, device="cuda", requires_grad=True)
    gates = stack.gates(torch.randn(3, 4, device="cuda"))
    hidden = torch.baddbmm(stack.bias_hh[:, None], state, stack.weight_hh.mT)
    plain = gru_cell(gates, hidden, state)
    fused = stack.step(gates, state)
    torch.testing.assert_close(fused, plain, atol=1e-4, rtol=1e-3)
    fused_grad, plain_grad = (
        torch.autograd.grad(y.square().sum(), state, retain_graph=True)[0]
        for y in (fused, plain)
    )
    torch.testing.assert_close(fused_grad, plain_grad, atol=1e-3, rtol=1e-3)


def test_flags_are_exactly_zero_or_one_and_have_a_gradient():
    logits = torch.randn(1000, 2, requires_grad=True)
    mask, _ = sample_flags(logits, 0.7, torch.rand(1000, 2) * 0.99 + 0.005)
    assert set(mask.detach().unique().tolist()) == {0.0, 1.0}
    mask[:, BOUNDARY].sum().backward()
    assert (logits.grad != 0).all()


def test_a_tie_begins_a_segment():
    assert sample_flags(torch.zeros(1, 2), 1.0, None).mask.tolist() == [[1.0, 0.0]]


def test_segment_counts():
    boundary = torch.tensor([[0, 0, 1, 0, 1, 1]]).bool()
    length, count = segment_counts(boundary)
    assert length.tolist() == [[1, 2, 1, 2, 1, 1]]
    assert count.tolist() == [[0, 0, 1, 1, 2, 3]]


def test_bernoulli_entropy_is_in_nats():
    entropy = bernoulli_entropy(torch.tensor([0.5, 0.0, 1.0]))
    torch.testing.assert_close(entropy, torch.tensor([np.log(2), 0.0, 0.0]).float())


def test_the_first_modeled_frame_always_begins_a_segment():
    world = make_world().train()
    post = world.infer(world.pixels.preprocess(make_batch()["image"], rng()), {}, rng())
    assert (post.mask[:, 0, BOUNDARY] == 1).all()


def test_the_upper_level_changes_only_where_segments_begin():
    world = make_world(ACTION).train()
    post = world.infer(
        world.pixels.preprocess(make_batch()["image"], rng()), make_batch(), rng()
    )
    held = post.mask[:, 1:, BOUNDARY] == 0
    assert held.any()
    for name in ("abs_belief", "abs_state", "abs_feat"):
        value = getattr(post if hasattr(post, name) else post.states, name)
        moved = (value[:, 1:] - value[:, :-1]).abs().amax(-1)
        # equal rows of a matrix product may be rounded differently
        assert moved[held].max() <= (1e-6 if name == "abs_feat" else 0)
        assert (moved[~held] > 1e-3).all()
    assert not held.all()


def test_evaluation_assigns_the_flag_loss_to_its_own_frame():
    world, batch = make_world().eval(), make_batch()
    with torch.no_grad():  # certain detector flags, and a prior without boundaries
        world.flag_prior.weight.zero_()
        world.flag_prior.bias.copy_(torch.tensor([-5.0, 5.0]))
        world.detector.out.weight.mul_(100)
        update, copy = world.elbo(batch, rng()).posterior.detector_logits.unbind(-1)
        world.detector.out.bias[BOUNDARY] -= (update - copy).median()
    losses, _, boundary, detector_prob, prior_prob = world.evaluate(batch, rng())
    mask = world.elbo(batch, rng()).losses["mask"]
    assert torch.equal(losses["mask"][:, 1:], mask[:, :-1])
    assert torch.allclose(losses["mask"].mean(), mask.mean())
    loss, detected = losses["mask"][:, 1:], boundary[:, 1:]
    assert detected.any()
    assert not detected.all()
    assert loss[detected].min() > loss[~detected].max()
    assert (detector_prob[:, 1:][detected] > 0.5).all()
    assert (prior_prob[:, 1:] < 0.5).all()


def test_actions_in_the_context_have_no_effect():
    world = make_world(ACTION).eval()
    batch = make_batch()
    other = {**batch, "action": batch["action"].clone()}
    context = world.config.context
    other["action"][:, :context] = 2 - other["action"][:, :context]
    before, after = (
        world.infer(world.pixels.preprocess(b["image"], rng()), b, rng())
        for b in (batch, other)
    )
    assert torch.equal(before.states.abs_belief, after.states.abs_belief)


def test_only_training_losses_anneal_the_temperature():
    world = make_world(anneal=1.0).train()
    world.loss(make_batch(), rng())
    first = float(world.temperature)
    world.loss(make_batch(), rng())
    assert 1.0 > first > float(world.temperature)
    world.eval()
    world.loss(make_batch(), rng())
    assert float(world.updates) == 2
    again = make_world(anneal=1.0)
    again.load_state_dict(world.state_dict())
    assert float(again.temperature) == float(world.temperature) < first


def test_scales_apply_to_losses_and_not_to_the_elbo():
    batch, plain = make_batch(), make_world().eval()
    scaled = make_world(obs_scale=3.0, abs_scale=0.5, mask_scale=2.0).eval()
    one = plain.loss(batch, rng())
    two = scaled.loss(batch, rng())
    for key, scale in {"image": 1, "obs": 3, "abs": 0.5, "mask": 2}.items():
        torch.testing.assert_close(two.losses[key], scale * one.losses[key])
    torch.testing.assert_close(one.metrics["elbo"], two.metrics["elbo"])


def test_kl_to_detector_adds_the_upper_kl_to_the_gradient_of_the_flags():
    gradients = []
    for enabled in (False, True):
        world = make_world(kl_to_detector=enabled).train()
        terms = world.elbo(make_batch(), rng())
        mask, post = terms.posterior.mask, terms.posterior
        (grad,) = torch.autograd.grad(
            terms.losses["abs"].sum(), mask, retain_graph=True
        )
        gradients.append(grad[:, 1:, BOUNDARY])
        cost = post.post_abs.kl(post.prior_abs).detach()[:, 1:]
    torch.testing.assert_close(gradients[1] - gradients[0], cost)


def test_a_static_lower_belief_has_a_constant_prior_within_a_segment():
    change = {}
    for static in (False, True):
        world = make_world(static_lower_belief=static).train()
        post = world.elbo(make_batch(), rng()).posterior
        copied = post.mask[:, 1:, NO_BOUNDARY] > 0.5
        assert copied.any()
        difference = post.prior_obs.mean.detach().diff(dim=1).abs().amax(-1)
        change[static] = float(difference[copied].max())
        assert float(difference[~copied].min()) > 0
    assert change[True] < 1e-6 < change[False]


def test_a_static_lower_belief_trains_and_imagines():
    world = make_world(static_lower_belief=True, kl_to_detector=True)
    result = world.train().loss(make_batch(), rng())
    sum(x.mean() for x in result.losses.values()).backward()
    assert all(p.grad is not None for p in world.parameters())
    start = world.eval().state_from_frames(make_batch()["image"][:, :2], rng())
    states = world.imagine(start, lambda _: {}, 6, rng()).states
    held, belief = states.boundary[:, 1:] < 0.5, states.obs_belief
    assert held.any()
    assert torch.equal(belief[:, 1:][held], belief[:, :-1][held])


def test_boundaries_are_random_during_the_warm_up():
    world = make_world(random_boundary_steps=2).train()
    for uses_detector in (False, False, True):
        result = world.loss(make_batch(), rng())
        prob = float(result.metrics["boundary_prob/post"])
        assert (prob == 0.5) != uses_detector
        weights = list(world.detector.parameters())
        loss = sum(x.mean() for x in result.losses.values())
        grads = torch.autograd.grad(loss, weights)
        assert any(bool(grad.any()) for grad in grads) == uses_detector


def test_without_warm_up_the_detector_is_used_from_the_start():
    world = make_world().train()
    assert world.elbo(make_batch(), rng()).posterior.detector_logits.all()


def test_evaluation_is_about_its_own_frame():
    world = make_world().eval()
    result = world.evaluate(make_batch(), rng())
    assert result.image.shape == (3, 5, 32, 32, 3)
    assert result.boundary[:, 0].all()
    # without noise, a segment begins where its probability is at least 0.5
    assert torch.equal(result.boundary, result.detector_prob >= 0.5)


@pytest.mark.parametrize("jumpy", [False, True])
def test_rollouts_begin_with_a_segment_and_jumpy_ones_have_first_frames_only(jumpy):
    world = make_world(ACTION).eval()
    batch = make_batch()
    start = world.state_from_frames(batch["image"][:, :2], rng())
    action = {"action": batch["action"][:, 0]}
    imagine = world.imagine_segments if jumpy else world.imagine
    states = imagine(start, lambda _: action, 6, rng()).states
    assert states.boundary.shape == (3, 7)
    assert (states.boundary[:, 0] == 1).all()
    assert not jumpy or (states.boundary == 1).all()
    image = world.decode(states)["image"]
    assert image.shape == (3, 7, 32, 32, 3)
    assert 0 <= float(image.detach().min()) <= float(image.detach().max()) <= 1
    assert tuple(world.image_keys) == ("image",)


@pytest.mark.parametrize("levels", ["all", "floor", "spread"])
def test_pixel_quantization(levels):
    world = make_world(levels=levels, loss="gaussian", bits=3)
    x = world.pixels.preprocess(make_batch()["image"], rng())
    spread = levels == "spread"
    assert float(x.min()) >= (-1 if spread else 0)
    assert float(x.max()) <= 1
    if levels == "floor":
        assert len(x.unique()) <= 9
    result = world.eval().evaluate(make_batch(), rng())
    assert 0 <= float(result.image.min()) <= float(result.image.max()) <= 1


def test_quantized_pixels_keep_their_level():
    from reverie.nets.quantize import dequantize, requantize

    x = torch.arange(256) / 255
    spread = dequantize(x, 5, torch.full((256,), 0.5))
    level = torch.round(requantize(spread, 5) * 31).long()
    assert torch.equal(level, torch.arange(256) // 8)


def test_bfloat16_is_used_for_images_and_stays_close():
    batch = make_batch()
    full, half = make_world().eval(), make_world(dtype=torch.bfloat16).eval()
    dtypes = []
    for net in (full.enc, full.dec, half.enc, half.dec):
        net.register_forward_hook(lambda net, given, out: dtypes.append(out.dtype))
    with torch.backends.mkldnn.flags(enabled=False):  # see run/device.py
        one, two = (w.loss(batch, rng()).losses for w in (full, half))
    assert dtypes == [torch.float32] * 2 + [torch.bfloat16] * 2
    assert all(loss.dtype == torch.float32 for loss in two.values())
    torch.testing.assert_close(
        one["image"].mean(), two["image"].mean(), rtol=0.02, atol=0
    )


def test_larger_images():
    world = make_world(obs_space={"image": Space(np.uint8, (64, 64, 3), 0, 256)})
    assert world.evaluate(make_batch(side=64), rng()).image.shape[2:] == (64, 64, 3)


@pytest.mark.parametrize(
    ("space", "message"),
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
def test_unsupported_observations_are_refused(space, message):
    with pytest.raises(UserError, match=message):
        make_world(obs_space=space)


def test_a_window_of_another_length_is_refused():
    world = make_world()
    with pytest.raises(UserError, match=r"2 \+ 5 \+ 2 frames"):
        world.evaluate(make_batch(frames=8), rng())


def test_the_smallest_config_has_finite_losses():
    sizes = {"context": 1, "length": 2, "belief": 1, "state": 1, "layers": 0, "bits": 1}
    world = make_world(**sizes, levels="floor", max_segment=1, max_segments=1).train()
    losses = world.loss(make_batch(frames=4), rng()).losses
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
def test_invalid_configs_are_refused(settings):
    with pytest.raises(ValueError, match="must"):
        VTAConfig(**settings)


def test_the_number_of_weights_is_that_of_the_port():
    world = VTA(IMAGE, {}, VTAConfig())
    assert sum(p.numel() for p in world.parameters()) == 2_236_871
    unbiased = VTA(IMAGE, {}, VTAConfig(bias=False))
    assert sum(p.numel() for p in unbiased.parameters()) == 2_235_975
    with_actions = VTA(IMAGE, ACTION, VTAConfig())
    assert sum(p.numel() for p in with_actions.parameters()) == 2_238_023
