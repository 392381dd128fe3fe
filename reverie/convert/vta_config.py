"""Config files of the port of VTA to bouncing balls and the maze, as settings of ours.

They are flat JSON with an `env_type`, by which they are recognised. Keys we do not know
are reported and left out, as that program did silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reverie.api import UserError

MAZE = "3d_maze_default"
BLOCKS = {"bouncing_balls": "vta_balls", "3d_maze": "vta_maze"}
LOSSES = {"bce": "bernoulli", "mse": "gaussian"}

NAMES = {
    "seed": "seed",
    "device": "device",
    "maze_data_dir": "source.folder",
    "epoch_data_size": "source.chunk",
    "dt": "source.dt",
    "batch_size": "watcher.batch_size",
    "seq_size": "watcher.vta.length",
    "init_size": "watcher.vta.context",
    "state_size": "watcher.vta.state",
    "belief_size": "watcher.vta.belief",
    "num_layers": "watcher.vta.layers",
    "obs_std": "watcher.vta.obs_std",
    "learn_rate": "watcher.opt.lr",
    "grad_clip": "watcher.opt.clip",
    "max_iters": "run.steps",
    "seg_num": "watcher.vta.max_segments",
    "seg_len": "watcher.vta.max_segment",
    "max_beta": "watcher.vta.temperature",
    "min_beta": "watcher.vta.min_temperature",
    "beta_anneal": "watcher.vta.anneal",
}

DEFAULTS = {
    "seed": 111,
    "epoch_data_size": 2000,
    "batch_size": 64,
    "max_iters": 10000,
    "beta_anneal": 100,
}
"""Of that program, where ours are others."""

SILENT = {
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
"""Keys that are used below, follow from the data, or never did anything."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "env_type": tuple(BLOCKS),
    "loss_type": tuple(LOSSES),
    "use_amp": (True, False),
}
PATHS = ("exp_name", "work_dir", "data_root")


def is_vta_file(data: Mapping[str, Any]) -> bool:
    return "env_type" in data


def from_vta_file(data: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """The block to stand on, the settings above it, and the keys that say nothing."""
    kind = data["env_type"]
    given = {**DEFAULTS, **{k: v for k, v in data.items() if v is not None}}
    _refuse_misfits({**given, "env_type": kind})
    if "beta_anneal" in data and data["beta_anneal"] is None:
        given["beta_anneal"] = 0  # there, too, the temperature then stays
    found = {NAMES[key]: value for key, value in given.items() if key in NAMES}
    found["source.refresh"] = 0  # that program trains on one set of sequences
    found["precision"] = "auto" if given.get("use_amp", True) else "float32"
    if "device" not in data:
        found["device"] = "auto"
    if "exp_name" in given or "work_dir" in given:
        name = given.get("exp_name", "vta_bouncing_balls")
        found["logdir"] = f"{given.get('work_dir', '.')}/{name}"
    if kind == "3d_maze" and "maze_data_dir" not in given:
        found["source.folder"] = _usual_folder(str(given.get("data_root", "data")))
    if kind == "bouncing_balls":
        found["watcher.vta.loss"] = LOSSES[given.get("loss_type", "bce")]
        if given.get("obs_bit") is not None:
            found["watcher.vta.levels"] = "floor"
            found["watcher.vta.bits"] = given["obs_bit"]
    known = {*NAMES, *SILENT}
    return BLOCKS[kind], found, [key for key in data if key not in known]


def _refuse_misfits(given: Mapping[str, Any]) -> None:
    """Values that no setting of ours would check."""
    for key, options in CHOICES.items():
        if key in given and given[key] not in options:
            words = [str(option).lower() for option in options]
            raise UserError(
                f"There is no {key} {given[key]!r}.\n  Fix: use {' or '.join(words)}."
            )
    for key in PATHS:
        if not isinstance(given.get(key, ""), str | int | float):
            raise UserError(
                f"{key} is {given[key]!r}, which is no path.\n"
                f'  Fix: write it in quotes, like "{key}": "name".'
            )


def _usual_folder(root: str) -> str:
    """Where that program keeps its maze: below its data, or else right here."""
    below, here = Path(root) / MAZE, Path(MAZE)
    return str(here if here.is_dir() and not below.is_dir() else below)
