"""Train VTA on bouncing balls with several objectives at once, and compare boundaries.

    python benchmarks/vta_balls.py --minutes 9 --out logdir/balls base warm3

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
SMALL = {"lower_state": 4, "state": 16}
WAYS = {
    "base": {},
    "seg10": {"max_segments": 10},
    "seg10_len5": {"max_segments": 10, "max_segment": 5},
    "seg10_obs3": {"max_segments": 10, "obs_scale": 3},
    "warm2": {"max_segments": 10, "obs_scale": 2, "obs_warmup": 8000},
    "warm3": {"max_segments": 10, "obs_scale": 3, "obs_warmup": 8000},
    "warm5": {"max_segments": 10, "obs_scale": 5, "obs_warmup": 8000},
    "warm8": {"max_segments": 10, "obs_scale": 8, "obs_warmup": 8000},
    "pays": {"read_pays": True},
    "free": {"read_pays": True, **FREE},
    "linked": {"linked": True, "state": 16, **FREE},
    "linked_pays": {"linked": True, "state": 16, "read_pays": True, **FREE},
    "low4": {"lower_state": 4, "state": 16, **FREE},
    "low4_pays": {"lower_state": 4, "state": 16, "read_pays": True, **FREE},
    "low5_pays": {"lower_state": 5, "read_pays": True, **FREE},
    "low6_pays": {"lower_state": 6, "read_pays": True, **FREE},
    "low7_pays": {"lower_state": 7, "read_pays": True, **FREE},
    "both": {"lower_state": 4, "linked": True, "state": 16, **FREE},
    "both_pays": {
        "lower_state": 4,
        "linked": True,
        "state": 16,
        "read_pays": True,
        **FREE,
    },
    "pays_seg10": {"read_pays": True, "max_segments": 10},
    "pays_seg7_warm3": {
        "read_pays": True,
        "max_segments": 7,
        "obs_scale": 3,
        "obs_warmup": 8000,
    },
    "pays_seg10_warm3": {
        "read_pays": True,
        "max_segments": 10,
        "obs_scale": 3,
        "obs_warmup": 8000,
    },
    "pays_seg10_warm6": {
        "read_pays": True,
        "max_segments": 10,
        "obs_scale": 6,
        "obs_warmup": 8000,
    },
    "deaf": {"feedback": False, "read_pays": True, **FREE},
    "deaf_low4": {"feedback": False, "read_pays": True, **SMALL, **FREE},
    "deaf_linked": {"feedback": False, "linked": True, "read_pays": True, **FREE},
    "deaf_obs2": {"feedback": False, "read_pays": True, "obs_scale": 2, **FREE},
    "deaf_obs3": {"feedback": False, "read_pays": True, "obs_scale": 3, **FREE},
    "deaf_obs4": {"feedback": False, "read_pays": True, "obs_scale": 4, **FREE},
    "deaf_obs6": {"feedback": False, "read_pays": True, "obs_scale": 6, **FREE},
    "deaf_hidden": {"feedback": False, **FREE},
    "warm3_seg5": {"obs_scale": 3, "obs_warmup": 8000},
    "warm5_seg5": {"obs_scale": 5, "obs_warmup": 8000},
    "warm8_seg5": {"obs_scale": 8, "obs_warmup": 8000},
    "warm3_seg7": {"max_segments": 7, "obs_scale": 3, "obs_warmup": 8000},
    "warm5_seg7": {"max_segments": 7, "obs_scale": 5, "obs_warmup": 8000},
    "warm5_len12": {
        "max_segments": 10,
        "max_segment": 12,
        "obs_scale": 5,
        "obs_warmup": 8000,
    },
    "seg7_obs5": {"max_segments": 7, "obs_scale": 5},
    "seg7_abs02": {"max_segments": 7, "abs_scale": 0.2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ways", nargs="*", default=["base", "warm3"])
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--anneal", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("logdir/balls"))
    parser.add_argument("--sequences", type=int, default=1024)
    args, more = parser.parse_known_args()
    runs = {}
    for way in args.ways:
        flags = [f"--watcher.vta.{key}={value}" for key, value in WAYS[way].items()]
        place = args.out / way
        place.parent.mkdir(parents=True, exist_ok=True)
        command = [*REVERIE, "train", "--configs", "vta_balls", *flags]
        command += [f"--watcher.vta.anneal={args.anneal}", "--run.steps=10000000"]
        command += ["--run.report_every=60", "--run.log_every=30", *more]
        command += [f"--logdir={place}", "--logger.outputs", "jsonl", "media"]
        log = (args.out / f"{way}.log").open("w")
        runs[way] = subprocess.Popen(command, stdout=log, stderr=log)
    time.sleep(60 * args.minutes)
    for run in runs.values():
        run.terminate()  # it saves itself
    for run in runs.values():
        run.wait()
    rows = []
    for way in runs:
        place = args.out / way
        command = [*REVERIE, "eval", str(place), "--episodes", str(args.sequences)]
        done = subprocess.run(command, capture_output=True, text=True)
        print(f"== {way} {WAYS[way]}\n{done.stdout}{done.stderr}", flush=True)
        if done.returncode == 0:
            found = json.loads((place / "boundaries.json").read_text())
            step = int(found["checkpoint"].split("-")[0])
            rows.append((found["boundaries/exact/f1"], way, step))
    for f1, way, step in sorted(rows, reverse=True):
        print(f"{f1:.3f}  {way}  after {step} updates")


if __name__ == "__main__":
    main()
