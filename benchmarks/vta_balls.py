"""Train VTA on bouncing balls with several objectives in parallel; compare boundaries.

    python benchmarks/vta_balls.py --minutes 9 --out logdir/balls original static_2
    python benchmarks/vta_balls.py static_1.5 static_2 static_3 --seeds 2 3

Every name is a variant of the objective, see `VARIANTS`. All runs share one device.
After the given time each run saves a checkpoint and is evaluated on new sequences. With
two seeds, the agreement of their boundaries is also computed, which needs no labels: it
can be used to select a weight. Other flags are passed on to all runs, for example
`--device=cpu`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

REVERIE = [sys.executable, "-m", "reverie"]
RAISED_LIMITS = {"max_segments": 20, "max_segment": 20}
"""Maximum number and length of segments."""
STATIC = ["vta_static"]
"""Preset with the static lower belief and the KL to the detector."""
VARIANTS: dict[str, tuple[list[str], dict[str, object]]] = {
    "original": ([], {}),
    "kl_to_detector": ([], {"kl_to_detector": True, **RAISED_LIMITS}),
    "no_kl_to_detector": (STATIC, {"kl_to_detector": False}),
    "no_random_boundaries": (STATIC, {"random_boundary_steps": 0}),
    "moving_lower_belief": (STATIC, {"static_lower_belief": False}),
    "static_1": (STATIC, {"abs_scale": 1}),
    "static_1.5": (STATIC, {"abs_scale": 1.5}),
    "static_2": (STATIC, {}),
    "static_3": (STATIC, {"abs_scale": 3}),
    "static_4": (STATIC, {"abs_scale": 4}),
}
"""By name: presets in addition to `vta_balls`, and settings of `vta.world`."""

Runs = dict[tuple[str, int], Path]
"""Run folders by variant and seed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variants", nargs="*", default=["original", "static_2"])
    parser.add_argument("--minutes", type=float, default=9.0, help="training time")
    parser.add_argument("--out", type=Path, default=Path("logdir/balls"))
    parser.add_argument("--sequences", type=int, default=1024, help="for evaluation")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args, flags = parser.parse_known_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = {
        (variant, seed): args.out / f"{variant}-{seed}"
        for variant in args.variants
        for seed in args.seeds
    }
    train(runs, args.minutes, flags)
    evaluate(list(runs.values()), args.sequences)
    agreement = {}
    if len(args.seeds) > 1:
        first, second = args.seeds[:2]
        pairs = {v: [runs[v, first], runs[v, second]] for v in args.variants}
        agreement = evaluate_pairs(pairs, args.sequences)
    print_table(runs)
    for variant, text in agreement.items():
        print(f"{variant:20s} {text}")


def train(runs: Runs, minutes: float, flags: list[str]) -> None:
    """Train all runs in parallel for this time."""
    processes = []
    for (variant, seed), folder in runs.items():
        presets, settings = VARIANTS[variant]
        command = [*REVERIE, "train", "--configs", "vta_balls", *presets]
        command += [f"--vta.world.{key}={value}" for key, value in settings.items()]
        command += ["--run.steps=10000000", "--run.report_every=60"]
        command += ["--run.log_every=30", f"--seed={seed}", *flags]
        command += [f"--logdir={folder}", "--logger.outputs", "jsonl", "media"]
        with Path(f"{folder}.log").open("w") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    time.sleep(60 * minutes)
    for process in processes:
        process.terminate()  # the run saves a checkpoint
    for process in processes:
        process.wait()


def evaluate(folders: list[Path], sequences: int) -> None:
    """Evaluate all runs in parallel; each writes its results to its folder."""
    options = ["--episodes", str(sequences)]
    commands = [[*REVERIE, "eval", str(folder), *options] for folder in folders]
    for process in [subprocess.Popen(command) for command in commands]:
        process.wait()


def evaluate_pairs(pairs: dict[str, list[Path]], sequences: int) -> dict[str, str]:
    """Return what `reverie eval` prints about the agreement of each pair of runs."""
    options, processes = ["--episodes", str(sequences)], {}
    for variant, folders in pairs.items():
        command = [*REVERIE, "eval", *map(str, folders), *options]
        processes[variant] = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True
        )
    return {k: process.communicate()[0].strip() for k, process in processes.items()}


def print_table(runs: Runs) -> None:
    """Print the results of all runs, the highest F1 first."""
    rows = []
    for (variant, seed), folder in runs.items():
        if (file := folder / "eval.json").exists():
            result = json.loads(file.read_text())
            updates = int(result["checkpoint"].split("-")[0])
            summary = result["summary"]
            f1 = summary["boundaries/exact/f1"]
            rows.append((f1, variant, seed, updates, summary))
    print("F1, variant, seed, updates, precision, recall, segments, losses in nats")
    for f1, variant, seed, updates, results in sorted(
        rows, reverse=True, key=lambda row: row[0]
    ):
        exact = [results[f"boundaries/exact/{key}"] for key in ("precision", "recall")]
        losses = [results[f"loss/{key}"] for key in ("image", "abs", "obs", "mask")]
        values = [*exact, results["segments/count"], *losses]
        print(
            f"{f1:.3f} {variant:20s} {seed} {updates:6d}",
            *(f"{value:.2f}" for value in values),
        )


if __name__ == "__main__":
    main()
