"""`reverie export`: write the policy of a run to a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reverie.api import UserError
from reverie.cli.arguments import explain_path_errors, parse_arguments

EXPORT_SETTINGS = {"device": "cpu", "precision": "float32", "compile": "none"}
"""Settings with which the agent is loaded: fused kernels cannot be exported."""


@dataclass(frozen=True)
class ExportOptions:
    format: Literal["onnx", "torch"] = "onnx"
    """`onnx` for ONNX Runtime, or `torch` for `torch.export.load` (a .pt2 file)."""
    out: str = ""
    """Folder for the files; empty for a folder `export` inside of the given run or
    checkpoint folder, next to the given .reverie file, or in the current folder if an
    `hf://` name is given."""
    sample: bool = False
    """Sample actions as `reverie eval` does, instead of the most probable ones."""
    with_world: bool = False
    """Export the steps `observe`, `imagine` and `decode` of the world model, too."""


def export(argv: list[str]) -> int:
    """Export the policy of a run for ONNX Runtime or torch.export, and verify it."""
    from reverie.export.export import export_policy, format_report
    from reverie.run.hub import is_hub_name
    from reverie.run.python import load

    arguments = parse_arguments(argv, max_positional=1)
    if not arguments.positional:
        raise UserError(
            "`reverie export` needs the folder of a run, a checkpoint or a .reverie "
            "file (of `reverie pack`).\n"
            "  Fix: reverie export LOGDIR"
        )
    options = arguments.take_options(ExportOptions)
    logdir, folder = Path(arguments.positional[0]).expanduser(), Path("export")
    if options.out:
        folder = Path(options.out).expanduser()
    elif not is_hub_name(arguments.positional[0]):
        folder = (logdir if logdir.is_dir() else logdir.parent) / "export"
    settings = {**dict(arguments.flags), **EXPORT_SETTINGS}
    with explain_path_errors():
        player = load(logdir, configs=arguments.presets, **settings)
        exported = export_policy(
            player, folder, options.format, not options.sample, options.with_world
        )
    print(format_report(exported))
    return 0
