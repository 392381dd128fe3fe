"""Import the weights and optimizers of a `latest.pt` into the state of an agent."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reverie.agents.weights import check_fit
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
from reverie.patterns import matches

OPTIMIZERS = {
    "world": ("model", "_wm."),
    "actor": ("actor", "_task_behavior.actor."),
    "critic": ("value", "_task_behavior.value."),
}
EXPLORE_OPTIMIZERS = {
    "actor": ("explore_actor", f"{BEHAVIOR}actor."),
    "critic": ("explore_value", f"{BEHAVIOR}value."),
}
"""Optimizers of the agent: names and parameters in the original."""
ALTERNATIVES = ((".mean.", ".logits."), (".logits.", ".pred."), (".pred.", ".logits."))
"""Names of output layers, which depend on the distribution."""


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
        optimizers = read_optimizers(path)
        state["opt"] = optimizer_states(optimizers, weights, template)
        if "explore_opt" in template:
            state["explore_opt"] = explore_optimizer_states(
                optimizers, weights, template
            )
        state["continues_training"] = True
    return state


def from_original(
    weights: Mapping[str, Tensor], template: StateDict, components: str = ".*"
) -> StateDict:
    """Return the state of an agent with the weights of the original."""
    state = dict(template)
    renamed = new_names(weights, template)
    for component in COMPONENTS.values():
        if component not in template or not _matches(components, component):
            continue
        new = {n: weights[old] for old, (c, n) in renamed.items() if c == component}
        if not new and component.startswith("explore_"):
            continue  # trained without Plan2Explore, which starts with new weights
        check_fit(component, template[component], {component: new})
        state[component] = new
    ensemble = stack_ensemble(weights)
    if ensemble and "ensemble" in template and _matches(components, "ensemble"):
        check_fit("ensemble", template["ensemble"], {"ensemble": ensemble})
        state["ensemble"] = ensemble
    for prefix, name in (("_task_behavior.", "retnorm"), (BEHAVIOR, "explore_retnorm")):
        ema: Any = weights.get(f"{prefix}ema_vals")
        own = template.get(name, {})
        if ema is not None and "lo" in own and _matches(components, name):
            state[name] = {**own, "lo": ema[0], "hi": ema[1]}
    return state


def new_names(
    weights: Mapping[str, Tensor], template: StateDict
) -> dict[str, tuple[str, str]]:
    """Return component and parameter name of each tensor, as in `template`.

    The names of output layers depend on the distributions of the agent.
    """
    key = next((n.split(".")[1] for n in template["pol"] if n.startswith("head.")), "")
    renamed = {}
    for old, (component, new) in rename(weights, key).items():
        names = [new, *(new.replace(a, b) for a, b in ALTERNATIVES)]
        own = [name for name in names if name in template.get(component, ())]
        renamed[old] = (component, own[0] if own else new)
    return renamed


def optimizer_states(
    optimizers: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    template: StateDict,
) -> StateDict:
    """Return the states of the optimizers; unchanged if one has not taken a step."""
    return _optimizer_states(OPTIMIZERS, template["opt"], optimizers, weights, template)


def explore_optimizer_states(
    optimizers: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    template: StateDict,
) -> StateDict:
    """Return the states of the optimizers of Plan2Explore, like `optimizer_states`."""
    own = template["explore_opt"]
    states = _optimizer_states(EXPLORE_OPTIMIZERS, own, optimizers, weights, template)
    states["ensemble"] = ensemble = dict(own["ensemble"])
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
    table: Mapping[str, tuple[str, str]],
    own_states: StateDict,
    optimizers: Mapping[str, Mapping[str, Any]],
    weights: Mapping[str, Tensor],
    template: StateDict,
) -> StateDict:
    """Return the states of the optimizers in a table of names and parameters.

    An optimizer of the original numbers its parameters in the order of the tensors.
    """
    renamed, states = new_names(weights, template), {}
    for name, (original, prefix) in table.items():
        states[name] = own = dict(own_states[name])
        saved = optimizers.get(original, {}).get("state", {})
        if not saved:
            continue
        names = [old for old in weights if old.startswith(prefix)]
        for moment, entry in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
            own[moment] = {
                ".".join(renamed[old]): _moment(saved, i, entry, weights[old])
                for i, old in enumerate(names)
            }
        own["step"] = torch.as_tensor(saved[0]["step"]).float()
    return states


def _moment(saved: Mapping[Any, Any], index: int, entry: str, like: Tensor) -> Tensor:
    value = saved.get(index, {}).get(entry)
    if not isinstance(value, Tensor) or value.shape != like.shape:
        raise UserError(
            f"The optimizer in the checkpoint does not fit its weights ({entry} of "
            f"parameter {index}).\n  Fix: --run.from_components '[a-z_]*'. Optimizers "
            "are loaded only with '.*', the default."
        )
    return value


def _matches(pattern: str, component: str) -> bool:
    try:
        return matches(pattern, component)
    except re.error:  # reported by `load_weights`
        return True
