"""Initialize, load and check the weights of an agent's components."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from reverie.api import StateDict, UserError
from reverie.patterns import select_names


def init_generator(seed: int) -> torch.Generator:
    """Return the random generator for the initial weights of a run with this seed."""
    # "init" separates this generator from others with the same seed
    seeds = np.random.SeedSequence([seed, *b"init"]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(seeds[0]) >> 1)  # a positive int64


def trainable_parameters(components: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the parameters that need gradients, named `component.parameter`."""
    return {
        f"{component}.{name}": parameter
        for component, module in components.items()
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }


def load_components(
    components: dict[str, nn.Module], state: StateDict, pattern: str
) -> list[str]:
    """Load the components whose names match `pattern`; return their names.

    If one of them does not fit, an error is raised and none is loaded.
    """
    names = matching_components(components, pattern)
    own_state = {name: module.state_dict() for name, module in components.items()}
    for name in names:
        check_same_tensors(name, own_state[name], state, own_state)
    for name in names:
        components[name].load_state_dict(state[name])
    return names


def matching_components(components: dict[str, nn.Module], pattern: str) -> list[str]:
    """Return the component names that match a pattern; raise if there are none."""
    try:
        names = select_names(pattern, components)
    except re.error:
        names = []
    if not names:
        raise UserError(
            f"No component matches {pattern!r}.\n"
            f"  Fix: use a pattern for some of {', '.join(components)}."
        )
    return names


def check_same_tensors(
    name: str,
    tensors: dict[str, Tensor],
    state: StateDict,
    own_state: StateDict | None = None,
) -> None:
    """Raise unless component `name` of `state` has the same tensors as `tensors`.

    `own_state` is the state of all components of this agent. With it, the error can
    name the size preset of the checkpoint.
    """
    saved = state.get(name)
    if not isinstance(saved, Mapping):
        common = "|".join(x for x in own_state or {} if x in state)
        hint = f", or --run.from_components '{common}'" if common else ""
        raise UserError(
            f"The checkpoint has no component {name!r}, only {', '.join(state)}.\n"
            f"  Fix: load a checkpoint of the same agent{hint}."
        )
    for key, tensor in tensors.items():
        other = saved.get(key)
        shape = tuple(other.shape) if isinstance(other, Tensor) else None
        if shape != tuple(tensor.shape):
            actual = "is missing" if shape is None else f"has shape {shape}"
            raise UserError(
                f"{name}.{key} {actual} in the checkpoint; this agent expects shape "
                f"{tuple(tensor.shape)}.\n"
                f"  Fix: {_suggest_fix(state, own_state or {})}"
            )
    if extra := saved.keys() - tensors.keys():
        raise UserError(
            f"The checkpoint has {name}.{min(extra)}, which this agent does not have.\n"
            f"  Fix: {_suggest_fix(state, own_state or {})}"
        )


def size_preset_of(state: StateDict) -> str | None:
    """Return the size preset with the layer widths of a checkpoint, if there is one."""
    try:
        widths = {
            "deter": state["dyn"]["dyngru.bias"].numel() // 3,  # a GRU has 3 gates
            "hidden": state["dyn"]["dynin0.bias"].numel(),
            "units": state["val"]["mlp.linear0.bias"].numel(),
        }
    except (AttributeError, KeyError, TypeError):  # a checkpoint of another agent
        return None
    for name, preset in size_presets().items():
        if all(_preset_value(preset, key) == width for key, width in widths.items()):
            return name
    return None


def size_presets() -> dict[str, dict[str, Any]]:
    """Read the presets of model sizes (`size12m`, ...).

    The settings in the group `dreamer.rssm` of a preset are added to the preset itself.
    """
    text = resources.files("reverie").joinpath("presets/sizes.yaml").read_text()
    presets: dict[str, dict[str, Any]] = yaml.safe_load(text)
    rssm = "dreamer.rssm"
    return {name: {**x, **x.get(rssm, {})} for name, x in presets.items()}


def _preset_value(preset: dict[str, Any], field: str) -> Any:
    """Return the value of a field in a preset; None if the preset does not set it."""
    # keys may be regular expressions, such as `dreamer\..*\.units$`
    matches = [v for key, v in preset.items() if key.rstrip("$").endswith(field)]
    return matches[0] if matches else None


def _suggest_fix(state: StateDict, own_state: StateDict) -> str:
    """Return the fix for a checkpoint whose tensors do not fit this agent.

    If the checkpoint has another size preset, the fix is to select that preset.
    """
    size = size_preset_of(state)
    if size is None or size == size_preset_of(own_state):
        return (
            "use the config and environment of the checkpoint, or load only some "
            "components with --run.from_components."
        )
    return f"add `--configs {size}`, or point --logdir at a new folder."
