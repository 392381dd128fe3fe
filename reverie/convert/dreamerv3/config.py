"""Convert configs of the original DreamerV3.

A run of the original saves all its options in `config.yaml`. Options of the agent, its
batches, the environment and the amount of training are converted; options of JAX,
logging and processes have no equivalent.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from reverie.agents.dreamer.config import DreamerConfig
from reverie.api import UserError
from reverie.config import differences

IGNORED = (
    "(dyn|enc|dec)\\.typ|.*\\.winit|opt\\.momentum|policy\\.unimix|policy_dist_.*|"
    "report|logdir|seed|replicas?|.*\\.debug"
)
"""Options that Reverie does not need, or that have no effect in the original."""
TOP_LEVEL = {
    "task": "task",
    "seed": "seed",
    "run.steps": "run.steps",
    "run.train_ratio": "run.train_ratio",
    "run.envs": "run.envs",
    "replay.size": "replay.capacity",
    **{
        name: f"dreamer.{name}"
        for name in ("batch_size", "batch_length", "report_length", "replay_context")
    },
}
"""Options outside of the agent, and the settings of Reverie."""
SUITES = {"atari100k": "atari"}
"""Suites of the original whose settings have another name in Reverie."""


def is_config(data: Mapping[str, Any]) -> bool:
    """True if the contents of a file are a config of the original."""
    agent = data.get("agent")
    return isinstance(agent, Mapping) and {"dyn", "enc"} <= agent.keys()


def convert_options(
    options: Mapping[str, Any], known: Container[str]
) -> dict[str, Any]:
    """Convert the options of `config.yaml` to settings by dotted name.

    `known` are the settings of Reverie; options of environments without such a setting
    are left out. Import paths (`package.module:Class`) are left out too: the original
    has none, and the file may be from another user, who must not choose code to run.
    """
    flat = _flatten({k: v for k, v in options.items() if k != "agent"})
    settings = {new: flat[name] for name, new in TOP_LEVEL.items() if name in flat}
    suite = str(flat.get("task", "")).partition("_")[0]
    group = SUITES.get(suite, suite)
    for name, value in flat.items():
        setting = f"env.{group}.{name.removeprefix(f'env.{suite}.')}"
        if name.startswith(f"env.{suite}.") and setting in known:
            settings[setting] = value
    sticky = f"env.{group}.sticky"
    if isinstance(settings.get(sticky), bool):  # the original fixes the probability
        settings[sticky] = 0.25 if settings[sticky] else 0.0
    agent = config_from_original(options["agent"])
    changed = differences(DreamerConfig(), agent)
    settings |= {f"dreamer.{name}": new for name, (_, new) in changed.items()}
    plugins = {"task", *(f"dreamer.{name}" for name in DreamerConfig.plugin_settings)}
    return {k: v for k, v in settings.items() if k not in plugins or ":" not in str(v)}


def config_from_original(options: Mapping[str, Any]) -> DreamerConfig:
    """Convert the agent config of the original, nested or flat with dots."""
    changes: dict[str, Any] = {}
    for key, value in _flatten(options).items():
        if re.fullmatch(IGNORED, key):
            continue
        renamed = key.replace("dyn.rssm.", "rssm.").replace(".simple.", ".")
        *path, leaf = renamed.split(".")
        group = changes
        for name in path:
            group = group.setdefault(name, {})
        group[leaf] = value
    config: DreamerConfig = _replace_fields(DreamerConfig(), changes, "")
    if config.opt.schedule == "cosine":
        # the original passes 0.1 * lr as the final learning rate
        config = replace(config, opt=replace(config.opt, floor=0.1 * config.opt.lr))
    return config


def _flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _replace_fields(config: Any, changes: dict[str, Any], prefix: str) -> Any:
    """Replace nested fields of a config; `prefix` is the path, for error messages."""
    names = {field.name for field in fields(config)}
    new = {}
    for name, value in changes.items():
        if name not in names:
            raise UserError(
                f"The option {prefix + name!r} of DreamerV3 is not supported.\n"
                "  Fix: remove it from `agent` in the config.yaml of the original."
            )
        old = getattr(config, name)
        if is_dataclass(old):
            new[name] = _replace_fields(old, value, f"{prefix}{name}.")
        else:
            new[name] = tuple(value) if isinstance(old, tuple) else type(old)(value)
    return replace(config, **new)
