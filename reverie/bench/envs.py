"""Benchmark of environments: steps per second and overhead over the simulator.

    reverie bench envs --tasks atari_pong crafter_reward --counts 8 16

Every variant (one environment, vectorized environments, with and without worker
processes) is compared with the same number of bare simulators, without the adapters and
wrappers of Reverie. For Atari, the bare simulator is the emulator with screens resized
by NumPy and Pillow; for Crafter, the original game (with the faster world generation of
Reverie, because the original takes seconds per world); for other suites, the adapter
without wrappers. `8 simulators` step in turn in one process, because several simulators
compete for the CPU cache. `8 simulators x 2` step in two independent processes: an
upper bound for vectorized environments with two workers.

The overhead is the additional CPU time per step, including worker processes. CPU time
depends less on other load on the machine than steps per second do. All variants play
the same episodes with the same actions and are measured alternately; the overhead is
the median over repeats.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie import envs
from reverie.api import Env, UserError
from reverie.envs.seeding import derive_seed
from reverie.envs.wrappers import without_wrappers
from reverie.spaces import Space
from reverie.storage.atomic import make_parent, write_json


class StepTiming(NamedTuple):
    """Environment steps, with the wall-clock and CPU time they took."""

    steps: float
    seconds: float
    cpu_seconds: float

    @property
    def rate(self) -> float:
        """Steps per second."""
        return self.steps / self.seconds

    @property
    def cost(self) -> float:
        """CPU seconds per step."""
        return self.cpu_seconds / max(1.0, self.steps)


Step = Callable[[int], Any]
"""Takes a step with the action of the given index. Simulators return their image."""

Measure = Callable[[int], StepTiming]
"""Takes the given number of steps in every environment; returns their timing."""

NUM_ACTIONS = 1000
"""Number of random actions, which are repeated in a cycle."""


@dataclass(frozen=True)
class EnvBenchConfig:
    """Settings of `reverie bench envs`."""

    tasks: tuple[str, ...] = ("atari_pong", "crafter_reward", "catch")
    """Tasks to measure; tasks of suites that are not installed are skipped."""
    counts: tuple[int, ...] = (8, 16)
    """Numbers of vectorized environments."""
    workers: int = -1
    """Worker processes; -1 for one per CPU core."""
    seconds: float = 1.0
    """Duration of each measurement of the bare simulators; other variants take the same
    number of steps."""
    repeats: int = 5
    """Number of measurements of each variant."""
    native: bool = True
    """Also measure vectorized environments in C++ (ale-py, EnvPool), if installed."""
    output: str = ""
    """JSON file for the results."""

    def __post_init__(self) -> None:
        if not self.tasks or min(self.counts, default=0) < 1 or self.repeats < 1:
            raise UserError(
                "A benchmark of environments needs tasks, counts of at least 1, and at "
                "least 1 repeat.\n  Fix: --tasks catch --counts 8 16 --repeats 5"
            )


@dataclass(frozen=True)
class EnvVariant:
    """One way to step the environments of a task."""

    name: str
    measure: Measure
    close: Callable[[], object]
    count: int
    """Number of environments."""

    @property
    def baseline(self) -> str:
        """Name of the variant to compare with."""
        return "simulator" if self.count == 1 else f"{self.count} simulators"


def bench_envs(
    config: EnvBenchConfig, settings: envs.EnvConfig | None = None
) -> dict[str, Any]:
    """Measure every task, print a table, and return the results."""
    settings = settings or envs.EnvConfig()
    results: dict[str, Any] = {"cores": os.cpu_count(), "seconds": config.seconds}
    print(f"{os.cpu_count()} cores, {config.repeats} x {config.seconds} seconds")
    print(f"{'task':<16} {'variant':<18} {'steps/s':>9} {'us/step':>9} {'overhead':>9}")
    for task in config.tasks:
        suite = envs.SUITES.get(envs.split_task(task)[0])
        if suite is not None and not suite.is_installed:
            print(f"{task:<16} is not installed: {suite.install_command}")
            continue
        results[task] = variants = _measure_task(task, config, settings)
        for name, row in variants.items():
            cost = f"{1e6 * row['cost']:.0f}"
            line = f"{task:<16} {name:<18} {row['rate']:>9.0f} {cost:>9}"
            print(f"{line} {row['overhead']:>9.0%} over {row['baseline']}")
    if config.output:
        path = Path(config.output).expanduser()
        make_parent(path)
        write_json(path, results)
    return results


def _measure_task(
    task: str, config: EnvBenchConfig, settings: envs.EnvConfig
) -> dict[str, dict[str, Any]]:
    """Measure steps per second, CPU time per step and overhead of every variant."""
    rate = _estimate_rate(measure_simulators(task, settings), config.seconds)
    variants = _make_variants(task, config, settings)
    timings: dict[str, list[StepTiming]] = {variant.name: [] for variant in variants}
    try:
        for _ in range(config.repeats):
            for variant in variants:
                steps = max(1, round(config.seconds * rate / variant.count))
                timings[variant.name].append(variant.measure(steps))
    finally:
        for variant in variants:
            variant.close()
    results = {}
    for variant in variants:
        own, baseline = timings[variant.name], timings[variant.baseline]
        total = StepTiming(*map(sum, zip(*own, strict=True)))
        results[variant.name] = {
            "rate": total.rate,
            "cost": total.cost,
            "baseline": variant.baseline,
            "overhead": overhead(own, baseline),
        }
    return results


def overhead(timings: list[StepTiming], baseline: list[StepTiming]) -> float:
    """Return the median additional CPU time per step, as a fraction of the baseline."""
    pairs = zip(timings, baseline, strict=True)
    return statistics.median([one.cost / other.cost for one, other in pairs]) - 1


def _estimate_rate(measure: Measure, seconds: float) -> float:
    """Return the approximate number of steps per second."""
    steps, timing = 1, measure(1)
    while timing.seconds < seconds / 2:
        steps *= 2
        timing = measure(steps)
    return timing.rate


def _make_variants(
    task: str, config: EnvBenchConfig, settings: envs.EnvConfig
) -> list[EnvVariant]:
    """Create the variants of a task, including the baselines of all of them."""
    factory = envs.TaskFactory(task, settings, seed=0)
    workers = config.workers if config.workers > 0 else os.cpu_count() or 1
    variants: dict[str, EnvVariant] = {}

    def add(name: str, measure: Measure, close: Any, count: int) -> None:
        # a count of 1 adds the variant `simulator` again: keep the first one
        variants.setdefault(name, EnvVariant(name, measure, close, count))

    def add_vec_env(name: str, count: int, **options: Any) -> None:
        vec = envs.make_vec_env(factory, count, envs.VecEnvConfig(**options))
        add(name, measure_vec_env(vec), vec.close, count)

    env = factory(0)
    add("simulator", measure_simulators(task, settings), lambda: None, 1)
    add("env", _timed(_make_step(env, 0)), env.close, 1)
    for count in config.counts:
        bare = "simulator" if count == 1 else f"{count} simulators"
        add(bare, measure_simulators(task, settings, range(count)), lambda: None, count)
        add_vec_env(f"{count} vectorized", count)
        processes = min(workers, count)
        if workers > 1:
            parallel = ParallelSimulators(task, settings, count, processes)
            add(f"{bare} x {processes}", parallel, parallel.close, count)
            add_vec_env(f"{count} in {processes} workers", count, workers=processes)
        for backend in _native_backends(task) if config.native else ():
            add_vec_env(f"{count} in {backend}", count, native=backend)
    return list(variants.values())


def _native_backends(task: str) -> list[Any]:
    """Return the installed C++ implementations of vectorized environments."""
    backends = {"ale": "ale_py", "envpool": "envpool"} if task[:5] == "atari" else {}
    return [name for name, package in backends.items() if find_spec(package)]


def _make_step(env: Env, index: int, seed: int | None = None) -> Step:
    """Return a function that steps an environment, and resets it after each episode."""
    actions = {k: s.sample(_rng(index), NUM_ACTIONS) for k, s in env.act_space.items()}
    env.reset(seed)

    def step(i: int) -> None:
        if env.step({key: value[i] for key, value in actions.items()})["is_last"]:
            env.reset()

    return step


def measure_vec_env(vec: Any) -> Measure:
    """Return a function that times vectorized environments, with random actions."""
    actions = {
        key: np.stack([space.sample(_rng(i), NUM_ACTIONS) for i in range(len(vec))], 1)
        for key, space in vec.act_space.items()
    }
    vec.reset()

    def step(i: int) -> None:
        vec.step({key: value[i] for key, value in actions.items()})

    return _timed(step, len(vec), getattr(vec, "pids", ()))


def _rng(index: int) -> np.random.Generator:
    """Random generator of the actions of an environment, the same in all variants."""
    return np.random.default_rng(index)


def measure_simulators(
    task: str, settings: envs.EnvConfig, indices: Sequence[int] = (0,)
) -> Measure:
    """Return a function that times bare simulators of a task, which step in turn."""
    steps = [_simulator_step(task, settings, index) for index in indices]

    def step(i: int) -> None:
        for step_one in steps:
            step_one(i)

    return _timed(step, len(steps))


def _simulator_step(task: str, settings: envs.EnvConfig, index: int) -> Step:
    """Return a function that steps a bare simulator; see the top of this file."""
    suite, name = envs.split_task(task)
    seed = derive_seed(0, index)
    if suite.startswith("atari"):
        return _atari_step(name, settings, index, seed)
    if suite == "crafter":
        return _crafter_step(settings, index, seed)
    return _make_step(without_wrappers(envs.make(task, settings)), index, seed)


def _atari_step(name: str, settings: envs.EnvConfig, index: int, seed: int) -> Step:
    from ale_py import ALEInterface, LoggerMode, roms
    from PIL import Image

    from reverie.envs.suites.atari import GRAY_WEIGHTS, NOOP, find_game

    config = settings.atari
    ALEInterface.setLoggerMode(LoggerMode.Error)
    ale = ALEInterface()
    ale.setFloat("repeat_action_probability", config.sticky)
    ale.setInt("random_seed", seed)
    rom: Any = roms.get_rom_path(find_game(name))
    ale.loadROM(rom)
    use_all = config.actions == "all"
    legal = ale.getLegalActionSet() if use_all else ale.getMinimalActionSet()
    space = Space(np.dtype(np.int32), (), 0, len(legal))
    actions = [legal[i].value for i in space.sample(_rng(index), NUM_ACTIONS)]
    size = config.size[::-1]
    rng = np.random.default_rng(seed)

    def reset() -> None:
        ale.reset_game()
        for _ in range(rng.integers(config.noops + 1)):
            ale.act(NOOP)

    def step(i: int) -> np.ndarray:
        screens = []
        for frame in range(config.repeat):
            ale.act(actions[i])
            if frame >= config.repeat - config.pooling:
                screens.append(ale.getScreenRGB())
        screen = Image.fromarray(np.max(screens, 0))
        image = np.asarray(screen.resize(size, Image.Resampling.BILINEAR))
        if config.gray:
            image = (image @ GRAY_WEIGHTS).astype(np.uint8)
        if ale.game_over():
            reset()
        return image

    reset()
    return step


def _crafter_step(settings: envs.EnvConfig, index: int, seed: int) -> Step:
    from reverie.envs.suites.crafter import make_game

    game = make_game(settings.crafter, reward=True, seed=seed)
    game.reset()
    space = Space(np.dtype(np.int32), (), 0, game.action_space.n)
    actions = space.sample(_rng(index), NUM_ACTIONS)

    def step(i: int) -> np.ndarray:
        image, _, done, _ = game.step(actions[i])
        if done:
            game.reset()
        return np.asarray(image)

    return step


def _timed(step: Step, count: int = 1, pids: Any = ()) -> Measure:
    """Return a function that times calls of `step`, which steps `count` environments.

    The CPU time of the worker processes `pids` is included.
    """
    index = 0

    def measure(steps: int) -> StepTiming:
        nonlocal index
        start, cpu_start = time.perf_counter(), _cpu_seconds(pids)
        for _ in range(steps):
            step(index % NUM_ACTIONS)
            index += 1
        seconds = time.perf_counter() - start
        return StepTiming(steps * count, seconds, _cpu_seconds(pids) - cpu_start)

    return measure


def _cpu_seconds(pids: Any) -> float:
    """CPU time of this process and of the processes `pids`."""
    total = time.process_time()
    if sys.platform.startswith("linux"):  # not available elsewhere
        for pid in pids:
            total += time.clock_gettime((~pid << 3) | 2)  # see clock_getcpuclockid
    return total


class ParallelSimulators:
    """Measures bare simulators in several independent processes."""

    def __init__(self, task: str, settings: envs.EnvConfig, count: int, processes: int):
        import cloudpickle

        shares = np.array_split(np.arange(count), processes)
        self._processes = [
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
        self(0)  # returns when all of them have started

    def __call__(self, steps: int) -> StepTiming:
        for process in self._processes:
            assert process.stdin is not None
            print(steps, file=process.stdin, flush=True)
        lines = [process.stdout.readline() for process in self._processes]  # type: ignore
        columns = zip(*(map(float, line.split()) for line in lines), strict=True)
        num_steps, seconds, cpu_seconds = columns
        return StepTiming(sum(num_steps), max(seconds), sum(cpu_seconds))

    def close(self) -> None:
        for process in self._processes:
            process.communicate()


def _serve_measurements(pickled: str) -> None:
    """Main function of a process: read numbers of steps, and write their timings."""
    import cloudpickle

    measure = measure_simulators(*cloudpickle.loads(bytes.fromhex(pickled)))
    for line in sys.stdin:
        print(*measure(int(line)), flush=True)


if __name__ == "__main__":
    _serve_measurements(sys.argv[1])
