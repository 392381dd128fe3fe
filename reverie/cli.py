"""The `reverie` command: read the arguments, call one function of `run/`."""

from __future__ import annotations

import contextlib
import errno
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from reverie import config as configs
from reverie.api import UserError

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


REFUSED = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
"""What the system says of paths that cannot be read or written."""

BELOW: dict[str, tuple[str, ...]] = {
    "train": (),
    "train_eval": (),
    "offline": ("offline",),
    "bc": ("offline", "bc"),
}
"""Commands that train, and the blocks that lie beneath all others in each."""


class Command(NamedTuple):
    function: Callable[[list[str]], int]
    usage: str
    summary: str
    settings: bool = True


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
        return 0
    return command.function(rest)


class Settings(NamedTuple):
    """Command-line arguments, sorted: what was named by position, and the settings."""

    places: list[str]
    names: list[str]
    files: list[str]
    flags: list[tuple[str, Any]]

    def take(self, name: str, default: Any) -> Any:
        """Remove a flag of the command's own and return its value."""
        for pair in self.flags:
            if pair[0].replace("-", "_") == name:
                self.flags.remove(pair)
                return pair[1]
        return default


def _settings(arguments: list[str], places: int = 0) -> Settings:
    count = 0
    while count < min(places, len(arguments)) and arguments[count][:2] != "--":
        count += 1
    names: list[str] = []
    files: list[str] = []
    flags: list[tuple[str, Any]] = []
    for name, value in configs.parse_flags(arguments[count:]):
        if name in ("configs", "config"):
            if value is None:
                raise UserError(f"--{name} needs a value.\n  Fix: --{name} NAME")
            values = value if isinstance(value, list) else [value]
            words = [w for text in values for w in text.split(",") if w]
            (names if name == "configs" else files).extend(words)
        else:
            flags.append((name, value))
    return Settings(arguments[:count], names, files, flags)


def _resolve(settings: Settings) -> Any:
    from reverie.run.config import resolve

    return resolve(settings.names, settings.files, settings.flags)


def _acted_in(config: Any) -> Any:
    """A config for those who want an environment."""
    from reverie.data.sources import is_source

    if is_source(config.task):
        raise UserError(
            f"{config.task} is there to be watched: it has no environment.\n"
            f"  Fix: reverie train --agent watcher --task {config.task}, or name a "
            "task that `reverie envs` lists."
        )
    return config


def _training_config(settings: Settings, below: Sequence[str] = ()) -> Any:
    """The config of a run; `--logdir` alone resumes with the settings saved there.

    The blocks `below` lie beneath all others.
    """
    from reverie.run import folder
    from reverie.run.config import with_flags

    logdir = dict(settings.flags).get("logdir")
    known = isinstance(logdir, str) and (folder.place(logdir) / "config.yaml").exists()
    asks_more = settings.names or settings.files
    if known and not asks_more:
        harmless = all(
            name.replace("-", "_").startswith(folder.HARMLESS)
            for name, _ in settings.flags
        )
        if harmless:
            saved = folder.read_config(folder.place(str(logdir)))
            return with_flags(saved, settings.flags)
    names = [*below, *settings.names]
    blocks = settings._replace(names=names, flags=[])
    if below and _resolve(blocks).run.clock == "phases":
        names.append("in_updates")  # recordings have no phases of acting
    return _resolve(settings._replace(names=names))


def _train(arguments: list[str]) -> int:
    from reverie.run.train import train

    return _finish(train, arguments)


def _train_eval(arguments: list[str]) -> int:
    from reverie.run.train_eval import train_eval

    return _finish(train_eval, arguments)


def _offline(arguments: list[str]) -> int:
    from reverie.run.offline import offline

    return _finish(offline, arguments, BELOW["offline"])


def _bc(arguments: list[str]) -> int:
    from reverie.run.offline import offline

    return _finish(offline, arguments, BELOW["bc"])


