"""Import JSON config files of the port of VTA (Mainlst/stable-deep-world-model).

They are flat JSON objects, recognized by the key `env_type`. Unknown keys are reported
and ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reverie.api import UserError

MAZE = "3d_maze_default"  # folder of the maze dataset in the port
PRESETS = {"bouncing_balls": "vta_balls", "3d_maze": "vta_maze"}
"""Presets of Reverie by `env_type`."""
LOSSES = {"bce": "bernoulli", "mse": "gaussian"}
"""Values of `vta.world.loss` by `loss_type`."""

NAMES = {
    "seed": "seed",
    "device": "device",
    "maze_data_dir": "sequences.folder",
    "epoch_data_size": "sequences.chunk",
    "dt": "sequences.dt",
    "batch_size": "vta.batch_size",
    "seq_size": "vta.world.length",
    "init_size": "vta.world.context",
    "state_size": "vta.world.state",
    "belief_size": "vta.world.belief",
    "num_layers": "vta.world.layers",
    "obs_std": "vta.world.obs_std",
    "learn_rate": "vta.opt.lr",
    "grad_clip": "vta.opt.clip",
    "max_iters": "run.steps",
    "seg_num": "vta.world.max_segments",
    "seg_len": "vta.world.max_segment",
    "max_beta": "vta.world.temperature",
    "min_beta": "vta.world.min_temperature",
    "beta_anneal": "vta.world.anneal",
}
"""Keys of the port, and the settings of Reverie."""

DEFAULTS = {
    "seed": 111,
    "epoch_data_size": 2000,
    "batch_size": 64,
    "max_iters": 10000,
    "beta_anneal": 100,
}
"""Defaults of the port that differ from those of Reverie."""

OTHER_KEYS = {
    "env_type",
    "exp_name",
    "work_dir",
    "data_root",
    "data_mode",
    "action_size",
    "loss_type",
    "obs_bit",
    "use_amp",
}
"""Known keys that are converted in `from_vta_file`, follow from the data, or have no
effect."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "env_type": tuple(PRESETS),
    "loss_type": tuple(LOSSES),
    "use_amp": (True, False),
}
"""Allowed values of keys that are converted in `from_vta_file`."""
PATHS = ("exp_name", "work_dir", "data_root")
"""Keys whose values are paths or parts of them."""


def is_vta_file(data: Mapping[str, Any]) -> bool:
    return "env_type" in data


class VTAFile(NamedTuple):
    """Settings of a config file."""

    preset: str
    """Preset on which the settings are based."""
    defaults: dict[str, Any]
    """Defaults of the port; lower precedence than any other setting."""
    settings: dict[str, Any]
    """Settings in the file."""
    unknown: list[str]
    """Keys that are not known."""


def from_vta_file(data: Mapping[str, Any]) -> VTAFile:
    """Convert the contents of a config file."""
    kind = data["env_type"]
    # A null value stands for the default, except for `env_type`, where it is an error.
    given = {key: value for key, value in data.items() if value is not None}
    _check_values({**given, "env_type": kind})
    if "beta_anneal" in data and data["beta_anneal"] is None:
        given["beta_anneal"] = 0  # constant temperature
    defaults: dict[str, Any] = {NAMES[key]: value for key, value in DEFAULTS.items()}
    defaults["sequences.refresh"] = 0  # the port trains on one set of sequences
    if kind == "3d_maze":
        defaults["sequences.folder"] = _default_folder(
            str(given.get("data_root", "data"))
        )
    settings = {NAMES[key]: value for key, value in given.items() if key in NAMES}
    if "use_amp" in given:
        settings["precision"] = "auto" if given["use_amp"] else "float32"
    if "exp_name" in given or "work_dir" in given:
        name = given.get("exp_name", "vta_bouncing_balls")
        settings["logdir"] = f"{given.get('work_dir', '.')}/{name}"
    if kind == "bouncing_balls":
        settings.pop("sequences.folder", None)  # `maze_data_dir` has no effect
        if "loss_type" in given:
            settings["vta.world.loss"] = LOSSES[given["loss_type"]]
        if "obs_bit" in given:
            settings["vta.world.levels"] = "floor"
            settings["vta.world.bits"] = given["obs_bit"]
    known = {*NAMES, *OTHER_KEYS}
    unknown = [key for key in data if key not in known]
    return VTAFile(PRESETS[kind], defaults, settings, unknown)


def _check_values(given: Mapping[str, Any]) -> None:
    """Check the values of keys that are not settings of Reverie."""
    for key, options in CHOICES.items():
        if key in given and given[key] not in options:
            choices = [str(option).lower() for option in options]
            raise UserError(
                f"{key} cannot be {given[key]!r}.\n  Fix: use {' or '.join(choices)}."
            )
    for key in PATHS:
        if not isinstance(given.get(key, ""), str | int | float):
            raise UserError(
                f"{key} is {given[key]!r}, which is not a path.\n"
                f'  Fix: write it in quotes, like "{key}": "name".'
            )


def _default_folder(root: str) -> str:
    """Return the default folder of the maze in the port: in `root`, or else in the
    working directory."""
    below, here = Path(root) / MAZE, Path(MAZE)
    return str(here if here.is_dir() and not below.is_dir() else below)
