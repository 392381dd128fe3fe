"""`reverie report`: a table of the results of several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import parse_arguments, path_errors

X = ("frames", "step", "hours")


@dataclass(frozen=True)
class ReportOptions:
    format: str = "md"
    """Format of the table: md, latex, csv or json."""
    out: str = ""
    """File to write; empty to print the table."""
    y: str = "episode/score"
    """Metric to report: a key of `scores.jsonl` (`episode/...`) or `metrics.jsonl`."""
    x: str = "frames"
    """Unit of the window: frames of the simulator, step of the agent, or hours."""
    window: float = 0.05
    """Share of the budget, at its end, whose episodes count for the score."""
    budget: float = 0.0
    """Length of the training in units of x; 0 for that of the longest run of a task."""
    by: tuple[str, ...] = ()
    """Settings that distinguish methods; empty for all settings that differ."""
    baseline: str = ""
    """Published results to compare with, for example dreamerv3."""


def report(words: list[str]) -> int:
    """Print a table of the scores of several runs, by task and method."""
    from reverie.results.benchmarks import find_baseline
    from reverie.results.report import FORMATS, make_report
    from reverie.results.runs import find_runs, group_runs
    from reverie.storage.atomic import write_file

    arguments = parse_arguments(words, max_positional=len(words))
    options = arguments.take_options(ReportOptions)
    arguments.refuse_blocks("`reverie report` reads the settings of the runs.")
    fields = tuple(ReportOptions.__dataclass_fields__)
    arguments.refuse_other_flags("reverie report", fields)
    if not arguments.positional:
        raise UserError(
            "`reverie report` needs folders of runs.\n  Fix: reverie report LOGDIR ..."
        )
    _check_choice("format", options.format, tuple(FORMATS))
    _check_choice("x", options.x, X)
    if not 0 < options.window <= 1:
        raise UserError(
            f"--window must be above 0 and at most 1, not {options.window}.\n"
            "  Fix: --window 0.05 for the last 5 % of the budget."
        )
    if options.budget < 0:
        raise UserError(
            f"--budget must not be negative, but is {options.budget}.\n"
            "  Fix: --budget 400000, or remove it."
        )
    runs = find_runs(arguments.positional)
    groups = group_runs(runs, options.by)
    tasks = {run.task for run in runs}
    result = make_report(
        groups,
        options.y,
        options.x,
        options.budget,
        options.window,
        find_baseline(options.baseline, tasks) if options.baseline else None,
    )
    if not result.rows:
        raise UserError(
            f"None of the {len(runs)} runs has values of {options.y!r} over "
            f"{options.x}.\n  Fix: choose a key of scores.jsonl or metrics.jsonl with "
            "--y, or wait until an episode has ended."
        )
    text = FORMATS[options.format](result)
    if options.out:
        with path_errors():
            write_file(Path(options.out).expanduser(), text.encode())
        print(options.out)
    else:
        print(text, end="")
    return 0


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UserError(
            f"--{name} cannot be {value!r}.{configs.suggest(value, choices)}\n"
            f"  Fix: choose from {', '.join(choices)}."
        )