def _finish(
    loop: Callable[[Any], Path], arguments: list[str], below: Sequence[str] = ()
) -> int:
    from reverie.run.signals import Interrupted

    try:
        path = loop(_training_config(_settings(arguments), below))
    except Interrupted as stop:
        print("Saved. The same command resumes.", file=sys.stderr)
        return stop.exit_code
    print(f"Done: {path}", file=sys.stderr)
    return 0


def _eval(arguments: list[str]) -> int:
    from reverie.data.sources import is_source
    from reverie.run import judge
    from reverie.run.checkpoint import locate
    from reverie.run.evaluate import FAILURES, evaluate
    from reverie.run.folder import home_of, read_config
    from reverie.run.measure import (
        compare_boundaries,
        in_words,
        measure_boundaries,
        which,
    )

    settings = _settings(arguments, places=2)
    if not settings.places:
        raise UserError("Which run?\n  Fix: reverie eval LOGDIR")
    episodes = _whole(settings, "episodes", 100)
    if episodes < 1:
        raise UserError("--episodes takes at least one.\n  Fix: --episodes 100")
    videos = _whole(settings, "videos", 0)
    failures = _whole(settings, "failures", FAILURES)
    if settings.names or settings.files:
        raise UserError(
            "An evaluation uses the settings saved with the run.\n"
            "  Fix: leave out --configs and --config; single settings may change."
        )
    logdir = Path(settings.places[0])
    config = read_config(home_of(locate(logdir)))
    if len(settings.places) > 1:
        if not is_source(config.task):
            raise UserError(
                f"{logdir} is evaluated by itself: only boundaries of runs that watch "
                f"are compared.\n  Fix: reverie eval {logdir}"
            )
        other = Path(settings.places[1])
        found = compare_boundaries(logdir, other, episodes, settings.flags)
        print(
            f"Boundaries agree to {found['agreement']:.3f} (Cohen's kappa: 1 is "
            f"always, 0 as by chance) in {which(found)}; they begin at "
            "{:.3f} and {:.3f} of all frames.".format(*found["rates"])
        )
        return 0
    if config.offline.data and "task" not in dict(settings.flags):
        print(judge.in_words(judge.judge_run(logdir, settings.flags)))
        return 0
    if is_source(config.task):
        print(in_words(measure_boundaries(logdir, episodes, settings.flags)))
        return 0
    result = evaluate(
        logdir, episodes, settings.flags, videos=videos, failures=failures
    )
    if "success" in result:
        low, high = 100 * result["success_low"], 100 * result["success_high"]
        print(
            f"{result['task']}: success {100 * result['success']:.1f} % "
            f"(95 % between {low:.1f} and {high:.1f})"
        )
    print(
        f"{result['task']}: score {result['score']:.4g} ± {result['score_std']:.4g} "
        f"(min {result['score_min']:.4g}, max {result['score_max']:.4g}), "
        f"length {result['length']:.4g}, over {result['count']:.0f} episodes"
    )
    if "files" in result:
        print("\n".join(["Films, and episodes that failed:", *result["files"]]))
    return 0


def _whole(settings: Settings, name: str, default: int) -> int:
    """A flag of the command's own that counts something."""
    value = str(settings.take(name, default))
    if not value.isdigit():
        raise UserError(f"--{name} takes a whole number.\n  Fix: --{name} 5")
    return int(value)


def _sweep(arguments: list[str]) -> int:
    from reverie.run.signals import Interrupted
    from reverie.run.sweep import sweep

    try:
        sweep(_sweep_request(arguments))
    except Interrupted as stop:
        print("Saved. The same command goes on.", file=sys.stderr)
        return stop.exit_code
    return 0


def _sweep_request(arguments: list[str]) -> Any:
    """The plan of a sweep: a file, or what a folder of one says."""
    from reverie.run.folder import place
    from reverie.run.sweep import PLAN
    from reverie.run.sweep_plan import make_plan

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
    return make_plan(Path(places[0]), command, words, _config_of)


def _config_of(command: str, words: list[str]) -> Any:
    """The config of a command that trains."""
    if command not in BELOW:
        raise UserError(
            f"A sweep cannot run {command!r}.{configs.suggest(command, BELOW)}\n"
            f"  Fix: choose from {', '.join(BELOW)}."
        )
    return _training_config(_settings(words), BELOW[command])


