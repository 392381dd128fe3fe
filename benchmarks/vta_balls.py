"""Train VTA on bouncing balls with several objectives at once, and compare boundaries.

    python benchmarks/vta_balls.py --minutes 9 --out logdir/balls original still_2

Every name is a way of training, see `WAYS`; they share one device. When the time is up
each run saves itself and is measured on fresh sequences. Flags this program does not
know go to all runs, as `--device=cpu`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

REVERIE = [sys.executable, "-m", "reverie.cli"]
FREE = {"max_segments": 20, "max_segment": 20}
STILL = ["vta_still"]
WAYS: dict[str, tuple[list[str], dict[str, object]]] = {
    "original": ([], {}),
    "pays": ([], {"read_pays": True, **FREE}),
    "hidden": (STILL, {"read_pays": False}),
    "asked": (STILL, {"coins": 0}),
    "still_1": (STILL, {"abs_scale": 1}),
    "still_1.5": (STILL, {"abs_scale": 1.5}),
    "still_2": (STILL, {}),
    "still_3": (STILL, {"abs_scale": 3}),
}
"""Blocks beside `vta_balls`, and settings of `watcher.vta`, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=["original", "still_2"])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--out", type=Path, default=Path("logdir/balls"))
    parser.add_argument("--sequences", type=int, default=1024)
    args, more = parser.parse_known_args()
    runs = {}
    for way in args.ways:
        blocks, settings = WAYS[way]
        flags = [f"--watcher.vta.{key}={value}" for key, value in settings.items()]
        place = args.out / way
        place.parent.mkdir(parents=True, exist_ok=True)
        command = [*REVERIE, "train", "--configs", "vta_balls", *blocks, *flags]
        command += ["--run.steps=10000000", "--run.report_every=60"]
        command += ["--run.log_every=30", *more]
        command += [f"--logdir={place}", "--logger.outputs", "jsonl", "media"]
        log = (args.out / f"{way}.log").open("w")
        runs[way] = subprocess.Popen(command, stdout=log, stderr=log)
    time.sleep(60 * args.minutes)
    for run in runs.values():
        run.terminate()  # it saves itself
    for run in runs.values():
        run.wait()
    evals = {}
    for way in runs:
        command = [*REVERIE, "eval", str(args.out / way)]
        command += ["--episodes", str(args.sequences)]
        evals[way] = subprocess.Popen(command)
    rows = []
    for way, run in evals.items():
        if run.wait() == 0:
            found = json.loads((args.out / way / "boundaries.json").read_text())
            step = int(found["checkpoint"].split("-")[0])
            rows.append((found["boundaries/exact/f1"], way, step, found))
    print("F1, way, updates, precision, recall, segments, nats of a frame as weighed")
    for f1, way, step, found in sorted(rows, reverse=True, key=lambda row: row[0]):
        exact = [found[f"boundaries/exact/{key}"] for key in ("precision", "recall")]
        nats = [found[f"loss/{key}"] for key in ("image", "abs", "obs", "mask")]
        shown = [*exact, found["segments/count"], *nats]
        print(f"{f1:.3f} {way:10s} {step:6d}", *(f"{x:.2f}" for x in shown))


if __name__ == "__main__":
    main()
