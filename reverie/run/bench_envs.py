"""How many steps per second environments give: alone, in pools, and without us.

    reverie bench envs --tasks atari_pong crafter_reward --counts 8 16

The measure of a pool is the simulator itself (`raw`), which does the same work without
our adapters, wrappers and pools: for Atari the emulator with the screens the settings
ask for, for Crafter the game (with worlds made our way: its own takes seconds for one),
for other suites the adapter alone. A pool is held against as many of them in turn (`8
raw`), because they crowd each other out of the cache; `raw x 2` is two of it in
processes of their own, which is what two workers could reach at best.

Overhead is what a step costs in processor time beyond the simulator, workers included:
steps per second say as much about what else a machine is doing. All ways take turns.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie import envs
from reverie.api import Env, UserError
from reverie.envs.wrappers import Wrapper, resize


class Sample(NamedTuple):
    """What one or more turns brought."""

    steps: float
    seconds: float
    work: float
    """Processor time, in seconds."""

    @property
    def rate(self) -> float:
        return self.steps / self.seconds

    @property
    def cost(self) -> float:
        return self.work / max(1.0, self.steps)


Step = Callable[[int], None]
"""Takes a step; the number picks its action."""

Turn = Callable[[float], Sample]
"""Runs for so many seconds."""


@dataclass(frozen=True)
class EnvBenchConfig:
    tasks: tuple[str, ...] = ("atari_pong", "crafter_reward", "catch")
    """What to measure; tasks whose package is missing are passed over."""
    counts: tuple[int, ...] = (8, 16)
    """Environments in a pool."""
    workers: int = -1
    """Worker processes of a pool; -1 for one per core."""
    seconds: float = 1.0
    """How long each way runs in its turn."""
    turns: int = 5
    """How often; the table has all of them together, as new episodes come in bursts."""
    native: bool = True
    """Measure the vector environments written in C++, where they are installed."""
    output: str = ""
    """A file for the numbers as JSON."""

    def __post_init__(self) -> None:
        if not self.tasks or min(self.counts, default=0) < 1 or self.turns < 1:
            raise UserError(
                "There is nothing to measure.\n  Fix: give --tasks, --counts of at "
                "least 1 and --turns of at least 1."
            )


@dataclass(frozen=True)
class Way:
    """One way to step a task, and what it is held against."""

    name: str
    turn: Turn
    close: Callable[[], object]
    against: str = "raw"


def bench_envs(
    config: EnvBenchConfig, settings: envs.EnvConfig | None = None
) -> dict[str, Any]:
    """Measure every task and print a table; returns the numbers."""
    settings = settings or envs.EnvConfig()
    found: dict[str, Any] = {"cores": os.cpu_count(), "seconds": config.seconds}
    print(f"{os.cpu_count()} cores, {config.turns} turns of {config.seconds} seconds")
    print(f"{'task':<16} {'way':<18} {'steps/s':>9} {'us/step':>9} {'overhead':>9}")
    for task in config.tasks:
        suite = envs.SUITES.get(envs.split_task(task)[0])
        if suite is not None and not suite.is_installed:
            print(f"{task:<16} is not installed: {suite.install}")
            continue
        found[task] = measured = _measure(task, config, settings)
        for name, row in measured.items():
            cost = f"{1e6 * row['cost']:.0f}"
            line = f"{task:<16} {name:<18} {row['rate']:>9.0f} {cost:>9}"
            print(f"{line} {row['overhead']:>9.0%} of {row['against']}")
    if any(task.startswith("crafter") for task in found):
        found["crafter world"] = worlds = crafter_worlds(config.turns)
        print(
            f"A Crafter world takes the stock code {worlds['stock']:.3f} s and ours "
            f"{worlds['ours']:.3f} s, {worlds['stock'] / worlds['ours']:.1f} times "
            "less, and is the same."
        )
    if config.output:
        path = Path(config.output).expanduser()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=2) + "\n")
    return found


def _measure(
    task: str, config: EnvBenchConfig, settings: envs.EnvConfig
) -> dict[str, dict[str, Any]]:
    """Every way's steps per second, cost of a step, and overhead over `raw`."""
    ways = _ways(task, config, settings)
    samples: dict[str, list[Sample]] = {way.name: [] for way in ways}
    try:
        for _ in range(config.turns):
            for way in ways:
                samples[way.name].append(way.turn(config.seconds))
    finally:
        for way in ways:
            way.close()
    sums = {
        name: Sample(*map(sum, zip(*each, strict=True)))
        for name, each in samples.items()
    }
    return {
        way.name: {
            "rate": sums[way.name].rate,
            "cost": sums[way.name].cost,
            "against": way.against,
            "overhead": sums[way.name].cost / sums[way.against].cost - 1,
        }
        for way in ways
    }


