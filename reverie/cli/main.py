"""The `reverie` command: parses the name of a command and runs it."""

from __future__ import annotations

import errno
import inspect
import signal
import sys
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pkgutil import resolve_name
from typing import Any, NamedTuple

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.bench import bench, bench_help
from reverie.cli.campaign import CAMPAIGN_HELP, campaign
from reverie.cli.config import show_config
from reverie.cli.data import data, data_help
from reverie.cli.draw import draw, draw_help
from reverie.cli.envs import check_env, list_envs
from reverie.cli.evaluate import evaluate
from reverie.cli.explain import explain, explain_groups
from reverie.cli.export import export
from reverie.cli.play import PLAY_HELP, play, view
from reverie.cli.plot import plot
from reverie.cli.report import report
from reverie.cli.share import pack, push
from reverie.cli.streams import flush_output, open_standard_streams
from reverie.cli.sweep import sweep
from reverie.cli.train import (
    BASE_PRESETS,
    TRAINING_COMMANDS,
    TrainOptions,
    bc,
    demo,
    offline,
    train,
    train_eval,
)
from reverie.distributed.launch import find_launch
from reverie.log.messages import print_message, record_output
from reverie.log.status import StatusLine
from reverie.run.signals import Interrupted, StoppedWithoutSaving
from reverie.run.trust import allow
from reverie.storage.os_errors import FILE_ERRORS, TOO_MANY_FILES, describe_error

TRUST = "--trust"
"""Flag that allows commands to import the modules named in the config of a run."""

HELP = """\
Reverie trains reinforcement learning agents with world models (DreamerV3, Δ-IRIS, VTA).

Usage
  reverie train [--configs PRESET ...] [--task TASK] [--logdir DIR]
                [--SETTING VALUE ...]
  reverie COMMAND --help

Commands
{commands}

Options of commands that use the folder of a run
  --trust  import the Python modules that the config of the run names
           (`my_module:MyAgent`), even if you did not start the run on this machine.
           Their code is executed with your permissions.

Exit codes
  0 success, 1 internal error, 2 invalid input (the message says how to fix it),
  130 stopped by Ctrl-C, 143 by SIGTERM, 128 + number by SIGHUP, SIGUSR1, SIGUSR2
  or SIGXCPU (training saves a checkpoint before it stops)
"""

SETTINGS_HELP = """\
Options
  --configs PRESET ...  apply presets, from left to right
  --config FILE ...     apply YAML or JSON files of settings
  --SETTING VALUE       set a single setting; flags override presets and files

Presets
{presets}
"""

EXPLAIN_HELP = """
`reverie config --explain PREFIX` prints type, default and meaning of the settings of a
group (`run`, `dreamer.rssm`); `reverie config` prints the values of all settings.
"""


class Command(NamedTuple):
    """A command of `reverie`, and its help text."""

    function: Callable[[list[str]], int]
    """Its docstring is the summary of the command."""
    usage: str
    """Lines of usage, without `reverie COMMAND`."""
    help: Callable[[list[str]], str] = lambda argv: ""
    """Returns the options part of the help text for these arguments."""

    @property
    def summary(self) -> str:
        return inspect.getdoc(self.function) or ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    if argv is not None:  # called from Python code
        return _run(list(argv))
    argv = sys.argv[1:]
    # Store the start time as the time of the last output: after some seconds without
    # output, a status line is printed.
    record_output()
    warnings.showwarning = _show_warning
    open_standard_streams()
    code = _run(argv)
    # ignore Ctrl-C while the interpreter exits: it would only print a traceback
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    error = flush_output()
    # training also writes its results to files, so it does not need standard output
    needs_output = not argv or argv[0] not in TRAINING_COMMANDS or _asks_help(argv)
    return _output_failed(error) if error and needs_output and not code else code


def _run(argv: list[str]) -> int:
    """Run a command; errors that the user can correct are printed with their fix."""
    try:
        return _dispatch(argv)
    except UserError as error:
        from reverie.cli.originals import explain_original

        # the command line may be one of another implementation, such as dreamerv3
        return _fail(explain_original(argv, error, COMMANDS) or str(error))
    except Interrupted as stop:
        print_message(
            "Saved. Run the same command again to resume."
            if stop.is_saved
            else "Stopped before the first step, so nothing was saved."
        )
        return stop.exit_code
    except KeyboardInterrupt as stop:
        print_message("reverie: stopped without saving.")
        return stop.exit_code if isinstance(stop, StoppedWithoutSaving) else 130
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        # an error without a file name may come from writing to standard output
        if isinstance(error, OSError) and error.filename is None:
            output = flush_output()
            if output is not None and output.errno == error.errno:
                return _output_failed(output)
        message = _describe_system_error(error)
        if message is None:
            raise
        return _fail(message)


