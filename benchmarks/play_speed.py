"""Measure speed and memory of `reverie play` with a WebSocket client.

    python benchmarks/play_speed.py --task catch --json .local/play.json
    python benchmarks/play_speed.py --task crafter_reward --configs size12m
    python benchmarks/play_speed.py logdir/demo --minutes 10

Starts the server with the run in LOGDIR, or with a new run of the task that has its
initial weights. Such a world model predicts the end of an episode at random, so the end
is ignored there. The client runs on the same machine, acknowledges every view, as the
page does, and presses another key four times per second. The measurement starts after
100 views, when kernels are compiled and CUDA graphs are captured. Printed are:

- frames per second between consecutive steps of an episode, at the highest speed of the
  page. The rate of the environment times this speed (`target`) is the most that the
  server sends, unless `--unlimited` is given.
- milliseconds from sending a key to the view of the first step that used it, with the
  images decoded.
- milliseconds of CPU time of the server per frame, which does not depend on other
  processes.
- resident memory of the server, and its growth per minute after the first fifth.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from PIL import Image
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from reverie.cli import main as cli
from reverie.play.load import LoadedRun
from reverie.play.simulation import IN_MODEL, Simulation

KEY_SECONDS = 0.25
"""Time between two keys."""
WARM_UP_SECONDS, WARM_UP_VIEWS = 3.0, 100
"""Duration of the warm-up: first this many views, then this time."""
MAX_WARM_UP_SECONDS = 300.0
FLAGS = {"human-model": "-w", "agent-model": "-a", "human-env": "-u"}
"""Flags of `reverie play`, by mode."""
SERVER = "server"
"""First argument of the process of the server."""


class Sample(NamedTuple):
    """State of the server process."""

    time: float
    cpu: float
    """Seconds of CPU time."""
    memory: float
    """Resident memory in MB."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logdir", nargs="?", help="folder of a run")
    parser.add_argument("--task", default="catch")
    parser.add_argument("--configs", nargs="*", default=[], help="presets")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--mode", choices=[*FLAGS, "agent-env"], default="human-model")
    parser.add_argument("--minutes", type=float, default=0.5)
    parser.add_argument("--unlimited", action="store_true")
    parser.add_argument("--json", type=Path, help="file to write the results to")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as folder:
        logdir = arguments.logdir or make_run(arguments, Path(folder) / "run")
        with Server(logdir, arguments) as server:
            results = measure(server, arguments.minutes * 60)
    for name, value in results.items():
        print(f"{name:24}{value}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def make_run(arguments: argparse.Namespace, logdir: Path) -> str:
    """Write a run whose networks have their initial weights."""
    command = ["train", "--task", arguments.task, "--logdir", str(logdir)]
    command += ["--configs", *arguments.configs] if arguments.configs else []
    command += ["--run.steps", "10", "--run.envs", "1", "--run.report_every", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "reverie", *command, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"The run could not be made:\n{done.stdout[-3000:]}")
    return str(logdir)


class Server:
    """`reverie play` in its own process."""

    def __init__(self, logdir: str, arguments: argparse.Namespace):
        changes = ["unlimited"] * arguments.unlimited
        changes += ["endless"] * (not arguments.logdir)
        command = [sys.executable, __file__, SERVER, ",".join(changes), "play", logdir]
        command += ["--no-open", "--device", arguments.device]
        if arguments.mode in FLAGS:
            command.append(FLAGS[arguments.mode])
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        lines = iter(self._process.stdout.readline, "")
        found = next(filter(None, (re.search(r"http://\S+", x) for x in lines)), None)
        if found is None:  # the error is on standard error
            raise SystemExit(f"`reverie play` ended with {self._process.wait()}.")
        self.address = found.group()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)

    def connect(self) -> ClientConnection:
        parts = urlsplit(self.address)
        return connect(f"ws://{parts.netloc}/ws?{parts.query}", max_size=2**24)

    def sample(self) -> Sample:
        """Return CPU time (of user and system) and memory, from `/proc`."""
        folder = Path(f"/proc/{self._process.pid}")
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        pages = int((folder / "statm").read_text().split()[1])
        return Sample(
            time.perf_counter(),
            ticks / os.sysconf("SC_CLK_TCK"),
            pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        )


