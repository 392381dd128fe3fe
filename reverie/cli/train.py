"""Commands that train, and the settings of their runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.settings import Settings, read_settings, to_config

BELOW: dict[str, tuple[str, ...]] = {
    "train": (),
    "train_eval": (),
    "offline": ("offline",),
    "bc": ("offline", "bc"),
}
"""Commands that train, and the blocks that lie beneath all others in each."""


def train(arguments: list[str]) -> int:
    from reverie.run import train as loop

    return _finish(loop.train, arguments)


def train_eval(arguments: list[str]) -> int:
    from reverie.run import train_eval as loop

    return _finish(loop.train_eval, arguments)


def offline(arguments: list[str]) -> int:
    from reverie.run import offline as loop

    return _finish(loop.offline, arguments, BELOW["offline"])


def bc(arguments: list[str]) -> int:
    from reverie.run import offline as loop

    return _finish(loop.offline, arguments, BELOW["bc"])


def demo(arguments: list[str]) -> int:
    from reverie.run import demo as loop

    settings = read_settings(arguments)
    if settings.names or settings.files:
        raise UserError(
            "The demo has a block of settings of its own.\n"
            "  Fix: leave out --configs and --config; single settings may change."
        )
    return loop.demo(settings.flags)


def config_of(command: str, words: list[str]) -> Any:
    """The config of a command that trains."""
    if command not in BELOW:
        raise UserError(
            f"A sweep cannot run {command!r}.{configs.suggest(command, BELOW)}\n"
            f"  Fix: choose from {', '.join(BELOW)}."
        )
    return training_config(read_settings(words), BELOW[command])


def training_config(settings: Settings, below: Sequence[str] = ()) -> Any:
    """The config of a run; `--logdir` alone resumes with the settings saved there.

    So it does with settings beside it that are the same, or that only steer the loop.
    The blocks `below` lie beneath all others.
    """
    from reverie.run import folder
    from reverie.run.config import with_flags

    logdir = dict(settings.flags).get("logdir")
    home = folder.place(logdir) if isinstance(logdir, str) else Path()
    known = isinstance(logdir, str) and (home / "config.yaml").exists()
    asks_more = settings.names or settings.files
    if known and not asks_more:
        harmless = all(
            name.replace("-", "_").startswith(folder.HARMLESS)
            for name, _ in settings.flags
        )
        if harmless or (home / "ckpt").exists():
            saved = folder.read_config(home)
            wanted = with_flags(saved, settings.flags)
            if not harmless:
                folder.refuse_changes(saved, wanted, home)
            command = "offline" if saved.offline.data else "train"
            command = "bc" if saved.agent == "bc" else command
            if command != (below[-1] if below else "train"):
                raise UserError(
                    f"{logdir} was begun by another command.\n"
                    f"  Fix: reverie {command} --logdir {logdir}"
                )
            return wanted
    names = [*below, *settings.names]
    blocks = settings._replace(names=names, flags=[])
    if below and to_config(blocks).run.clock == "phases":
        names.append("in_updates")  # recordings have no phases of acting
    return to_config(settings._replace(names=names))


def _finish(
    loop: Callable[[Any], Path], arguments: list[str], below: Sequence[str] = ()
) -> int:
    from reverie.run.signals import Interrupted

    try:
        path = loop(training_config(read_settings(arguments), below))
    except Interrupted as stop:
        print("Saved. The same command resumes.", file=sys.stderr)
        return stop.exit_code
    print(f"Done: {path}", file=sys.stderr)
    return 0
