"""The commands that train: `train`, `train_eval`, `offline`, `bc` and `demo`."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import Arguments, parse_arguments, to_config
from reverie.config import check_minimum
from reverie.distributed.launch import describe_separate_task, find_launch
from reverie.log.messages import print_message
from reverie.log.status import StatusLine
from reverie.run import precompile

BASE_PRESETS: dict[str, tuple[str, ...]] = {
    "train": (),
    "train_eval": (),
    "offline": ("offline",),
    "bc": ("offline", "bc"),
}
"""Presets that each training command applies before all others."""
TRAINING_COMMANDS = tuple(BASE_PRESETS)


@dataclass(frozen=True)
class TrainOptions:
    """Options of the training commands that are not settings of the run."""

    profile: int | None = None
    """Write a trace of N updates, after the first five, to `profile` in the run folder,
    for Perfetto (https://ui.perfetto.dev) or TensorBoard."""

    def __post_init__(self) -> None:
        if self.profile is not None:
            check_minimum(self, profile=1)


def train(argv: list[str]) -> int:
    """Train an agent online."""
    return _run("train", "reverie.run.train:train", argv)


def train_eval(argv: list[str]) -> int:
    """Train an agent online and evaluate it regularly."""
    return _run("train_eval", "reverie.run.train:train", argv, evaluate=True)


def offline(argv: list[str]) -> int:
    """Train a world model on recorded episodes."""
    return _run("offline", "reverie.run.offline.train:offline", argv)


def bc(argv: list[str]) -> int:
    """Train a policy on recorded episodes by behavior cloning."""
    return _run("bc", "reverie.run.offline.train:offline", argv)


def demo(argv: list[str]) -> int:
    """Train on `catch` for a few minutes and save videos of imagined rollouts."""
    from reverie.run.demo import demo as run_demo

    arguments = parse_arguments(argv)
    arguments.refuse_presets("The demo uses its own preset.")
    return run_demo(arguments.flags)


def command_config(command: str, argv: list[str]) -> Any:
    """Return the config of a training command; raise if `command` is not one.

    Used for the runs of sweeps and campaigns, which cannot have `TrainOptions`.
    """
    if command not in TRAINING_COMMANDS:
        raise UserError(
            f"{command!r} is not a training command."
            f"{configs.suggest(command, TRAINING_COMMANDS)}\n"
            f"  Fix: choose from {', '.join(TRAINING_COMMANDS)}."
        )
    return training_config(parse_arguments(argv), command)


def parse_training_command(command: str, argv: list[str]) -> tuple[Any, TrainOptions]:
    """Return the config of a training command, and its options (not settings)."""
    arguments = parse_arguments(argv)
    options = arguments.take_options(TrainOptions)
    return training_config(arguments, command), options


def training_config(arguments: Arguments, command: str = "train") -> Any:
    """Return the config of a new run, or of the run to resume in `--logdir`.

    Without presets and config files, a run is resumed with its saved settings. Flags
    are allowed if they have the saved values or only affect the training loop (logging,
    intervals, number of steps). With presets or config files, the config is made from
    the command line, and `open_run_folder` compares it with the saved one. A run
    without a checkpoint starts from scratch and may have new settings.
    """
    from reverie.run import folder
    from reverie.run.used_settings import resolve_for_command, with_used_flags

    base_presets = BASE_PRESETS[command]
    logdir = dict(arguments.flags).get("logdir")
    path = folder.resolve_logdir(logdir) if isinstance(logdir, str) else Path()
    exists = isinstance(logdir, str) and (path / "config.yaml").exists()
    if exists and not (arguments.presets or arguments.files):
        all_changeable = all(
            name.replace("-", "_").startswith(folder.CHANGEABLE_ON_RESUME)
            for name, _ in arguments.flags
        )
        if all_changeable or (path / "ckpt").exists():
            saved = folder.read_config(path)
            is_offline = "offline" in base_presets
            if bool(saved.offline.data) != is_offline:
                other = "offline" if saved.offline.data else "train"
                raise UserError(
                    f"The run in {logdir} was started by another command.\n"
                    f"  Fix: reverie {other} --logdir {logdir}"
                )
            config = with_used_flags(saved, command, arguments.flags)
            if not all_changeable:
                folder.check_unchanged(saved, config, path)
            return config
    is_resumed = exists and (path / "ckpt").exists()
    run_to_resume = folder.read_config(path) if is_resumed else None
    presets = [*base_presets, *arguments.presets]
    without_flags = arguments._replace(presets=presets, flags=[])
    if base_presets and to_config(without_flags).run.clock == "epochs":
        # an epoch begins with data collection, which these commands do not have
        presets.append("in_updates")
    return resolve_for_command(
        command, presets, arguments.files, arguments.flags, run_to_resume
    )


def _run(command: str, loop: str, argv: list[str], **options: bool) -> int:
    """Run the training loop with this import path.

    In a data-parallel run, only rank 0 runs it; the other ranks execute the functions
    that rank 0 sends.
    """
    launch = find_launch()
    if launch.rank:
        from reverie.run.ranks import run_follower

        run_follower()
        return 0
    if separate := describe_separate_task():
        print_message(separate)
    if command in ("train", "train_eval"):
        precompile.start_compiler_early()
    with StatusLine("importing PyTorch"), garbage_collection_disabled():
        run: Callable[..., Path] = resolve_name(loop)
        config, train_options = parse_training_command(command, argv)
        from reverie.run.ranks import run_on_ranks
    if launch.world_size > 1 and dict(configs.parse_flags(argv)).get("devices"):
        _check_devices(config.processes, launch.world_size)
    if config.processes > 1 and launch.world_size == 1:
        from reverie.run.device import check_train_devices
        from reverie.run.launcher import run_processes
        from reverie.run.ranks import check_processes

        check_processes(config)
        if config.run.train_devices:
            check_train_devices(config.run.train_devices, config.processes)
        precompile.stop_early_compiler()
        # not in `argv`: `cli/main.py` has removed it
        trust = [word for word in sys.argv if word == "--trust"]
        return run_processes(config.processes, [command, *argv, *trust])
    path = run_on_ranks(
        lambda: run(config, profile=train_options.profile or 0, **options)
    )
    print_message(f"Done: {path}")
    return 0


def _check_devices(devices: int, world_size: int) -> None:
    """Raise if `--devices` is not the number of processes that a launcher started."""
    if devices != world_size:
        raise UserError(
            f"--devices is {devices}, but the number of processes that were started "
            f"for this run is {world_size}.\n  Fix: remove --devices."
        )


@contextlib.contextmanager
def garbage_collection_disabled() -> Iterator[None]:
    """Disable garbage collection while modules are imported.

    Imported modules are never garbage; collecting would take about a tenth of the time
    of the imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