def _demo(arguments: list[str]) -> int:
    from reverie.run.demo import demo

    return demo(_settings(arguments).flags)


def _bench(arguments: list[str]) -> int:
    if arguments[:1] == ["envs"]:
        return _bench_envs(arguments[1:])
    from reverie.run.bench import bench, compare

    options, resolve = _bench_request(arguments)
    if options.vary:
        from reverie.run.growth import growth

        growth(resolve, options)
    elif options.compare:
        compare(resolve([], {}), options)
    else:
        bench(resolve([], {}), options)
    return 0


def _bench_request(arguments: list[str]) -> tuple[Any, Callable[..., Any]]:
    """What to measure, and the config for it with more blocks and settings on top."""
    from reverie.run.bench import BenchConfig

    settings = _settings(arguments)
    own = [("compare", settings.take("compare", "false") or "true")]
    flags = []
    for name, value in settings.flags:
        if name.startswith("bench."):
            own.append((name.removeprefix("bench."), value))
        else:
            flags.append((name, value))
    layer = configs.flag_layer(BenchConfig, own, BenchConfig())
    options = configs.resolve(BenchConfig, [("the flags", layer)])

    def resolve(blocks: list[str], more: dict[str, Any]) -> Any:
        names = [*settings.names, *blocks]
        whole = Settings([], names, settings.files, [*more.items(), *flags])
        return _acted_in(_resolve(whole))

    return options, resolve


def _bench_envs(arguments: list[str]) -> int:
    from reverie.run.bench_envs import bench_envs

    bench_envs(*_bench_envs_request(arguments))
    return 0


def _bench_envs_request(arguments: list[str]) -> tuple[Any, Any]:
    """What to measure, and the settings of environments."""
    from reverie.run.bench_envs import EnvBenchConfig

    settings = _settings(arguments)
    mine = set(EnvBenchConfig.__dataclass_fields__)
    own = [(n, v) for n, v in settings.flags if n.replace("-", "_") in mine]
    more = [pair for pair in settings.flags if pair not in own]
    layer = configs.flag_layer(EnvBenchConfig, own, EnvBenchConfig())
    options = configs.resolve(EnvBenchConfig, [("the flags", layer)])
    return options, _resolve(settings._replace(flags=more)).env


def _config(arguments: list[str]) -> int:
    print(configs.dump(_resolve(_settings(arguments))), end="")
    return 0


def _envs(arguments: list[str]) -> int:
    from reverie import envs

    if len(arguments) > 1:
        raise UserError("One suite at a time.\n  Fix: reverie envs SUITE")
    print(envs.table(*arguments))
    return 0


def _check_env(arguments: list[str]) -> int:
    from reverie import envs
    from reverie.envs.check import check_env, describe
    from reverie.envs.seat import summary

    settings = _settings(arguments, places=1)
    if not settings.places:
        raise UserError("Which task?\n  Fix: reverie check-env TASK")
    settings.flags.append(("task", settings.places[0]))
    config = _acted_in(_resolve(settings))
    try:
        env = envs.make(config.task, config.env, config.seed)
    except UserError:
        raise
    except Exception as error:  # whatever the code of its author raises
        raise UserError(
            f"{config.task} could not be built: {summary(error)}\n"
            "  Fix: mend that, and check it again."
        ) from error
    try:
        findings = check_env(env)
    finally:
        env.close()
    print(describe(config.task, env, findings))
    return 2 if any(finding.severity == "error" for finding in findings) else 0


def _data(arguments: list[str]) -> int:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb not in DATA:
        raise UserError(
            f"`reverie data` takes one of {', '.join(DATA)}, not {verb!r}."
            f"{configs.suggest(verb, DATA)}\n  Fix: reverie data inspect PATH, "
            "or reverie data export LOGDIR FOLDER"
        )
    with _naming_paths():
        return DATA[verb](rest)