def _output_failed(error: OSError) -> int:
    """Report that standard output cannot be written, and return the exit code."""
    if isinstance(error, BrokenPipeError):
        return 0  # the program that reads the output, such as `head`, has exited
    return _fail(
        f"The output could not be written ({error.strerror}).\n"
        "  Fix: send it to a terminal, or to a file on a disk with free space."
    )


def _describe_system_error(error: Exception) -> str | None:
    """Return a message for memory and file errors; None for other errors."""
    from reverie.run.memory import describe_out_of_memory, is_out_of_memory

    if is_out_of_memory(error):
        return (
            f"{describe_out_of_memory(error, 'running this command')}\n  Fix: use "
            "smaller batches, sequences or replay buffers, or fewer --episodes."
        )
    code = error.errno if isinstance(error, OSError) else None
    if TOO_MANY_FILES in str(error):
        code = errno.EMFILE
    if code is None or code not in FILE_ERRORS:
        return None
    return describe_error(code, getattr(error, "filename", None))


def _fail(message: str) -> int:
    """Print an error message and return the exit code for invalid input."""
    print_message(f"reverie: {message}")
    return 2


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    print_message(f"warning: {message}")


def _dispatch(argv: list[str]) -> int:
    """Print the help or the version, or run a command."""
    name, arguments = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help", "help"):
        summaries = {name: command.summary for name, command in COMMANDS.items()}
        rows = [f"  {n:<11} {s[:1].lower()}{s[1:-1]}" for n, s in summaries.items()]
        print(HELP.format(commands="\n".join(rows)), end="")
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
    command, launch = COMMANDS[name], find_launch()
    if launch.world_size > 1 and name not in (*TRAINING_COMMANDS, "bench"):
        raise UserError(
            f"{launch.launcher} has started {launch.world_size} processes, but "
            f"`reverie {name}` runs in a single process.\n"
            f"  Fix: start it without {launch.launcher}."
        )
    if _asks_help(arguments):
        usage = "\n  ".join(f"reverie {name} {x}" for x in command.usage.split("\n"))
        text = f"{command.summary}\n\nUsage\n  {usage}\n\n{command.help(arguments)}"
        print(text.rstrip())
        return 0
    without_trust = [word for word in arguments if word != TRUST]
    with allow(_import_paths(without_trust), everything=TRUST in arguments):
        return command.function(without_trust)


def _import_paths(argv: Sequence[str]) -> list[str]:
    """Return the `module:Class` paths of user code in a command line."""
    start = next((i for i, word in enumerate(argv) if word[:2] == "--"), len(argv))
    flags = argv[start:]
    if not any(":" in word for word in flags):
        return []
    with StatusLine("importing PyTorch"):
        from reverie.run.config import import_paths

    return list(import_paths([dict(configs.parse_flags(flags))]).values())


def _asks_help(argv: list[str]) -> bool:
    return "-h" in argv or "--help" in argv


def _settings_help(argv: list[str], command: str = "train") -> str:
    """Return the help on presets, top-level settings and groups of settings."""
    from reverie.run.config import Config

    base = BASE_PRESETS[command]
    layers = [configs.get_preset(name) for name in base]
    defaults: dict[str, Any] = {
        name: preset[name]
        for preset in layers
        for name in ("task", "agent")
        if name in preset
    }

    rows = []
    for path in sorted(configs.PRESETS_FOLDER.glob("*.yaml")):
        names = ", ".join(configs.read_config_file(path))
        rows.append(
            f"  {path.stem:<16} " + f"\n{' ' * 19}".join(textwrap.wrap(names, 67))
        )
    settings = explain_groups(Config, defaults)
    text = SETTINGS_HELP.format(presets="\n".join(rows))
    if base:
        names = " and ".join(base)
        text += f"  `reverie {command}` applies {names} before all other presets.\n"
    return f"{text}\nSettings\n{settings}\n{EXPLAIN_HELP}"


def _train_help(argv: list[str], command: str = "train") -> str:
    """Return the help on presets, settings and options of a training command."""
    settings = _settings_help(argv, command)
    return f"{settings}\nOptions that are not settings\n{explain(TrainOptions)}"


def _options_help(path: str, intro: str = "") -> Callable[[list[str]], str]:
    """Return a `Command.help` function that explains the options in a dataclass.

    `path` is the import path of the dataclass, which is imported only when the help is
    printed. `intro` is printed before the options.
    """
    return lambda argv: f"{intro}Options\n{explain(resolve_name(path))}"


