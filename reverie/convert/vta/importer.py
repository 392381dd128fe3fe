"""Recognize checkpoints of VTA, and infer their settings.

They were written by the authors' code (taesupkim/vta) or by its port
(Mainlst/stable-deep-world-model).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reverie.api import UserError
from reverie.convert.importer import Importer, Settings, find_files
from reverie.convert.vta.config import is_vta_file
from reverie.convert.vta.weights import (
    action_width,
    import_state,
    infer_sizes,
    rename_tensors,
)
from reverie.storage.limits import read_json

PRESETS = {
    "sequences_balls": "vta_balls",
    "sequences_maze": "vta_maze",
    "recordings": "vta_episodes",
}
"""Presets by task."""
AUTHORS = "vta_authors"
"""Preset of the authors' model, whose convolutions have no biases."""


def is_checkpoint(contents: Any) -> bool:
    names = map(str, contents) if isinstance(contents, Mapping) else ()
    return any(name.startswith("state_model.") for name in names)


def find_config(path: Path) -> Path | None:
    """Return the JSON config of the port in the folder of a checkpoint.

    Raises if there are several, because they may differ.
    """
    found = []
    for file in sorted(path.parent.glob("*.json")):
        try:
            data = read_json(file)
        except (OSError, ValueError):
            continue
        if isinstance(data, Mapping) and is_vta_file(data):
            found.append(file)
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise UserError(
            f"{path.parent} has several configs of VTA: {names}.\n"
            f"  Fix: --config {found[0]}"
        )
    return found[0] if found else None


def _infer(path: Path, contents: Any, given: Settings) -> dict[str, Settings]:
    """Return settings by component, as `Importer.infer_settings`."""
    weights = _rename(contents)
    if "abs_feat.weight" not in weights:
        return {}  # the error is raised later, when the weights are loaded
    settings = dict(infer_sizes(weights))
    if not action_width(weights):
        settings["sequences.actions"] = False
    return {"world": settings}


def _presets(task: str, contents: Any) -> tuple[str, ...]:
    preset = PRESETS.get(task, "vta_sequences")
    weights = _rename(contents)
    is_authors = bool(weights) and "enc.conv0.bias" not in weights
    # `vta_authors` has the settings of the authors' model of the maze
    return (preset, AUTHORS) if is_authors and preset == "vta_maze" else (preset,)


def _rename(contents: Any) -> dict[str, Any]:
    """Return the tensors by the names of Reverie; empty if some are missing."""
    try:
        return rename_tensors(contents)
    except (KeyError, UserError):
        return {}


IMPORTER = Importer(
    program="VTA",
    file="model_best.pt",
    matches=is_checkpoint,
    import_state=import_state,
    infer_settings=_infer,
    presets=_presets,
    task_hint=(
        "--config FILE.json with the config of the port, or --task sequences_balls, or "
        "--task sequences_maze --sequences.folder FOLDER"
    ),
    find=lambda folder: find_files(folder, "model_best.pt", "ckpt_*.pt"),
    find_config=find_config,
)
