"""How fast a config is on this machine: one table, and the same numbers as JSON.

Updates are timed as a run makes them: many in a row, fed from a full replay, with one
wait at the end. The pieces of an update are timed alone in the same way, for agents
that can name them (`capabilities.Profilable`). An agent that only watches gets its
sequences from their source (`bench_watch.py`). A policy call takes observations from
host memory and is over when its actions are there. Every number is taken several times.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from reverie.api import Action, Agent, Feed, Mode, Obs, UserError, VecEnv
from reverie.bench.table import rows_of, table
from reverie.capabilities import Profilable
from reverie.replay import device_copy
from reverie.replay.buffer import Replay
from reverie.replay.device_copy import DeviceCopy
from reverie.replay.feed import ReplayFeed
from reverie.run import device as devices
from reverie.run.config import Config
from reverie.run.factory import MakeEnv, make_agent, make_envs
from reverie.run.folder import about, place
from reverie.run.sequences import watches
from reverie.spaces import Spaces
from reverie.storage.atomic import write_file

WARM_UP = 4
"""Calls before the first measured one: kernels are built and graphs recorded then."""


@dataclass(frozen=True)
class BenchConfig:
    repeats: int = 3
    """How often each number is taken."""
    seconds: float = 1.0
    """How long each of them is measured."""
    steps: int = 100_000
    """Steps in the replay, if its capacity allows."""
    vary: Literal["", "size", "batch", "length", "image"] = ""
    """Instead of one table: how an update grows with this."""
    at_once: int = 1
    """How many of those configurations are brought up side by side, each in a process
    of its own; they are still timed one by one."""
    compare: bool = False
    """Instead: how many times as fast it is as without anything that speeds it up."""
    output: str = ""
    """The JSON file; by itself `bench.json` in the logdir."""

    def __post_init__(self) -> None:
        counts = (self.repeats, self.steps, self.at_once)
        if min(counts) < 1 or self.seconds < 0:
            raise UserError(
                "A measurement takes at least one repetition and one step.\n"
                "  Fix: --bench.repeats 3 --bench.seconds 1 --bench.steps 100000"
            )


@dataclass(frozen=True)
class BenchFlags:
    """The options by the names that flags have."""

    bench: BenchConfig = field(default_factory=BenchConfig)


class Timing(NamedTuple):
    """How long one call takes, by several measurements of many calls."""

    ms: list[float]

    @property
    def mean(self) -> float:
        return sum(self.ms) / len(self.ms)

    @property
    def spread(self) -> float:
        """Half the distance between the largest and the smallest."""
        return (max(self.ms) - min(self.ms)) / 2


def bench(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure one config, print the table, write the JSON; returns what it says."""
    with (
        the_machine(alone=True) as waited,
        subject_of(config, options, make_env) as subject,
    ):
        results = subject.measure(waited)
    print(table(results))
    return write(config, options, {"about": about(), "results": results})


