"""`reverie view`: draw what a run has learnt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.paths import naming_paths
from reverie.cli.settings import own_options


def view(arguments: list[str]) -> int:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb not in VIEWS:
        raise UserError(
            f"`reverie view` takes one of {', '.join(VIEWS)}, not {verb!r}."
            f"{configs.suggest(verb, VIEWS)}\n  Fix: reverie view boundaries LOGDIR"
        )
    with naming_paths():
        return VIEWS[verb](rest)


def _boundaries(arguments: list[str]) -> int:
    from reverie.evaluation.draw import view_boundaries
    from reverie.run.config import Config

    if not arguments or arguments[0].startswith("--"):
        raise UserError("Which run?\n  Fix: reverie view boundaries LOGDIR")
    known = {"idx": 0, "num_samples": 10, "out": ""}
    given, every = configs.parse_flags(arguments[1:]), configs.names(Config)
    flags = [pair for pair in given if pair[0].replace("-", "_") in every]
    own = [pair for pair in given if pair not in flags]
    options = own_options(own, known, "reverie view boundaries")
    folder = Path(options["out"]).expanduser() if options["out"] else None
    logdir, samples = Path(arguments[0]), options["num_samples"]
    for path in view_boundaries(logdir, options["idx"], samples, folder, flags):
        print(path)
    return 0


VIEWS: dict[str, Callable[[list[str]], int]] = {"boundaries": _boundaries}
