"""Convert configs of dreamerv3-torch.

`configs.yaml` has presets (named groups of options), which are merged over its preset
`defaults`. Environment options (task, size, action repeat, time limit) are not
converted: Reverie has its own presets for them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from reverie.api import UserError
from reverie.config import flatten
from reverie.nets.blocks import ACTIVATIONS

PRESET = "dreamerv3_torch"
"""Preset with the defaults of the original."""
WORLD, ACTOR_CRITIC = "dreamer.dreamerv3_torch", "dreamer.dreamerv3_torch_ac"
"""Settings of the world model and of the actor-critic."""
HEADS = ("rewhead", "conhead", "policy", "value")
LAYER_NORM = "layer1em3"  # with an epsilon of 1e-3
ENSEMBLE = "explore.ensemble"

NAMES = {
    "dyn_hidden": f"{WORLD}.hidden",
    "dyn_deter": f"{WORLD}.deter",
    "dyn_stoch": f"{WORLD}.stoch",
    "dyn_discrete": f"{WORLD}.classes",
    "dyn_mean_act": f"{WORLD}.mean_act",
    "dyn_std_act": f"{WORLD}.std_act",
    "dyn_min_std": f"{WORLD}.min_std",
    "unimix_ratio": f"{WORLD}.unimix",
    "initial": f"{WORLD}.initial",
    "kl_free": f"{WORLD}.free_nats",
    "dyn_scale": "dreamer.loss_scales.dyn",
    "rep_scale": "dreamer.loss_scales.rep",
    "reward_head.loss_scale": "dreamer.loss_scales.rew",
    "cont_head.loss_scale": "dreamer.loss_scales.con",
    "decoder.image_dist": f"{WORLD}.image_dist",
    "decoder.outscale": "dreamer.dec.outscale",
    "encoder.symlog_inputs": "dreamer.enc.symlog",
    **{
        f"{group}.{key}": f"dreamer.{group[:3]}.{name}"  # `enc` or `dec`
        for group in ("encoder", "decoder")
        for key, name in (
            ("cnn_depth", "depth"),
            ("kernel_size", "kernel"),
            ("mlp_layers", "layers"),
            ("mlp_units", "units"),
        )
    },
    **{
        f"{group}.{key}": f"dreamer.{name}.{key}"
        for group, name in (
            ("reward_head", "rewhead"),
            ("cont_head", "conhead"),
            ("actor", "policy"),
            ("critic", "value"),
        )
        for key in ("layers", "outscale")
    },
    "actor.entropy": "dreamer.imag_loss.actent",
    "actor.unimix_ratio": "dreamer.policy.unimix",
    "actor.min_std": "dreamer.policy.minstd",
    "actor.max_std": "dreamer.policy.maxstd",
    **{
        f"{group}.{key}": f"dreamer.{group}_opt.{name}"
        for group in ("actor", "critic")
        for key, name in (("lr", "lr"), ("eps", "eps"), ("grad_clip", "clip"))
    },
    "model_lr": "dreamer.world_opt.lr",
    "opt_eps": "dreamer.world_opt.eps",
    "grad_clip": "dreamer.world_opt.clip",
    "critic.slow_target_update": "dreamer.slowvalue.every",
    "critic.slow_target_fraction": "dreamer.slowvalue.rate",
    "discount": f"{ACTOR_CRITIC}.discount",
    "discount_lambda": "dreamer.imag_loss.lam",
    "imag_gradient": f"{ACTOR_CRITIC}.imag_gradient",
    "imag_gradient_mix": f"{ACTOR_CRITIC}.imag_gradient_mix",
    "batch_size": "dreamer.batch_size",
    "batch_length": "dreamer.batch_length",
    "train_ratio": "run.train_ratio",
    "prefill": "run.prefill",
    "pretrain": "run.pretrain",
    "envs": "run.envs",
    "dataset_size": "replay.capacity",
    "seed": "seed",
    "expl_intr_scale": "explore.intrinsic",
    "expl_extr_scale": "explore.extrinsic",
    "disag_target": "explore.target",
    "disag_log": "explore.log",
    "disag_offset": "explore.offset",
    "disag_action_cond": "explore.action_conditioned",
    **{
        f"disag_{name}": f"explore.ensemble.{name}"
        for name in ("models", "layers", "units")
    },
}
"""Options with the same meaning, and the settings of Reverie."""

CONVERTED = re.compile(
    r"(encoder\.|decoder\.)?(act|norm|minres|mlp_keys|cnn_keys)|units|reward_EMA|size|"
    r"decoder\.(cnn_sigmoid|vector_dist)|actor\.(dist|std)|(critic|reward_head)\.dist|"
    r"critic\.slow_target|imag_horizon|precision|grad_heads|dyn_rec_depth|opt|steps|"
    r"action_repeat|expl_behavior|expl_until|image_standardize(_dataset)?|image_std_min"
)
"""Options that are converted or checked by the functions below."""

IGNORED = re.compile(
    r"(offline_)?(log|train|eval)dir|deterministic_run|parallel|eval_.*|log_every|"
    r"reset_every|device|compile|debug|video_pred_log|task|time_limit|grayscale|"
    r"weight_decay|actor\.temp|step|value\.layers|expl_gifs|stickey|lives|noops|"
    r"resize|actions|break_speed|camera.*|configs"
)
"""Options without an effect in the original, or of environments and logging."""

SUPPORTED: dict[str, tuple[Any, ...]] = {
    "dyn_rec_depth": (1,),
    "opt": ("adam",),
    "precision": (32, 16),
    "critic.slow_target": (True,),
    "decoder.vector_dist": ("symlog_mse", "mse"),
    "reward_head.dist": ("symlog_disc",),
    "critic.dist": ("symlog_disc", "symlog_mse"),
    "actor.dist": ("onehot", "normal", "normal_std_fixed", "trunc_normal"),
    "eval_state_mean": (False,),
    "expl_behavior": ("greedy", "random", "plan2explore", "Plan2Explore"),
}
"""Values that can be converted; most others raise an error in the original too."""
OUTPUTS = {"symlog_disc": "symlog_twohot", "symlog_mse": "symlog_mse"}
"""Distributions of heads, and their names in Reverie."""


class ConvertedConfig(NamedTuple):
    """Result of `convert_options`."""

    settings: dict[str, Any]
    """Settings of Reverie by dotted name."""
    unknown: list[str]
    """Options that are neither converted nor ignored."""


def is_config(data: Mapping[str, Any]) -> bool:
    """True if the contents of a file are a config of dreamerv3-torch."""
    defaults = data.get("defaults")
    return "dyn_deter" in (defaults if isinstance(defaults, Mapping) else data)


def merge_presets(
    data: Mapping[str, Any], presets: Iterable[str], source: str
) -> dict[str, Any]:
    """Return the options of `configs.yaml` with these presets over its defaults."""
    if "defaults" not in data:
        data = {"defaults": data}
    options = flatten(data["defaults"])
    names = [k for k, v in data.items() if isinstance(v, Mapping) and k != "defaults"]
    for preset in presets:
        if preset not in names:
            fix = f"choose from {', '.join(names)}." if names else f"--config {source}"
            raise UserError(f"{source} has no preset {preset!r}.\n  Fix: {fix}")
        options |= flatten(data[preset])
    return options


def convert_options(options: Mapping[str, Any]) -> ConvertedConfig:
    """Convert nested or dotted options to settings that override `PRESET`."""
    given = {k: v for k, v in flatten(dict(options)).items() if v is not None}
    for name, values in SUPPORTED.items():
        if name in given and given[name] not in values:
            raise UserError(
                f"The option {name}: {given[name]} of dreamerv3-torch is not "
                f"supported.\n  Fix: use {' or '.join(map(str, values))}."
            )
    settings: dict[str, Any] = {f"{WORLD}.scale_images": "image"}
    settings |= {NAMES[k]: v for k, v in given.items() if k in NAMES}
    settings |= _layer_settings(given) | _image_settings(given) | _actor_settings(given)
    settings |= _standardization(given)
    for option, head in (("reward_head.dist", "rewhead"), ("critic.dist", "value")):
        if option in given:
            settings[f"dreamer.{head}.output"] = OUTPUTS[given[option]]
    if "units" in given:
        settings |= {f"dreamer.{head}.units": given["units"] for head in HEADS}
    if "imag_horizon" in given:  # it counts states; `imag_length` counts steps
        settings["dreamer.imag_length"] = int(given["imag_horizon"]) - 1
    if "reward_EMA" in given:
        impl = "perc" if given["reward_EMA"] else "none"
        settings |= {f"{x}.retnorm.impl": impl for x in ("dreamer", "explore")}
    if "precision" in given:
        precisions = {32: "float32", 16: "float16"}
        settings["precision"] = precisions[int(given["precision"])]
    if "grad_heads" in given:
        settings["dreamer.reward_grad"] = _reward_gradient(given["grad_heads"])
    if given.get("expl_behavior", "greedy") != "greedy":
        settings["explore.policy"] = str(given["expl_behavior"]).lower()
    repeat = int(given.get("action_repeat", 1))
    for option, name in (("steps", "run.steps"), ("expl_until", "explore.until")):
        if option in given:
            settings[name] = int(float(given[option])) // repeat
    unknown = [
        name
        for name in given
        if name not in NAMES
        and not any(known.fullmatch(name) for known in (CONVERTED, IGNORED))
    ]
    return ConvertedConfig(settings, unknown)


def _layer_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of activations and norms."""
    settings: dict[str, Any] = {}
    groups = {
        "": (WORLD, *(f"dreamer.{head}" for head in HEADS), ENSEMBLE),
        "encoder.": ("dreamer.enc",),
        "decoder.": ("dreamer.dec",),
    }
    for prefix, names in groups.items():
        if (act := given.get(f"{prefix}act")) is not None:
            if str(act).lower() not in ACTIVATIONS:
                raise UserError(
                    f"The activation {prefix}act: {act} is not supported.\n"
                    f"  Fix: use one of {', '.join(ACTIVATIONS)}."
                )
            settings |= {f"{name}.act": str(act).lower() for name in names}
        if (norm := given.get(f"{prefix}norm")) is not None:
            value = LAYER_NORM if norm else "none"
            # the ensemble of exploration always has layer norms
            normed = [name for name in names if name != ENSEMBLE]
            settings |= {f"{name}.norm": value for name in normed}
    return settings


