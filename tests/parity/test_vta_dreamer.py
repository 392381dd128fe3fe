"""Recurrent VTA compared with a recording of the port's Dreamer variant."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from vta_recording import RecordedNoise, load, tensors, under

from reverie.spaces import Space
from reverie.worlds.vta.boundaries import BOUNDARY
from reverie.worlds.vta.config import RecurrentVTAConfig
from reverie.worlds.vta.dynamics import RecurrentVTADynamics, RecurrentVTAState
from reverie.worlds.vta.recurrent import latent_losses, rate_loss

DATA = load("dreamer_vta")
SIZES = json.loads(str(DATA["cfg_json"]))
MODEL = SIZES["model"]
IN = tensors(DATA, "in/")
CONFIG = {
    "abs_belief": MODEL["abs_belief"],
    "abs_stoch": MODEL["abs_stoch"],
    "obs_belief": MODEL["obs_belief"],
    "obs_stoch": MODEL["obs_stoch"],
    "hidden": MODEL["hidden"],
    "layers": MODEL["num_layers"],
    "max_segment": MODEL["max_seg_len"],
    "max_segments": MODEL["max_seg_num"],
    "temperature": MODEL["boundary_temp"],
    "forced_logit": MODEL["boundary_force_scale"],
    "free_nats": SIZES["free"],
    "reward_to_detector": MODEL["vta_posterior_input"] == "embed_reward",
}
LAYERS = {
    "_abs_inp_layers": "abs_cell.into",
    "_obs_inp_layers": "obs_cell.into",
    "_init_obs_belief": "reset_belief",
}
STATE = {
    "abs_belief": "abs_belief",
    "abs_stoch": "abs_stoch",
    "obs_belief": "obs_belief",
    "obs_stoch": "obs_stoch",
    "seg_len": "segment_length",
    "seg_num": "segment_count",
    "boundary": "boundary",
}


def close(ours, theirs, atol=1e-4):
    torch.testing.assert_close(ours.detach(), theirs, atol=atol, rtol=0)


def converted(theirs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert recorded weights, gradients or statistics to the names used here."""
    ours = {}
    heads: dict[str, dict] = {}
    last = max(
        (int(k.split(".")[2]) for k in theirs if k.startswith("post_boundary")),
        default=0,
    )
    for key, value in theirs.items():
        part, _, rest = key.partition(".")
        leaf = key.rsplit(".", 1)[-1]
        norm = {"weight": "scale", "bias": "shift"}.get(leaf, leaf)
        if part in LAYERS:
            index = int(rest.split(".")[0])
            place = "linear.weight" if index == 0 else f"norm.{norm}"
            ours[f"{LAYERS[part]}.{place}"] = value
        elif part in ("_abs_cell", "_obs_cell"):
            place = "linear.weight" if "linear" in rest else f"norm.{norm}"
            ours[f"{part[1:]}.{place}"] = value
        elif part == "prior_boundary":
            index = int(rest.split(".")[1])
            names = {0: "flag_prior_in.linear.weight", 1: f"flag_prior_in.norm.{norm}"}
            ours[names.get(index, f"flag_prior_out.{leaf}")] = value
        elif part == "post_boundary":
            index, kind = divmod(int(rest.split(".")[1]), 3)
            place = ("conv", "norm")[kind] + str(index)
            out = kind == 0 and index * 3 == last
            ours[f"detector.{'out' if out else place}.{leaf}"] = value
        elif part == "init_abs_belief":
            ours["start"] = value[0]
        else:
            name = part.removesuffix("_state")
            words = rest.split(".")
            if words[0] == "feat":
                place = "linear.weight" if words[1] == "0" else f"norm.{norm}"
                ours[f"{name}.feat.{place}"] = value
            else:
                heads.setdefault(f"{name}.out.{leaf}", {})[words[0]] = value
    for key, parts in heads.items():
        ours[key] = torch.cat([parts["mean_layer"], parts["std_layer"]])
    return {k: v for k, v in ours.items() if "num_batches_tracked" not in k}


def make_dynamics(**changes) -> RecurrentVTADynamics:
    actions = {"action": Space(np.float32, (MODEL["num_actions"],))}
    config = RecurrentVTAConfig(**{**CONFIG, **changes})
    dynamics = RecurrentVTADynamics(MODEL["embed_size"], actions, config)
    state = dynamics.state_dict()
    ours = converted(tensors(DATA, "param/")) | converted(tensors(DATA, "buffer/"))
    trained = {k for k, p in dynamics.named_parameters() if p.requires_grad}
    assert trained <= ours.keys() <= state.keys()
    biases = {k: torch.zeros_like(v) for k, v in state.items() if k[-4:] == "bias"}
    dynamics.load_state_dict({**state, **biases, **ours})
    return dynamics


def observe(dynamics, embed, prefix="noise/", uniforms=()):
    noise = zip(
        tensors(DATA, prefix)["post_abs"].unbind(1),
        tensors(DATA, prefix)["post_obs"].unbind(1),
        strict=True,
    )
    rng = RecordedNoise([sample for pair in noise for sample in pair], uniforms)
    inputs = embed
    if dynamics.config.reward_to_detector:
        inputs = torch.cat([embed, IN["reward"][..., None]], -1)
    logits = dynamics.detector(inputs)
    start = dynamics.initial(len(embed), torch.float32)
    first = IN["is_first"].bool()
    action = {"action": IN["action"]}
    return dynamics.observe(start, embed, logits, action, first, rng)