def compare(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure a config plainly and fast, and print how many times as fast it is.

    Both take turns, so that a machine that is busy at times is so for both.
    """
    quick = config if config.compile != "none" else replace(config, compile="auto")
    slow = replace(config, compile="none")
    with (
        the_machine(alone=True),
        subject_of(slow, options, make_env) as plain,
        subject_of(quick, options, make_env) as fast,
    ):
        calls = [subject.calls() for subject in (plain, fast)]
        found: dict[str, Any] = {"plain_ms": {}, "fast_ms": {}, "ratios": {}}
        for name in calls[0]:
            before, after = plain.time(*(each[name] for each in calls))
            found["plain_ms"][name], found["fast_ms"][name] = before.ms, after.ms
            pairs = zip(before.ms, after.ms, strict=True)
            found["ratios"][name] = [a / b for a, b in pairs]
    print(
        f"--compile none / --compile {quick.compile}\n"
        + rows_of(found["ratios"].items())
    )
    return write(config, options, {"about": about(), **found})


def subject_of(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> Bench:
    """What is to be measured: an agent that acts, or one that watches."""
    from reverie.bench.sequences import WatchBench

    kind = WatchBench if watches(config) else Bench
    return kind(config, options, make_env)


class Bench:
    """One config brought up on this machine: environments, agent, a full replay."""

    feed: Feed
    capacity = 0
    """Steps of the replay."""
    device_copy: DeviceCopy | None = None
    """The replay on the device, if it is there."""

    def __init__(
        self, config: Config, options: BenchConfig, make_env: MakeEnv | None = None
    ) -> None:
        self.config, self.options = config, options
        self.device = devices.pick_device(config.device)
        self._make_env = make_env
        self._closing: list[Callable[[], None]] = []

    def __enter__(self) -> Bench:
        try:
            self._open()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        while self._closing:
            self._closing.pop()()
        for name in ("agent", "feed", "device_copy", "replay", "envs"):
            self.__dict__.pop(name, None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepare(self) -> None:
        config = self.config
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        devices.seed_everything(config.seed)
        if not config.deterministic:
            devices.be_quick(self.device)
        self.precision = devices.pick_precision(config.precision, self.device)

    def _open(self) -> None:
        self._prepare()
        config, precision = self.config, self.precision
        self.envs: VecEnv = make_envs(config, config.run.envs, 0, self._make_env)
        self._closing.append(self.envs.close)
        self.agent: Agent = make_agent(config, self.envs, self.device, precision)
        self.capacity = min(self.options.steps, config.replay.capacity)
        self.replay = Replay(
            {**self.envs.obs_space, **self.envs.act_space},
            self.agent.extras,
            replace(config.replay, storage="ram", save=False, online=False),
            capacity=self.capacity,
            streams=config.run.envs,
            windows=self.agent.windows,
            directory=None,
            seed=config.seed,
        )
        self._closing.append(self.replay.close)
        feed = ReplayFeed(
            self.replay,
            self.agent.windows,
            self.device,
            prefetch=self.device.type == "cuda",
            on_device=device_copy.fits_on_device(self.replay, self.device),
        )
        self._closing.append(feed.close)
        self.feed, self.device_copy = feed, feed.device_copy

    def measure(self, waited: float = 0.0) -> dict[str, Any]:
        """Everything there is to say about this config, which waited to be alone."""
        found: dict[str, Any] = {
            "task": self.config.task,
            "agent": self.config.agent,
            "device": self._device_name(),
            "precision": self.precision,
            "compile": devices.pick_compile(self.config.compile, self.device),
            "parameters": self.parameters(),
            "replay_on_device": self.device_copy is not None,
        }
        found["first_update_s"] = self.first_update() - waited
        found["update_ms"] = self.update().ms
        found.update(self.memory())  # before others use any
        found["parts_ms"], found["parts_gb"] = self.parts()
        return {**found, **self.around()}

    def around(self) -> dict[str, Any]:
        """What a run does besides updates."""
        return {
            "policy_ms": {str(n): self.policy(n).ms for n in (1, 16)},
            "env_steps_per_s": self.env_rate(),
            "replay_mb_per_s": self.replay_rates(),
        }

    def first_update(self) -> float:
        """Seconds from the start of this process to the end of the first update."""
        self.fill(self._needed())
        self.agent.train(self.feed)
        self.wait()
        return time.time() - started()

    def warm_up(self) -> None:
        """Have the replay full and kernels built; the rest is better done alone."""
        self.fill(self.capacity)
        with devices.not_choosing():
            self.agent.train(self.feed)
        self.wait()

    def update(self) -> Timing:
        """A whole update, fed from a full replay."""
        self.fill(self.capacity)
        return self.time(lambda: self.agent.train(self.feed))[0]

    def calls(self) -> dict[str, Callable[[], Any]]:
        """What can be done plainly and fast: updates, their parts, acting."""
        self.fill(self.capacity)
        parts = (
            self.agent.sections(self.feed) if isinstance(self.agent, Profilable) else {}
        )
        return {
            "update": lambda: self.agent.train(self.feed),
            **{f"  {name}": piece for name, piece in parts.items()},
            "policy, 1 env": self._acting(1),
            "policy, 16 envs": self._acting(16),
        }

    def parts(self) -> tuple[dict[str, list[float]], dict[str, float]]:
        """The pieces of an update, each alone, and the GPU memory each takes at most.

        That of the agent's weights is part of it, that of the replay is not.
        """
        if not isinstance(self.agent, Profilable):
            return {}, {}
        times, most = dict[str, list[float]](), dict[str, float]()
        for name, piece in self.agent.sections(self.feed).items():
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
            times[name] = self.time(piece)[0].ms
            memory = self.memory()
            if "gpu_peak_gb" in memory:
                most[name] = memory["gpu_peak_gb"] - memory["gpu_replay_gb"]
        return times, most

    def policy(self, envs: int) -> Timing:
        """One call of the policy, from arrays to arrays."""
        return self.time(self._acting(envs))[0]

    def _acting(self, envs: int) -> Callable[[], None]:
        rng = np.random.default_rng(0)
        obs = sample(self.envs.obs_space, rng, envs)
        memory = self.agent.initial(envs)
        # agents with a schedule of their own may begin by acting at random
        mode: Mode = "train" if self.agent.schedule is None else "eval"

        def call() -> None:
            nonlocal memory
            memory, _, _ = self.agent.policy(memory, obs, mode)

        return call

    def env_rate(self) -> list[float]:
        """Agent steps per second of the environments, all of them together."""
        rng = np.random.default_rng(0)
        self.envs.reset()
        many = [sample(self.envs.act_space, rng, len(self.envs)) for _ in range(16)]
        turn = 0

        def call() -> None:
            nonlocal turn
            turn += 1
            self.envs.step(many[turn % len(many)])

        return [1000 * len(self.envs) / ms for ms in self.time(call)[0].ms]

    def replay_rates(self) -> dict[str, list[float]]:
        """Megabytes per second that can be stored, and cut into batches."""
        rng = np.random.default_rng(0)
        row = sum(space.nbytes for space in self.replay.spaces.values())
        rows = sample(self.replay.spaces, rng, self.config.run.envs)
        for key in ("is_first", "is_last", "is_terminal"):
            rows[key][:] = False  # or every step would be an episode of its own
        name, window = next(iter(self.agent.windows.items()))
        steps = window.batch * (window.context + window.length)
        add = self.time(lambda: self.replay.add(rows))[0]
        serve = self.time(lambda: self.feed(name))[0]
        return {
            "add": [self.config.run.envs * row / ms / 1e3 for ms in add.ms],
            "sample": [steps * row / ms / 1e3 for ms in serve.ms],
        }

    def memory(self) -> dict[str, float]:
        """The most memory that was taken at once, in GB."""
        used = {"peak_gb": _resident_peak() / 1e9}
        if self.device.type == "cuda":
            used["gpu_peak_gb"] = torch.cuda.max_memory_allocated(self.device) / 1e9
            held = 0 if self.device_copy is None else self.device_copy.nbytes
            used["gpu_replay_gb"] = held / 1e9
        return used

    def parameters(self) -> int:
        """How many numbers the agent learns, if it says."""
        each = getattr(self.agent, "opts", {"": getattr(self.agent, "opt", None)})
        tensors = [x for opt in each.values() for x in getattr(opt, "tensors", ())]
        return sum(tensor.numel() for tensor in tensors)

    def fill(self, steps: int) -> None:
        """Random rows, until the replay holds this many."""
        rng = np.random.default_rng(self.config.seed)
        block: dict[str, np.ndarray] = {}
        while (missing := min(steps, self.replay.capacity) - len(self.replay)) > 0:
            count = min(missing, 1000)
            if len(block.get("is_first", ())) != count:
                block = sample(self.replay.spaces, rng, count)
                block["is_first"][:] = np.arange(count) % 200 == 0
                block["is_last"][:] = np.arange(count) % 200 == 199
                block["is_terminal"][:] = False
            self.replay.add_episode(block)

    def time(self, *calls: Callable[[], Any]) -> list[Timing]:
        """Milliseconds each call takes when many follow each other.

        Several calls take turns.
        """
        found: list[Timing] = []
        counts = []
        for call in calls:
            for _ in range(WARM_UP):
                call()
            self.wait()
            once = max(self._seconds(call, 1), 1e-7)
            counts.append(max(1, math.ceil(self.options.seconds / once)))
            found.append(Timing([]))
        for _ in range(self.options.repeats):
            for call, count, timing in zip(calls, counts, found, strict=True):
                timing.ms.append(1000 * self._seconds(call, count) / count)
        return found

    def _seconds(self, call: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _needed(self) -> int:
        windows = self.agent.windows.values()
        return max(w.batch * (w.length + w.context) + w.span for w in windows)

    def _device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return f"{self.device.type} with {torch.get_num_threads()} threads"


@contextmanager
def the_machine(alone: bool) -> Iterator[float]:
    """Use it beside others that do, or wait until nobody does and have it alone.

    Whatever a user measures on this machine takes part in it, in whatever process.
    Gives the seconds it had to wait.
    """
    path = Path(tempfile.gettempdir()) / f"reverie-bench-{os.getuid()}.lock"
    begun = time.perf_counter()
    try:
        lock = path.open("w")
    except OSError as error:
        raise UserError(
            f"Measurements take turns by {path}, which cannot be written "
            f"({error.strerror}).\n"
            "  Fix: remove it, or set TMPDIR to a folder of your own."
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield time.perf_counter() - begun


def sample(spaces: Spaces, rng: np.random.Generator, count: int) -> Obs | Action:
    """Random rows of every key."""
    return {key: space.sample(rng, count) for key, space in spaces.items()}


def started() -> float:
    """When this process began, in seconds since the epoch."""
    try:
        text = Path("/proc/self/stat").read_text()
        ticks = int(text.rsplit(")", 1)[1].split()[19])
        boot = next(
            int(line.split()[1])
            for line in Path("/proc/stat").read_text().splitlines()
            if line.startswith("btime")
        )
        return boot + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, StopIteration):
        return _LOADED


_LOADED = time.time()


def _resident_peak() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def write(
    config: Config, options: BenchConfig, found: dict[str, Any]
) -> dict[str, Any]:
    """Keep what was found beside its config; returns both."""
    path = Path(options.output).expanduser()
    if not options.output:
        path = place(config.logdir) / "bench.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {**found, "config": dataclasses.asdict(config)}
    write_file(path, json.dumps(found, indent=1, default=str).encode())
    print(f"\n{path}", file=sys.stderr)
    return found