def measure(server: Server, seconds: float) -> dict[str, Any]:
    """Connect, wait for the warm-up, and measure for this time; return the results."""
    with server.connect() as socket:
        hello = json.loads(socket.recv())
        keys = single_keys(hello["controls"])
        send(socket, type="speed", speed=hello["speeds"][-1])
        warm_up(socket, keys)
        samples = [server.sample()]
        intervals, latencies, frames = [], [], 0
        target = 0.0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            batch = receive_for(socket, min(seconds, 2.0), keys)
            intervals += batch.intervals
            latencies += batch.latencies
            frames += batch.frames
            target = batch.target
            samples.append(server.sample())
    cpu = samples[-1].cpu - samples[0].cpu
    later = samples[len(samples) // 5 :]  # without the first fifth
    times = np.array([sample.time / 60 for sample in later])
    memory = np.array([sample.memory for sample in later])
    growth = (
        float(np.polyfit(times - times[0], memory, 1)[0]) if len(later) > 2 else 0.0
    )
    return {
        "task": hello["task"],
        "agent": hello["agent"],
        "frames": frames,
        "frames per second": round(1 / float(np.mean(intervals)), 1),
        "target": round(target, 1),
        "latency ms, median": round(1e3 * float(np.median(latencies)), 1),
        "latency ms, 95 %": round(1e3 * float(np.quantile(latencies, 0.95)), 1),
        "CPU ms per frame": round(1e3 * cpu / max(frames, 1), 2),
        "memory MB": round(samples[-1].memory, 1),
        "memory MB per minute": round(growth, 3),
        "minutes": round((samples[-1].time - samples[0].time) / 60, 2),
    }


def warm_up(socket: ClientConnection, keys: list[str]) -> None:
    """Receive views until the server has reached its speed."""
    start, views = time.perf_counter(), 0
    while views < WARM_UP_VIEWS:
        if time.perf_counter() > start + MAX_WARM_UP_SECONDS:
            raise SystemExit(
                f"The server sent {views} views in {MAX_WARM_UP_SECONDS} s."
            )
        views += receive_for(socket, 1.0, keys).frames
    receive_for(socket, WARM_UP_SECONDS, keys)


class Batch(NamedTuple):
    """Measurements of `receive_for`; times are in seconds."""

    intervals: list[float]
    """Times between consecutive steps."""
    latencies: list[float]
    """Times from a key to the first view that used it."""
    frames: int
    target: float
    """Frames per second that the server aims at."""


def receive_for(socket: ClientConnection, seconds: float, keys: list[str]) -> Batch:
    """Receive views for some seconds; press another key every `KEY_SECONDS`."""
    start = time.perf_counter()
    next_key, pressed = start, 0
    intervals, latencies, frames, target = [], [], 0, 0.0
    previous: tuple[int, int, float] | None = None  # episode, step and time
    key_time: float | None = None  # when the key was sent that no view has used yet
    while (now := time.perf_counter()) < start + seconds:
        if now >= next_key:
            pressed += 1
            held = [keys[pressed % len(keys)]] if keys else []
            key_time = now
            send(socket, type="keys", held=held, timestamp=now)
            next_key = now + KEY_SECONDS
        try:
            message = socket.recv(timeout=max(0.001, next_key - now))
        except TimeoutError:
            continue
        except ConnectionClosed as error:
            raise SystemExit(f"The server closed the connection: {error}") from None
        if isinstance(message, str):
            continue
        header = decode(message)
        now = time.perf_counter()
        send(socket, type="ack", number=header["number"])
        if key_time is not None and header["timestamp"] == key_time:
            latencies.append(now - key_time)
            key_time = None
        frames += 1
        target = header["target_fps"]
        step = header["episode"], header["step"], now
        if previous is not None and step[:2] == (previous[0], previous[1] + 1):
            intervals.append(now - previous[2])
        previous = step
    return Batch(intervals, latencies, frames, target)


def decode(message: bytes) -> dict[str, Any]:
    """Decode a view, including its images, as the page does; return its header."""
    (length,) = struct.unpack_from("<I", message)
    header: dict[str, Any] = json.loads(message[4 : 4 + length])
    start = 4 + length
    for image in header["images"]:
        data = message[start : start + image["bytes"]]
        Image.open(io.BytesIO(data)).load()
        start += image["bytes"]
    return header


def single_keys(controls: list[dict[str, Any]]) -> list[str]:
    """Return the keys that select an action without other keys."""
    combinations = [keys for c in controls for keys in c["key_combinations"]]
    return [keys[0] for keys in combinations if len(keys) == 1]


def send(socket: ClientConnection, **message: Any) -> None:
    socket.send(json.dumps(message))


def run_server(changes: str, *words: str) -> int:
    """Run `reverie play`.

    With `unlimited`, it steps as often as it can; with `endless`, episodes in the world
    model do not end.
    """
    if "unlimited" in changes:
        fps = property(lambda loaded: 1000.0)
        LoadedRun.fps = fps  # type: ignore[assignment, method-assign]
    if "endless" in changes:
        original: Any = vars(Simulation)["end_reason"]

        def end_reason(simulation: Simulation) -> Any:
            in_model = simulation.mode in IN_MODEL
            return "" if in_model else original.fget(simulation)

        setattr(Simulation, "end_reason", property(end_reason))  # noqa: B010
    return cli.main(list(words))


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVER]:
        sys.exit(run_server(*sys.argv[2:]))
    main()
