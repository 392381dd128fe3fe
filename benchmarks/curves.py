"""Compare learning curves with and without fused kernels, over several seeds.

    python benchmarks/curves.py --out logdir/curves

Trains `catch` on images of 64 x 64 pixels with the networks of size12m in bfloat16
(`--small`: 12 x 12 pixels and small networks), with `--compile none` and with
`--compile auto`, all seeds in parallel on one device. Writes `curves.json` (scores,
averaged in bins of steps, and their comparison) and `curves.png` (mean over seeds, with
a band from the worst to the best seed). Other flags are passed on to all runs, for
example `--run.steps=2000`. `--draw` only evaluates existing runs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from reverie.render.curve import draw_lines, read_scores
from reverie.render.video import write_image

MODES = {"plain": "none", "fast": "auto"}
"""Names of the compared `--compile` settings."""
TRAIN = [sys.executable, "-m", "reverie", "train", "--configs", "catch"]
COMMON_SETTINGS = {
    "precision": ["bfloat16"],
    "logger.outputs": ["jsonl"],
    "run.report_every": ["0"],
    "run.save_every": ["0"],
    "run.overlap": ["off"],
}
LARGE_SETTINGS = {
    "env.catch.size": ["64", "64"],
    "dreamer.enc.mults": ["2", "3", "4", "4"],
    "dreamer.dec.mults": ["2", "3", "4", "4"],
    "dreamer.enc.kernel": ["5"],
    "dreamer.dec.kernel": ["5"],
    "dreamer.opt.lr": ["3e-4"],
}
MAX_BINS = 16
"""Maximum number of bins of a curve."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("logdir/curves"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="time limit of the training"
    )
    parser.add_argument("--small", action="store_true", help="small networks")
    parser.add_argument(
        "--draw", action="store_true", help="only evaluate existing runs"
    )
    args, flags = parser.parse_known_args()
    seeds = range(args.seeds)
    if not args.draw:
        settings = COMMON_SETTINGS
        settings = settings if args.small else settings | LARGE_SETTINGS
        words = [
            word for key, values in settings.items() for word in (f"--{key}", *values)
        ]
        words = ["size12m", *words] if not args.small else words
        train(args.out, args.seeds, args.minutes, [*words, *flags])
    scores = {
        mode: [read_scores(args.out / f"{mode}-{seed}") for seed in seeds]
        for mode in MODES
    }
    steps, curves = bin_scores(scores)
    result = {"steps": steps.tolist(), **compare(curves)}
    result |= {mode: curve.tolist() for mode, curve in curves.items()}
    (args.out / "curves.json").write_text(json.dumps(result, indent=1))
    lines = {
        mode: (steps, curve.mean(0), curve.min(0), curve.max(0))
        for mode, curve in curves.items()
    }
    title = f"catch, bfloat16, {args.seeds} seeds each: mean, worst and best"
    write_image(args.out / "curves.png", draw_lines(lines, title))
    print(json.dumps({k: v for k, v in result.items() if k not in ("steps", *MODES)}))


def train(out: Path, seeds: int, minutes: float, words: list[str]) -> None:
    """Train all runs in parallel; stop those that exceed the time limit."""
    out.mkdir(parents=True, exist_ok=True)
    runs, start = {}, time.time()
    for mode, compile in MODES.items():
        for seed in range(seeds):
            name = f"{mode}-{seed}"
            options = ["--compile", compile, "--seed", str(seed)]
            command = [*TRAIN, *words, *options, "--logdir", str(out / name)]
            with (out / f"{name}.log").open("w") as log:
                runs[name] = subprocess.Popen(command, stdout=log, stderr=log)
    for name, run in runs.items():
        try:
            code = run.wait(max(1.0, 60 * minutes - (time.time() - start)))
        except subprocess.TimeoutExpired:
            run.terminate()
            code = run.wait()
        print(f"{name}: {time.time() - start:.0f} s, exit {code}", flush=True)


def bin_scores(scores: dict[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return bin centers and, by mode, the mean scores `(seeds, bins)`.

    The bins cover the steps that all runs have reached.
    """
    all_runs = [np.array(run) for runs in scores.values() for run in runs]
    bins = min(MAX_BINS, *(len(np.unique(run[:, 0])) // 2 for run in all_runs))
    edges = np.linspace(0, min(run[-1, 0] for run in all_runs), bins + 1)
    curves = {}
    for mode, runs in scores.items():
        means = []
        for run in map(np.array, runs):
            index = np.digitize(run[:, 0], edges[1:-1])
            means.append([run[index == i, 1].mean() for i in range(bins)])
        curves[mode] = np.array(means)
    return (edges[1:] + edges[:-1]) / 2, curves


def compare(curves: dict[str, np.ndarray]) -> dict[str, Any]:
    """Compare the mean curves of both modes with the spread of the seeds.

    They agree if the means over all steps differ by no more than the seeds of the plain
    mode do, and if in at least 75 % of the bins the fast mean is within two standard
    deviations (over seeds, pooled over both modes) of the plain one.
    """
    plain, fast = curves["plain"], curves["fast"]
    means = {mode: curve.mean(1) for mode, curve in curves.items()}
    difference = abs(means["fast"].mean() - means["plain"].mean())
    spread = np.ptp(means["plain"])
    deviation = np.sqrt((plain.var(0, ddof=1) + fast.var(0, ddof=1)) / 2)
    inside = np.abs(fast.mean(0) - plain.mean(0)) <= 2 * deviation
    return {
        "mean_plain": [round(float(x), 4) for x in means["plain"]],
        "mean_fast": [round(float(x), 4) for x in means["fast"]],
        "last_plain": [round(float(x), 4) for x in plain[:, -1]],
        "last_fast": [round(float(x), 4) for x in fast[:, -1]],
        "difference": round(float(difference), 4),
        "plain_spread": round(float(spread), 4),
        "fraction_of_bins_within": round(float(inside.mean()), 3),
        "agree": bool(difference <= spread and inside.mean() >= 0.75),
    }


if __name__ == "__main__":
    main()
