"""Benchmark of a config: time and memory of updates, policy, environments and replay.

Updates are timed as in a run: many in a row, with batches from a full replay buffer,
and one synchronization at the end. The sections of an update are timed separately for
agents that define them (`capabilities.Profilable`). The time of a policy call includes
the copies of observations and actions between host and device. Every measurement is
repeated.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from reverie.api import Action, Agent, Feed, Mode, Obs, UserError, VecEnv
from reverie.bench.table import format_rows, format_table
from reverie.capabilities import HasParameterCount, Profilable
from reverie.config import check_minimum
from reverie.log.messages import print_message
from reverie.replay import device_copy
from reverie.replay.buffer import Replay
from reverie.replay.device_copy import DeviceCopy
from reverie.replay.feed import ReplayFeed
from reverie.run import device as devices
from reverie.run.config import Config
from reverie.run.factory import MakeEnv, make_agent, make_envs
from reverie.run.folder import open_lock, resolve_logdir, system_info
from reverie.run.offline.datasets import OfflineSequences, trains_on_sequences
from reverie.run.resources import Resources
from reverie.spaces import Spaces
from reverie.storage.atomic import make_parent, write_file
from reverie.storage.system import lock_file, peak_memory


@dataclass(frozen=True)
class BenchConfig:
    """Settings of `reverie bench`."""

    repeats: int = 3
    """Number of measurements of each value."""
    seconds: float = 1.0
    """Duration of each measurement."""
    steps: int = 100_000
    """Steps in the replay buffer, if its capacity allows."""
    vary: Literal["", "algorithm", "size", "batch", "length", "image"] = ""
    """Measure the time of an update for several values of: model size, batch size,
    sequence length, image size, or algorithm (the given config, Plan2Explore, each
    option of DreamerV3, and the algorithm of dreamerv3-torch)."""
    jobs: int = 1
    """Number of configs that `vary` prepares at the same time, in separate processes.
    Measurements are made one after another."""
    compare: bool = False
    """Measure the speedup over `--compile none`."""
    process_group: bool = False
    """Measure how much slower updates are in a process group of one rank, with the
    collective operations of data-parallel training."""
    end_to_end: bool = False
    """Measure the wall time of each part of a short training run."""
    updates: int = 200
    """Number of updates that `end_to_end` measures, after the warm-up."""
    output: str = ""
    """JSON file for the results; empty for `bench.json` in the run folder."""

    def __post_init__(self) -> None:
        check_minimum(self, "bench.", repeats=1, steps=1, jobs=1, seconds=0)
        check_minimum(self, "bench.", updates=1)


@dataclass(frozen=True)
class BenchFlags:
    """Defines the flags `--bench.NAME`, one for each option."""

    bench: BenchConfig = field(default_factory=BenchConfig)


WARMUP_CALLS = 4
"""Calls before the first measurement, to build kernels and capture CUDA graphs."""
EPISODE_LENGTH = 200
"""Rows of the random episodes in the replay buffer."""


def bench_config(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure a config, print a table, and write the results as JSON."""
    with (
        machine_lock(exclusive=True) as waited,
        make_benchmark(config, options, make_env) as benchmark,
    ):
        results = benchmark.measure(waited)
    print(format_table(results))
    return write_results(config, options, {"about": system_info(), "results": results})


