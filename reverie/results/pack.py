"""Write packages of trained agents, for `reverie pack` and `reverie push`.

`reverie/run/package.py` describes their format and reads them.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from reverie.api import StateDict, UserError
from reverie.results.report import describe_command
from reverie.results.runs import SCORE, find_runs
from reverie.results.scores import final_score, final_window
from reverie.run import checkpoint
from reverie.run.config import Config
from reverie.run.imported import find_imported
from reverie.run.load import SavedRun, open_run
from reverie.run.package import CONFIG, MAX_SMALL_BYTES, RESULTS, SPACES, SUFFIX
from reverie.storage.atomic import atomic_write
from reverie.storage.limits import read_bytes, read_json
from reverie.storage.run_spaces import read_spaces

FINAL_FRACTION = 0.05
"""Last fraction of the training over which the score is averaged."""


def open_for_package(logdir: Path) -> SavedRun:
    """Open the best checkpoint of a run; without one, the newest."""
    if imported := find_imported(logdir, Config):
        raise UserError(
            f"{imported.describe()}, which has no settings to pack.\n"
            f"  Fix: reverie train --run.from_checkpoint {logdir} --task TASK, and use "
            "that run."
        )
    return open_run(logdir, prefer_best=True)


def write_package_file(run: SavedRun, path: Path) -> Path:
    """Write a package as one file; return its path, with the suffix `.reverie`."""
    if path.suffix != SUFFIX:
        path = path.with_name(path.name + SUFFIX)
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_package(run, folder)
        with (
            atomic_write(path) as temporary,
            zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive,
        ):
            for file in sorted(folder.iterdir()):
                # without timestamps, so that archives are reproducible
                member = zipfile.ZipInfo(file.name)
                with archive.open(member, "w", force_zip64=True) as target:
                    target.write(file.read_bytes())
    return path


def write_package(run: SavedRun, folder: Path) -> dict[str, Any]:
    """Write the files of a package to a folder; return the results."""
    manifest = checkpoint.read_manifest(run.checkpoint)
    parts = {
        "agent": _agent_state(run),
        "loop": {"clock": {"updates": _updates(run), "step": manifest["step"]}},
    }
    if "images" in manifest["parts"]:  # image crop of offline training
        parts["images"] = checkpoint.read_part(run.checkpoint, "images")
    results = collect_results(run, int(manifest["step"]))
    checkpoint.write_folder(folder, parts, int(manifest["step"]))
    settings = _settings(run.config)
    (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n")
    (folder / SPACES).write_bytes(read_bytes(run.folder / SPACES, MAX_SMALL_BYTES))
    (folder / RESULTS).write_text(json.dumps(results, indent=1) + "\n")
    return results


def collect_results(run: SavedRun, step: int) -> dict[str, Any]:
    """Return scores of training and `reverie eval`, with command, commit and GPU."""
    (found,) = find_runs([run.folder])
    config = run.config
    results: dict[str, Any] = {
        "task": config.task,
        "agent": config.agent,
        "seed": config.seed,
        "step": step,
        "updates": _updates(run),
    }
    window = final_window([found], "frames", 0.0, FINAL_FRACTION, SCORE)
    score = final_score(found, SCORE, window)
    if score is not None:
        points = found.points(SCORE, "frames")
        results["training"] = {
            "score": score,
            "window": f"mean of {window}",
            "episodes": int((points[:, 0] > window.start).sum()),
        }
    if evaluation := _read_evaluation(run):
        results["evaluation"] = evaluation
    about = found.about
    results["command"] = describe_command(about.get("command"))
    names = ("commit", "gpu", "python", "versions", "time")
    return results | {name: about[name] for name in names if about.get(name)}


def _read_evaluation(run: SavedRun) -> dict[str, Any] | None:
    """Return the result of `reverie eval` for the checkpoint that is packed."""
    try:
        data = read_json(run.folder / "eval.json")
        if data["checkpoint"] != run.checkpoint.name:
            return None
        return {
            "task": data["task"],
            "episodes": len(data["episodes"]),
            **{k: v for k, v in data["summary"].items() if not isinstance(v, list)},
        }
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _updates(run: SavedRun) -> int:
    """Return the number of gradient updates of a checkpoint."""
    return int(checkpoint.read_part(run.checkpoint, "loop")["clock"]["updates"])


def _settings(config: Config) -> dict[str, Any]:
    """Return the settings with the default `logdir`, not the folder of this run."""
    return asdict(config) | {"logdir": type(config)().logdir}


def _agent_state(run: SavedRun) -> StateDict:
    """Return the state of an agent with its weights, but without its other arrays.

    Arrays of optimizers, random generators and recurrent states are left out, because
    they are only needed to continue the training.
    """
    state = checkpoint.read_part(run.checkpoint, "agent")
    agent = run.load_agent(read_spaces(run.folder))
    weights = {*agent.load_weights(state)}
    return {
        name: value if name in weights else _without_arrays(value)
        for name, value in state.items()
    }


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_arrays(v) for k, v in value.items() if not _is_array(v)}
    if isinstance(value, list | tuple):
        return [_without_arrays(item) for item in value if not _is_array(item)]
    return value


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor | np.ndarray) and value.ndim > 0
