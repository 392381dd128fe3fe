"""The commands that train: `train`, `train_eval`, `offline`, `bc` and `demo`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import Arguments, parse_arguments, to_config
from reverie.log.messages import print_message
from reverie.log.status import StatusLine

BASE_BLOCKS: dict[str, tuple[str, ...]] = {
    "train": (),
    "train_eval": (),
    "offline": ("offline",),
    "bc": ("offline", "bc"),
}
"""Preset blocks that each training command applies before all others."""


def train(words: list[str]) -> int:
    """Train an agent online."""
    return _run("train", "reverie.run.train:train", words)


def train_eval(words: list[str]) -> int:
    """Train an agent online and evaluate it regularly."""
    return _run("train_eval", "reverie.run.train:train", words, evaluate=True)


def offline(words: list[str]) -> int:
    """Train a world model on recorded episodes."""
    return _run("offline", "reverie.run.offline.train:offline", words)


def bc(words: list[str]) -> int:
    """Train a policy on recorded episodes by behavior cloning."""
    return _run("bc", "reverie.run.offline.train:offline", words)


def demo(words: list[str]) -> int:
    """Train on `catch` for a few minutes and save videos of imagined rollouts."""
    from reverie.run import demo as loop

    arguments = parse_arguments(words)
    arguments.refuse_blocks("The demo uses its own preset block.")
    return loop.demo(arguments.flags)


def command_config(command: str, words: list[str]) -> Any:
    """The config of a run of a training command with these arguments."""
    if command not in BASE_BLOCKS:
        raise UserError(
            f"{command!r} is not a training command."
            f"{configs.suggest(command, BASE_BLOCKS)}\n"
            f"  Fix: choose from {', '.join(BASE_BLOCKS)}."
        )
    return training_config(parse_arguments(words), command)


def training_config(arguments: Arguments, command: str = "train") -> Any:
    """The config of a new run, or of the run to resume in an existing `--logdir`.

    A run is resumed with its saved settings. Other flags are allowed if they have the
    saved values or only affect the loop (logging, intervals, number of steps).
    """
    from reverie.run import folder
    from reverie.run.used_settings import resolve_for_command, with_used_flags

    base_blocks = BASE_BLOCKS[command]
    logdir = dict(arguments.flags).get("logdir")
    path = folder.resolve_logdir(logdir) if isinstance(logdir, str) else Path()
    exists = isinstance(logdir, str) and (path / "config.yaml").exists()
    if exists and not (arguments.blocks or arguments.files):
        may_differ = all(
            name.replace("-", "_").startswith(folder.RESUMABLE_SETTINGS)
            for name, _ in arguments.flags
        )
        if may_differ or (path / "ckpt").exists():
            saved = folder.read_config(path)
            if bool(saved.offline.data) != bool(base_blocks):
                other = "offline" if saved.offline.data else "train"
                raise UserError(
                    f"The run in {logdir} was started by another command.\n"
                    f"  Fix: reverie {other} --logdir {logdir}"
                )
            config = with_used_flags(saved, command, arguments.flags)
            if not may_differ:
                folder.check_unchanged(saved, config, path)
            return config
    is_resumed = exists and (path / "ckpt").exists()
    run_to_resume = folder.read_config(path) if is_resumed else None
    blocks = [*base_blocks, *arguments.blocks]
    without_flags = arguments._replace(blocks=blocks, flags=[])
    if base_blocks and to_config(without_flags).run.clock == "epochs":
        blocks.append("in_updates")  # without data collection there are no epochs
    return resolve_for_command(
        command, blocks, arguments.files, arguments.flags, run_to_resume
    )


def _run(command: str, loop: str, words: list[str], **options: bool) -> int:
    """Run the training loop at an import path; print its activity from the start."""
    with StatusLine("importing PyTorch"):
        run: Callable[..., Path] = resolve_name(loop)
        config = command_config(command, words)
    path = run(config, **options)
    print_message(f"Done: {path}")
    return 0