def bench_speedup(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure how much faster a config is than with `--compile none`.

    Both are measured alternately, so that other load on the machine affects both.
    """
    mode = "auto" if config.compile == "none" else config.compile
    with (
        machine_lock(exclusive=True),
        make_benchmark(replace(config, compile="none"), options, make_env) as plain,
        make_benchmark(replace(config, compile=mode), options, make_env) as fast,
    ):
        plain_calls, fast_calls = plain.calls(), fast.calls()
        results: dict[str, Any] = {"plain_ms": {}, "fast_ms": {}, "ratios": {}}
        for name in plain_calls:
            plain_ms, fast_ms = plain.time(plain_calls[name], fast_calls[name])
            results["plain_ms"][name], results["fast_ms"][name] = plain_ms, fast_ms
            pairs = zip(plain_ms, fast_ms, strict=True)
            results["ratios"][name] = [a / b for a, b in pairs]
    print(f"Speedup of --compile {mode} over --compile none")
    print(format_rows(results["ratios"].items()))
    return write_results(config, options, {"about": system_info(), **results})


def make_benchmark(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> UpdateBenchmark:
    """Return the benchmark of a config, to use as a context manager."""
    benchmark = SequenceBenchmark if trains_on_sequences(config) else UpdateBenchmark
    return benchmark(config, options, make_env)


class UpdateBenchmark(Resources):
    """Measures one config with its environments, agent and a full replay buffer."""

    agent: Agent
    feed: Feed
    source: Any
    """Environments or dataset; has `obs_space` and `act_space`."""
    capacity = 0
    """Steps in the replay buffer."""
    device_copy: DeviceCopy | None = None
    """Copy of the replay buffer on the device."""

    def __init__(
        self, config: Config, options: BenchConfig, make_env: MakeEnv | None = None
    ) -> None:
        super().__init__()
        self.config, self.options = config, options
        self.device = devices.pick_device(config.device)
        self._make_env = make_env

    def close(self) -> None:
        super().close()
        for name in ("agent", "feed", "device_copy", "replay", "envs", "source"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _open(self) -> None:
        config = self.config
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        devices.seed_everything(config.seed)
        if not config.deterministic:
            devices.enable_autotuning(self.device)
        devices.keep_freed_memory(self.device)
        self.precision = devices.pick_precision(config.precision, self.device)
        self._open_data()

    def _open_data(self) -> None:
        """Open the environments and the replay buffer, and make the agent."""
        config = self.config
        self.envs: VecEnv = make_envs(config, config.run.envs, 0, self._make_env)
        self._cleanup.callback(self.envs.close)
        self.source = self.envs
        self.agent = make_agent(config, self.envs, self.device, self.precision)
        self.capacity = min(self.options.steps, config.replay.capacity)
        self.replay = Replay(
            {**self.envs.obs_space, **self.envs.act_space},
            self.agent.extras,
            replace(config.replay, storage="ram", save=False, online=False),
            capacity=self.capacity,
            num_envs=config.run.envs,
            windows=self.agent.windows,
            directory=None,
            seed=config.seed,
        )
        self._cleanup.callback(self.replay.close)
        feed = ReplayFeed(
            self.replay,
            self.agent.windows,
            self.device,
            prefetch=self.device.type == "cuda",
            on_device=device_copy.fits_on_device(self.replay, self.device),
        )
        self._cleanup.callback(feed.close)
        self.feed, self.device_copy = feed, feed.device_copy

    def measure(self, waited: float = 0.0) -> dict[str, Any]:
        """Return all measurements.

        `waited`, the seconds spent waiting for the lock, is subtracted from the time of
        the first update, which counts from the start of the process.
        """
        results: dict[str, Any] = {
            "task": self.config.task,
            "agent": self.config.agent,
            "device": device_name(self.device),
            "precision": self.precision,
            "compile": devices.pick_compile(self.config.compile, self.device),
            "parameters": self.parameters(),
            "replay_on_device": self.device_copy is not None,
        }
        results["first_update_s"] = self.first_update() - waited
        results["update_ms"] = self.update()
        results.update(self.memory())  # before the other measurements use memory
        results["sections_ms"], results["sections_gb"] = self.sections()
        return {**results, **self.measure_collection()}

    def measure_collection(self) -> dict[str, Any]:
        """Measure what provides data: policy, environments and replay buffer."""
        return {
            "policy_ms": {str(n): self.time(self._policy_call(n))[0] for n in (1, 16)},
            "env_steps_per_s": self.env_rate(),
            "replay_mb_per_s": self.replay_rates(),
        }

    def first_update(self) -> float:
        """Seconds from the start of this process to the end of the first update."""
        windows = self.agent.windows.values()
        # enough rows for one batch of any window
        self.fill(max(w.batch * (w.length + w.context) + w.span for w in windows))
        self.agent.train(self.feed)
        self.synchronize()
        return process_age()

    def warm_up(self) -> None:
        """Fill the replay buffer and build the kernels.

        Autotuning is disabled, because other processes may use the GPU at this time.
        """
        self.fill(self.capacity)
        with devices.autotuning_disabled():
            self.agent.train(self.feed)
        self.synchronize()

    def update(self) -> list[float]:
        """Milliseconds of an update with a full replay buffer."""
        self.fill(self.capacity)
        return self.time(lambda: self.agent.train(self.feed))[0]

    def calls(self) -> dict[str, Callable[[], Any]]:
        """Return the functions to compare: the update, its sections, and the policy."""
        self.fill(self.capacity)
        return {
            "update": lambda: self.agent.train(self.feed),
            **{f"  {name}": section for name, section in self._sections().items()},
            "policy, 1 env": self._policy_call(1),
            "policy, 16 envs": self._policy_call(16),
        }

    def sections(self) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Time and peak GPU memory of each section of an update.

        The memory includes the weights of the agent, but not the replay buffer.
        """
        times, peaks = dict[str, list[float]](), dict[str, float]()
        for name, section in self._sections().items():
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            times[name] = self.time(section)[0]
            memory = self.memory()
            if "gpu_peak_gb" in memory:
                peaks[name] = memory["gpu_peak_gb"] - memory["gpu_replay_gb"]
        return times, peaks

    def _sections(self) -> dict[str, Callable[[], Any]]:
        if isinstance(self.agent, Profilable):
            return self.agent.sections(self.feed)
        return {}

    def _policy_call(self, envs: int) -> Callable[[], None]:
        """Return a function that calls the policy with random observations."""
        rng = np.random.default_rng(0)
        obs = sample(self.envs.obs_space, rng, envs)
        carry = self.agent.initial(envs)
        # agents with a training schedule (epochs) may start with random actions
        mode: Mode = "train" if self.agent.schedule is None else "eval"

        def call() -> None:
            nonlocal carry
            carry, _, _ = self.agent.policy(carry, obs, mode)

        return call

    def env_rate(self) -> list[float]:
        """Agent steps per second of all environments together."""
        rng = np.random.default_rng(0)
        self.envs.reset()
        space, envs = self.envs.act_space, len(self.envs)
        actions = itertools.cycle([sample(space, rng, envs) for _ in range(16)])
        times = self.time(lambda: self.envs.step(next(actions)))[0]
        return [1000 * envs / ms for ms in times]

    def replay_rates(self) -> dict[str, list[float]]:
        """Throughput of adding steps and of sampling batches, in MB per second."""
        rng = np.random.default_rng(0)
        row_bytes = sum(space.nbytes for space in self.replay.spaces.values())
        rows = sample(self.replay.spaces, rng, self.config.run.envs)
        for key in ("is_first", "is_last", "is_terminal"):
            rows[key][:] = False  # no episode ends
        name, window = next(iter(self.agent.windows.items()))
        steps = window.batch * (window.context + window.length)
        add = self.time(lambda: self.replay.add(rows))[0]
        sampling = self.time(lambda: self.feed(name))[0]
        return {
            "add": [self.config.run.envs * row_bytes / ms / 1e3 for ms in add],
            "sample": [steps * row_bytes / ms / 1e3 for ms in sampling],
        }

    def memory(self) -> dict[str, float]:
        """Peak memory in GB."""
        peak = peak_memory()
        peaks = {} if peak is None else {"peak_gb": peak / 1e9}
        if self.device.type == "cuda":
            peaks["gpu_peak_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            replay_bytes = 0 if self.device_copy is None else self.device_copy.nbytes
            peaks["gpu_replay_gb"] = replay_bytes / 1e9
        return peaks

    def parameters(self) -> int:
        """Number of trainable parameters, 0 if the agent has none."""
        agent = self.agent
        return agent.parameter_count() if isinstance(agent, HasParameterCount) else 0

    def fill(self, steps: int) -> None:
        """Add random episodes until the replay buffer has this many steps."""
        rng = np.random.default_rng(self.config.seed)
        rows: dict[str, np.ndarray] = {}
        while (missing := min(steps, self.replay.capacity) - len(self.replay)) > 0:
            count = min(missing, 1000)
            if len(rows.get("is_first", ())) != count:
                rows = sample(self.replay.spaces, rng, count)
                row = np.arange(count) % EPISODE_LENGTH  # in its episode
                rows["is_first"][:] = row == 0
                rows["is_last"][:] = row == EPISODE_LENGTH - 1
                rows["is_terminal"][:] = False
            self.replay.add_episode(rows)

    def time(self, *calls: Callable[[], Any]) -> list[list[float]]:
        """Measure milliseconds per call of each function, alternating between them."""
        timings: list[list[float]] = [[] for _ in calls]
        counts = []
        for call in calls:
            for _ in range(WARMUP_CALLS):
                call()
            self.synchronize()
            once = max(self._seconds(call, 1), 1e-7)
            counts.append(max(1, math.ceil(self.options.seconds / once)))
        for _ in range(self.options.repeats):
            for call, count, timing in zip(calls, counts, timings, strict=True):
                timing.append(1000 * self._seconds(call, count) / count)
        return timings

    def _seconds(self, call: Callable[[], Any], count: int) -> float:
        """Return the duration of `count` calls, including their work on the GPU."""
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class SequenceBenchmark(UpdateBenchmark):
    """Measures an agent that trains on a sequence dataset instead of environments."""

    def _open_data(self) -> None:
        dataset = OfflineSequences(self.config)
        self._cleanup.callback(dataset.close)
        self.source = dataset
        self.agent = make_agent(self.config, dataset, self.device, self.precision)
        feed = dataset.open_feed(self.agent, self.device)
        self._cleanup.callback(feed.close)
        self.feed = feed

    def fill(self, steps: int) -> None:
        """Do nothing: there is no replay buffer."""

    def calls(self) -> dict[str, Callable[[], Any]]:
        return {"update": lambda: self.agent.train(self.feed)}

    def measure_collection(self) -> dict[str, Any]:
        """Measure the time to load a batch, and sequences per second."""
        batch = self.agent.windows["train"].batch
        times = self.time(lambda: self.feed("train"))[0]
        return {"batch_ms": times, "sequences_per_s": [1000 * batch / t for t in times]}


@contextmanager
def machine_lock(exclusive: bool) -> Iterator[float]:
    """Hold the lock that all benchmarks of a user on this machine share.

    Measurements hold it exclusively; preparations can share it. Yields the number of
    seconds waited for it.
    """
    # Windows has no user ids, but a separate temporary folder for each user
    user = os.getuid() if hasattr(os, "getuid") else ""
    path = Path(tempfile.gettempdir()) / f"reverie-bench-{user}.lock"
    start = time.perf_counter()
    try:
        lock = open_lock(path)
    except OSError as error:
        raise UserError(
            f"Cannot write the lock file of benchmarks, {path}: {error.strerror}.\n"
            "  Fix: remove it, or set TMPDIR to a folder that you can write to."
        ) from error
    with lock:
        lock_file(lock, exclusive, math.inf)
        yield time.perf_counter() - start


def sample(spaces: Spaces, rng: np.random.Generator, count: int) -> Obs | Action:
    """Return `count` random values of every key."""
    return {key: space.sample(rng, count) for key, space in spaces.items()}


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the number of threads of a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} with {torch.get_num_threads()} threads"


def process_age() -> float:
    """Return the age of this process in seconds (outside Linux: since the import)."""
    try:
        fields = Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
        # `starttime` (see proc(5)), in clock ticks since the system was booted
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, IndexError, AttributeError):
        return time.time() - _IMPORT_TIME


_IMPORT_TIME = time.time()


def write_results(
    config: Config, options: BenchConfig, results: dict[str, Any]
) -> dict[str, Any]:
    """Write the results and the config to a JSON file, and return both."""
    path = Path(options.output).expanduser()
    if not options.output:
        path = resolve_logdir(config.logdir) / "bench.json"
    make_parent(path)
    results = {**results, "config": dataclasses.asdict(config)}
    write_file(path, json.dumps(results, indent=1, default=str).encode())
    print_message(f"\n{path}")
    return results
