"""Load weights part by part; refuse those of another shape, and say their size."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import yaml
from torch import Tensor, nn

from reverie.api import StateDict, UserError


def load_components(
    mine: dict[str, nn.Module], state: StateDict, pattern: str
) -> list[str]:
    """Load the components whose names match, all or none; says which."""
    chosen = matching(mine, pattern)
    own = {name: part.state_dict() for name, part in mine.items()}
    for name in chosen:
        check_fit(name, own[name], state, own)
    for name in chosen:
        mine[name].load_state_dict(state[name])
    return chosen


def matching(mine: dict[str, nn.Module], pattern: str) -> list[str]:
    """The components that a pattern names; it must name one."""
    try:
        chosen = [name for name in mine if re.fullmatch(pattern, name)]
    except re.error:
        chosen = []
    if not chosen:
        raise UserError(
            f"No component matches {pattern!r}.\n"
            f"  Fix: use a pattern for some of {', '.join(mine)}."
        )
    return chosen


def check_fit(
    name: str, mine: dict[str, Tensor], state: StateDict, own: StateDict | None = None
) -> None:
    """Raise unless component `name` of `state` has the tensors of `mine`.

    `own` is the whole of this agent, by which advice is given.
    """
    saved = state.get(name)
    if saved is None:
        raise UserError(
            f"The checkpoint has no component {name!r}, only {', '.join(state)}.\n"
            "  Fix: load a checkpoint of the same agent."
        )
    for key, tensor in mine.items():
        other = saved.get(key)
        if other is None or tuple(other.shape) != tuple(tensor.shape):
            came = "is missing" if other is None else f"is {tuple(other.shape)}"
            raise UserError(
                f"In the checkpoint {name}.{key} {came}, this agent wants "
                f"{tuple(tensor.shape)}.\n"
                f"  Fix: {_advice(state, own or {})}"
            )
    if extra := saved.keys() - mine.keys():
        raise UserError(
            f"The checkpoint has {name}.{min(extra)}, which this agent has no place "
            f"for.\n  Fix: {_advice(state, own or {})}"
        )


def size_of(state: StateDict) -> str | None:
    """The size block whose widths a checkpoint has, if it is one of them."""
    try:
        widths = {
            "deter": state["dyn"]["dyngru.bias"].numel() // 3,
            "hidden": state["dyn"]["dynin0.bias"].numel(),
            "units": state["val"]["mlp.linear0.bias"].numel(),
        }
    except KeyError:
        return None
    for name, block in sizes().items():
        if all(_value(block, key) == width for key, width in widths.items()):
            return name
    return None


def sizes() -> dict[str, dict[str, Any]]:
    """The size blocks, as the presets spell them."""
    text = resources.files("reverie").joinpath("presets/sizes.yaml").read_text()
    blocks: dict[str, dict[str, Any]] = yaml.safe_load(text)
    return blocks


def _value(block: dict[str, Any], field: str) -> Any:
    matches = [v for key, v in block.items() if key.rstrip("$").endswith(field)]
    return matches[0] if matches else None


def _advice(state: StateDict, own: StateDict) -> str:
    size = size_of(state)
    if size is None or size == size_of(own):
        return (
            "use the config, and the environment, that the checkpoint was made with; "
            "--run.from_components takes some components alone."
        )
    return f"add `--configs {size}`, or point --logdir at a new folder."