# parts of usage lines
SETTINGS = "[--configs PRESET ...] [--config FILE ...] [--SETTING VALUE ...]"
RECORDINGS = f"--offline.data PATH {SETTINGS}"

COMMANDS: dict[str, Command] = {
    "train": Command(train, f"{SETTINGS} [--profile N]", _train_help),
    "train_eval": Command(train_eval, f"{SETTINGS} [--profile N]", _train_help),
    "offline": Command(offline, RECORDINGS, partial(_train_help, command="offline")),
    "bc": Command(
        bc, f"[--bc.run LOGDIR] {RECORDINGS}", partial(_train_help, command="bc")
    ),
    "eval": Command(
        evaluate,
        "LOGDIR [--episodes 100] [--videos 0] [--task TASK] [--SETTING VALUE ...]\n"
        "LOGDIR --follow                  evaluate new checkpoints during training\n"
        "LOGDIR LOGDIR [--episodes 100]   compare the segment boundaries of two runs",
        _options_help("reverie.cli.evaluate:EvalOptions"),
    ),
    "play": Command(
        play,
        "LOGDIR [-u | -a | -w | -e] [-s] [--header] [--port 8642] [--no-open] "
        "[--SETTING VALUE ...]",
        _options_help("reverie.cli.play:PlayOptions", f"{PLAY_HELP}\n"),
    ),
    "view": Command(
        view,
        "FOLDER [--port 8642] [--no-open]\nFOLDER --export DIR",
        _options_help("reverie.cli.play:ViewOptions"),
    ),
    "sweep": Command(
        sweep,
        "FILE [COMMAND] [--jobs 1] [--trials 20] [--logdir DIR] [--SETTING VALUE ...]\n"
        "--logdir DIR [--trials 20]       continue a sweep, with its saved settings",
        _options_help("reverie.sweep.spec:SweepConfig"),
    ),
    "campaign": Command(
        campaign,
        "--tasks TASK ... [--seeds 5] [--configs PRESET ...] [--per-gpu 3] "
        "[--logdir DIR] [--SETTING VALUE ...]\n"
        "FILE.yaml [--SETTING VALUE ...]\n"
        "FOLDER            resume this campaign, or start another worker\n"
        "FOLDER --status   print the state of all runs",
        _options_help("reverie.campaign.spec:CampaignConfig", f"{CAMPAIGN_HELP}\n"),
    ),
    "demo": Command(demo, "[--logdir DIR]"),
    "bench": Command(
        bench,
        f"{SETTINGS}\n"
        "--compare [--configs PRESET ...] [--SETTING VALUE ...]\n"
        "--end-to-end [--bench.updates 200] [--configs PRESET ...] "
        "[--SETTING VALUE ...]\n"
        "--bench.vary algorithm|size|batch|length|image [--SETTING VALUE ...]\n"
        "envs [--tasks TASK ...] [--counts 8 16] [--env.SETTING VALUE ...]",
        bench_help,
    ),
    "config": Command(show_config, f"{SETTINGS}\n--explain [PREFIX]", _settings_help),
    "data": Command(
        data,
        "inspect|stats|view PATH\nconvert|split SRC DST\nmerge SRC SRC ... DST\n"
        "replay FILE --task TASK\nrender FILE DST --task TASK\ndemos FILE\n"
        "export LOGDIR FOLDER\nballs|maze --out FOLDER",
        data_help,
    ),
    "draw": Command(
        draw,
        "openloop LOGDIR [--clips 6] [--observed 16] [--horizon 48] [--out FILE]\n"
        "boundaries LOGDIR [--idx 0] [--num-samples 10] [--out FOLDER]",
        draw_help,
    ),
    "plot": Command(
        plot,
        "RUN ... [--out FILE ...] [--kind curves|profile|aggregates|improvement] "
        "[--baseline dreamerv3]",
        _options_help("reverie.cli.plot:PlotOptions"),
    ),
    "report": Command(
        report,
        "RUN ... [--format md|latex|csv|json] [--out FILE] [--baseline dreamerv3]",
        _options_help("reverie.cli.report:ReportOptions"),
    ),
    "pack": Command(pack, "LOGDIR FILE.reverie"),
    "push": Command(
        push,
        "LOGDIR USER/NAME [--private True] [--dry-run DIR]",
        _options_help("reverie.cli.share:PushOptions"),
    ),
    "export": Command(
        export,
        "LOGDIR [--format onnx|torch] [--out DIR] [--sample] [--with-world]",
        _options_help("reverie.cli.export:ExportOptions"),
    ),
    "envs": Command(list_envs, "[SUITE]"),
    "check-env": Command(check_env, "TASK [--SETTING VALUE ...]"),
}
