"""`reverie data`: look at recordings, convert them, and write some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.paths import naming_paths
from reverie.cli.settings import Settings, own_options, read_settings, to_config


def data(arguments: list[str]) -> int:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb not in DATA:
        raise UserError(
            f"`reverie data` takes one of {', '.join(DATA)}, not {verb!r}."
            f"{configs.suggest(verb, DATA)}\n  Fix: reverie data inspect PATH, "
            "or reverie data export LOGDIR FOLDER"
        )
    with naming_paths():
        return DATA[verb](rest)


def data_options(words: list[str]) -> str:
    """The options of a verb, for whoever asks for help with it."""
    from reverie.recordings.tools import VERBS

    verb = next((word for word in words if word in DATA), "")
    if verb in VERBS:
        return f"\nreverie data {verb} {' '.join(VERBS[verb].places)}\n" + (
            configs.explained(VERBS[verb].options)
        )
    if verb in WRITTEN:
        known = [f"--{name} {usual}" for name, usual in WRITTEN[verb].items()]
        return f"\nreverie data {verb} --out FOLDER\n  " + "\n  ".join(known)
    return "" if verb else "\n`reverie data VERB --help` lists the options of one."


def _apply(verb: str, arguments: list[str]) -> int:
    from reverie.recordings.tools import VERBS

    places, options = data_request(verb, arguments)
    return VERBS[verb].function(*places, options)


def data_request(verb: str, arguments: list[str]) -> tuple[list[str], Any]:
    """What a verb on recordings is to work on, and its options."""
    from reverie.recordings.tools import VERBS

    _, schema, wanted, shared = VERBS[verb]
    settings = read_settings(arguments, places=len(wanted))
    if len(settings.places) != len(wanted):
        raise UserError(
            f"`reverie data {verb}` takes {' and '.join(wanted)}.\n"
            f"  Fix: reverie data {verb} {' '.join(wanted)}"
        )
    known = configs.names(schema)
    for flag, _ in settings.flags:
        if flag.replace("-", "_") not in known:
            raise UserError(
                f"`reverie data {verb}` has no option --{flag}."
                f"{configs.suggest(flag, known)}\n"
                f"  Fix: choose from {', '.join('--' + name for name in known)}."
            )
    below = _shared(verb, settings, shared)
    start: Any = configs.resolve(schema, [("the blocks", below)])
    layer = configs.flag_layer(schema, settings.flags, start)
    layers = [("the blocks", below), ("the flags", layer)]
    return settings.places, configs.resolve(schema, layers)


def _shared(verb: str, settings: Settings, shared: Sequence[str]) -> dict[str, Any]:
    """What blocks say about options that are settings of a run as well."""
    named = settings.names or settings.files
    if named and not shared:
        raise UserError(
            f"`reverie data {verb}` takes no blocks of settings.\n"
            "  Fix: leave out --configs and --config."
        )
    task = [(name, value) for name, value in settings.flags if name == "task"]
    if not named and not (task and shared):
        return {}
    whole = to_config(settings._replace(flags=task))
    return {name: value for name, value in asdict(whole).items() if name in shared}


def _export(arguments: list[str]) -> int:
    from reverie.recordings.export import export_episodes

    if len(arguments) != 2:
        raise UserError(
            "`reverie data export` takes two folders.\n"
            "  Fix: reverie data export LOGDIR FOLDER"
        )
    count = export_episodes(Path(arguments[0]), Path(arguments[1]).expanduser())
    print(f"{count} episodes in {arguments[1]}; --run.episodes reads them back.")
    return 0


def _balls(arguments: list[str]) -> int:
    from reverie.datasets.synthetic.balls import write_balls

    return _write_sequences(write_balls, "balls", arguments)


def _maze(arguments: list[str]) -> int:
    from reverie.datasets.synthetic.maze import write_maze

    return _write_sequences(write_maze, "maze", arguments)


WRITTEN: dict[str, dict[str, Any]] = {
    "balls": {"train": 2000, "test": 500, "length": 30, "seed": 0, "dt": 2.0},
    "maze": {"train": 1000, "test": 100, "length": 300, "seed": 0},
}
"""Options of verbs that make sequences up, with what they usually are."""


def _write_sequences(write: Callable[..., int], name: str, arguments: list[str]) -> int:
    given, known = configs.parse_flags(arguments), WRITTEN[name]
    options = own_options(given, {"out": "", **known}, f"reverie data {name}")
    folder = options.pop("out")
    if not folder:
        raise UserError(f"Where to?\n  Fix: reverie data {name} --out FOLDER")
    for option, usual in known.items():
        if option != "seed" and not options[option]:
            raise UserError(f"--{option} must be above 0.\n  Fix: --{option} {usual}")
    count = write(Path(folder).expanduser(), **options)
    print(
        f"{count} sequences in {folder}; read them with --task sequences_{name} "
        f"--source.folder {folder}."
    )
    return 0


DATA: dict[str, Callable[[list[str]], int]] = {
    "export": _export,
    "balls": _balls,
    "maze": _maze,
    **{
        verb: partial(_apply, verb)
        for verb in ("inspect", "convert", "split", "stats", "view", "demos")
    },
}
