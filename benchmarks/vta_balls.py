"""Train VTA on bouncing balls with several objectives at once, and compare boundaries.

    python benchmarks/vta_balls.py --minutes 9 --out logdir/balls original still_2
    python benchmarks/vta_balls.py still_1.5 still_2 still_3 --seeds 2 3

Every name is a way of training, see `WAYS`; they share one device. When the time is up
each run saves itself and is measured on fresh sequences. Of a way with two seeds it is
also measured how far they agree on boundaries, which takes no labels: a weight can be
chosen by it. Flags this program does not know go to all runs, as `--device=cpu`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

REVERIE = [sys.executable, "-m", "reverie"]
FREE = {"max_segments": 20, "max_segment": 20}
STILL = ["vta_still"]
WAYS: dict[str, tuple[list[str], dict[str, object]]] = {
    "original": ([], {}),
    "pays": ([], {"kl_to_detector": True, **FREE}),
    "hidden": (STILL, {"kl_to_detector": False}),
    "asked": (STILL, {"coins": 0}),
    "moving": (STILL, {"static_lower_belief": False}),
    "still_1": (STILL, {"abs_scale": 1}),
    "still_1.5": (STILL, {"abs_scale": 1.5}),
    "still_2": (STILL, {}),
    "still_3": (STILL, {"abs_scale": 3}),
    "still_4": (STILL, {"abs_scale": 4}),
}
"""Blocks beside `vta_balls`, and settings of `vta.world`, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=["original", "still_2"])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("logdir/balls"))
    parser.add_argument("--sequences", type=int, default=1024)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args, more = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    places = {
        (way, seed): args.out / f"{way}-{seed}"
        for way in args.ways
        for seed in args.seeds
    }
    runs = []
    for (way, seed), place in places.items():
        blocks, settings = WAYS[way]
        flags = [f"--vta.world.{key}={value}" for key, value in settings.items()]
        command = [*REVERIE, "train", "--configs", "vta_balls", *blocks, *flags]
        command += ["--run.steps=10000000", "--run.report_every=60"]
        command += ["--run.log_every=30", f"--seed={seed}", *more]
        command += [f"--logdir={place}", "--logger.outputs", "jsonl", "media"]
        with Path(f"{place}.log").open("w") as log:
            runs.append(subprocess.Popen(command, stdout=log, stderr=log))
    time.sleep(60 * args.minutes)
    for run in runs:
        run.terminate()  # it saves itself
    for run in runs:
        run.wait()
    evaluate(list(places.values()), args.sequences)
    agree = {way: [places[way, seed] for seed in args.seeds[:2]] for way in args.ways}
    words = evaluate_pairs(agree, args.sequences) if len(args.seeds) > 1 else {}
    report(places)
    for way, word in words.items():
        print(f"{way:10s} {word}")


def evaluate(places: list[Path], sequences: int) -> None:
    """Measure all runs side by side; each writes its numbers into its folder."""
    amount = ["--episodes", str(sequences)]
    runs = [subprocess.Popen([*REVERIE, "eval", str(p), *amount]) for p in places]
    for run in runs:
        run.wait()


def evaluate_pairs(pairs: dict[str, list[Path]], sequences: int) -> dict[str, str]:
    """How far the two runs of each pair agree, in words."""
    amount, runs = ["--episodes", str(sequences)], {}
    for way, places in pairs.items():
        command = [*REVERIE, "eval", *map(str, places), *amount]
        runs[way] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    return {way: run.communicate()[0].strip() for way, run in runs.items()}


def report(places: dict[tuple[str, int], Path]) -> None:
    rows = []
    for (way, seed), place in places.items():
        if (file := place / "boundaries.json").exists():
            found = json.loads(file.read_text())
            step = int(found["checkpoint"].split("-")[0])
            rows.append((found["boundaries/exact/f1"], way, seed, step, found))
    print(
        "F1, way, seed, updates, precision, recall, segments, weighed nats of a frame"
    )
    for f1, way, seed, step, found in sorted(
        rows, reverse=True, key=lambda row: row[0]
    ):
        exact = [found[f"boundaries/exact/{key}"] for key in ("precision", "recall")]
        nats = [found[f"loss/{key}"] for key in ("image", "abs", "obs", "mask")]
        shown = [*exact, found["segments/count"], *nats]
        print(f"{f1:.3f} {way:10s} {seed} {step:6d}", *(f"{x:.2f}" for x in shown))


if __name__ == "__main__":
    main()
