"""Compare train ratios and network sizes after equal wall time.

    python benchmarks/equal_time.py --out logdir/equal_time
    python benchmarks/equal_time.py --tasks atari100k_boxing atari100k_pong \\
        --configs size12m --large "--configs size50m" --seconds 300 --jobs 1

Trains every task with its usual train ratio, with two and four times this ratio, and
with a larger network and the usual ratio. Each run is stopped after `--seconds`. The
first command has small tasks for a CPU, the second needs a GPU.

Prints a table with the mean score of the episodes in the last quarter of the time, and
over the whole time, which shows how fast a run learns. Writes all numbers to
`equal_time.json` in the folder `--out`. Run it on a machine without other work.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.run.config import resolve

SMALL_TASKS = {
    "catch": ["catch"],
    "memory": ["memory"],
    "gym_CartPole-v1": ["tiny"],
}
"""Default tasks, with their presets."""
LARGE = (
    "--dreamer.rssm.deter 256 --dreamer.rssm.hidden 128 "
    r"--dreamer\..*\.units 128 --dreamer\..*\.depth 16"
)
"""Flags of the larger network of the default tasks: twice the width of `tiny`."""
RATIOS = (1, 2, 4)
"""Multiples of the usual train ratio."""
ENDLESS = "1e9"
"""Number of steps that no run reaches."""


class Run(NamedTuple):
    """One training run and its command line."""

    task: str
    variant: str
    seed: int
    flags: list[str]

    @property
    def name(self) -> str:
        return f"{self.task}-{self.variant}-seed{self.seed}".replace(" ", "_")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("logdir/equal_time"))
    parser.add_argument("--tasks", nargs="+", default=list(SMALL_TASKS))
    parser.add_argument("--configs", nargs="+", default=[], help="presets of all runs")
    parser.add_argument("--large", default=LARGE, help="flags of the larger network")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    runs = list(
        make_runs(args.tasks, args.configs, shlex.split(args.large), args.seeds)
    )
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda run: train(run, args.out, args.seconds), runs))
    results = {
        run.name: {**run._asdict(), **measure(args.out / run.name, args.seconds)}
        for run in runs
    }
    (args.out / "equal_time.json").write_text(json.dumps(results, indent=1))
    print(format_table(list(results.values())))


def make_runs(
    tasks: list[str], configs: list[str], large: list[str], seeds: int
) -> Iterator[Run]:
    """Yield all runs; those of the same variant follow each other."""
    for task in tasks:
        presets = configs or SMALL_TASKS.get(task, [])
        common = ["--task", task, *(["--configs", *presets] if presets else [])]
        usual = resolve(presets, flags={"task": task}).run.train_ratio
        variants = {
            f"{ratio} x ratio": ["--run.train_ratio", str(ratio * usual)]
            for ratio in RATIOS
        }
        variants["larger network"] = large
        for variant, flags in variants.items():
            for seed in range(seeds):
                yield Run(task, variant, seed, [*common, *flags, "--seed", str(seed)])


def train(run: Run, out: Path, seconds: float) -> None:
    """Run `reverie train` for this time, in a folder with the name of the run."""
    command = [sys.executable, "-m", "reverie", "train", *run.flags]
    command += ["--logdir", str(out / run.name), "--run.steps", ENDLESS]
    command += ["--run.save_every", "0", "--run.report_every", "0"]
    command += ["--logger.outputs", "jsonl"]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    with (out / f"{run.name}.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **threads}
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()
            return
    raise SystemExit(f"{shlex.join(command)}\nended early ({code}): see {log.name}")


def measure(folder: Path, seconds: float) -> dict[str, Any]:
    """Return mean scores of a run, and its number of steps."""
    rows = [json.loads(x) for x in (folder / "scores.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["seconds"] <= seconds]
    scores = np.array([row["episode/score"] for row in rows], float)
    is_late = np.array([row["seconds"] >= 0.75 * seconds for row in rows], bool)
    late = float(scores[is_late].mean()) if is_late.any() else None
    steps = rows[-1]["step"] if rows else 0
    mean = float(scores.mean()) if rows else None
    return {"last_quarter": late, "all": mean, "episodes": len(rows), "steps": steps}


def format_table(results: list[dict[str, Any]]) -> str:
    """Return a table of the means over seeds, with the lowest and highest value."""
    lines = [
        "| task | variant | score, last quarter | score, whole time | frames |",
        "| -- | -- | -- | -- | -- |",
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for result in results:
        groups.setdefault((result["task"], result["variant"]), []).append(result)
    for (task, variant), group in groups.items():
        cells = [
            format_values([x[key] for x in group]) for key in ("last_quarter", "all")
        ]
        frames = f"{np.mean([x['steps'] for x in group]):,.0f}"
        lines.append(f"| {task} | {variant} | {' | '.join(cells)} | {frames} |")
    return "\n".join(lines)


def format_values(values: list[float | None]) -> str:
    """Return mean, lowest and highest of the values that exist."""
    known = [value for value in values if value is not None]
    if not known:
        return "no episode"
    return f"{np.mean(known):.2f} ({min(known):.2f} to {max(known):.2f})"


if __name__ == "__main__":
    start = time.time()
    main()
    print(f"{time.time() - start:.0f} s")
