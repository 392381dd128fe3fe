"""Measure the time of DreamerV3 updates on one batch, and profile their kernels.

    python benchmarks/update.py size50m size200m --kernels 40

Unlike `reverie bench`, it measures neither replay nor environments nor the sections of
an update, so it starts faster.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.api import Batch
from reverie.run import device as devices
from reverie.run.config import resolve
from reverie.spaces import Space

FLAG = Space(np.dtype(bool))
OBS = {
    "image": Space(np.dtype(np.uint8), (64, 64, 3)),
    "reward": Space(np.dtype(np.float32)),
    "is_first": FLAG,
    "is_last": FLAG,
    "is_terminal": FLAG,
}
ACT = {"action": Space(np.dtype(np.int32), (), 0, 18)}


class OneBatchFeed:
    """Feed that always returns the same batch."""

    def __init__(self, batch: Batch):
        self.batch = batch

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        return self.batch

    def ready(self, name: str) -> bool:
        return True

    def write_back(self, *_: Any) -> None: ...

    def prioritize(self, *_: Any) -> None: ...

    def count_uses(self, *_: Any) -> None: ...


def main() -> None:
    parser = make_parser(__doc__, updates=60)
    parser.add_argument("sizes", nargs="+")
    args = parser.parse_args()
    for size in args.sizes:
        measure(size, args)


def make_parser(description: str | None, updates: int) -> argparse.ArgumentParser:
    """Return a parser with the options that this program and `iris.py` share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--updates", type=int, default=updates)
    parser.add_argument(
        "--kernels", type=int, default=0, help="number of kernels to list"
    )
    return parser


def measure(size: str, args: argparse.Namespace) -> None:
    """Print the time of updates of one size, and the peak GPU memory."""
    device = devices.pick_device("auto")
    devices.enable_autotuning(device)
    devices.keep_freed_memory(device)
    agent = Dreamer(
        OBS,
        ACT,
        resolve([size], flags={"task": "dummy_disc"}).dreamer,
        BuildOptions(
            device,
            precision=devices.pick_precision(args.precision, device),
            compile=devices.pick_compile(args.compile, device),
            overlap=device.type == "cuda",
        ),
    )
    feed, start = OneBatchFeed(make_batch(agent)), time.perf_counter()
    metrics = agent.train(feed)
    wait(device)
    print(f"{size}: first update {time.perf_counter() - start:.1f} s", flush=True)
    for _ in range(4):  # includes the capture of CUDA graphs
        agent.train(feed)
    wait(device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(args.updates):
            metrics = agent.train(feed)
        wait(device)
        times.append(1000 * (time.perf_counter() - start) / args.updates)
    loss, rounded = float(metrics["opt/loss"]), [round(ms, 3) for ms in times]
    print(f"{size}: {rounded} ms per update, loss {loss:.3f}")
    if device.type == "cuda":
        print(f"{size}: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB peak memory")
    if args.kernels:
        show_kernels(lambda: agent.train(feed), args.kernels)


def make_batch(agent: Dreamer) -> Batch:
    """Return a random batch, in which few sequences start a new episode."""
    window, rng = agent.windows["train"], np.random.default_rng(0)
    rows = (window.batch, window.context + window.length)
    batch = {
        key: space.sample(rng, rows[0] * rows[1]).reshape(*rows, *space.shape)
        for key, space in {**OBS, **ACT, **agent.extras}.items()
    }
    batch["is_first"] = rng.random(rows) < 0.02
    batch["is_last"] = batch["is_terminal"] = np.zeros(rows, bool)
    batch["stepid"] = np.arange(rows[0] * rows[1]).reshape(rows)
    batch["consec"] = np.zeros(rows, np.int64)
    return {k: torch.as_tensor(v, device=agent.device) for k, v in batch.items()}


def show_kernels(call: Any, count: int) -> None:
    """Profile a call, and print its `count` kernels that take the longest."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.key_averages() if e.device_time_total > 0]
    total = sum(e.device_time_total for e in events) / 1e3
    print(f"{sum(e.count for e in events)} kernels, {total:.3f} ms")
    for e in sorted(events, key=lambda e: -e.device_time_total)[:count]:
        print(f"{e.device_time_total / 1e3:8.3f} ms {e.count:5d}  {e.key[:100]}")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
