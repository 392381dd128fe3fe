"""Config files of the port of VTA to bouncing balls and the maze, as settings of ours.

They are flat JSON with an `env_type`, by which they are recognised. Keys we do not know
are reported and left out, as that program did silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from reverie.api import UserError

MAZE = "3d_maze_default"
BLOCKS = {"bouncing_balls": "vta_balls", "3d_maze": "vta_maze"}
LOSSES = {"bce": "bernoulli", "mse": "gaussian"}

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


class VTAFile(NamedTuple):
    """What such a file asks for."""

    block: str
    """The block of ours that it stands on."""
    usual: dict[str, Any]
    """Settings that program has by itself: they yield to whatever was named."""
    given: dict[str, Any]
    """Settings the file gives."""
    unknown: list[str]
    """Keys that mean nothing here."""


def from_vta_file(data: Mapping[str, Any]) -> VTAFile:
    kind = data["env_type"]
    given = {key: value for key, value in data.items() if value is not None}
    _refuse_misfits({**given, "env_type": kind})
    if "beta_anneal" in data and data["beta_anneal"] is None:
        given["beta_anneal"] = 0  # there, too, the temperature then stays
    usual: dict[str, Any] = {NAMES[key]: value for key, value in DEFAULTS.items()}
    usual["sequences.refresh"] = 0  # that program trains on one set of sequences
    if kind == "3d_maze":
        usual["sequences.folder"] = _usual_folder(str(given.get("data_root", "data")))
    found = {NAMES[key]: value for key, value in given.items() if key in NAMES}
    if "use_amp" in given:
        found["precision"] = "auto" if given["use_amp"] else "float32"
    if "exp_name" in given or "work_dir" in given:
        name = given.get("exp_name", "vta_bouncing_balls")
        found["logdir"] = f"{given.get('work_dir', '.')}/{name}"
    if kind == "bouncing_balls":
        found.pop("sequences.folder", None)  # it says where the maze would be
        if "loss_type" in given:
            found["vta.world.loss"] = LOSSES[given["loss_type"]]
        if "obs_bit" in given:
            found["vta.world.levels"] = "floor"
            found["vta.world.bits"] = given["obs_bit"]
    known = {*NAMES, *SILENT}
    unknown = [key for key in data if key not in known]
    return VTAFile(BLOCKS[kind], usual, found, unknown)


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
