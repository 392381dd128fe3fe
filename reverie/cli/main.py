"""The `reverie` command: the table of commands, and which one is meant."""

from __future__ import annotations

import errno
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.bench import bench
from reverie.cli.data import data, data_options
from reverie.cli.draw import view
from reverie.cli.envs import check_env, list_envs
from reverie.cli.evaluate import evaluate
from reverie.cli.settings import show_settings
from reverie.cli.sweep import sweep
from reverie.cli.train import bc, demo, offline, train, train_eval

USAGE = """\
Reverie: agents that learn inside a world model.

  reverie train [--configs BLOCK ...] [--task TASK] [--logdir DIR] [--SETTING VALUE]
  reverie COMMAND --help

Commands
{commands}

Exit codes: 0 done, 1 a bug of ours, 2 something to mend (it says what),
130 stopped by Ctrl-C and 143 by SIGTERM, both after saving.
"""

SETTINGS_HELP = """\
  --configs BLOCK ...    named settings, laid from left to right: {blocks}
  --config FILE          settings from a YAML or JSON file
  --SETTING VALUE        any setting by its name, e.g. --run.steps 1e6
                         (`reverie config` prints them all)
"""


class Command(NamedTuple):
    function: Callable[[list[str]], int]
    usage: str
    summary: str
    settings: bool = True
    more: Callable[[list[str]], str] | None = None
    """What else there is to say to whoever asks for help, after such words."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if argv is None:  # a program of its own, and not a call from Python
        warnings.showwarning = _show_warning
    try:
        return _dispatch(arguments)
    except UserError as error:
        print(f"reverie: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("reverie: stopped without saving.", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except MemoryError as error:
        why = f": {error}" if str(error) else ""
        print(
            f"reverie: There is not enough memory{why}.\n  Fix: ask for less at once, "
            "for example smaller batches, chunks or replays, or fewer --episodes.",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = f" at {error.filename}" if error.filename else ""
        print(
            f"reverie: The disk is full{where}.\n"
            "  Fix: free some space and run the same command again.",
            file=sys.stderr,
        )
        return 2


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr, flush=True)


def _dispatch(arguments: list[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", [])
    if name in ("-h", "--help", "help"):
        rows = [f"  {n:<11} {c.summary}" for n, c in COMMANDS.items()]
        print(USAGE.format(commands="\n".join(rows)), end="")
        return 0
    if name in ("-V", "--version"):
        from importlib.metadata import version

        print(f"reverie {version('reverie')}")
        return 0
    if name not in COMMANDS:
        raise UserError(
            f"There is no command {name!r}.{configs.suggest(name, COMMANDS)}\n"
            f"  Fix: choose from {', '.join(COMMANDS)}."
        )
    command = COMMANDS[name]
    if "-h" in rest or "--help" in rest:
        print(f"reverie {name} {command.usage}\n\n  {command.summary}")
        if command.settings:
            print(SETTINGS_HELP.format(blocks=", ".join(sorted(configs.blocks()))))
        if command.more:
            print(command.more(rest))
        return 0
    return command.function(rest)


COMMANDS: dict[str, Command] = {
    "train": Command(
        train, "[--configs BLOCK ...] [--SETTING VALUE ...]", "learn a task online"
    ),
    "train_eval": Command(
        train_eval,
        "[--configs BLOCK ...] [--SETTING VALUE ...]",
        "the same, with evaluations in between",
    ),
    "offline": Command(
        offline,
        "--offline.data PATH [--configs BLOCK ...] [--SETTING VALUE ...]",
        "learn a world from recordings",
    ),
    "bc": Command(
        bc,
        "--offline.data PATH [--bc.run LOGDIR] [--configs BLOCK ...] "
        "[--SETTING VALUE ...]",
        "clone the policy that made recordings",
    ),
    "eval": Command(
        evaluate,
        "LOGDIR [--episodes 100] [--videos 0] [--failures 10] [--task TASK]\n"
        "    [--SETTING VALUE ...]\n"
        "reverie eval LOGDIR OTHER [--episodes 100]   compares boundaries",
        "measure a trained agent; one of recordings by them, or in a task",
        settings=False,
    ),
    "sweep": Command(
        sweep,
        "FILE [COMMAND] [--jobs 1] [--trials 20] [--logdir DIR] [--SETTING VALUE ...]\n"
        "    (see docs/sweep.md; --logdir DIR alone goes on)",
        "search for settings: many runs of a command, and the best of them",
        settings=False,
    ),
    "demo": Command(
        demo,
        "[--logdir DIR]",
        "learn `catch` in minutes, and show the dream",
        settings=False,
    ),
    "bench": Command(
        bench,
        "[--configs BLOCK ...] [--compare] [--bench.vary size|batch|length|image]\n"
        "    [--bench.seconds 1] [--bench.repeats 3] [--bench.at_once 1]\n"
        "    [--bench.output FILE], or:\n"
        "  envs [--tasks TASK ...] [--counts 8 16] [--seconds 1] [--output FILE]",
        "measure how fast a config is on this machine",
    ),
    "config": Command(
        show_settings,
        "[--configs BLOCK ...] [--SETTING VALUE ...]",
        "print the resolved settings",
    ),
    "data": Command(
        data,
        "inspect|stats|view PATH, convert|split SRC DST, demos FILE,\n"
        "    export LOGDIR FOLDER, or: balls|maze --out FOLDER (see docs/offline.md)",
        "look at recordings, convert, split and measure them; write some",
        settings=False,
        more=data_options,
    ),
    "view": Command(
        view,
        "boundaries LOGDIR [--idx 0] [--num-samples 10] [--out FOLDER]\n"
        "    [--SETTING VALUE ...]",
        "draw what a run has learnt",
        settings=False,
    ),
    "envs": Command(
        list_envs, "[SUITE]", "list suites, tasks and how to install them", False
    ),
    "check-env": Command(
        check_env, "TASK [--SETTING VALUE ...]", "tell what is wrong with an env"
    ),
}

if __name__ == "__main__":
    sys.exit(main())
