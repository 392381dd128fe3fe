"""VTA compared with recordings of the authors' code and of its port with actions."""

from __future__ import annotations

import pytest
import torch
from vta_recording import (
    MODELS,
    RecordedNoise,
    VTARecording,
    groups,
    load,
    tensors,
    under,
)

from reverie.convert.vta.weights import rename_tensors
from reverie.nets.optim.adam import AMSGradConfig
from reverie.nets.optim.optimizer import Optimizer
from reverie.nets.quantize import dequantize, quantize, requantize
from reverie.worlds.vta.boundaries import (
    annealed_temperature,
    bernoulli_entropy,
    limit_segments,
    log_density,
    sample_flags,
)

TRACE = {
    "enc": "embed",
    "post_boundary_logits": "detector_logits",
    "prior_boundary_logits_raw": "next_flag_logits",
    "abs_post_fwd": "abs_fwd",
    "abs_post_bwd": "abs_bwd",
    "obs_post_fwd": "obs_fwd",
    "abs_belief": "abs_belief",
    "abs_state": "abs_state",
    "obs_belief": "obs_belief",
    "obs_state": "obs_state",
    "abs_feat": "abs_feat",
    "obs_feat": "obs_feat",
}
LOSSES = {
    "obs_cost": ("image", 5e-2),
    "kl_abs_state": ("abs", 5e-4),
    "kl_obs_state": ("obs", 5e-4),
    "kl_mask": ("mask", 5e-4),
}

models = pytest.mark.parametrize("name", MODELS)


def close(ours, theirs, atol=2e-4, rtol=1e-3):
    torch.testing.assert_close(ours.detach(), theirs, atol=atol, rtol=rtol)


def total(terms):
    return torch.stack([loss.mean() for loss in terms.losses.values()]).sum()


def compare(terms, data):
    """Compare all recorded results of one forward pass."""
    post = terms.posterior
    assert torch.equal(post.mask[..., :1].detach(), data["mask_data"])
    for theirs, ours in TRACE.items():
        close(getattr(post if hasattr(post, ours) else post.states, ours), data[theirs])
    for side in ("prior", "post"):
        for level in ("abs", "obs"):
            head = getattr(post, f"{side}_{level}")
            if f"{side}_{level}_mean" in data:
                close(head.mean, data[f"{side}_{level}_mean"])
                close(head.std, data[f"{side}_{level}_std"])
    close(terms.image, data["rec_data"])
    for theirs, (ours, atol) in LOSSES.items():
        close(terms.losses[ours], data[theirs], atol, 0)
    for theirs, prob in (("p", terms.prior_prob), ("q", terms.post_prob)):
        close(prob, data[f"{theirs}_mask"])
        close(bernoulli_entropy(prob), data[f"{theirs}_ent"])
    close(total(terms), data["train_loss"], 1e-2, 0)


def test_the_recordings_contain_models():
    assert MODELS, "without models, the tests below would not run"


@models
def test_forward_pass_in_training_mode(name):
    recording = VTARecording(name)
    world = recording.make_world().train()
    terms = world.elbo(recording.batch, recording.rng())
    compare(terms, tensors(recording.data, "train/"))
    after = rename_tensors(tensors(recording.data, "buffer_after/"))
    state = world.state_dict()
    assert after
    for key, value in after.items():
        close(state[key], value)


@models
def test_all_gradients(name):
    recording = VTARecording(name)
    world = recording.make_world().train()
    losses = world.loss(recording.batch, recording.rng()).losses
    torch.stack([loss.mean() for loss in losses.values()]).sum().backward()
    theirs = rename_tensors(tensors(recording.data, "grad/"))
    ours = {key: p.grad for key, p in world.named_parameters()}
    assert ours.keys() == theirs.keys()
    for key, grad in theirs.items():
        gap = (ours[key] - grad).abs().max()
        assert gap <= max(1e-2, 1e-3 * grad.abs().max()), key
    norm = torch.nn.utils.get_total_norm(list(ours.values()))
    close(norm, torch.tensor(recording.data["train/grad_norm"]))


@models
def test_forward_pass_in_evaluation_mode(name):
    recording = VTARecording(name)
    world = recording.make_world().eval()
    normals = [torch.tensor(recording.data[f"eval/noise_{key}"]) for key in "zs"]
    terms = world.elbo(recording.batch, RecordedNoise(normals))
    compare(terms, tensors(recording.data, "eval/"))


@models
@pytest.mark.parametrize("kind", ["gen_full", "gen_jumpy"])
def test_generation(name, kind):
    recording = VTARecording(name)
    world = recording.make_world().eval()
    data = tensors(recording.data, f"{kind}/")
    noise = zip(data["noise_z"].unbind(1), data["noise_s"].unbind(1), strict=True)
    rng = RecordedNoise([sample for pair in noise for sample in pair])
    context, length = recording.context, recording.length
    start = world.state_from_frames(recording.obs[:, :context], rng)
    acts = iter(recording.act[:, context:].unbind(1))
    imagine = world.imagine_segments if kind == "gen_jumpy" else world.imagine
    states = imagine(
        start,
        lambda _: {"action": next(acts)} if recording.act_space else {},
        length - 1,
        rng,
    ).states
    for key in ("abs_belief", "abs_state", "obs_belief", "obs_state"):
        close(getattr(states, key), data[key])
    if "flags" in data:
        assert torch.equal(states.boundary[..., None], data["flags"])
        close(states.next_flag_logits, data["prior_boundary_logits"])
    image = world.decode(states)["image"].movedim(-1, -3)
    images = data["images"]
    if world.config.loss == "gaussian":  # decode clips to [0, 1]
        images = images.clamp(0, 1)
    close(image, images)