def _image_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys, number of convolutions and output of encoder and decoder."""
    settings: dict[str, Any] = {}
    side = (given.get("size") or [64])[0]
    for group in ("encoder", "decoder"):
        for keys in ("mlp_keys", "cnn_keys"):
            if (pattern := given.get(f"{group}.{keys}")) is not None:
                # the original matches the beginning of a key
                settings[f"dreamer.{group[:3]}.{keys}"] = f"(?:{pattern}).*"
        if (minres := given.get(f"{group}.minres")) is not None:
            stages = int(math.log2(side) - math.log2(minres))
            mults = [2**i for i in range(max(1, stages))]
            settings[f"dreamer.{group[:3]}.mults"] = mults
    if "decoder.cnn_sigmoid" in given:
        output = "sigmoid" if given["decoder.cnn_sigmoid"] else "shifted"
        settings[f"{WORLD}.image_output"] = output
    if "decoder.vector_dist" in given:
        settings["dreamer.dec.symlog"] = given["decoder.vector_dist"] == "symlog_mse"
    return settings


def _standardization(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the standardization of images, an option of the fork for robomimic."""
    if not given.get("image_standardize"):
        return {}
    mode = "dataset" if given.get("image_standardize_dataset") else "batch"
    settings: dict[str, Any] = {}
    for group in ("dreamer.enc", "dreamer.dec"):
        settings[f"{group}.standard"] = mode
        if "image_std_min" in given:
            settings[f"{group}.minstd"] = float(given["image_std_min"])
    return settings


def _actor_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the distribution of continuous actions."""
    settings: dict[str, Any] = {}
    if given.get("actor.dist", "onehot") != "onehot":
        settings[f"{ACTOR_CRITIC}.normal.dist"] = given["actor.dist"]
    std = given.get("actor.std", "learned")
    if std not in ("learned", "none", "None"):
        settings[f"{ACTOR_CRITIC}.normal.std"] = float(std)
    return settings


def _reward_gradient(heads: Iterable[str]) -> bool:
    """True if gradients of the reward head reach the world model (`grad_heads`)."""
    heads = set(heads)
    if not {"decoder", "cont"} <= heads:
        raise UserError(
            "grad_heads without decoder or cont is not supported.\n"
            "  Fix: write `grad_heads: [decoder, reward, cont]` in the config."
        )
    return "reward" in heads
