"""Record Atari 100k runs: scores, curves, and the table in `benchmarks/README.md`.

    reverie campaign benchmarks/atari100k/campaign.yaml --per-gpu 3 --logdir atari
    python benchmarks/atari100k.py atari

Arguments are folders of campaigns, of which the finished runs are recorded, folders of
finished runs, or another folder that this program wrote with `--out`. Recorded runs are
kept if other games, seeds or options are added. Without arguments only the table is
written again.

Writes the scores to `GAME-seedN.jsonl`, their settings, commit, GPU, command and
duration, and which other runs of the campaign ran at the same time, to `runs.json`. The
files of runs with other options than `--configs size12m` have these options in their
names. Writes a curve to `GAME.png`, and the tables to the section Atari 100k of
`README.md`, if the README is in the folder above.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.campaign.queue import QUEUE, Queue, RunStatus
from reverie.render.curve import write_curve
from reverie.results.benchmarks import (
    Baseline,
    find_baseline,
    human_normalized_score,
)
from reverie.results.report import describe_command, format_number
from reverie.results.runs import CONFIG, INDEX, SCORE, SCORES, Run, find_runs
from reverie.results.scores import ScoreWindow
from reverie.results.statistics import AGGREGATES, QUANTILES, RESAMPLES, Statistic
from reverie.run.folder import read_exit_record
from reverie.storage.atomic import write_file, write_json

FOLDER = Path(__file__).parent / "atari100k"
WINDOWS = (
    ScoreWindow(340_000, 440_000, "frames"),
    ScoreWindow(380_000, 400_000, "frames"),
)
"""Frames whose episodes count: the end of the run, which has more episodes, and the
last 5 % of 400,000 frames, as in the published scores."""
COMMON_PRESETS = ("atari100k", "size12m")
COMMON_FLAGS = ("--task", "--seed", "--run.log_every", "--run.save_every", "--device")
"""Presets and flags of commands that are not options of a run."""
SECTION = re.compile(
    r"(?<=<!-- begin atari100k -->\n).*?(?=<!-- end atari100k -->)", re.S
)
"""The part of the README that is written."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="campaigns or runs")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--commit", help="commit of runs that have not recorded it")
    parser.add_argument("--note", help="remark about the machine, such as 'with MPS'")
    parser.add_argument(
        "--frames",
        type=float,
        default=np.inf,
        help="also record runs that were stopped after this many frames",
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for run in find_finished(args.runs, args.frames):
        record(run, args.out, args.commit, args.note)
        print(f"recorded {run.path}")
    runs = find_runs([args.out / INDEX]) if (args.out / INDEX).exists() else []
    table = format_section(runs, args.out.name)
    readme = args.out.parent / "README.md"
    if readme.exists() and SECTION.search(text := readme.read_text()):
        write_file(readme, SECTION.sub(lambda _: f"\n{table}\n", text).encode())
        print(f"wrote the section Atari 100k of {readme}")
    else:
        print(table)


def find_finished(paths: Iterable[Path], frames: float = np.inf) -> list[Run]:
    """Return the finished runs in campaigns and in the other given folders.

    Runs that were stopped after at least `frames` frames are included. Other unfinished
    runs of campaigns are left out, and those given by their path are an error.
    """
    found: list[Run] = []
    for path in paths:
        is_campaign = (path / QUEUE).is_dir()
        runs = runs_of_campaign(Queue(path)) if is_campaign else find_runs([path])
        for run in runs:
            end = max(run.points(SCORE, "frames")[:, 0], default=0.0)
            if not run.path.is_dir() or read_exit_record(run.path).finished:
                found.append(run)
            elif end >= frames:
                note = f"stopped after {end:,.0f} frames"
                found.append(with_note(run, run.about.get("note"), note))
            elif is_campaign:
                print(f"not recorded: {run.path} has not finished ({end:,.0f} frames)")
            else:
                raise SystemExit(f"{run.path} has not finished ({end:,.0f} frames).")
    return [run for run in found if run.task.startswith("atari100k_")]


def runs_of_campaign(queue: Queue) -> list[Run]:
    """Return the runs that have started, each with a note of the runs in parallel."""
    statuses = {
        queue.run_folder(status.run.name): status
        for status in queue.statuses()
        if (queue.run_folder(status.run.name) / CONFIG).is_file()
    }
    runs = find_runs(statuses) if statuses else []
    periods = [find_period(run, statuses[run.path]) for run in runs]
    noted = []
    for run, own in zip(runs, periods, strict=True):
        names = sorted(
            " ".join(filter(None, (title(game_of(other)), find_options(other))))
            for other, period in zip(runs, periods, strict=True)
            if other is not run and own.overlaps(period)
        )
        with_others = f"at the same time as {', '.join(names)}"
        alone = "no other run of the campaign at the same time"
        noted.append(with_note(run, with_others if names else alone))
    return noted


class Period(NamedTuple):
    """When a run was trained (in seconds since 1970), and on which machine."""

    machine: str
    start: float
    end: float

    def overlaps(self, other: Period) -> bool:
        is_same_machine = self.machine == other.machine
        return is_same_machine and self.start < other.end and other.start < self.end


def find_period(run: Run, status: RunStatus) -> Period:
    """Return the period of the last attempt."""
    attempt = status.attempts[-1]
    start = datetime.fromisoformat(run.about["time"]).timestamp()
    end = start + (attempt.seconds or run.seconds or 0.0)
    return Period(str(attempt.claim.get("machine")), start, end)


def with_note(run: Run, *texts: str | None) -> Run:
    """Return the run with a note that consists of the texts that are given."""
    return replace(run, about={**run.about, "note": ", ".join(filter(None, texts))})


def record(run: Run, out: Path, commit: str | None, note: str | None) -> None:
    """Copy the scores of a run, add it to the index, and plot all runs of its game."""
    game, command, options = game_of(run), find_command(run), find_options(run)
    name = "-".join(filter(None, (game, options, f"seed{run.seed}.jsonl")))
    source = run.path / SCORES if run.path.is_dir() else run.path
    shutil.copyfile(source, out / name)
    index = json.loads((out / INDEX).read_text()) if (out / INDEX).exists() else {}
    size = re.search(r"\bsize\d+m\b", command)
    index[name] = {
        "settings": {
            "task": run.task,
            "agent": run.agent,
            "size": size[0] if size else run.settings.get("size", ""),
            "seed": run.seed,
            **({"options": options} if options else {}),
        },
        "repeat": run.repeat,
        "commit": run.about.get("commit") or commit or "",
        "gpu": run.about.get("gpu") or "",
        "command": command,
        "seconds": round(run.seconds) if run.seconds else None,
        "note": with_note(run, run.about.get("note"), note).about["note"],
    }
    write_json(out / INDEX, dict(sorted(index.items())))
    curves = {}
    for path in sorted(out.glob(f"{game}-*seed*.jsonl")):
        label = path.stem.removeprefix(f"{game}-").replace("-seed", " seed")
        curves[re.sub(r"seed(\d+)$", r"seed \1", label)] = path
    write_curve(out / f"{game}.png", curves, f"Atari 100k {title(game)}")


def find_command(run: Run) -> str:
    """Return the command of a run without `--logdir` and `--trust`."""
    command = describe_command(run.about.get("command"))
    return re.sub(r" --(logdir ('[^']*'|\S+)|trust\b)", "", command)


def find_options(run: Run) -> str:
    """Return the presets and flags that are not those of the standard run.

    They are joined to a part of a file name, such as `curious_replay-harmony`.
    """
    options: list[str] = []
    words = [*shlex.split(find_command(run)), "--"]
    for i, word in enumerate(words):
        if not word.startswith("--"):
            continue
        stop = next((j for j in range(i + 1, len(words)) if words[j][:2] == "--"), i)
        values = words[i + 1 : stop]
        if word == "--configs":
            options += [x for x in values if x not in COMMON_PRESETS]
        elif word not in COMMON_FLAGS and word != "--":
            options.append(word[2:].rpartition(".")[2])
            options += [x for x in values if x != "True"]
    return "-".join(re.sub(r"[^\w.]+", "_", x) for x in options)


def format_section(runs: list[Run], folder: str) -> str:
    """Return the tables of all games, one for each set of options."""
    if not runs:
        return "No runs are recorded."
    by_options: dict[str, list[Run]] = {}
    for run in sorted(runs, key=lambda run: options_of(run)):
        by_options.setdefault(options_of(run), []).append(run)
    baseline = find_baseline("dreamerv3/atari100k", [run.task for run in runs])
    tasks = {run.task for run in runs}
    parts = [
        f"{len(tasks)} of the {len(baseline.scores)} games are recorded:",
        "",
        f"- score: mean ± standard deviation of the {WINDOWS[0]}",
        f"- score at 400k: mean of the {WINDOWS[1]}, as in the published scores",
        f"- published: mean ± standard deviation over {max(baseline.seeds.values())} "
        "seeds of the original with 200 M parameters",
        "- normalized: human-normalized score (0: random policy, 1: human)",
        "- seconds: duration of the training, from the log of the run",
        f"- commit: {describe_commits(runs)}",
        "",
    ]
    for options, group in by_options.items():
        if options:
            parts += [f"Runs with the options `{options}`:", ""]
        parts += [*format_table(group, folder, baseline), ""]
    return "\n".join(parts)


def format_table(runs: Sequence[Run], folder: str, baseline: Baseline) -> list[str]:
    """Return the table of some runs, and the aggregates over their games."""
    tasks = sorted({run.task for run in runs})
    parts = [
        "| game | seed | score | episodes | score at 400k | episodes | published | "
        "normalized | seconds | machine | commit |",
        "| -- | -- | -- | -- | -- | -- | -- | -- | -- | -- | -- |",
    ]
    for run in sorted(runs, key=lambda run: (run.task, run.seed)):
        end, budget = (episodes(run, window) for window in WINDOWS)
        game, task = game_of(run), run.task
        seconds = run.seconds
        machine = ", ".join(filter(None, (run.about["gpu"], run.about.get("note"))))
        cells = [
            f"[{title(game)}]({folder}/{run.path.name}) ([curve]({folder}/{game}.png))",
            str(run.seed),
            f"{format_number(end.mean())} ± {format_number(end.std(ddof=1))}"
            if len(end) > 1
            else mean_text(end),
            str(len(end)),
            mean_text(budget),
            str(len(budget)),
            f"{format_number(baseline.scores[task])} ± "
            f"{format_number(baseline.stds[task])}",
            f"{human_normalized_score(task, end.mean()):.2f}" if len(end) else "",
            f"{seconds:.0f}" if seconds else "",
            machine,
            run.about.get("commit", ""),
        ]
        parts.append(f"| {' | '.join(cells)} |")
    count = "this game" if len(tasks) == 1 else f"these {len(tasks)} games"
    parts += [
        "",
        f"Human-normalized scores over {count}, with 95 % bootstrap intervals over "
        "games:",
        "",
        f"| scores | {' | '.join(AGGREGATES)} |",
        "| -- |" + " -- |" * len(AGGREGATES),
    ]
    for window in WINDOWS:
        scores = {t: mean_score(runs, t, window) for t in tasks}
        known = {t: x for t, x in scores.items() if x is not None}
        label = f"{window.start:,.0f} to {window.end:,.0f} frames"
        if 0 < len(known) < len(tasks):
            label += f", {len(known)} games with episodes"
        if known:
            parts.append(aggregate_row(label, known))
    published = {task: baseline.scores[task] for task in tasks}
    parts.append(aggregate_row("published, the same games", published))
    if len(published) < len(baseline.scores):
        label = f"published, all {len(baseline.scores)} games"
        parts.append(aggregate_row(label, baseline.scores))
    return parts


def describe_commits(runs: Iterable[Run]) -> str:
    """Return the commits of all runs, each with its number of runs."""
    commits: dict[str, int] = {}
    for run in runs:
        commit = run.about.get("commit") or "not recorded"
        commits[commit] = commits.get(commit, 0) + 1
    names = [f"{name} ({count})" for name, count in sorted(commits.items())]
    return f"version of Reverie; number of runs per commit: {', '.join(names)}"


def aggregate_row(label: str, scores: Any) -> str:
    """Return a row of normalized aggregates of the mean score of each game."""
    values = np.array(
        [human_normalized_score(task, score) for task, score in scores.items()], float
    )
    texts = [with_interval(values, statistic) for statistic in AGGREGATES.values()]
    return f"| {label} | {' | '.join(texts)} |"


def with_interval(values: np.ndarray, statistic: Statistic) -> str:
    """Format a statistic over games, with its bootstrap interval over games."""
    rng = np.random.default_rng(0)
    draws = values[rng.integers(0, len(values), (RESAMPLES, len(values)))]
    low, high = np.quantile([statistic(list(x[:, None])) for x in draws], QUANTILES)
    value = statistic(list(values[:, None]))
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def episodes(run: Run, window: ScoreWindow) -> np.ndarray:
    """Return the scores of the episodes that end in a window."""
    points = run.points(SCORE, window.x)
    inside = (points[:, 0] > window.start) & (points[:, 0] <= window.end)
    return points[inside, 1]


def mean_score(runs: Iterable[Run], task: str, window: ScoreWindow) -> float | None:
    """Return the mean over seeds; None if no episode ended in the window."""
    scores = [x for run in runs if run.task == task if len(x := episodes(run, window))]
    return float(np.mean([score.mean() for score in scores])) if scores else None


def mean_text(values: np.ndarray) -> str:
    """Format the mean; empty if there are no values."""
    return format_number(values.mean()) if len(values) else ""


def game_of(run: Run) -> str:
    return run.task.removeprefix("atari100k_")


def options_of(run: Run) -> str:
    """Return the options of a recorded run, as `find_options` returned them."""
    return str(run.settings.get("options", ""))


def title(game: str) -> str:
    return game.replace("_", " ").title()


if __name__ == "__main__":
    main()
