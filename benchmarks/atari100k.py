"""Record Atari 100k runs: scores, a learning curve per game, and a table of results.

    python benchmarks/atari100k.py logdir/boxing logdir/krull

Arguments are folders of finished runs of `reverie train --configs atari100k size12m`.
Reads `scores.jsonl`, `metrics.jsonl`, `config.yaml` and, if it exists, `time.json` with
the `seconds` that the command took. Copies the scores to
`benchmarks/atari100k/GAME-seedN.jsonl` and plots all seeds of a game.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from reverie.render.curve import read_scores, write_curve

FOLDER = Path(__file__).parent / "atari100k"
PUBLISHED = {
    "alien": "1008 ± 100",
    "amidar": "94.0 ± 18.7",
    "assault": "664 ± 91",
    "boxing": "79.7 ± 6.2",
    "krull": "7935 ± 785",
    "pong": "-4.9 ± 3.2",
}
"""Scores of the original with size200m, by game."""
FINAL_SCORE_START = 340_000
"""Frame after which episodes count for the final score."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = [record(run, args.out) for run in args.runs]
    print("| game | seed | score | episodes | published | s | steps/s | GPU busy |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print("| " + " | ".join(map(str, row.values())) + " |")


def record(run: Path, out: Path) -> dict[str, Any]:
    """Copy the scores of a run, plot its game, and return its row of the table."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    game, seed = config["task"].removeprefix("atari100k_"), config["seed"]
    shutil.copyfile(run / "scores.jsonl", out / f"{game}-seed{seed}.jsonl")
    seeds = sorted(out.glob(f"{game}-seed*.jsonl"))
    names = {f"size12m, seed {path.stem.rpartition('seed')[2]}": path for path in seeds}
    write_curve(out / f"{game}.png", names, f"Atari 100k {game.capitalize()}")
    scores = np.array(
        [score for frame, score in read_scores(run) if frame > FINAL_SCORE_START]
    )
    lines = (run / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    time = run / "time.json"
    seconds = json.loads(time.read_text())["seconds"] if time.exists() else "?"
    return {
        "game": game,
        "seed": seed,
        "score": f"{scores.mean():.1f} ± {scores.std(ddof=1):.1f}"
        if len(scores) > 1
        else "?",
        "episodes": len(scores),
        "published": PUBLISHED.get(game, "?"),
        "seconds": seconds,
        "steps/s": value_range(metrics, "fps/policy"),
        "GPU": value_range(metrics, "usage/gpu"),
    }


def value_range(metrics: list[dict[str, Any]], key: str) -> str:
    """Return the range of a metric, without its first and last value."""
    values = [float(row[key]) for row in metrics[1:-1] if row.get(key) is not None]
    return f"{min(values):.3g} to {max(values):.3g}" if values else "?"


if __name__ == "__main__":
    main()
