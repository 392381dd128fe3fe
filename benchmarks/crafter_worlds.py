"""Compare the time to generate a Crafter world: original generator and Reverie's.

    python benchmarks/crafter_worlds.py --worlds 5

Prints the median CPU time of both for the same seeds, and checks that the worlds are
equal. The first seed is not counted, because the original may compile code with Numba.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from crafter import constants, engine, objects, worldgen

from reverie.envs.suites.crafter.terrain import generate_world

AREA = (64, 64)
"""Width and height of a world in cells."""
GENERATORS = {"original": worldgen.generate_world, "Reverie": generate_world}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, default=5, help="seeds to measure")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in GENERATORS}
    for seed in range(args.worlds + 1):
        maps = []
        for name, generate in GENERATORS.items():
            world = engine.World(AREA, constants.materials, (12, 12))
            world.reset(seed)
            player = objects.Player(world, (AREA[0] // 2, AREA[1] // 2))
            world.add(player)
            start = time.process_time()
            generate(world, player)
            seconds[name].append(time.process_time() - start)
            maps.append(world._mat_map)
        assert np.array_equal(*maps), f"different worlds for seed {seed}"
    medians = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    for name, median in medians.items():
        print(f"{name:10s} {median:.3f} s")
    print(f"ratio      {medians['original'] / medians['Reverie']:.1f}")


if __name__ == "__main__":
    main()
