"""Infer the settings of a checkpoint of dreamerv3-torch from the shapes of its tensors.

Sizes of layers can be inferred. For the categorical variables, only the product of
their number and their classes can be inferred. The number, the classes and other
options are taken from the defaults of the original, from its config, or from flags.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from reverie.convert.dreamerv3_torch.config import LAYER_NORM, WORLD
from reverie.convert.dreamerv3_torch.exploration import infer_exploration
from reverie.convert.importer import select_prefix, split_stochastic
from reverie.nets.encoder import NO_KEYS, EncoderConfig

STOCH, CLASSES = 32, 32
"""Number and classes of the categorical variables in all configs of the original."""


def infer_settings(
    weights: Mapping[str, Tensor], stoch: int = 0, classes: int = 0
) -> dict[str, Any]:
    """Return the settings that the tensors of a checkpoint determine.

    `stoch` and `classes` are the number and classes of the categorical variables if the
    user has given them, otherwise 0.
    """
    settings = {
        **encoder_settings(select_prefix(weights, "_wm.encoder."), "dreamer.enc"),
        **encoder_settings(select_prefix(weights, "_wm.heads.decoder."), "dreamer.dec"),
    }
    for prefix, group in (
        ("_wm.heads.reward.", "dreamer.rewhead"),
        ("_wm.heads.cont.", "dreamer.conhead"),
        ("_task_behavior.actor.", "dreamer.policy"),
        ("_task_behavior.value.", "dreamer.value"),
    ):
        part = select_prefix(weights, prefix)
        settings |= mlp_settings(part, group)
        outputs = len(part.get("mean_layer.bias", ()))
        if group in ("dreamer.rewhead", "dreamer.value") and outputs:
            settings[f"{group}.output"] = (
                "symlog_twohot" if outputs > 1 else "symlog_mse"
            )
            settings |= {f"{group}.bins": outputs} if outputs > 1 else {}
    decoded = [
        name.split(".")[1]
        for name in select_prefix(weights, "_wm.heads.decoder._mlp.")
        if re.fullmatch(r"mean_layer\..+\.weight", name)
    ]
    # Set the order only if it is not the sorted one: this is the default, and includes
    # keys that are not decoded.
    if decoded != sorted(decoded):
        settings[f"{WORLD}.key_order"] = decoded
    if "_task_behavior.ema_vals" not in weights:
        settings["dreamer.retnorm.impl"] = "none"
    settings[f"{WORLD}.scale_images"] = "image"
    dynamics = select_prefix(weights, "_wm.dynamics.")
    settings |= _dynamics_settings(weights, dynamics, stoch, classes)
    if f"{WORLD}.deter" in settings:
        settings |= _exploration_settings(weights, dynamics, settings)
    return settings


def infer_encoder(weights: Mapping[str, Tensor]) -> EncoderConfig:
    """Return the config of the encoder."""
    part = select_prefix(weights, "_wm.encoder.")
    settings = {name[1:]: value for name, value in encoder_settings(part, "").items()}
    if "mults" not in settings:
        settings["cnn_keys"] = NO_KEYS
    return EncoderConfig(**settings)


def encoder_settings(part: Mapping[str, Tensor], group: str) -> dict[str, Any]:
    """Return the settings of an encoder or decoder: its MLP and its convolutions."""
    settings = mlp_settings(part, group)
    convs = {k: v for k, v in part.items() if v.ndim == 4}
    if not convs:
        return settings
    # the decoder stores transposed convolutions, from the smallest image to the largest
    is_decoder = any(name.startswith("_cnn._linear_layer") for name in part)
    channels = [x.shape[0] for x in convs.values()]
    channels = channels[::-1] if is_decoder else channels
    mults = [count / channels[0] for count in channels]
    if len(convs) > 1 or not is_decoder:  # the last one of a decoder never has a norm
        normed = any(re.match(r"_cnn\.layers\.\d+\.norm\.", name) for name in part)
        settings[f"{group}.norm"] = LAYER_NORM if normed else "none"
    return settings | {
        f"{group}.depth": channels[0],
        f"{group}.mults": tuple(int(mult) for mult in mults),
        f"{group}.kernel": next(iter(convs.values())).shape[-1],
    }


def mlp_settings(part: Mapping[str, Tensor], group: str) -> dict[str, Any]:
    """Return number and width of the hidden layers of an MLP, and its norm."""
    hidden = [v for k, v in part.items() if re.search(r"_linear\d+\.weight$", k)]
    if not hidden:
        return {}
    has_norm = any(re.search(r"_norm\d+\.weight$", name) for name in part)
    return {
        f"{group}.layers": len(hidden),
        f"{group}.units": hidden[0].shape[0],
        f"{group}.norm": LAYER_NORM if has_norm else "none",
    }


def _dynamics_settings(
    weights: Mapping[str, Tensor], part: Mapping[str, Tensor], stoch: int, classes: int
) -> dict[str, Any]:
    """Return the settings of the RSSM; `part` has the weights of the dynamics."""
    gates = part.get("_cell.layers.GRU_linear.weight")
    inputs, statistics = (
        part.get(f"{name}.weight") for name in ("_img_in_layers.0", "_imgs_stat_layer")
    )
    actions = weights.get("_task_behavior.actor.mean_layer.weight")
    if gates is None or inputs is None or statistics is None or actions is None:
        return {}  # an incomplete agent: loading the weights raises an error
    width = inputs.shape[1] - actions.shape[0]  # of the flattened stochastic state
    settings = {
        f"{WORLD}.deter": gates.shape[0] // 3,
        f"{WORLD}.hidden": inputs.shape[0],
        f"{WORLD}.initial": "learned" if "W" in part else "zeros",
        f"{WORLD}.norm": LAYER_NORM if "_img_in_layers.1.weight" in part else "none",
    }
    if statistics.shape[0] == 2 * width:  # mean and std: a Gaussian stochastic state
        return settings | {f"{WORLD}.stoch": width, f"{WORLD}.classes": 0}
    if not stoch and not classes and width == STOCH * CLASSES:
        stoch = STOCH
    options = "dyn_stoch and dyn_discrete"
    stoch, classes = split_stochastic(width, stoch, classes, options, WORLD)
    return settings | {f"{WORLD}.stoch": stoch, f"{WORLD}.classes": classes}


def _exploration_settings(
    weights: Mapping[str, Tensor], part: Mapping[str, Tensor], known: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of Plan2Explore; `known` has the settings of the RSSM."""
    deter = known[f"{WORLD}.deter"]
    stoch = known[f"{WORLD}.stoch"] * max(1, known[f"{WORLD}.classes"])
    embed = part["_obs_out_layers.0.weight"].shape[1] - deter
    actions = len(weights["_task_behavior.actor.mean_layer.weight"])
    widths = {"stoch": stoch, "deter": deter, "embed": embed, "feat": stoch + deter}
    return infer_exploration(weights, widths, actions)