def _ways(task: str, config: EnvBenchConfig, settings: envs.EnvConfig) -> list[Way]:
    factory = envs.TaskFactory(task, settings, seed=0)
    single = factory(0)
    ways = [
        Way("raw", raw(task, settings), lambda: None),
        Way("single", steps_of(single), single.close),
    ]
    workers = config.workers if config.workers > 0 else os.cpu_count() or 1
    for count in config.counts:
        bare = f"{count} raw"
        ways.append(Way(bare, raw(task, settings, count), lambda: None, bare))
        local = envs.make_pool(factory, count, envs.PoolConfig())
        ways.append(Way(f"pool of {count}", steps_of_pool(local), local.close, bare))
    if workers > 1:
        together = Together(task, settings, workers)
        ways.append(Way(f"raw x {workers}", together, together.close))
        for count in config.counts:
            options = envs.PoolConfig(workers=min(workers, count))
            pool = envs.make_pool(factory, count, options)
            name = f"{count} in {min(workers, count)} workers"
            bare = f"{count} raw"
            ways.append(Way(name, steps_of_pool(pool), pool.close, bare))
    for backend in _native(task) if config.native else ():
        for count in config.counts:
            made = envs.make_pool(factory, count, envs.PoolConfig(native=backend))
            name, bare = f"{count} in {backend}", f"{count} raw"
            ways.append(Way(name, steps_of_pool(made), made.close, bare))
    return ways


def _native(task: str) -> list[Any]:
    """The vector environments a task could run on here."""
    from importlib.util import find_spec

    known = {"ale": "ale_py", "envpool": "envpool"} if task[:5] == "atari" else {}
    return [name for name, package in known.items() if find_spec(package)]


def steps_of(env: Env) -> Turn:
    """Steps one environment with random actions."""
    return _timed(_stepping(env))


def _stepping(env: Env) -> Step:
    rng = np.random.default_rng(0)
    actions = {key: space.sample(rng, 1000) for key, space in env.act_space.items()}
    env.reset(seed=0)

    def step(turn: int) -> None:
        if env.step({key: value[turn] for key, value in actions.items()})["is_last"]:
            env.reset()

    return step


def steps_of_pool(pool: Any) -> Turn:
    """Steps a pool with random actions; counts every environment."""
    rng, count = np.random.default_rng(0), len(pool)
    actions = {k: s.sample(rng, 1000, count) for k, s in pool.act_space.items()}
    pool.reset()

    def step(turn: int) -> None:
        pool.step({key: value[turn] for key, value in actions.items()})

    return _timed(step, count, getattr(pool, "pids", ()))


def raw(task: str, settings: envs.EnvConfig, count: int = 1) -> Turn:
    """Steps simulators of a task without anything of ours, one after the other."""
    steps = [_raw_step(task, settings) for _ in range(count)]

    def step(turn: int) -> None:
        for each in steps:
            each(turn)

    return _timed(step, count)


def _raw_step(task: str, settings: envs.EnvConfig) -> Step:
    suite, name = envs.split_task(task)
    if suite.startswith("atari"):
        return _raw_atari(name, settings)
    if suite == "crafter":
        return _raw_crafter(settings)
    env: Any = envs.make(task, settings)
    while isinstance(env, Wrapper):
        env = env.env
    return _stepping(env)


