"""Record Atari 100k runs: scores, curves, and the table in `benchmarks/README.md`.

    reverie campaign benchmarks/atari100k/campaign.yaml --per-gpu 3 --logdir atari
    python benchmarks/atari100k.py atari

Arguments are folders of campaigns, of which the finished runs are recorded, folders of
finished runs, or another folder that this program wrote with `--out`. Without arguments
only the table is written again.

Writes the scores to `GAME-seedN.jsonl`, their settings, commit, GPU, command and
duration to `runs.json`, a curve to `GAME.png`, and the table to the section Atari 100k
of `README.md`, if the README is in the folder above.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from reverie.campaign.queue import QUEUE, Queue
from reverie.render.curve import write_curve
from reverie.results.benchmarks import find_baseline, human_normalized_score
from reverie.results.report import describe_command, format_number
from reverie.results.runs import INDEX, SCORE, SCORES, Run, find_runs
from reverie.results.scores import ScoreWindow
from reverie.results.statistics import AGGREGATES, QUANTILES, RESAMPLES, Statistic
from reverie.run.folder import read_last_end
from reverie.storage.atomic import write_file, write_json

FOLDER = Path(__file__).parent / "atari100k"
WINDOWS = (
    ScoreWindow(340_000, 440_000, "frames"),
    ScoreWindow(380_000, 400_000, "frames"),
)
"""Frames whose episodes count: the end of the run, which has more episodes, and the
last 5 % of 400,000 frames, as in the published scores."""
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
    parser.add_argument("--commit", help="of runs that have not recorded it")
    parser.add_argument("--note", help="about the machine: 3 runs on one GPU")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for run in find_finished(args.runs):
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


def find_finished(paths: Iterable[Path]) -> list[Run]:
    """Return the finished runs of campaigns, and the other runs at these paths."""
    folders: list[Path] = []
    for path in paths:
        if not (path / QUEUE).is_dir():
            folders.append(path)
            continue
        queue = Queue(path)
        done = [s.run.name for s in queue.statuses() if s.state == "finished"]
        folders += [queue.run_folder(name) for name in done]
    runs = find_runs(folders) if folders else []
    for run in runs:
        if run.path.is_dir() and not read_last_end(run.path).finished:
            raise SystemExit(f"{run.path} has not finished.")
    return [run for run in runs if run.task.startswith("atari100k_")]


def record(run: Run, out: Path, commit: str | None, note: str | None) -> None:
    """Copy the scores of a run, add it to the index, and plot all seeds of its game."""
    game = game_of(run)
    name = f"{game}-seed{run.seed}.jsonl"
    source = run.path / SCORES if run.path.is_dir() else run.path
    shutil.copyfile(source, out / name)
    index = json.loads((out / INDEX).read_text()) if (out / INDEX).exists() else {}
    command = re.sub(
        r" --(logdir \S+|trust\b)", "", describe_command(run.about.get("command"))
    )
    size = re.search(r"\bsize\d+m\b", command)
    index[name] = {
        "settings": {
            "task": run.task,
            "agent": run.agent,
            "size": size[0] if size else run.settings.get("size", ""),
            "seed": run.seed,
        },
        "repeat": run.repeat,
        "commit": run.about.get("commit") or commit or "",
        "gpu": run.about.get("gpu") or "",
        "command": command,
        "seconds": round(run.seconds) if run.seconds else None,
        "note": note or run.about.get("note", ""),
    }
    write_json(out / INDEX, dict(sorted(index.items())))
    seeds = sorted(out.glob(f"{game}-seed*.jsonl"))
    names = {f"seed {path.stem.rpartition('seed')[2]}": path for path in seeds}
    write_curve(out / f"{game}.png", names, f"Atari 100k {title(game)}")


def format_section(runs: list[Run], folder: str) -> str:
    """Return the table of all games, and the aggregates over them."""
    if not runs:
        return "No runs are recorded."
    baseline = find_baseline("dreamerv3/atari100k", [run.task for run in runs])
    tasks = sorted({run.task for run in runs})
    parts = [
        f"{len(tasks)} of the {len(baseline.scores)} games are recorded:",
        "",
        f"- score: mean ± standard deviation of the {WINDOWS[0]}",
        f"- score at 400k: mean of the {WINDOWS[1]}, as in the published scores",
        f"- published: mean ± standard deviation over {max(baseline.seeds.values())} "
        "seeds of the original with 200 M parameters",
        "- normalized: human-normalized score (0: random policy, 1: human)",
        "- seconds: duration of the training",
        "",
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
            f"[{title(game)}]({folder}/{game}-seed{run.seed}.jsonl) "
            f"([curve]({folder}/{game}.png))",
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
    parts += [
        "",
        f"Human-normalized scores over these {len(tasks)} games, with 95 % bootstrap "
        "intervals over games:",
        "",
        f"| scores | {' | '.join(AGGREGATES)} |",
        "| -- |" + " -- |" * len(AGGREGATES),
    ]
    for window in WINDOWS:
        scores = {t: mean_score(runs, t, window) for t in tasks}
        known = {t: x for t, x in scores.items() if x is not None}
        label = f"{window.start:,.0f} to {window.end:,.0f} frames"
        parts.append(aggregate_row(label, known))
    published = {task: baseline.scores[task] for task in tasks}
    parts.append(aggregate_row("published, the same games", published))
    if len(published) < len(baseline.scores):
        label = f"published, all {len(baseline.scores)} games"
        parts.append(aggregate_row(label, baseline.scores))
    return "\n".join(parts) + "\n"


def aggregate_row(label: str, scores: Any) -> str:
    """Return a row of normalized aggregates of the mean score of each game."""
    values = np.array(
        [human_normalized_score(task, score) for task, score in scores.items()], float
    )
    texts = [with_interval(values, statistic) for statistic in AGGREGATES.values()]
    return f"| {label} | {' | '.join(texts)} |"


def with_interval(values: np.ndarray, statistic: Statistic) -> str:
    """Return a statistic over games, and its interval if the games were redrawn."""
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
    return format_number(values.mean()) if len(values) else ""


def game_of(run: Run) -> str:
    return run.task.removeprefix("atari100k_")


def title(game: str) -> str:
    return game.replace("_", " ").title()


if __name__ == "__main__":
    main()
