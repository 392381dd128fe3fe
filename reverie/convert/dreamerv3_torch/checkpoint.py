"""Read `latest.pt`, and rename its tensors to the names of Reverie.

Modules of the original contain references to each other, so a file has several names
for one tensor. Only the world model (`_wm.`), the task behavior (`_task_behavior.`) and
Plan2Explore (`_expl_behavior._networks.`, `_expl_behavior._behavior.`) are read. If the
model was compiled, names contain `_orig_mod.`, which is removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from reverie.api import UserError
from reverie.convert.dreamerv3_torch.exploration import BEHAVIOR, is_exploration
from reverie.nets.blocks import ModulesByKey
from reverie.storage.torch_file import read_torch_file

WEIGHTS, OPTIMIZERS = "agent_state_dict", "optims_state_dict"

COMPONENTS = {
    "_wm.encoder.": "enc",
    "_wm.dynamics.": "dyn",
    "_wm.heads.decoder.": "dec",
    "_wm.heads.reward.": "rew",
    "_wm.heads.cont.": "con",
    "_task_behavior.actor.": "pol",
    "_task_behavior.value.": "val",
    "_task_behavior._slow_value.": "slowval",
    f"{BEHAVIOR}actor.": "explore_pol",
    f"{BEHAVIOR}value.": "explore_val",
    f"{BEHAVIOR}_slow_value.": "explore_slowval",
}
"""Prefixes of the original, and the components of the agent."""

OPTIMIZERS_BY_MODULE = {
    ("_wm", False, "model"): "model",
    ("_task_behavior", False, "actor"): "actor",
    ("_task_behavior", False, "value"): "value",
    ("_expl_behavior", False, "expl"): "explore_ensemble",
    ("_expl_behavior", True, "actor"): "explore_actor",
    ("_expl_behavior", True, "value"): "explore_value",
}
"""New names of the optimizers. A key is the module that has the optimizer, True if it
is in the `_behavior` of that module, and the optimizer's name without `_opt`."""

