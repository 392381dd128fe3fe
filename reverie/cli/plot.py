"""`reverie plot`: figures of the results of several runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reverie.api import UserError
from reverie.cli.arguments import explain_path_errors
from reverie.cli.report import (
    check_choice,
    check_score_options,
    find_baselines,
    missing_values_error,
    parse_runs,
)

KINDS = ("curves", "profile", "aggregates", "improvement")


@dataclass(frozen=True)
class PlotOptions:
    out: tuple[str, ...] = ("plot.png",)
    """Files to write: .png, .svg or .pdf."""
    kind: str = "curves"
    """Figure: curves (scores during training), profile (fraction of runs above each
    final score), aggregates (mean, median, interquartile mean and optimality gap of
    final scores) or improvement (probability that one method is better than
    another)."""
    y: str = "episode/score"
    """Metric to draw: a key of `scores.jsonl` (`episode/...`) or `metrics.jsonl`, or
    crafter_score."""
    x: str = "frames"
    """Unit of the x axis: frames (of the simulator), step (of the agent) or hours."""
    by: tuple[str, ...] = ()
    """Settings that distinguish methods; empty for all settings that differ."""
    bins: int = 40
    """Maximum number of bins of a curve. Episodes that end in a bin are averaged."""
    window: float = 0.05
    """A final score is the mean of the episodes in this last fraction of the budget."""
    budget: float = 0.0
    """Length of the training in units of x; 0 for the longest run of each task."""
    baseline: tuple[str, ...] = ()
    """Published results to draw, as horizontal lines over curves: dreamerv3,
    delta_iris, iris or simple."""


def plot(argv: list[str]) -> int:
    """Draw learning curves and aggregates of several runs as PNG, SVG or PDF."""
    paths, options = parse_runs(argv, "reverie plot", PlotOptions)
    _check_options(options)
    return _write_figure(paths, options)


def _check_options(options: PlotOptions) -> None:
    """Raise an error if an option is not valid."""
    from reverie.render.panels import FORMATS

    check_choice("kind", options.kind, KINDS)
    check_score_options(options.x, options.window, options.budget)
    if options.bins < 1:
        raise UserError(
            f"--bins must be at least 1, but is {options.bins}.\n  Fix: --bins 40"
        )
    for name in options.out or ("",):
        if Path(name).suffix.lower().removeprefix(".") not in FORMATS:
            raise UserError(
                f"Figures are written as .{', .'.join(FORMATS)}, not as {name!r}.\n"
                "  Fix: --out plot.png"
            )


def _write_figure(paths: list[str], options: PlotOptions) -> int:
    """Draw the figure and write it to all files of `--out`."""
    from reverie.render.panels import encode_figure
    from reverie.results import plot as plots
    from reverie.results.report import make_report
    from reverie.results.runs import find_runs, group_runs
    from reverie.storage.atomic import write_file

    runs = find_runs(paths)
    groups = group_runs(runs, options.by)
    baselines = find_baselines(options.baseline, runs, options.y)
    for name, baseline in zip(options.baseline, baselines, strict=True):
        if options.kind == "profile" and not baseline.runs:
            raise UserError(
                "A performance profile needs the scores of single runs, but only mean "
                f"scores of {name} are published.\n"
                "  Fix: remove --baseline, or use --kind curves."
            )
    points = plots.read_points(groups, options.y, options.x)
    if not points:
        raise missing_values_error(runs, options.y, options.x)
    if options.kind == "curves":
        figure = plots.draw_curves(
            points, options.y, options.x, options.bins, baselines
        )
    else:
        report = make_report(
            groups, options.y, options.x, options.budget, options.window, baselines
        )
        if options.kind == "profile":
            figure = plots.draw_profiles(report)
        elif options.kind == "aggregates":
            figure = plots.draw_aggregates(report)
        else:
            figure = plots.draw_improvements(report)
    for name in options.out:
        path = Path(name).expanduser()
        with explain_path_errors():
            write_file(path, encode_figure(figure, path.suffix.lower()[1:]))
        print(name)
    return 0
