"""`reverie demo`: train on `catch` for minutes, evaluate and plot the scores."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reverie.api import UserError
from reverie.evaluation.episodes import evaluate
from reverie.plugins import PLAY_PACKAGES, install_command, missing_packages
from reverie.render.curve import write_curve
from reverie.run.config import resolve
from reverie.run.folder import resolve_logdir
from reverie.run.signals import Interrupted
from reverie.run.train import train
from reverie.storage.atomic import refuse_link
from reverie.storage.os_errors import explain_write_errors

EPISODES = 100
"""Number of evaluation episodes."""


def demo(flags: Sequence[tuple[str, Any]]) -> int:
    """Train on `catch` from scratch, evaluate, and print the score and the files."""
    flags = [("logdir", "logdir/demo"), *flags]
    config = resolve(["catch"], flags=flags)
    logdir = resolve_logdir(config.logdir)
    if logdir.exists():
        if not (logdir / "config.yaml").exists():
            raise UserError(
                f"{logdir} exists and is not a run folder.\n  Fix: --logdir ANOTHER"
            )
        refuse_link(logdir)
        with explain_write_errors(logdir / "config.yaml"):
            shutil.rmtree(logdir)
    try:
        train(config)
    except Interrupted as stop:
        return stop.exit_code
    result = evaluate(logdir, EPISODES)
    curve = logdir / "curve.png"
    write_curve(curve, {"DreamerV3": logdir}, "catch: score by agent steps")
    videos = sorted((logdir / "media").rglob("*openloop*"))
    video = f"  open-loop video  {_short(videos[-1])}\n" if videos else ""
    print(
        f"\nscore {result.summary['score']:.2f} over {EPISODES} episodes of catch "
        f"(-1 for a miss, +1 for a catch; a random policy scores about -0.7)\n"
        f"  learning curve   {_short(curve)}\n"
        f"{video}"
        f"  run folder       {_short(logdir)}\n"
        f"{_play_advice(logdir)}"
        f"Next: {_program()} eval {_short(logdir)}, or\n"
        f"  {_program()} train --task gym_CartPole-v1"
    )
    return 0


def _play_advice(logdir: Path) -> str:
    """Return the command to play in the world model, and to install what it needs."""
    install = ""
    if missing_packages(PLAY_PACKAGES):
        install = f"  {install_command('play')}\n"
    play = f"  {_program()} play {shlex.quote(str(_short(logdir)))} -w\n"
    return f"Play in the world model, in the browser:\n{install}{play}"


def _program() -> str:
    """Return the command that runs this program from the working directory."""
    called = Path(sys.argv[0])
    found = shutil.which("reverie")
    if called.name != "reverie" or not called.is_file():
        return "reverie" if found else f"{shlex.quote(sys.executable)} -m reverie"
    if found and Path(found).resolve() == called.resolve():
        return "reverie"
    return shlex.quote(str(_short(called.absolute())))


def _short(path: Path) -> Path:
    """Return the path relative to the working directory, if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
