"""Infer the settings of a checkpoint of the original DreamerV3 from its shapes.

Sizes of layers can be inferred. For the categorical variables, only the product of
their number and their classes can be inferred; unless set by the user, their number is
32, as in all sizes of the paper. Activations, norms and other options keep the defaults
of the original.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from reverie.convert.importer import Settings, split_stochastic
from reverie.nets.encoder import NO_KEYS

STOCH = 32
"""Number of categorical variables in all sizes of the original."""
STOCH_SETTINGS = ("dreamer.rssm.stoch", "dreamer.rssm.classes")
"""Settings of the number and classes of the categorical variables."""
HEADS = {"rew": "rewhead", "con": "conhead", "pol": "policy", "val": "value"}
"""Names of the heads in the checkpoint, and of their settings."""

Shapes = dict[str, tuple[int, ...]]
"""Shapes of the arrays of one component."""


def infer_settings(arrays: Mapping[str, Any], given: Settings) -> dict[str, Settings]:
    """Return the settings that the shapes determine, by component.

    `given` has the number or the classes of the categorical variables, if the user has
    set them.
    """
    parts = {
        part: {
            name.removeprefix(f"{part}/"): array.shape
            for name, array in arrays.items()
            if name.startswith(f"{part}/")
        }
        for part in ("dyn", "enc", "dec", *HEADS)
    }
    settings = {
        "dyn": _dynamics_settings(parts["dyn"], given),
        "enc": _encoder_settings(parts["enc"], parts["dec"]),
        "dec": _decoder_settings(parts["dec"]),
    }
    groups = {"dyn": "rssm", "enc": "enc", "dec": "dec", **HEADS}
    for part in HEADS:
        outputs = parts[part].get("head/logits/bias", (0,))[0]
        bins = {"bins": outputs} if part in ("rew", "val") and outputs else {}
        hidden = _mlp_settings(parts[part], "mlp/linear")
        settings[part] = hidden | bins
    return {
        part: {f"dreamer.{groups[part]}.{name}": x for name, x in values.items()}
        for part, values in settings.items()
    }


def _dynamics_settings(shapes: Shapes, given: Settings) -> Settings:
    names = ("dyngru/kernel", "dynin0/bias", "obslogit/bias")
    if any(name not in shapes for name in names):
        return {}  # loading the weights raises an error
    # `gates` is (blocks, inputs, 3 * outputs)
    gates, hidden, logits = (shapes[name] for name in names)
    stoch, classes = (given.get(x, 0) for x in STOCH_SETTINGS)
    if not stoch and not classes and logits[0] % STOCH == 0:
        stoch = STOCH
    options = "dyn.rssm.stoch and dyn.rssm.classes"
    stoch, classes = split_stochastic(
        logits[0], stoch, classes, options, "dreamer.rssm"
    )
    return {
        "deter": gates[0] * gates[2] // 3,
        "hidden": hidden[0],
        "stoch": stoch,
        "classes": classes,
        "blocks": gates[0],
        "dynlayers": _count(shapes, r"dynhid\d+/kernel"),
        "obslayers": _count(shapes, r"obs\d+/kernel"),
        "imglayers": _count(shapes, r"prior\d+/kernel"),
    }


def _encoder_settings(shapes: Shapes, decoder: Shapes) -> Settings:
    convs = [shapes[f"cnn{i}/kernel"] for i in range(_count(shapes, r"cnn\d+/kernel"))]
    settings: Settings = {}
    if _count(shapes, r"mlp\d+/kernel"):
        settings |= _mlp_settings(shapes, "mlp")
        settings["mlp_keys"] = _vector_keys(decoder)
    elif convs:
        settings["mlp_keys"] = NO_KEYS
    if convs:
        settings |= _conv_settings([conv[-1] for conv in convs], convs[0][0])
    elif settings:
        settings["cnn_keys"] = NO_KEYS
    return settings


def _decoder_settings(shapes: Shapes) -> Settings:
    has_vectors = _count(shapes, r"mlp/linear\d+/kernel") > 0
    settings: Settings = {"mlp_keys": NO_KEYS, "cnn_keys": NO_KEYS}
    if has_vectors:
        settings |= _mlp_settings(shapes, "mlp/linear")
        settings["mlp_keys"] = _vector_keys(shapes)
    if image := shapes.get("imgout/kernel"):
        count = _count(shapes, r"conv\d+/kernel")
        inner = [shapes[f"conv{i}/kernel"][-2] for i in range(count)]
        del settings["cnn_keys"]
        settings |= _conv_settings([image[-2], *inner], image[0])
        settings["bspace"] = shapes["sp0/kernel"][0] if "sp0/kernel" in shapes else 0
        if "sp1/bias" in shapes:  # `sp1` has 2 * units outputs
            settings["units"] = shapes["sp1/bias"][0] // 2
    return settings if has_vectors or image else {}


def _conv_settings(channels: list[int], kernel: int) -> Settings:
    depth = math.gcd(*channels)
    mults = tuple(count // depth for count in channels)
    return {"depth": depth, "mults": mults, "kernel": kernel}


def _mlp_settings(shapes: Shapes, layer: str) -> Settings:
    """Return number and width of the layers `LAYER0`, `LAYER1`, ..."""
    count = _count(shapes, rf"{layer}\d+/kernel")
    return {"layers": count, "units": shapes[f"{layer}0/kernel"][-1]} if count else {}


def _vector_keys(decoder: Shapes) -> str:
    """Return a pattern of the keys of vector observations, from the decoder's heads."""
    heads = (re.fullmatch(r"vec/(.+)/(?:pred|logits)/kernel", name) for name in decoder)
    keys = [re.escape(head[1]) for head in heads if head]
    return "|".join(keys) or ".*"


def _count(shapes: Shapes, pattern: str) -> int:
    return sum(re.fullmatch(pattern, name) is not None for name in shapes)
