"""Recognize checkpoints and run folders of the original DreamerV3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from reverie.convert.dreamerv3.config import is_config
from reverie.convert.dreamerv3.sizes import STOCH_SETTINGS, infer_settings
from reverie.convert.dreamerv3.weights import import_state
from reverie.convert.importer import Importer, Settings, find_files, read_text
from reverie.storage.limits import InvalidFile, parse_yaml

FILE = "agent.pkl"
FOLDERS = (".", "ckpt", "ckpt/agent")
"""Folders that may have checkpoints; `--script parallel` uses `ckpt/agent`."""


def is_checkpoint(contents: Any) -> bool:
    params = contents.get("params") if isinstance(contents, Mapping) else None
    return isinstance(params, Mapping) and any(
        str(name).startswith("dyn/") for name in params
    )


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run or checkpoint folder, the latest one first.

    The file `latest` contains the folder name of the latest checkpoint.
    """
    if (folder / FILE).is_file():
        return [folder / FILE]
    for name in FOLDERS:
        files = find_files(folder / name, f"*/{FILE}")
        latest = read_text(folder / name / "latest").strip()
        if files:
            return sorted(files, key=lambda file: file.parent.name != latest)
    return []


def find_config(path: Path) -> Path | None:
    """Return the `config.yaml` of the run of a checkpoint, if it exists."""
    folders = [path.parent]
    # RUN/ckpt/TIME/agent.pkl, or RUN/ckpt/agent/TIME/agent.pkl
    if "ckpt" in path.parts[-4:-1]:
        folders += path.parents[2:4]
    for folder in folders:
        file = folder / "config.yaml"
        try:
            data = parse_yaml(read_text(file))
        except (InvalidFile, yaml.YAMLError):
            continue
        if isinstance(data, Mapping) and is_config(data):
            return file
    return None


def _infer(path: Path, contents: Any, given: Settings) -> dict[str, Settings]:
    return infer_settings(contents["params"], given)


IMPORTER = Importer(
    program="danijar/dreamerv3",
    file=FILE,
    matches=is_checkpoint,
    import_state=import_state,
    infer_settings=_infer,
    undetermined=STOCH_SETTINGS,
    find=find_checkpoints,
    find_config=find_config,
)
