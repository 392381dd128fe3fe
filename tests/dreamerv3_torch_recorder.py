"""Write recordings in the form of those of dreamerv3-torch, with other sizes.

`python tests/dreamerv3_torch_recorder.py DIR/dreamerv3_torch` writes them to a folder.
The tests in `tests/parity` read them with `REVERIE_PARITY_DIR=DIR`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from dreamerv3_torch_networks import (
    SLOW,
    VALUE,
    Networks,
    make_options,
    make_state,
    symexp,
    two_hot_logp,
    with_copies,
)

BATCH, LENGTH, IMAGINED = 2, 7, 5

VECTORS = {"position": (4,), "height": (1,), "velocity": (3,)}
NO_IMAGES = {"cnn_keys": "$^", "mlp_keys": ".*"}
RECORDINGS = {
    # proprioceptive control; the original needs the image, but encodes only vectors
    "vectors": (
        {"image": (64, 64, 3), **VECTORS},
        5,
        {
            "size": [64, 64],
            "encoder": {**NO_IMAGES, "minres": 4, "mlp_layers": 3, "mlp_units": 20},
            "decoder": {**NO_IMAGES, "minres": 4, "mlp_layers": 1, "mlp_units": 12},
            "dyn_stoch": 5,
            "dyn_discrete": 7,
            "actor": {"layers": 3, "dist": "normal", "std": "learned", "min_std": 0.2},
            "reward_head": {"layers": 1},
            "units": 24,
            "kl_free": 0.3,
            "dyn_scale": 0.8,
            "unimix_ratio": 0.05,
        },
    ),
    # two cameras, vectors of which some are not decoded, and Gaussian states
    "both": (
        {"image": (32, 32, 1), "camera": (32, 32, 3), **VECTORS},
        2,
        {
            "size": [32, 32],
            "encoder": {"minres": 8, "kernel_size": 3, "symlog_inputs": False},
            "decoder": {
                "mlp_keys": "position|velocity",
                "minres": 16,
                "kernel_size": 5,
                "cnn_depth": 6,
                "norm": False,
                "cnn_sigmoid": True,
                "image_dist": "normal",
                "act": "ELU",
            },
            "dyn_stoch": 6,
            "dyn_discrete": 0,
            "dyn_mean_act": "tanh5",
            "dyn_std_act": "abs",
            "dyn_min_std": 0.2,
            "actor": {"dist": "trunc_normal", "std": "0.4"},
            "critic": {"dist": "symlog_mse", "layers": 3},
            "initial": "zeros",
            "reward_EMA": False,
        },
    ),
    # images whose sides are no power of two, without norms
    "image": (
        {"image": (48, 48, 3)},
        9,
        {
            "size": [48, 48],
            "encoder": {"norm": False, "act": "ReLU"},
            "decoder": {"norm": False, "act": "GELU", "cnn_depth": 2},
            "dyn_stoch": 3,
            "dyn_discrete": 11,
            "dyn_hidden": 20,
            "dyn_deter": 24,
            "actor": {"unimix_ratio": 0.1, "layers": 1},
            "cont_head": {"layers": 4},
            "norm": False,
            "act": "Tanh",
        },
    ),
}
"""Shapes of the observations, number of actions, and options, by name."""
COMPILED = "image"
"""Recording whose names are those of a compiled model."""


def make_inputs(shapes, actions, discrete, rng):
    """Return random inputs; `action[t]` led to row t."""
    rows = (BATCH, LENGTH)
    inputs = {
        key: rng.integers(0, 256, (*rows, *shape), dtype=np.uint8)
        if len(shape) == 3
        else 3 * rng.normal(size=(*rows, *shape)).astype(np.float32)
        for key, shape in shapes.items()
    }
    inputs["action"] = sample_actions(rows, actions, discrete, rng)
    inputs["reward"] = rng.normal(size=rows).astype(np.float32)
    inputs["is_first"] = np.zeros(rows, bool)
    inputs["is_first"][:, 0] = inputs["is_first"][0, 3] = True
    inputs["is_terminal"] = np.zeros(rows, bool)
    inputs["is_terminal"][0, 2] = True
    inputs["discount"] = 1 - inputs["is_terminal"].astype(np.float32)
    return inputs


def sample_actions(rows, actions, discrete, rng):
    if discrete:
        return np.eye(actions, dtype=np.float32)[rng.integers(actions, size=rows)]
    return rng.uniform(-1, 1, (*rows, actions)).astype(np.float32)


@torch.no_grad()
def record(networks, inputs, actions):
    """Return the outputs for the inputs, and for imagined `actions`."""
    obs = {key: torch.tensor(value) for key, value in inputs.items()}
    embed = networks.encode(obs)
    deter, stoch, post = networks.observe(embed, obs["action"], obs["is_first"])
    prior, feat = networks.prior(deter), torch.cat([stoch, deter], -1)
    found = {"embed": embed, "feat": feat, "prior/deter": deter}
    found |= describe_states(networks, deter, stoch, post, "post/")
    found |= name_statistics(prior, "prior/")
    found |= record_heads(networks, feat, obs)
    free, scales = networks.options["kl_free"], networks.options
    kl = networks.kl(post, prior)
    found["kl/value"] = kl
    found["kl/dyn"] = found["kl/rep"] = kl.clamp(min=free)
    scale = scales["dyn_scale"] + scales["rep_scale"]
    found["kl/loss"] = scale * found["kl/dyn"]
    found |= record_behaviour(networks, feat)
    return found | imagine(networks, deter[:, -1], stoch[:, -1], torch.tensor(actions))


def describe_states(networks, deter, stoch, statistics, prefix):
    shape = (*stoch.shape[:-1], networks.options["dyn_stoch"], networks.classes)
    if networks.classes:
        stoch = stoch.reshape(shape)
    found = {f"{prefix}stoch": stoch, f"{prefix}deter": deter}
    return found | name_statistics(statistics, prefix)


def name_statistics(statistics, prefix):
    names = ("logit",) if len(statistics) == 1 else ("mean", "std")
    return {f"{prefix}{n}": x for n, x in zip(names, statistics, strict=True)}


def record_heads(networks, feat, obs):
    found = {}
    for key, output in networks.decode(feat).items():
        name, is_vector = f"head/decoder/{key}", len(networks.shapes[key]) == 1
        found[f"{name}/mode"] = symexp(output) if is_vector else output
        found[f"{name}/logprob"] = networks.decoder_logp(key, output, obs[key])
    logits, mode = networks.scalar(feat, "_wm.heads.reward.", "Reward")
    found["head/reward/mode"] = mode[..., None]
    found["head/reward/logprob"] = two_hot_logp(logits, obs["reward"])
    cont, target = networks.cont(feat), 1 - obs["is_terminal"].float()
    found["head/cont/mode"] = torch.sigmoid(cont)[..., None]
    logp = target * F.logsigmoid(cont) + (1 - target) * F.logsigmoid(-cont)
    return found | {"head/cont/logprob": logp}


def record_behaviour(networks, feat):
    dist = networks.actor(feat)
    if networks.discrete:
        (probs,) = dist
        mode = F.one_hot(probs.argmax(-1), probs.shape[-1]).float()
        found = {"actor/mode": mode, "actor/logits": torch.log(probs)}
    else:
        mean, std = dist
        mode = mean / mean.abs().clamp(min=1)
        found = {"actor/mode": mode, "actor/mean": mean, "actor/std": std}
    for name, prefix in (("value", VALUE), ("slow_value", SLOW)):
        found[f"{name}/mode"] = networks.scalar(feat, prefix, "Value")[1][..., None]
    return found


def imagine(networks, deter, stoch, actions):
    deters, stochs, priors = [], [], []
    for action in actions:
        deter = networks.cell(deter, stoch, action.expand(len(deter), -1))
        priors.append(networks.prior(deter))
        stoch = networks.draw(priors[-1])
        deters.append(deter)
        stochs.append(stoch)
    deter, stoch = torch.stack(deters, 1), torch.stack(stochs, 1)
    prior = [torch.stack(x, 1) for x in zip(*priors, strict=True)]
    found = describe_states(networks, deter, stoch, prior, "imagine/")
    decoded = networks.decode(torch.cat([stoch, deter], -1))
    images = {k: x for k, x in decoded.items() if len(networks.shapes[k]) == 3}
    return found | {f"imagine/{key}": x for key, x in images.items()}


def write_recording(folder: Path, name: str, seed: int = 0) -> None:
    shapes, count, changes = RECORDINGS[name]
    options, rng = make_options(**changes), np.random.default_rng(seed)
    discrete = options["actor"]["dist"] == "onehot"
    inputs = make_inputs(shapes, count, discrete, rng)
    actions = sample_actions((IMAGINED,), count, discrete, rng)
    state = make_state(options, shapes, count, seed)
    found = record(Networks(state, options, shapes), inputs, actions)
    arrays = {key: value.numpy() for key, value in found.items()}
    arrays |= {f"in/{key}": value for key, value in inputs.items()}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", **arrays, **{"imagine/action": actions})
    (folder / f"{name}_config.json").write_text(json.dumps(options))
    content = {
        "agent_state_dict": with_copies(state, compiled=name == COMPILED),
        "optims_state_dict": {},
    }
    torch.save(content, folder / f"{name}_latest.pt")


if __name__ == "__main__":
    for each in RECORDINGS:
        write_recording(Path(sys.argv[1]), each)
