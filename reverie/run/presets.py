"""Presets as layers of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reverie import config as configs
from reverie.config import ConfigError, Layer

NamedLayers = list[tuple[str, Layer]]
"""Layers with their origins; later layers override earlier ones."""


def expand_presets(
    names: Sequence[str], agent: str = "", seen: tuple[str, ...] = ()
) -> NamedLayers:
    """Return the layers of presets.

    A preset may list other presets under `configs`, whose layers come before it. Under
    `with_agent` it may have settings for each agent; those of `agent` come after it.
    `seen` are the presets that include this one.
    """
    layers: NamedLayers = []
    for name in names:
        if name in seen:
            raise ConfigError(
                f"The preset {name!r} includes itself.\n"
                "  Fix: remove it from the `configs` of the presets it includes."
            )
        preset, origin = dict(configs.get_preset(name)), f"the preset {name!r}"
        layers += expand_presets(preset.pop("configs", ()), agent, (*seen, name))
        agents = preset.pop("with_agent", {})
        layers += [(origin, layer) for layer in (preset, agents.get(agent)) if layer]
    return layers


def last_value(layers: Sequence[Layer], name: str, default: Any) -> Any:
    """Return the value of a setting in the last layer that has it.

    A layer has a setting under its dotted name (`run.steps`) or in a nested dict.
    """
    group, _, setting = name.partition(".")
    for layer in reversed(layers):
        if name in layer:
            return layer[name]
        inner = layer.get(group)
        if setting and isinstance(inner, Mapping) and setting in inner:
            return inner[setting]
    return default
