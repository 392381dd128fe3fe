"""`reverie sweep`: many runs of a command that trains."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.train import config_of


def sweep(arguments: list[str]) -> int:
    from reverie.run.signals import Interrupted
    from reverie.sweep import search as loop

    try:
        loop.sweep(sweep_request(arguments))
    except Interrupted as stop:
        print("Saved. The same command goes on.", file=sys.stderr)
        return stop.exit_code
    return 0


def sweep_request(arguments: list[str]) -> Any:
    """The plan of a sweep: a file, or what a folder of one says."""
    from reverie.run.folder import place
    from reverie.sweep.plan import make_plan
    from reverie.sweep.search import PLAN

    count = next((i for i, w in enumerate(arguments) if w[:2] == "--"), len(arguments))
    places, words = arguments[:count], arguments[count:]
    logdir = dict(configs.parse_flags(words)).get("logdir")
    if not places and isinstance(logdir, str) and (place(logdir) / PLAN).exists():
        places = [str(place(logdir) / PLAN)]
    if len(places) not in (1, 2):
        raise UserError(
            "A sweep takes a file with ranges, and then the command to run.\n"
            "  Fix: reverie sweep FILE [COMMAND], or reverie sweep --logdir FOLDER"
        )
    command = places[1] if len(places) == 2 else None
    return make_plan(Path(places[0]), command, words, config_of)