@contextlib.contextmanager
def _naming_paths() -> Iterator[None]:
    """What the system refuses about a path becomes a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED or not error.filename:
            raise
        raise UserError(
            f"{error.filename} cannot be used: {error.strerror}.\n"
            "  Fix: name a file or folder that you may read, or write."
        ) from None


def _data_verb(verb: str, arguments: list[str]) -> int:
    from reverie.run.datasets import VERBS

    places, options = _data_request(verb, arguments)
    return VERBS[verb].function(*places, options)


def _data_request(verb: str, arguments: list[str]) -> tuple[list[str], Any]:
    """What a verb on recordings is to work on, and its options."""
    from reverie.run.datasets import VERBS

    _, schema, wanted, shared = VERBS[verb]
    settings = _settings(arguments, places=len(wanted))
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
    whole = _resolve(settings._replace(flags=task))
    return {name: value for name, value in asdict(whole).items() if name in shared}


def _data_balls(arguments: list[str]) -> int:
    from reverie.data.sources.balls import write_balls

    known = {"train": 2000, "test": 500, "length": 30, "seed": 0, "dt": 2.0}
    return _write_sequences(write_balls, "balls", known, arguments)


def _data_maze(arguments: list[str]) -> int:
    from reverie.data.sources.maze import write_maze

    known = {"train": 1000, "test": 100, "length": 300, "seed": 0}
    return _write_sequences(write_maze, "maze", known, arguments)


def _write_sequences(
    write: Callable[..., int], name: str, known: dict[str, Any], arguments: list[str]
) -> int:
    given = configs.parse_flags(arguments)
    options = _options(given, {"out": "", **known}, f"reverie data {name}")
    folder = options.pop("out")
    if not folder:
        raise UserError(f"Where to?\n  Fix: reverie data {name} --out FOLDER")
    for option, usual in known.items():
        if option != "seed" and not options[option]:
            raise UserError(f"--{option} must be above 0.\n  Fix: --{option} {usual}")
    count = write(Path(folder).expanduser(), **options)
    print(
        f"{count} sequences in {folder}; --task watch_{name} --source.folder {folder} "
        "reads them."
    )
    return 0


def _options(
    flags: list[tuple[str, Any]], known: dict[str, Any], command: str
) -> dict[str, Any]:
    """Flags of a command's own, by the names and types of their defaults."""
    found = dict(known)
    for flag, value in flags:
        name = flag.replace("-", "_")
        if name not in known:
            raise UserError(
                f"`{command}` has no option --{flag}.{configs.suggest(name, known)}\n"
                f"  Fix: choose from {', '.join('--' + k for k in known)}."
            )
        try:
            found[name] = type(known[name])(value)
            counts = not isinstance(known[name], str)
            wrong = counts and not 0 <= found[name] < math.inf
        except (TypeError, ValueError):
            wrong = True
        if wrong or value is None:
            raise UserError(
                f"--{flag} cannot be {value!r}.\n  Fix: --{flag} {known[name]}"
            )
    return found


def _view(arguments: list[str]) -> int:
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if verb not in VIEWS:
        raise UserError(
            f"`reverie view` takes one of {', '.join(VIEWS)}, not {verb!r}."
            f"{configs.suggest(verb, VIEWS)}\n  Fix: reverie view boundaries LOGDIR"
        )
    with _naming_paths():
        return VIEWS[verb](rest)


def _view_boundaries(arguments: list[str]) -> int:
    from reverie.run.config import Config
    from reverie.run.view import view_boundaries

    if not arguments or arguments[0].startswith("--"):
        raise UserError("Which run?\n  Fix: reverie view boundaries LOGDIR")
    known = {"idx": 0, "num_samples": 10, "out": ""}
    given, every = configs.parse_flags(arguments[1:]), configs.names(Config)
    flags = [pair for pair in given if pair[0].replace("-", "_") in every]
    own = [pair for pair in given if pair not in flags]
    options = _options(own, known, "reverie view boundaries")
    folder = Path(options["out"]).expanduser() if options["out"] else None
    logdir, samples = Path(arguments[0]), options["num_samples"]
    for path in view_boundaries(logdir, options["idx"], samples, folder, flags):
        print(path)
    return 0