@models
def test_three_steps_of_the_optimizer(name):
    recording = VTARecording(name)
    data = tensors(recording.data, "opt/")
    world = recording.make_world(recording.sizes["beta_anneal"], 1.0).train()
    adam = Optimizer(dict(world.named_parameters()), AMSGradConfig())
    for i in range(len(data["loss"])):
        normals = [data["noise_z"][i], data["noise_s"][i]]
        rng = RecordedNoise(normals, [recording.gumbel(data["gumbel_u"][i])])
        losses = world.loss(recording.batch, rng).losses
        close(world.temperature.double(), data["beta"][i], 1e-6)
        loss = torch.stack([loss.mean() for loss in losses.values()]).sum()
        close(loss, data["loss"][i], 1e-2, 0)
        _, metrics = adam.update(loss)
        close(metrics["opt/grad_norm"], data["grad_norm"][i])
    ours = dict(world.named_parameters())
    for key, value in rename_tensors(under(data, "param_after/")).items():
        if not is_redundant_bias(key, world):
            close(ours[key], value, 1e-4, 0)


def is_redundant_bias(key, world):
    """True for biases before batch norm: their gradient is rounding noise."""
    part, place, leaf = key.rsplit(".", 2) if key.count(".") == 2 else ("", "", "")
    if part not in ("enc", "dec") or not place.startswith("conv") or leaf != "bias":
        return False
    return hasattr(getattr(world, part), place.replace("conv", "norm"))


@pytest.mark.parametrize("case", groups(load("segment_prior"), "case"))
def test_segment_limits(case):
    data = tensors(load("segment_prior"), f"{case}/")
    logits = data["logits"].requires_grad_()
    length, count = int(data["max_seg_len"]), int(data["max_seg_num"])
    out = limit_segments(logits, data["flags"], length, count)
    close(out, data["out"], 1e-6, 1e-6)
    (out * data["grad_weight"]).sum().backward()
    close(logits.grad, data["grad_logits"], 1e-6, 1e-6)


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("case", groups(load("boundary_sampler"), "beta"))
def test_boundary_sampler(case, mode):
    everything = tensors(load("boundary_sampler"), f"{case}/")
    data = under(everything, f"{mode}/")
    temperature = float(case.removeprefix("beta"))
    logits = everything["logits"].clone().requires_grad_()
    prior = everything["prior_logits"].clone().requires_grad_()
    noise = everything["u"] if mode == "train" else None
    mask, log_sample = sample_flags(logits, temperature, noise)
    assert torch.equal(mask.detach(), data["mask"])
    post_density = log_density(logits, log_sample, temperature)
    prior_density = log_density(prior, log_sample, temperature)
    close(log_sample, data["log_sample"], 1e-5, 1e-5)
    close(post_density, data["log_density_post"], 1e-5, 1e-5)
    close(prior_density, data["log_density_prior"], 1e-5, 1e-5)
    loss = (mask * everything["grad_weight"]).sum()
    (loss + (post_density - prior_density).sum()).backward()
    close(logits.grad, data["grad_logits"], 1e-4, 1e-4)
    close(prior.grad, data["grad_prior_logits"], 1e-4, 1e-4)


def test_temperature_schedule():
    data = load("boundary_sampler")
    schedules = under(data, "schedule/beta_anneal")
    assert schedules
    for anneal, betas in schedules.items():
        for update, beta in zip(data["schedule/iters"], betas, strict=True):
            ours = annealed_temperature(
                torch.tensor(float(update)), 1.0, 0.1, float(anneal)
            )
            assert float(ours) == pytest.approx(beta, abs=1e-6)


@pytest.mark.parametrize(
    "bits", [int(g[9:]) for g in groups(load("preprocess"), "orig_bits")]
)
def test_quantized_inputs(bits):
    data = {k: torch.tensor(v) for k, v in load("preprocess").items()}
    ours = dequantize(data["x"], bits, data[f"orig_bits{bits}/noise"])
    close(ours, data[f"orig_bits{bits}/pre"], 1e-6, 0)
    back = requantize(data[f"orig_bits{bits}/pre"], bits)
    gap = (back - data[f"orig_bits{bits}/post"]).abs()
    level = 1 / (2**bits - 1)
    assert gap.max() <= level + 1e-6
    assert (gap > 1e-6).float().mean() < 0.02
    close(quantize(data["x"], bits), data[f"main_bits{bits}/pre"], 1e-6, 0)