def check_states(states, data):
    for theirs, expected in data.items():
        value = getattr(states, STATE[theirs])
        close(value if value.ndim == expected.ndim else value[..., None], expected)


def check_head(head, data, level):
    close(head.mean, data[f"{level}_mean"])
    close(head.std, data[f"{level}_std"])


def only_states(data, *sampled):
    """Select the fields that prior and posterior share, and those in `sampled`."""
    keys = STATE.keys() - {"abs_stoch", "obs_stoch"} | set(sampled)
    return {key: data[key] for key in keys}


SAMPLED = "abs_stoch", "obs_stoch"
RECORDED = under(DATA, "post/").keys()


def test_observe_and_all_gradients():
    dynamics = make_dynamics().train()
    embed = IN["embed"].clone().requires_grad_()
    noise = torch.tensor(DATA["noise/u"])
    states, dists = observe(dynamics, embed, uniforms=[noise])
    post, prior = tensors(DATA, "post/"), tensors(DATA, "prior/")
    check_states(states, only_states(post, *SAMPLED))
    check_states(states, only_states(prior))
    assert torch.equal(states.boundary.detach(), post["boundary"][..., 0])
    for name, side in (("post", post), ("prior", prior)):
        for level in ("abs", "obs"):
            check_head(getattr(dists, f"{name}_{level}"), side, level)
        close(getattr(dists, f"{name}_flag"), side["boundary_logit"])
    after = converted(tensors(DATA, "buffer_after/"))
    assert after.keys() == converted(tensors(DATA, "buffer/")).keys()
    for key, value in after.items():
        close(dynamics.state_dict()[key], value)

    losses = latent_losses(states, dists, dynamics.config)
    kl = tensors(DATA, "kl/")
    close(losses["dyn"], kl["dyn"])
    close(losses["rep"], kl["rep"])
    close(losses["boundary"], kl["mask"])
    eager = replace(dynamics.config, free_nats=0.0)
    close(latent_losses(states, dists, eager)["rep"], kl["value"])
    total = 0.5 * losses["dyn"] + 0.1 * losses["rep"]
    total = total + SIZES["mask_scale"] * losses["boundary"]
    close(total, kl["loss"])
    rates = under(kl, "rate_reg_")
    for rate, expected in rates.items():
        chance = torch.softmax(dists.post_flag, -1)[..., BOUNDARY]
        close(rate_loss(chance, float(rate)), expected)

    feat = torch.cat(states[:4], -1)
    close(feat, torch.tensor(DATA["out/feat"]))
    total = total.mean() + (feat * IN["feat_weight"]).sum() / feat[..., 0].numel()
    close(total, torch.tensor(DATA["out/total"]))
    total.backward()
    grads = tensors(DATA, "grad/")
    close(embed.grad, grads.pop("in_embed"), 1e-3)
    theirs = converted(grads)
    ours = {k: p.grad for k, p in dynamics.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys()
    for key, grad in theirs.items():
        mine = torch.zeros_like(grad) if ours[key] is None else ours[key]
        close(mine.reshape(grad.shape), grad, 1e-3)


def test_observe_in_evaluation_mode():
    dynamics = make_dynamics().eval()
    states, dists = observe(dynamics, IN["embed"], "eval/noise_")
    data = tensors(DATA, "eval/post/")
    check_states(states, only_states(data, *SAMPLED))
    check_head(dists.post_abs, data, "abs")
    check_head(dists.post_obs, data, "obs")
    close(dists.post_flag, data["boundary_logit"])


@pytest.mark.parametrize("mode", ["prior", "fixed", "none", "jumpy"])
def test_imagination(mode):
    changes = (
        {"imagination": "jumpy"} if mode == "jumpy" else {"imagined_boundaries": mode}
    )
    dynamics = make_dynamics(**changes).train()
    data = tensors(DATA, f"imag_{mode}/")
    noise = zip(data["noise_abs"].unbind(1), data["noise_obs"].unbind(1), strict=True)
    uniforms = data["u"].unbind(1) if "u" in data else ()
    rng = RecordedNoise([sample for pair in noise for sample in pair], uniforms)
    start = {ours: data[theirs][:, 0] for theirs, ours in STATE.items()}
    names = ("segment_length", "segment_count", "boundary")
    scalars = {key: start[key][..., 0] for key in names}
    state = RecurrentVTAState(**{**start, **scalars})
    for t, action in enumerate(IN["action"][:, : data["noise_abs"].shape[1]].unbind(1)):
        now = {key: value[:, t + 1] for key, value in data.items() if key in RECORDED}
        if mode != "jumpy":
            close(dynamics.prior_flag(state), now["boundary_logit"])
        state = dynamics.imagine(rng, state, {"action": action})
        check_states(state, only_states(now, *SAMPLED))
        check_head(dynamics.prior_abs(state.abs_belief), now, "abs")
        check_head(dynamics.prior_obs(state.obs_belief), now, "obs")


def test_segment_limits():
    data = tensors(DATA, "constraint/")
    dynamics = make_dynamics()
    batch = len(data["logits"])
    state = dynamics.initial(batch, torch.float32)._replace(
        segment_length=data["seg_len"][:, 0], segment_count=data["seg_num"][:, 0]
    )
    close(dynamics.limit_segments(data["logits"], state), data["out"])
    free = make_dynamics(forced_logit=0.0)
    close(free.limit_segments(data["logits"], state), data["logits"])
