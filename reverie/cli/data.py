"""`reverie data`: inspect, convert, split and write recorded episodes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import (
    Arguments,
    explain_path_errors,
    parse_arguments,
    to_config,
)
from reverie.cli.explain import explain

if TYPE_CHECKING:
    from reverie.recordings.commands import DataCommand


@dataclass(frozen=True)
class DataExportOptions:
    """`reverie data export` has no options."""


@dataclass(frozen=True)
class SequenceOptions:
    """Options of generated sequences; the defaults are those of `maze`."""

    train: int = 1000
    """Number of training sequences."""
    test: int = 100
    """Number of test sequences."""
    out: str = ""
    """Folder for the sequences."""
    length: int = 300
    """Frames per sequence."""
    seed: int = 0
    """Random seed."""

    def __post_init__(self) -> None:
        configs.check_minimum(self, train=1, test=1, length=1, seed=0)


@dataclass(frozen=True)
class BallsOptions(SequenceOptions):
    train: int = 2000
    test: int = 500
    length: int = 30
    dt: float = 2.0
    """Time between two frames, in the units of the simulation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.dt < math.inf:
            raise UserError(f"--dt must be above 0, not {self.dt}.\n  Fix: --dt 2.0")


def data(argv: list[str]) -> int:
    """Inspect, convert, split and write recorded episodes."""
    name, commands = argv[0] if argv else "", data_commands()
    if name not in commands:
        hint = configs.suggest(name, commands)
        problem = f"has no command {name!r}.{hint}" if name else "needs a command."
        raise UserError(
            f"`reverie data` {problem}\n  Fix: choose from "
            f"{', '.join(commands)}, for example reverie data inspect PATH"
        )
    with explain_path_errors():
        positional, options = parse_data_arguments(name, argv[1:])
        return commands[name].function(*positional, options)


def data_commands() -> dict[str, DataCommand]:
    """Return the subcommands of `reverie data`, by name."""
    from reverie.recordings.commands import DATA_COMMANDS, DataCommand
    from reverie.recordings.simulator_commands import (
        RenderOptions,
        ReplayOptions,
        render_command,
        replay_command,
    )

    settings = ("task", "env")
    return {
        **DATA_COMMANDS,
        "replay": DataCommand(replay_command, ReplayOptions, ("FILE",), settings),
        "render": DataCommand(render_command, RenderOptions, ("FILE", "DST"), settings),
        "export": DataCommand(_export, DataExportOptions, ("LOGDIR", "FOLDER")),
        "balls": DataCommand(_write_balls, BallsOptions, ()),
        "maze": DataCommand(_write_maze, SequenceOptions, ()),
    }


def data_help(argv: list[str]) -> str:
    """Return usage and options of one subcommand, or the list of subcommands."""
    commands = data_commands()
    name = next((word for word in argv if word in commands), "")
    if not name:
        rows = [f"  {n:<8} {command.summary}" for n, command in commands.items()]
        end = "`reverie data COMMAND --help` lists the options of a command."
        return "\n".join(["Commands", *rows, "", end])
    command = commands[name]
    usage = " ".join(["reverie data", name, *command.positional])
    options = explain(command.options) or "  none"
    return f"{usage}\n  {command.summary}\n\nOptions\n{options}"


def parse_data_arguments(name: str, argv: list[str]) -> tuple[list[str], Any]:
    """Return the positional arguments and options of a subcommand."""
    command = data_commands()[name]
    count = len(command.positional)
    arguments = parse_arguments(argv, len(argv) if command.takes_more else count)
    if len(arguments.positional) < count:
        raise UserError(
            f"`reverie data {name}` needs {' and '.join(command.positional)}.\n"
            f"  Fix: reverie data {name} {' '.join(command.positional)}"
        )
    presets = _settings_from_presets(name, arguments, command.run_settings)
    options: Any = arguments.take_options(command.options, [("the presets", presets)])
    known = configs.settings_of(command.options)
    arguments.refuse_other_flags(f"reverie data {name}", known)
    return arguments.positional, options


def _settings_from_presets(
    command: str, arguments: Arguments, settings: tuple[str, ...]
) -> dict[str, Any]:
    """Return the values that presets, config files and `--task` give to `settings`."""
    if not settings:
        reason = f"`reverie data {command}` does not use presets."
        arguments.refuse_presets(reason, has_settings=False)
        return {}
    task = [(flag, value) for flag, value in arguments.flags if flag == "task"]
    if not (arguments.presets or arguments.files or task):
        return {}
    config = asdict(to_config(arguments._replace(flags=task)))
    return {name: value for name, value in config.items() if name in settings}


def _export(logdir: str, folder: str, _: DataExportOptions) -> int:
    """Write the episodes in the replay of a run to a folder, as NPZ files."""
    from reverie.recordings.export import export_episodes

    count = export_episodes(Path(logdir), Path(folder).expanduser())
    print(f"Wrote {count} episodes to {folder}. Use them with --run.episodes {folder}")
    return 0


def _write_balls(options: BallsOptions) -> int:
    """Generate sequences of bouncing balls for VTA, and write them as NPZ."""
    from reverie.datasets.synthetic.balls import write_balls

    return _write_sequences("balls", write_balls, options)


def _write_maze(options: SequenceOptions) -> int:
    """Generate sequences of walks in a 3D maze for VTA, and write them as NPZ."""
    from reverie.datasets.synthetic.maze import write_maze

    return _write_sequences("maze", write_maze, options)


def _write_sequences(
    name: str, write: Callable[..., int], options: SequenceOptions
) -> int:
    """Generate the dataset `sequences_NAME` with the function `write`."""
    from reverie.datasets.convert import refuse_existing

    arguments = asdict(options)
    folder = arguments.pop("out")
    if not folder:
        raise UserError(
            f"`reverie data {name}` needs an output folder.\n"
            f"  Fix: reverie data {name} --out FOLDER"
        )
    out = Path(folder).expanduser()
    for split in ("train", "test"):
        refuse_existing(out / split)
        refuse_existing(out / f"{split}.npz")
    count = write(out, **arguments)
    print(
        f"Wrote {count} sequences to {folder}. "
        f"Train on them with --task sequences_{name} --sequences.folder {folder}"
    )
    return 0