def _raw_atari(name: str, settings: envs.EnvConfig) -> Step:
    from ale_py import ALEInterface, LoggerMode, roms

    from reverie.envs.atari import GRAY, find_game

    config = settings.atari
    ALEInterface.setLoggerMode(LoggerMode.Error)
    console = ALEInterface()
    console.setFloat("repeat_action_probability", config.sticky)
    rom: Any = roms.get_rom_path(find_game(name))
    console.loadROM(rom)
    everything = config.actions == "all"
    known = console.getLegalActionSet() if everything else console.getMinimalActionSet()
    actions = np.random.default_rng(0).choice([each.value for each in known], 1000)

    def step(turn: int) -> None:
        screens = []
        for frame in range(config.repeat):
            console.act(actions[turn])
            if frame >= config.repeat - config.pooling:
                screens.append(console.getScreenRGB())
        image = resize(np.max(screens, 0), config.size)
        if config.gray:
            (image @ GRAY).astype(np.uint8)
        if console.game_over():
            console.reset_game()

    return step


def _raw_crafter(settings: envs.EnvConfig) -> Step:
    from reverie.envs.crafter import make_game

    game = make_game(settings.crafter, reward=True, seed=0)
    game.reset()
    actions = np.random.default_rng(0).integers(0, game.action_space.n, 1000)

    def step(turn: int) -> None:
        if game.step(actions[turn])[2]:
            game.reset()

    return step


def _timed(step: Step, count: int = 1, pids: Any = ()) -> Turn:
    """Turns of a function that takes `count` steps, with the help of processes."""
    counter = 0

    def turn(seconds: float) -> Sample:
        nonlocal counter
        steps, begin, work = 0, time.perf_counter(), _work(pids)
        while (spent := time.perf_counter() - begin) < seconds:
            step(counter % 1000)
            steps, counter = steps + count, counter + 1
        return Sample(steps, spent, _work(pids) - work)

    return turn


def _work(pids: Any) -> float:
    """Processor time this process and others have used, in seconds."""
    total = time.process_time()
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        if stat.exists():  # elsewhere only our own time is known
            fields = stat.read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


class Together:
    """The simulator in several processes at once: what workers could reach at best."""

    def __init__(self, task: str, settings: envs.EnvConfig, count: int):
        import cloudpickle

        parcel = cloudpickle.dumps((task, settings)).hex()
        command = [sys.executable, "-m", "reverie.run.bench_envs", parcel]
        self._helpers = [
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for _ in range(count)
        ]
        self(0.0)  # until all of them are there

    def __call__(self, seconds: float) -> Sample:
        for helper in self._helpers:
            assert helper.stdin is not None
            print(seconds, file=helper.stdin, flush=True)
        answers = [helper.stdout.readline() for helper in self._helpers]  # type: ignore
        each = [Sample(*map(float, answer.split())) for answer in answers]
        steps, work = sum(one.steps for one in each), sum(one.work for one in each)
        return Sample(steps, max(one.seconds for one in each), work)

    def close(self) -> None:
        for helper in self._helpers:
            helper.communicate()


def _help(parcel: str) -> None:
    """The life of one of the processes: read seconds, write steps per second."""
    import cloudpickle

    turn = raw(*cloudpickle.loads(bytes.fromhex(parcel)))
    turn(0.1)
    for line in sys.stdin:
        print(*turn(float(line)), flush=True)


def crafter_worlds(turns: int) -> dict[str, float]:
    """Seconds to generate a Crafter world, by the stock code and by ours."""
    from crafter import constants, engine, objects, worldgen

    from reverie.envs.terrain import generate_world

    ways = {"stock": worldgen.generate_world, "ours": generate_world}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for seed in range(turns):
        maps = []
        for name, generate in ways.items():
            world = engine.World((64, 64), constants.materials, (12, 12))
            world.reset(seed)
            player = objects.Player(world, (32, 32))
            world.add(player)
            begin = time.perf_counter()
            generate(world, player)
            times[name].append(time.perf_counter() - begin)
            maps.append(world._mat_map.copy())
        assert np.array_equal(*maps), f"the worlds of seed {seed} differ"
    return {name: statistics.median(each) for name, each in times.items()}


if __name__ == "__main__":
    _help(sys.argv[1])
