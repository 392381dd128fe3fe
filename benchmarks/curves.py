"""Does the fast path learn like the plain one? Curves of both, over several seeds.

    python benchmarks/curves.py --out logdir/curves

Trains `catch` on 64 x 64 pixels with the networks of size12m in bfloat16 (`--small`: on
12 x 12 with its own small ones), with `--compile none` and with `--compile auto`, all
seeds side by side on one device.
Writes `curves.json` (scores, binned by steps, and the verdict) and `curves.png` (mean
of each way on a band from its worst to its best seed). Flags this program does not know
go to all runs, as `--run.steps=2000`; with `--draw` nothing is trained, and what lies
in the folder is read again.
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

WAYS = {"plain": "none", "fast": "auto"}
TRAIN = [sys.executable, "-m", "reverie", "train", "--configs", "catch"]
COMMON = {
    "precision": ["bfloat16"],
    "logger.outputs": ["jsonl"],
    "run.report_every": ["0"],
    "run.save_every": ["0"],
    "run.overlap": ["off"],
}
LARGE = {
    "env.catch.size": ["64", "64"],
    "dreamer.enc.mults": ["2", "3", "4", "4"],
    "dreamer.dec.mults": ["2", "3", "4", "4"],
    "dreamer.enc.kernel": ["5"],
    "dreamer.dec.kernel": ["5"],
    "dreamer.opt.lr": ["3e-4"],
}
BINS = 16  # at most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("logdir/curves"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=60.0, help="at most")
    parser.add_argument("--small", action="store_true", help="small networks")
    parser.add_argument("--draw", action="store_true", help="train nothing")
    args, more = parser.parse_known_args()
    seeds = range(args.seeds)
    if not args.draw:
        flags = COMMON if args.small else COMMON | LARGE
        words = [w for key, values in flags.items() for w in (f"--{key}", *values)]
        words = ["size12m", *words] if not args.small else words
        train(args.out, args.seeds, args.minutes, [*words, *more])
    found = {
        way: [read_scores(args.out / f"{way}-{seed}") for seed in seeds] for way in WAYS
    }
    steps, curves = binned(found)
    result = {"steps": steps.tolist(), **verdict(curves)}
    result |= {way: curve.tolist() for way, curve in curves.items()}
    (args.out / "curves.json").write_text(json.dumps(result, indent=1))
    lines = {
        way: (steps, curve.mean(0), curve.min(0), curve.max(0))
        for way, curve in curves.items()
    }
    title = f"catch, bfloat16, {args.seeds} seeds each: mean, worst and best"
    write_image(args.out / "curves.png", draw_lines(lines, title))
    print(json.dumps({k: v for k, v in result.items() if k not in ("steps", *WAYS)}))


def train(out: Path, seeds: int, minutes: float, words: list[str]) -> None:
    """All runs at once; those that are not done in time save themselves and end."""
    out.mkdir(parents=True, exist_ok=True)
    runs, start = {}, time.time()
    for way, compile in WAYS.items():
        for seed in range(seeds):
            name = f"{way}-{seed}"
            own = ["--compile", compile, "--seed", str(seed)]
            command = [*TRAIN, *words, *own, "--logdir", str(out / name)]
            with (out / f"{name}.log").open("w") as log:
                runs[name] = subprocess.Popen(command, stdout=log, stderr=log)
    for name, run in runs.items():
        try:
            code = run.wait(max(1.0, 60 * minutes - (time.time() - start)))
        except subprocess.TimeoutExpired:
            run.terminate()
            code = run.wait()
        print(f"{name}: {time.time() - start:.0f} s, exit {code}", flush=True)


def binned(found: dict[str, Any]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Mean scores of every seed (rows) in equal parts of the steps all of them made."""
    scores = [np.array(run) for runs in found.values() for run in runs]
    bins = min(BINS, *(len(np.unique(run[:, 0])) // 2 for run in scores))
    edges = np.linspace(0, min(run[-1, 0] for run in scores), bins + 1)
    curves = {}
    for way, runs in found.items():
        means = []
        for run in map(np.array, runs):
            part = np.digitize(run[:, 0], edges[1:-1])
            means.append([run[part == i, 1].mean() for i in range(bins)])
        curves[way] = np.array(means)
    return (edges[1:] + edges[:-1]) / 2, curves


def verdict(curves: dict[str, np.ndarray]) -> dict[str, Any]:
    """Whether the fast mean is where the plain seeds are.

    Over the whole curve: is the difference of the two ways no larger than that between
    the plain seeds. By part: how often the fast mean is within two standard deviations
    (of seeds, pooled over both ways) of the plain one.
    """
    plain, fast = curves["plain"], curves["fast"]
    whole = {way: curve.mean(1) for way, curve in curves.items()}
    apart = abs(whole["fast"].mean() - whole["plain"].mean())
    spread = np.ptp(whole["plain"])
    deviation = np.sqrt((plain.var(0, ddof=1) + fast.var(0, ddof=1)) / 2)
    inside = np.abs(fast.mean(0) - plain.mean(0)) <= 2 * deviation
    return {
        "mean_plain": [round(float(x), 4) for x in whole["plain"]],
        "mean_fast": [round(float(x), 4) for x in whole["fast"]],
        "last_plain": [round(float(x), 4) for x in plain[:, -1]],
        "last_fast": [round(float(x), 4) for x in fast[:, -1]],
        "apart": round(float(apart), 4),
        "spread_of_plain": round(float(spread), 4),
        "share_of_parts_inside": round(float(inside.mean()), 3),
        "within_the_spread": bool(apart <= spread and inside.mean() >= 0.75),
    }


if __name__ == "__main__":
    main()
