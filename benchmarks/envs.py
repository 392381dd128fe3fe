"""How many steps per second environments give, alone and in pools.

    python benchmarks/envs.py --tasks catch atari_pong crafter_reward --count 8

For each task, in turns within one run: the suite's environment alone without our
wrappers (`raw`; for Crafter and Atari our adapter on the stock simulator), wrapped
(`made`), a pool of `--count` in this process (`local`) and one in worker processes
(`workers`). The last columns are shares of `raw`: `local` shows what wrappers and pool
cost, `workers` what the other cores bring. The last line compares world generation.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from reverie import envs
from reverie.envs.wrappers import Wrapper

TASKS = ["catch", "pinpad_three", "atari_pong", "crafter_reward"]
PACKAGES = {"atari": "ale_py", "crafter": "crafter"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--count", type=int, default=8, help="environments in a pool")
    parser.add_argument("--workers", type=int, default=-1, help="-1: one per core")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    options = parser.parse_args()
    results = {}
    print(f"{os.cpu_count()} cores, pools of {options.count}, steps per second")
    head = ("task", "raw", "made", "local", "workers", "local/raw", "workers/raw")
    print("".join(f"{word:>15}" for word in head))
    for task in options.tasks:
        package = PACKAGES.get(task.split("_")[0])
        if package and importlib.util.find_spec(package) is None:
            print(f"{task:>15}  needs {envs.SUITES[task.split('_')[0]].install}")
            continue
        rates = measure(task, options)
        results[task] = rates
        shares = (rates["local"] / rates["raw"], rates["workers"] / rates["raw"])
        print(
            f"{task:>15}"
            + "".join(f"{rate:15.0f}" for rate in rates.values())
            + "".join(f"{share:15.2f}" for share in shares)
        )
    if importlib.util.find_spec("crafter"):
        results["crafter world"] = worlds = world_times(options.turns)
        ratio = worlds["stock"] / worlds["ours"]
        print(
            f"a Crafter world: stock {worlds['stock']:.3f} s, ours "
            f"{worlds['ours']:.3f} s, {ratio:.1f} times faster"
        )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=2))


def measure(task: str, options: Any) -> dict[str, float]:
    """Steps per second of each way to run a task; medians of alternating turns."""
    factory = envs.TaskFactory(task, envs.EnvConfig(), seed=0)
    made = factory(0)
    raw: Any = factory(1)
    while isinstance(raw, Wrapper):
        raw = raw.env
    local = envs.make_pool(factory, options.count, envs.PoolConfig())
    config = envs.PoolConfig(workers=options.workers)
    workers = envs.make_pool(factory, options.count, config)
    ways = {
        "raw": single(raw),
        "made": single(made),
        "local": pooled(local),
        "workers": pooled(workers),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.turns):
        for name, turn in ways.items():
            rates[name].append(turn(options.seconds))
    local.close()
    workers.close()
    return {name: statistics.median(each) for name, each in rates.items()}


def single(env: Any) -> Callable[[float], float]:
    rng = np.random.default_rng(0)
    actions = {key: space.sample(rng, 1000) for key, space in env.act_space.items()}
    env.reset(seed=0)

    def turn(seconds: float) -> float:
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            action = {key: value[steps % 1000] for key, value in actions.items()}
            if env.step(action)["is_last"]:
                env.reset()
            steps += 1
        return steps / (time.perf_counter() - begin)

    return turn


def pooled(pool: Any) -> Callable[[float], float]:
    rng = np.random.default_rng(0)
    action = {k: s.sample(rng, 1000, len(pool)) for k, s in pool.act_space.items()}
    pool.reset()

    def turn(seconds: float) -> float:
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            pool.step({key: value[steps % 1000] for key, value in action.items()})
            steps += 1
        return steps * len(pool) / (time.perf_counter() - begin)

    return turn


def world_times(turns: int) -> dict[str, float]:
    """Seconds to generate a Crafter world, by the stock code and by ours."""
    from crafter import constants, engine, objects, worldgen

    from reverie.envs.terrain import generate_world

    times: dict[str, list[float]] = {"stock": [], "ours": []}
    for seed in range(turns):
        for name, generate in (
            ("stock", worldgen.generate_world),
            ("ours", generate_world),
        ):
            world = engine.World((64, 64), constants.materials, (12, 12))
            world.reset(seed)
            player = objects.Player(world, (32, 32))
            world.add(player)
            begin = time.perf_counter()
            generate(world, player)
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in times.items()}


if __name__ == "__main__":
    main()
