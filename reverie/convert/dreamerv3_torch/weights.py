"""Import the weights and optimizers of a `latest.pt` into the state of an agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reverie.agents.weights import check_same_tensors
from reverie.api import StateDict, UserError
from reverie.convert.dreamerv3_torch.checkpoint import (
    COMPONENTS,
    read_optimizers,
    read_weights,
    rename,
)
from reverie.convert.dreamerv3_torch.exploration import (
    BEHAVIOR,
    NETWORKS,
    stack_ensemble,
)
from reverie.convert.importer import is_selected

# Optimizers of the agent, with their name and parameter prefix in the original.
OPTIMIZERS = {
    "world": ("model", "_wm."),
    "actor": ("actor", "_task_behavior.actor."),
    "critic": ("value", "_task_behavior.value."),
}
EXPLORE_OPTIMIZERS = {
    "actor": ("explore_actor", f"{BEHAVIOR}actor."),
    "critic": ("explore_value", f"{BEHAVIOR}value."),
}
ALTERNATIVES = ((".mean.", ".logits."), (".logits.", ".pred."), (".pred.", ".logits."))
"""Other names of output layers, which depend on the distribution."""


def import_state(
    path: str | Path, template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the matching components of `latest.pt`.

    `template` is the state of an agent of the same size. With all components, the
    states of the optimizers are imported, too.
    """
    if "gru.weight" not in template["dyn"]:
        raise UserError(
            f"{path} is a checkpoint of dreamerv3-torch, but this run has another "
            "world model.\n  Fix: --configs dreamerv3_torch, without other settings of "
            "dreamer.world and dreamer.actor_critic."
        )
    weights = read_weights(path)
    state = from_original(weights, template, components)
    if components == ".*" and set(OPTIMIZERS) <= set(template.get("opt", ())):
        saved = read_optimizers(path)
        state["opt"] = _optimizer_states("opt", OPTIMIZERS, saved, weights, template)
        if "explore_opt" in template:
            state["explore_opt"] = _explore_optimizer_states(saved, weights, template)
        state["continues_training"] = True  # load the optimizers, see `Importer`
    return state


def from_original(
    weights: Mapping[str, Tensor], template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the weights of the original."""
    state = dict(template)
    renamed = new_names(weights, template)
    for component in COMPONENTS.values():
        if component not in template or not is_selected(components, component):
            continue
        new = {n: weights[old] for old, (c, n) in renamed.items() if c == component}
        if not new and component.startswith("explore_"):
            continue  # trained without Plan2Explore, which starts with new weights
        # the file does not contain the statistics of standardized images
        current = template[component].items()
        new |= {n: x for n, x in current if n.startswith("standardizers.")}
        check_same_tensors(component, template[component], {component: new})
        state[component] = new
    ensemble = stack_ensemble(weights)
    if ensemble and "ensemble" in template and is_selected(components, "ensemble"):
        check_same_tensors("ensemble", template["ensemble"], {"ensemble": ensemble})
        state["ensemble"] = ensemble
    for prefix, name in (("_task_behavior.", "retnorm"), (BEHAVIOR, "explore_retnorm")):
        ema: Any = weights.get(f"{prefix}ema_vals")
        norm = template.get(name, {})
        if ema is not None and "lo" in norm and is_selected(components, name):
            state[name] = {**norm, "lo": ema[0], "hi": ema[1]}
    return state


def new_names(
    weights: Mapping[str, Tensor], template: StateDict
) -> dict[str, tuple[str, str]]:
    """Return `(component, parameter name)` of each tensor, as in `template`.

    The names of output layers depend on the distributions of the agent.
    """
    key = next((n.split(".")[1] for n in template["pol"] if n.startswith("head.")), "")
    renamed = {}
    for old, (component, new) in rename(weights, key).items():
        names = [new, *(new.replace(a, b) for a, b in ALTERNATIVES)]
        existing = [name for name in names if name in template.get(component, ())]
        renamed[old] = (component, existing[0] if existing else new)
    return renamed


def _explore_optimizer_states(
    optimizers: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    template: StateDict,
) -> StateDict:
    """Return the states of the optimizers of Plan2Explore."""
    table, group = EXPLORE_OPTIMIZERS, "explore_opt"
    states = _optimizer_states(group, table, optimizers, weights, template)
    states["ensemble"] = ensemble = dict(template[group]["ensemble"])
    saved = optimizers.get("explore_ensemble", {}).get("state", {})
    if saved:
        names = [name for name in weights if name.startswith(NETWORKS)]
        for moment, entry in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            moments = {
                name: _moment(saved, i, entry, weights[name])
                for i, name in enumerate(names)
            }
            stacked = stack_ensemble(moments)
            ensemble[moment] = {f"ensemble.{k}": x for k, x in stacked.items()}
        ensemble["step"] = torch.as_tensor(saved[0]["step"]).float()
    return states


def _optimizer_states(
    group: str,
    table: Mapping[str, tuple[str, str]],
    optimizers: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    template: StateDict,
) -> StateDict:
    """Return the states of the optimizers in `table`, which are in `template[group]`.

    An optimizer without a state in the checkpoint keeps the one in `template`. The
    original numbers the parameters of an optimizer in the order of its tensors.
    """
    renamed, states = new_names(weights, template), {}
    for name, (original, prefix) in table.items():
        states[name] = state = dict(template[group][name])
        saved = optimizers.get(original, {}).get("state", {})
        if not saved:
            continue
        names = [old for old in weights if old.startswith(prefix)]
        for moment, entry in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            state[moment] = {
                ".".join(renamed[old]): _moment(saved, i, entry, weights[old])
                for i, old in enumerate(names)
            }
        state["step"] = torch.as_tensor(saved[0]["step"]).float()
    return states


def _moment(saved: Mapping[Any, Any], index: int, entry: str, like: Tensor) -> Tensor:
    """Return a running average of Adam for one parameter, after checking its shape."""
    value = saved.get(index, {}).get(entry)
    if not isinstance(value, Tensor) or value.shape != like.shape:
        raise UserError(
            f"The optimizer in the checkpoint does not fit its weights ({entry} of "
            f"parameter {index}).\n  Fix: load the weights without the optimizers, "
            "with --run.from_components '[a-z_]*'."
        )
    return value
