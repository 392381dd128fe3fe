"""`reverie report`: a table of the results of several runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import explain_path_errors, parse_arguments

if TYPE_CHECKING:
    from reverie.results.benchmarks import Baseline
    from reverie.results.runs import Run

T = TypeVar("T")

X_AXES = ("frames", "step", "hours")
"""Values of `--x`."""


@dataclass(frozen=True)
class ReportOptions:
    format: str = "md"
    """Format of the table: md, latex, csv or json."""
    out: str = ""
    """File to write; empty to print the table."""
    y: str = "episode/score"
    """Metric to report: a key of `scores.jsonl` (`episode/...`) or `metrics.jsonl`, or
    crafter_score."""
    x: str = "frames"
    """Unit of the budget: frames (of the simulator), step (of the agent) or hours."""
    window: float = 0.05
    """The score is the mean of the episodes in this last fraction of the budget."""
    budget: float = 0.0
    """Length of the training in units of x; 0 for the longest run of each task."""
    by: tuple[str, ...] = ()
    """Settings that distinguish methods; empty for all settings that differ."""
    baseline: tuple[str, ...] = ()
    """Published results to compare with: dreamerv3, delta_iris, iris or simple."""


def report(argv: list[str]) -> int:
    """Print a table of the scores of several runs, by task and method."""
    from reverie.storage.atomic import write_file

    paths, options = parse_runs(argv, "reverie report", ReportOptions)
    text = format_report(paths, options)
    if options.out:
        with explain_path_errors():
            write_file(Path(options.out).expanduser(), text.encode())
        print(options.out)
    else:
        print(text, end="")
    return 0


def format_report(paths: Sequence[Path | str], options: ReportOptions) -> str:
    """Return the table of the scores of the runs at these paths."""
    from reverie.results.report import FORMATS, make_report
    from reverie.results.runs import find_runs, group_runs

    check_choice("format", options.format, tuple(FORMATS))
    check_score_options(options.x, options.window, options.budget)
    runs = find_runs(paths)
    groups = group_runs(runs, options.by)
    result = make_report(
        groups,
        options.y,
        options.x,
        options.budget,
        options.window,
        find_baselines(options.baseline, runs, options.y),
    )
    if not result.rows:
        raise missing_values_error(runs, options.y, options.x)
    return FORMATS[options.format](result)


def find_baselines(
    names: Sequence[str], runs: Sequence[Run], key: str
) -> list[Baseline]:
    """Return the published results with these names, for the tasks of the runs."""
    from reverie.results.benchmarks import find_baseline
    from reverie.results.runs import SCORE

    if names and key != SCORE:
        raise UserError(
            f"Published results are scores, which cannot be compared with {key!r}.\n"
            "  Fix: remove --y or --baseline."
        )
    return [find_baseline(name, {run.task for run in runs}) for name in names]


def parse_runs(argv: list[str], command: str, schema: type[T]) -> tuple[list[str], T]:
    """Return the paths of runs, and the options of `reverie report` or `plot`."""
    arguments = parse_arguments(argv, max_positional=len(argv))
    options = arguments.take_options(schema)
    reason = f"`{command}` reads the settings of the runs."
    arguments.refuse_presets(reason, has_settings=False)
    names = [field.name for field in dataclasses.fields(schema)]  # type: ignore
    arguments.refuse_other_flags(command, names)
    if not arguments.positional:
        raise UserError(
            f"`{command}` needs at least one run folder.\n  Fix: {command} LOGDIR ..."
        )
    return arguments.positional, options


def check_score_options(x: str, window: float, budget: float) -> None:
    """Raise if `--x`, `--window` or `--budget` is not valid."""
    check_choice("x", x, X_AXES)
    if not 0 < window <= 1:
        raise UserError(
            f"--window must be above 0 and at most 1, not {window}.\n"
            "  Fix: --window 0.05 for the last 5 % of the budget."
        )
    if budget < 0:
        raise UserError(
            f"--budget must not be negative, but is {budget}.\n"
            "  Fix: --budget 400000, or remove it."
        )


def missing_values_error(runs: Sequence[Run], key: str, x: str) -> UserError:
    """Return the error for runs that have not logged a metric."""
    keys = sorted({name for run in runs for name in run.metric_names()})
    hint = "" if key in keys else configs.suggest(key, keys)
    fix = "wait until an episode has ended"
    if key in keys:
        fix = f"--x frames, because these runs have no times, or {fix}"
    elif keys:
        fix = f"choose a metric with --y: {', '.join(keys[:8])}"
        fix += ", ... (all are in metrics.jsonl)" if len(keys) > 8 else ""
    return UserError(
        f"None of the {len(runs)} runs has values of {key!r} over {x}.{hint}\n"
        f"  Fix: {fix}."
    )


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise unless the value of an option is one of the choices."""
    if value not in choices:
        raise UserError(
            f"--{name} cannot be {value!r}.{configs.suggest(value, choices)}\n"
            f"  Fix: choose from {', '.join(choices)}."
        )
