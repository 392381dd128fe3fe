"""How many steps per second environments give: alone, in pools, and without us.

    reverie bench envs --tasks atari_pong crafter_reward --counts 8 16

The measure of a pool is the simulator itself (`raw`), without our adapters, wrappers
and pools: for Atari the emulator with the screens the settings ask for, made with plain
numpy and Pillow; for Crafter the stock game (with worlds made our way: its own takes
seconds for one); for other suites the adapter alone. A pool is held against as many of
them in turn (`8 raw`), because they crowd each other out of the cache. `8 raw x 2` is
the same simulators in two processes that know nothing of each other: two busy cores
are slower each, and no pool of two workers could do better.

Overhead is what a step costs in processor time beyond the simulator, workers included:
steps per second say as much about what else a machine is doing. All ways play the same
episodes with the same actions, step for step, and take turns; the overhead is that of
the median turn.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie import envs
from reverie.api import Env, UserError
from reverie.envs.seeding import derive_seed
from reverie.envs.wrappers import Wrapper
from reverie.spaces import Space


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


Step = Callable[[int], Any]
"""Takes a step; the number picks its action. Simulators return their image."""

Turn = Callable[[int], Sample]
"""Takes so many steps in every environment."""

ACTIONS = 1000
"""Actions after which they repeat."""


@dataclass(frozen=True)
class EnvBenchConfig:
    tasks: tuple[str, ...] = ("atari_pong", "crafter_reward", "catch")
    """What to measure; tasks whose package is missing are passed over."""
    counts: tuple[int, ...] = (8, 16)
    """Environments in a pool."""
    workers: int = -1
    """Worker processes of a pool; -1 for one per core."""
    seconds: float = 1.0
    """How long the simulators take for their turn; other ways take as many steps."""
    turns: int = 5
    """How often each way has its turn."""
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
    count: int = 1
    """Environments it steps."""

    @property
    def against(self) -> str:
        return "raw" if self.count == 1 else f"{self.count} raw"


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
    pace = _pace(raw(task, settings), config.seconds)
    ways = _ways(task, config, settings)
    samples: dict[str, list[Sample]] = {way.name: [] for way in ways}
    try:
        for _ in range(config.turns):
            for way in ways:
                steps = max(1, round(config.seconds * pace / way.count))
                samples[way.name].append(way.turn(steps))
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
            "overhead": overhead(samples[way.name], samples[way.against]),
        }
        for way in ways
    }


def overhead(ours: list[Sample], theirs: list[Sample]) -> float:
    """What one way costs beyond another that took the same steps beside it."""
    ratios = [one.cost / two.cost for one, two in zip(ours, theirs, strict=True)]
    return statistics.median(ratios) - 1


def _pace(turn: Turn, seconds: float) -> float:
    """Roughly how many steps a second something takes."""
    steps, sample = 1, turn(1)
    while sample.seconds < seconds / 2:
        steps *= 2
        sample = turn(steps)
    return sample.rate


def _ways(task: str, config: EnvBenchConfig, settings: envs.EnvConfig) -> list[Way]:
    factory = envs.TaskFactory(task, settings, seed=0)
    workers = config.workers if config.workers > 0 else os.cpu_count() or 1
    ways: list[Way] = []

    def add(name: str, turn: Turn, close: Any, count: int) -> None:
        if name not in [way.name for way in ways]:
            ways.append(Way(name, turn, close, count))

    single = factory(0)
    add("raw", raw(task, settings), lambda: None, 1)
    add("single", steps_of(single), single.close, 1)
    for count in config.counts:
        bare = "raw" if count == 1 else f"{count} raw"
        add(bare, raw(task, settings, range(count)), lambda: None, count)
        local = envs.make_vec_env(factory, count, envs.VecEnvConfig())
        add(f"pool of {count}", steps_of_pool(local), local.close, count)
        split = min(workers, count)
        if workers > 1:
            together = Together(task, settings, count, split)
            add(f"{bare} x {split}", together, together.close, count)
            pool = envs.make_vec_env(factory, count, envs.VecEnvConfig(workers=split))
            name = f"{count} in {split} workers"
            add(name, steps_of_pool(pool), pool.close, count)
        for backend in _native(task) if config.native else ():
            made = envs.make_vec_env(factory, count, envs.VecEnvConfig(native=backend))
            add(f"{count} in {backend}", steps_of_pool(made), made.close, count)
    return ways


def _native(task: str) -> list[Any]:
    """The vector environments a task could run on here."""
    from importlib.util import find_spec

    known = {"ale": "ale_py", "envpool": "envpool"} if task[:5] == "atari" else {}
    return [name for name, package in known.items() if find_spec(package)]


def steps_of(env: Env) -> Turn:
    """Steps one environment with random actions."""
    return _timed(_stepping(env, 0))


def _stepping(env: Env, index: int, seed: int | None = None) -> Step:
    actions = {k: s.sample(_rng(index), ACTIONS) for k, s in env.act_space.items()}
    env.reset(seed)

    def step(turn: int) -> None:
        if env.step({key: value[turn] for key, value in actions.items()})["is_last"]:
            env.reset()

    return step


def steps_of_pool(pool: Any) -> Turn:
    """Steps a pool with random actions; counts every environment."""
    actions = {
        key: np.stack([space.sample(_rng(i), ACTIONS) for i in range(len(pool))], 1)
        for key, space in pool.act_space.items()
    }
    pool.reset()

    def step(turn: int) -> None:
        pool.step({key: value[turn] for key, value in actions.items()})

    return _timed(step, len(pool), getattr(pool, "pids", ()))


def _rng(index: int) -> np.random.Generator:
    """Where the actions of an environment come from, however it is stepped."""
    return np.random.default_rng(index)


def raw(task: str, settings: envs.EnvConfig, indices: Sequence[int] = (0,)) -> Turn:
    """Steps simulators of a task without anything of ours, one after the other."""
    steps = [_raw_step(task, settings, index) for index in indices]

    def step(turn: int) -> None:
        for each in steps:
            each(turn)

    return _timed(step, len(steps))


def _raw_step(task: str, settings: envs.EnvConfig, index: int) -> Step:
    suite, name = envs.split_task(task)
    seed = derive_seed(0, index)
    if suite.startswith("atari"):
        return _raw_atari(name, settings, index, seed)
    if suite == "crafter":
        return _raw_crafter(settings, index, seed)
    env: Any = envs.make(task, settings)
    while isinstance(env, Wrapper):
        env = env.env
    return _stepping(env, index, seed)


def _raw_atari(name: str, settings: envs.EnvConfig, index: int, seed: int) -> Step:
    from ale_py import ALEInterface, LoggerMode, roms
    from PIL import Image

    from reverie.envs.suites.atari import GRAY, NOOP, find_game

    config = settings.atari
    ALEInterface.setLoggerMode(LoggerMode.Error)
    console = ALEInterface()
    console.setFloat("repeat_action_probability", config.sticky)
    console.setInt("random_seed", seed)
    rom: Any = roms.get_rom_path(find_game(name))
    console.loadROM(rom)
    everything = config.actions == "all"
    known = console.getLegalActionSet() if everything else console.getMinimalActionSet()
    picks = Space(np.dtype(np.int32), (), 0, len(known)).sample(_rng(index), ACTIONS)
    actions = [known[pick].value for pick in picks]
    size = config.size[::-1]
    rng = np.random.default_rng(seed)

    def begin() -> None:
        console.reset_game()
        for _ in range(rng.integers(config.noops + 1)):
            console.act(NOOP)

    def step(turn: int) -> np.ndarray:
        screens = []
        for frame in range(config.repeat):
            console.act(actions[turn])
            if frame >= config.repeat - config.pooling:
                screens.append(console.getScreenRGB())
        screen = Image.fromarray(np.max(screens, 0))
        image = np.asarray(screen.resize(size, Image.Resampling.BILINEAR))
        if config.gray:
            image = (image @ GRAY).astype(np.uint8)
        if console.game_over():
            begin()
        return image

    begin()
    return step


def _raw_crafter(settings: envs.EnvConfig, index: int, seed: int) -> Step:
    from reverie.envs.suites.crafter import make_game

    game = make_game(settings.crafter, reward=True, seed=seed)
    game.reset()
    known = Space(np.dtype(np.int32), (), 0, game.action_space.n)
    actions = known.sample(_rng(index), ACTIONS)

    def step(turn: int) -> np.ndarray:
        image, _, done, _ = game.step(actions[turn])
        if done:
            game.reset()
        return np.asarray(image)

    return step


def _timed(step: Step, count: int = 1, pids: Any = ()) -> Turn:
    """Turns of a function that takes `count` steps, with the help of processes."""
    counter = 0

    def turn(steps: int) -> Sample:
        nonlocal counter
        begin, work = time.perf_counter(), _work(pids)
        for _ in range(steps):
            step(counter % ACTIONS)
            counter += 1
        spent = time.perf_counter() - begin
        return Sample(steps * count, spent, _work(pids) - work)

    return turn


def _work(pids: Any) -> float:
    """Processor time this process and others have used, in seconds."""
    total = time.process_time()
    if sys.platform.startswith("linux"):  # elsewhere only our own time is known
        for pid in pids:
            total += time.clock_gettime((~pid << 3) | 2)  # see clock_getcpuclockid
    return total


class Together:
    """Simulators in several processes at once: what workers could reach at best."""

    def __init__(self, task: str, settings: envs.EnvConfig, count: int, helpers: int):
        import cloudpickle

        shares = np.array_split(np.arange(count), helpers)
        self._helpers = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "reverie.bench.envs"),
                    cloudpickle.dumps((task, settings, share.tolist())).hex(),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for share in shares
        ]
        self(0)  # until all of them are there

    def __call__(self, steps: int) -> Sample:
        for helper in self._helpers:
            assert helper.stdin is not None
            print(steps, file=helper.stdin, flush=True)
        answers = [helper.stdout.readline() for helper in self._helpers]  # type: ignore
        each = [Sample(*map(float, answer.split())) for answer in answers]
        taken, work = sum(one.steps for one in each), sum(one.work for one in each)
        return Sample(taken, max(one.seconds for one in each), work)

    def close(self) -> None:
        for helper in self._helpers:
            helper.communicate()


def _help(parcel: str) -> None:
    """The life of one of the processes: read how many steps, write what they took."""
    import cloudpickle

    turn = raw(*cloudpickle.loads(bytes.fromhex(parcel)))
    for line in sys.stdin:
        print(*turn(int(line)), flush=True)


def crafter_worlds(turns: int) -> dict[str, float]:
    """Seconds to generate a Crafter world, by the stock code and by ours."""
    from crafter import constants, engine, objects, worldgen

    from reverie.envs.suites.crafter.terrain import generate_world

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