def _data_export(arguments: list[str]) -> int:
    from reverie.run.export import export_episodes

    if len(arguments) != 2:
        raise UserError(
            "`reverie data export` takes two folders.\n"
            "  Fix: reverie data export LOGDIR FOLDER"
        )
    count = export_episodes(Path(arguments[0]), Path(arguments[1]).expanduser())
    print(f"{count} episodes in {arguments[1]}; --run.episodes reads them back.")
    return 0


DATA: dict[str, Callable[[list[str]], int]] = {
    "export": _data_export,
    "balls": _data_balls,
    "maze": _data_maze,
    **{
        verb: partial(_data_verb, verb)
        for verb in ("inspect", "convert", "split", "stats", "view", "demos")
    },
}
VIEWS: dict[str, Callable[[list[str]], int]] = {"boundaries": _view_boundaries}


COMMANDS: dict[str, Command] = {
    "train": Command(
        _train, "[--configs BLOCK ...] [--SETTING VALUE ...]", "learn a task online"
    ),
    "train_eval": Command(
        _train_eval,
        "[--configs BLOCK ...] [--SETTING VALUE ...]",
        "the same, with evaluations in between",
    ),
    "offline": Command(
        _offline,
        "--offline.data PATH [--configs BLOCK ...] [--SETTING VALUE ...]",
        "learn a world from recordings",
    ),
    "bc": Command(
        _bc,
        "--offline.data PATH [--bc.run LOGDIR] [--configs BLOCK ...] "
        "[--SETTING VALUE ...]",
        "clone the policy that made recordings",
    ),
    "eval": Command(
        _eval,
        "LOGDIR [--episodes 100] [--videos 0] [--failures 10] [--task TASK]\n"
        "    [--SETTING VALUE ...]\n"
        "reverie eval LOGDIR OTHER [--episodes 100]   compares boundaries",
        "measure a trained agent; one of recordings by them, or in a task",
        settings=False,
    ),
    "sweep": Command(
        _sweep,
        "FILE [COMMAND] [--jobs 1] [--trials 20] [--logdir DIR] [--SETTING VALUE ...]\n"
        "    (see docs/sweep.md; --logdir DIR alone goes on)",
        "search for settings: many runs of a command, and the best of them",
        settings=False,
    ),
    "demo": Command(
        _demo,
        "[--logdir DIR]",
        "learn `catch` in minutes, and show the dream",
        settings=False,
    ),
    "bench": Command(
        _bench,
        "[--configs BLOCK ...] [--compare] [--bench.vary size|batch|length|image]\n"
        "    [--bench.seconds 1] [--bench.repeats 3] [--bench.at_once 1]\n"
        "    [--bench.output FILE], or:\n"
        "  envs [--tasks TASK ...] [--counts 8 16] [--seconds 1] [--output FILE]",
        "measure how fast a config is on this machine",
    ),
    "config": Command(
        _config,
        "[--configs BLOCK ...] [--SETTING VALUE ...]",
        "print the resolved settings",
    ),
    "data": Command(
        _data,
        "inspect|stats|view PATH, convert|split SRC DST, demos FILE,\n"
        "    export LOGDIR FOLDER, or: balls|maze --out FOLDER (see docs/offline.md)",
        "look at recordings, convert, split and measure them; write some",
        settings=False,
    ),
    "view": Command(
        _view,
        "boundaries LOGDIR [--idx 0] [--num-samples 10] [--out FOLDER]\n"
        "    [--SETTING VALUE ...]",
        "draw what a run has learnt",
        settings=False,
    ),
    "envs": Command(
        _envs, "[SUITE]", "list suites, tasks and how to install them", False
    ),
    "check-env": Command(
        _check_env, "TASK [--SETTING VALUE ...]", "tell what is wrong with an env"
    ),
}

if __name__ == "__main__":
    sys.exit(main())
