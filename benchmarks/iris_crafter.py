"""Record a run of Δ-IRIS on Crafter: learning curve, rewards and a table of scores.

    python benchmarks/iris_crafter.py LOGDIR --out benchmarks/iris

LOGDIR is a run folder, or a folder with its `scores.jsonl` and `metrics.jsonl`. Writes
`crafter.png` (moving average of the score, with a band of two standard errors),
`crafter-dreams.png` (reward per imagined and per collected step; the difference is due
to errors of the world model) and `crafter-seed0.jsonl` (all scores). Prints the mean
score in tenths of the run after its random steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
from pathlib import Path

import numpy as np

from reverie.render.curve import Curve, draw_curves, read_scores
from reverie.render.video import write_image

RANDOM_SCORE = 1.52, 0.12
"""Mean score of a random agent over 100 episodes, and its standard error."""
REWARD_METRICS = {
    "imagined": "train/actor_critic/imagined_reward",
    "collected": "collect/reward_mean",
}
TENTHS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/iris"))
    parser.add_argument(
        "--first", type=int, default=30_000, help="number of random steps"
    )
    parser.add_argument("--name", default="crafter")
    args = parser.parse_args()
    record(args.run, args.out, args.name, args.first)


def record(run: Path, out: Path, name: str, first: int) -> None:
    """Write the plots and scores of a run and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    scores = read_scores(run)
    last = max((step for step, _ in scores), default=1.0)
    mean, error = RANDOM_SCORE
    random_curve = [(0.0, mean), (last, mean)]
    title = f"Crafter, iris_crafter_short for 12 minutes; random agent {mean} ± {error}"
    curves: dict[str, Curve] = {"iris": scores, "random": random_curve}
    write_image(out / f"{name}.png", draw_curves(curves, title))
    source = run / "scores.jsonl"
    shutil.copyfile(source, out / f"{name}-seed0.jsonl")
    rewards = read_rewards(run / "metrics.jsonl")
    image = draw_curves(rewards, "reward per step", y_label="reward", smooth=False)
    write_image(out / f"{name}-dreams.png", image)
    print_table(scores, first)


def read_rewards(path: Path) -> dict[str, Curve]:
    """Return the mean reward per imagined and per collected step over time."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return {
        name: [(float(x["step"]), float(x[key])) for x in lines if key in x]
        for name, key in REWARD_METRICS.items()
    }


def print_table(scores: Curve, first: int) -> None:
    """Print mean and standard error of the score before and in tenths after `first`."""
    steps, score = np.array(scores).T
    edges = [0.0, *np.linspace(first, steps.max() + 1, TENTHS + 1)]
    for low, high in itertools.pairwise(edges):
        part = score[(steps >= low) & (steps < high)]
        if len(part):
            error = part.std() / math.sqrt(len(part))
            where = f"steps {low:>7,.0f} to {high:>7,.0f}"
            print(f"{where}: {part.mean():5.2f} ± {error:.2f}, {len(part)} episodes")


if __name__ == "__main__":
    main()
