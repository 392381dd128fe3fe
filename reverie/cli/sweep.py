"""`reverie sweep`: hyperparameter search with a training command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.train import command_config


def sweep(argv: list[str]) -> int:
    """Search for hyperparameters with many runs of a training command."""
    from reverie.sweep import search

    search.sweep(parse_sweep_arguments(argv))
    return 0


def parse_sweep_arguments(argv: list[str]) -> Any:
    """Return the spec of a sweep, from a YAML file or from the folder of a sweep.

    The folder is given by `--logdir` and has a copy of the file.
    """
    from reverie.run.folder import resolve_logdir
    from reverie.run.spec_file import code_in_spec
    from reverie.run.trust import check_trusted
    from reverie.sweep.search import JOURNAL, SPEC_FILE
    from reverie.sweep.spec import load_spec

    count = next((i for i, w in enumerate(argv) if w[:2] == "--"), len(argv))
    positional, flags = argv[:count], argv[count:]
    logdir, is_saved = dict(configs.parse_flags(flags)).get("logdir"), False
    if not positional and isinstance(logdir, str):
        saved = resolve_logdir(logdir) / SPEC_FILE
        positional = [str(saved)] if saved.exists() else []
        is_saved = bool(positional)
    if len(positional) not in (1, 2):
        raise UserError(
            "`reverie sweep` needs a YAML file, optionally followed by a command.\n"
            "  Fix: reverie sweep FILE [COMMAND], or reverie sweep --logdir FOLDER"
        )
    file = Path(positional[0]).expanduser()
    # the folder of a sweep may come from another user: check its code
    if is_saved or (file.name == SPEC_FILE and file.with_name(JOURNAL).exists()):
        check_trusted(file.parent, code_in_spec(configs.read_config_file(file)))
    command = positional[1] if len(positional) == 2 else None
    return load_spec(file, command, flags, command_config)
