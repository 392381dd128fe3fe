"""Measure the time of VTA updates on bouncing balls, and the speed of the generator.

    python benchmarks/vta.py                      default sizes, 128 windows of 30
    python benchmarks/vta.py bfloat16/graph       only this precision and compile mode
    python benchmarks/vta.py --batch 8 --belief 16 --updates 5      a short test

The generator is measured alone, in one thread. Updates are measured on one batch, and
with new sequences at the default rate (`sequences.chunk` every `sequences.refresh`
updates); the mean over those updates includes every wait for data.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from reverie.agents.options import BuildOptions
from reverie.agents.vta.agent import VTAAgent, VTAAgentConfig
from reverie.datasets.sequences import SequenceConfig
from reverie.datasets.sequences.feed import SequenceFeed
from reverie.datasets.synthetic.balls import BouncingBalls, make_sequences
from reverie.run.device import enable_autotuning
from reverie.worlds.vta.config import VTAConfig


def milliseconds(call: Callable[[], object], times: int, device: torch.device) -> float:
    """Return the median time of a call over `times` calls."""
    durations = []
    for _ in range(times):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        durations.append(1e3 * (time.perf_counter() - start))
    return float(np.median(durations))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


MODES = {
    "cuda": ["float32/none", "float32/graph", "bfloat16/none", "bfloat16/graph"],
    "cpu": ["float32/none"],
}
"""Precision and compile mode, by type of device."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modes", nargs="*", help="precision/compile")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--belief", type=int, default=128)
    parser.add_argument("--updates", type=int, default=50)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu"
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    enable_autotuning(device)
    config = VTAAgentConfig(args.batch, world=VTAConfig(belief=args.belief))
    window = config.sequence_window

    rng = np.random.default_rng(0)
    start = time.perf_counter()
    make_sequences(rng, args.chunk, window.length, dt=2.0)
    rate = args.chunk / (time.perf_counter() - start)
    needed = SequenceConfig().chunk // SequenceConfig().refresh
    print(
        f"generator: {rate:.0f} sequences/s in one thread; an update needs {needed}, "
        f"which take {1e3 * needed / rate:.2f} ms"
    )
    refresh = max(1, args.chunk // needed)
    for mode in args.modes or MODES[device.type]:
        precision, compile = mode.split("/")
        settings = SequenceConfig(chunk=args.chunk, refresh=refresh)
        source = BouncingBalls(settings, window, 0)
        feed = SequenceFeed(source, device, prefetch=device.type == "cuda")
        agent = VTAAgent(
            source.obs_space,
            {},
            config,
            BuildOptions(device, precision=precision, compile=compile),
        )
        for _ in range(min(5, args.updates)):
            agent.train(feed)
        data = feed("train")
        one_batch = milliseconds(
            lambda a=agent, d=data: a.train(lambda _: d), args.updates, device
        )
        updates = max(args.updates, 2 * refresh) if args.updates > 5 else args.updates
        _wait(device)
        start = time.perf_counter()
        for _ in range(updates):
            agent.train(feed)
        _wait(device)
        new_data = 1e3 * (time.perf_counter() - start) / updates
        print(
            f"{precision}, compile {compile}: {one_batch:.2f} ms per update of "
            f"{window.batch} x {window.length}; {new_data:.2f} ms with new data, "
            f"mean of {updates}",
            flush=True,
        )
        feed.close()


if __name__ == "__main__":
    main()