# Layers of the dynamics, and parameters of norms: original names and those in Reverie.
DYNAMICS = {
    "_img_in_layers": "input",
    "_cell.layers.GRU": "gru",
    "_img_out_layers": "prior",
    "_obs_out_layers": "posterior",
}
OUTPUTS = {"_imgs_stat_layer": "prior_out", "_obs_stat_layer": "posterior_out"}
NORM = {"weight": "norm.scale", "bias": "norm.shift"}


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of `latest.pt` by their original names, without copies."""
    data = read_torch_file(path, [WEIGHTS])  # without optimizers, which are larger
    weights = select_weights(data or read_torch_file(path))
    if not weights:
        raise UserError(
            f"{path} is not a checkpoint of dreamerv3-torch.\n"
            "  Fix: use a latest.pt of dreamerv3-torch, or the folder of a Reverie run."
        )
    return weights


def select_weights(contents: Any) -> dict[str, Tensor]:
    """Return the tensors of a file by their original names; empty for other files.

    Files of older versions have no optimizers, and their tensors are at the top level.
    """
    data = contents if isinstance(contents, Mapping) else {}
    state = data.get(WEIGHTS, data)
    weights: dict[str, Tensor] = {}
    for name, value in (state if isinstance(state, Mapping) else {}).items():
        plain = str(name).replace("_orig_mod.", "")
        is_copy = plain.startswith("_task_behavior._world_model.") or (
            plain.startswith("_expl_behavior.") and not is_exploration(plain)
        )
        if isinstance(value, Tensor) and not is_copy:
            weights[plain] = value
    is_agent = any(name.startswith("_wm.encoder.") for name in weights)
    return weights if is_agent else {}


def read_encoder(path: str | Path) -> dict[str, Tensor]:
    """Return the weights of the encoder by the names of Reverie."""
    weights = read_weights(path)
    names = rename(weights).items()
    return {new: weights[old] for old, (part, new) in names if part == "enc"}


def read_optimizers(path: str | Path) -> dict[str, Mapping[str, Any]]:
    """Return the states of the optimizers `model`, `actor` and `value`, by name.

    Those of Plan2Explore are `explore_ensemble`, `explore_actor` and `explore_value`.
    Names of compiled models have more parts between the module and the optimizer.
    """
    data = read_torch_file(path, [OPTIMIZERS])
    states = data.get(OPTIMIZERS) if isinstance(data, Mapping) else None
    found: dict[str, Mapping[str, Any]] = {}
    for name, state in (states if isinstance(states, Mapping) else {}).items():
        parts = [part for part in str(name).split(".") if part != "_orig_mod"]
        kind = parts[-2].strip("_").removesuffix("_opt") if parts[1:] else ""
        is_behavior = "_behavior" in parts[1:-2]
        if new := OPTIMIZERS_BY_MODULE.get((parts[0], is_behavior, kind)):
            found |= {new: state} if isinstance(state, Mapping) else {}
    return found


def rename(names: Iterable[str], action: str = "action") -> dict[str, tuple[str, str]]:
    """Return `(component, parameter name)` in Reverie of each original name.

    `action` is the key of the action. Names without an equivalent are left out.
    """
    names = list(names)
    # `_cnn.layers` has 2 or 3 entries per layer: convolution, norm (if any), activation
    strides = {
        part: 3 if any(n.startswith(part) and ".norm." in n for n in names) else 2
        for part in ("_wm.encoder._cnn.", "_wm.heads.decoder._cnn.")
    }
    renamed = {}
    for name in names:
        for prefix, component in COMPONENTS.items():
            if not name.startswith(prefix):
                continue
            rest, stride = name.removeprefix(prefix), 1
            if rest.startswith("_cnn."):
                stride = strides[f"{prefix}_cnn."]
            if new := _parameter_name(component, rest, stride, action):
                renamed[name] = (component, new)
    convs = [n for c, n in renamed.values() if c == "dec" and n.startswith("convs.")]
    last = max((int(n.split(".")[1]) for n in convs), default=-1)
    return {  # the last convolution of the decoder is named `imgout`
        old: (c, n.replace(f"convs.{last}.", "imgout.") if c == "dec" else n)
        for old, (c, n) in renamed.items()
    }


def _parameter_name(component: str, name: str, stride: int, action: str) -> str | None:
    """Return the parameter name in a component, such as `mlp.layers.0.weight` for
    `layers.Reward_linear0.weight`; None if there is no equivalent."""
    path, _, leaf = name.rpartition(".")
    if component == "dyn":
        return _dynamics_parameter_name(path, leaf)
    if match := re.fullmatch(r"_cnn\.layers\.(\d+)(\.norm)?", path):
        number = int(match[1]) // stride
        return f"convs.{number}.{NORM[leaf] if match[2] else leaf}"
    if path == "_cnn._linear_layer":
        return f"space.{leaf}"
    if match := re.fullmatch(r"(?:_mlp\.)?layers\.[A-Za-z]+_(linear|norm)(\d+)", path):
        new = leaf if match[1] == "linear" else NORM[leaf]
        return f"mlp.layers.{match[2]}.{new}"
    if match := re.fullmatch(r"_mlp\.mean_layer\.(.+)", path):
        return f"vec.{ModulesByKey.module_name(match[1])}.pred.{leaf}"
    key = ModulesByKey.module_name(action)
    outputs = {
        "pol": {"mean_layer": f"head.{key}.mean", "std_layer": f"head.{key}.stddev"},
        "con": {"mean_layer": "head.logit"},
    }
    kind = component.removeprefix("explore_")
    out = outputs.get(kind, {"mean_layer": "head.logits"}).get(path)
    return out and f"{out}.{leaf}"


def _dynamics_parameter_name(path: str, leaf: str) -> str | None:
    if leaf == "W":
        return "initial_deter"
    if path in OUTPUTS:
        return f"{OUTPUTS[path]}.{leaf}"
    match = re.fullmatch(r"(.+?)(?:\.(0|1)|_(linear|norm))", path)
    if not match or match[1] not in DYNAMICS:
        return None
    is_norm = match[2] == "1" or match[3] == "norm"
    return f"{DYNAMICS[match[1]]}.{NORM[leaf] if is_norm else leaf}"
