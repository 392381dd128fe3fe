"""`reverie export`: write the policy of a run to a file, and verify the file."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple

import torch

from reverie.api import UserError
from reverie.capabilities import Exportable, ExportStep, HasWorldSteps
from reverie.export import load_torch, runner
from reverie.export.env_step import env_space, to_env_step
from reverie.export.steps import FlatStep
from reverie.export.verify import (
    TOLERANCE,
    Comparison,
    compare_policy,
    compare_world,
    measure_latency,
)
from reverie.plugins import import_optional
from reverie.run.player import Player
from reverie.spaces import Space, agent_obs_space, to_nested
from reverie.storage.atomic import make_folder, write_file, write_json
from reverie.storage.os_errors import explain_write_errors

Format = Literal["onnx", "torch"]
SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}
"""File name extensions by format."""
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
"""Packages that the format onnx needs."""
RUNNERS = {"onnx": {"run_policy.py": runner}}
RUNNERS["torch"] = {**RUNNERS["onnx"], "load_torch.py": load_torch}
"""Modules that are copied next to the policy, by format and file name."""


class Exported(NamedTuple):
    """Files of an exported policy, and its comparison with the agent."""

    files: list[Path]
    comparisons: dict[str, Comparison]
    """By name of the step: `policy`, and the steps of the world model."""
    latency: dict[str, float]
    """Milliseconds per step with batch size 1: `exported` and `agent`."""


def export_policy(
    player: Player,
    folder: Path,
    format: Format = "onnx",
    greedy: bool = True,
    with_world: bool = False,
) -> Exported:
    """Write the policy of a player to a folder, and compare it with the player.

    The player must be on the CPU, in float32. With `with_world`, the steps of its world
    model are written, too. Raises an error if the agent has no exportable steps, or if
    the exported steps differ from the agent; the folder is not changed then.
    """
    agent, name = player.agent, player.source.config.agent
    if not isinstance(agent, Exportable):
        raise UserError(
            f"The agent {name!r} cannot be exported.\n  Fix: export a run of dreamer, "
            "iris or bc, or add `export_policy` to the agent (capabilities.Exportable)."
        )
    if with_world and not isinstance(agent, HasWorldSteps):
        raise UserError(
            f"The agent {name!r} has no world model to export.\n"
            "  Fix: leave out --with-world."
        )
    if format == "onnx":
        for package in PACKAGES:
            import_optional(package, "export", "`reverie export --format onnx`")
    step = FlatStep(
        to_env_step(agent.export_policy(greedy), player.source), "obs.", "action."
    )
    steps = {}
    if with_world and isinstance(agent, HasWorldSteps):
        steps = agent.world_steps()
    with _temporary_folder(folder) as temporary:
        exported = _write_and_verify(player, temporary, format, greedy, step, steps)
        with explain_write_errors(folder):
            for path in exported.files:
                os.replace(path, folder / path.name)
    return exported._replace(files=[folder / path.name for path in exported.files])


@contextlib.contextmanager
def _temporary_folder(folder: Path) -> Iterator[Path]:
    """Create a folder, and a temporary one in it that is deleted at the end.

    After an error, `folder` is deleted, too, unless it existed before.
    """
    is_new = not folder.exists()
    make_folder(folder, parents=True)
    try:
        with explain_write_errors(folder):
            temporary = TemporaryDirectory(prefix=".export-", dir=folder)
        with temporary as name:
            yield Path(name)
    except BaseException:
        if is_new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise


def _write_and_verify(
    player: Player,
    folder: Path,
    format: Format,
    greedy: bool,
    step: FlatStep,
    steps: dict[str, ExportStep],
) -> Exported:
    """Write the files; raise an error if the exported steps differ from the agent."""
    world = {k: FlatStep(x, state_prefix="state") for k, x in steps.items()}
    info: dict[str, Any] = {
        "agent": player.source.config.agent,
        "task": player.source.config.task,
        "format": format,
        "greedy": greedy,
        **write_step(step, folder, "policy", format),
        **describe_policy(player, step),
    }
    if world:
        info["world"] = {
            key: {
                **write_step(flat, folder, key, format),
                "inputs": [x.to_json() for x in flat.inputs],
                "state": [x.to_json() for x in flat.state],
                "noise": [x.to_json() for x in flat.noise],
                "outputs": [x.to_json() for x in flat.outputs],
            }
            for key, flat in world.items()
        }
    description = folder / "policy.json"
    write_json(description, info)
    programs = [folder / file for file in RUNNERS[format]]
    for path, module in zip(programs, RUNNERS[format].values(), strict=True):
        assert module.__file__ is not None
        write_file(path, Path(module.__file__).read_bytes())
    load = runner.load_onnx if format == "onnx" else load_torch.load_torch
    comparisons = {"policy": compare_policy(player, step, folder, load)}
    if world:
        files = {key: folder / info["world"][key]["file"] for key in world}
        exported = {key: load(path, info["world"][key]) for key, path in files.items()}
        spaces = {key: steps[key].inputs for key in world}
        comparisons |= compare_world(world, exported, spaces)
    for key, comparison in comparisons.items():
        if not comparison.error <= TOLERANCE:
            other = "torch" if format == "onnx" else "onnx"
            raise UserError(
                f"The exported step {key!r} differs from the agent by "
                f"{comparison.error:.1e} in the output {comparison.output!r}, in "
                f"{comparison.steps} steps; {TOLERANCE:g} is allowed, so no files were "
                f"kept.\n  Fix: --format {other}"
            )
    latency = measure_latency(player, folder, load)
    info["verified"] = {key: value.to_json() for key, value in comparisons.items()}
    write_json(description, info)
    names = [f"{key}{SUFFIX[format]}" for key in ("policy", *world)]
    paths = [*(folder / name for name in names), description, *programs]
    return Exported(paths, comparisons, latency)


def write_step(step: FlatStep, folder: Path, name: str, format: Format) -> Any:
    """Write one step; return its file and the names of its inputs and outputs."""
    batch = torch.export.Dim("batch")
    infos = (*step.inputs, *step.state, *step.noise)
    shapes = tuple({0: batch} if info.has_batch else {} for info in infos)
    path = folder / f"{name}{SUFFIX[format]}"
    with torch.no_grad(), _quiet():
        program = torch.export.export(
            step, tuple(step.examples), dynamic_shapes=(shapes,)
        )
        names: Any = {
            "input_names": step.input_names,
            "output_names": step.output_names,
        }
        if format == "torch":
            buffer = io.BytesIO()
            torch.export.save(program, buffer)
            write_file(path, buffer.getvalue())
        else:
            converted: Any = torch.onnx.export(
                program, dynamo=True, verbose=False, **names
            )
            write_file(path, converted.model_proto.SerializeToString())
    return {"file": path.name, **names}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide messages of the exporters that users cannot act on."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns that torchvision is not installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def describe_policy(player: Player, step: FlatStep) -> dict[str, Any]:
    """Return the part of `policy.json` about inputs, outputs and state."""
    obs_space, act_space = agent_obs_space(player.obs_space), player.act_space
    inputs = [x for x in step.inputs if x.name != "is_first"]
    assert all(x.has_batch for x in (*step.state, *step.noise)), "no batch axis"
    names = [info.name for info in step.outputs]
    keys = [info.name.removeprefix("obs.") for info in inputs]
    return {
        "observations": [
            {**info.to_json(), **_describe_value(key, obs_space[key], len(obs_space))}
            for info, key in zip(inputs, keys, strict=True)
        ],
        "actions": [
            {**info.to_json(), **_describe_value(key, act_space[key], len(act_space))}
            for info, key in zip(step.outputs, act_space, strict=True)
        ],
        "action": to_nested(act_space, dict(zip(act_space, names, strict=True))),
        "state": [info.to_json() for info in step.state],
        "noise": [info.to_json() for info in step.noise],
        "about": ABOUT,
    }


ABOUT = {
    "observations": "as the environment returns them, in its own units; the step "
    "resizes, crops and normalizes them",
    "actions": "as the environment's `step` takes them, in its own units; `action` has "
    "their names, nested as in the action space (JSON objects for dicts, lists for "
    "tuples)",
    "is_first": "bool; True for the first observation of an episode, resets the state",
    "state": "zeros before the first step, then the outputs named `next.*`",
    "noise": "new random numbers for every step: `uniform` in [0, 1), standard "
    "`normal`, or `exponential` with rate 1; `sampler` is the method of "
    "`numpy.random.Generator`",
    "shape": "without the batch axis at the front",
}


def _describe_value(key: str, space: Space, count: int) -> dict[str, Any]:
    """Return the path of a value in the environment's nested space, and its bounds."""
    path: list[str | int] = [key]
    if space.source is not None:
        path = list(space.source.path)
    elif count == 1 and key == "action":  # not nested, as in `to_nested`
        path = []
    data = env_space(space).to_json()
    return {"path": path, "low": data["low"], "high": data["high"]}


def format_report(exported: Exported) -> str:
    """Return the files and numbers as lines of text."""
    lines = [f"{path} ({_size(path)})" for path in exported.files]
    for name, comparison in exported.comparisons.items():
        lines.append(
            f"{name}: {comparison.steps} recurrent steps, largest difference "
            f"{comparison.error:.1e} (allowed: {TOLERANCE:g}), {comparison.ties} ties "
            "with another choice"
        )
        if comparison.rounding:
            lines[-1] += (
                f", differences up to {comparison.rounding:.1e} within the rounding "
                "errors of the agent"
            )
    exported_ms, agent_ms = (exported.latency[key] for key in ("exported", "agent"))
    lines.append(
        f"latency (batch size 1, CPU threads: {torch.get_num_threads()}): "
        f"{exported_ms:.2f} ms exported, {agent_ms:.2f} ms agent.act"
    )
    return "\n".join(lines)


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 2**20:.1f} MB" if size > 2**20 else f"{size / 2**10:.1f} kB"
