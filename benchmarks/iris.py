"""Measure the time of Δ-IRIS updates on one batch, by part, and profile their kernels.

    python benchmarks/iris.py crafter atari --kernels 30

Prints for each part (tokenizer, world model, actor-critic) the time of an update and
the peak GPU memory of the first updates and the capture of the CUDA graph. `reverie
bench --configs iris_crafter` also measures replay and environments, but starts slower.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from update import OBS, make_parser, show_kernels, wait

from reverie.agents.iris.agent import Iris
from reverie.agents.iris.config import COMPONENTS
from reverie.agents.options import BuildOptions
from reverie.api import Batch
from reverie.run import device as devices
from reverie.run.config import resolve
from reverie.spaces import Space

ACTIONS = {"crafter": 17, "atari": 4}
"""Number of actions, by preset."""


def main() -> None:
    parser = make_parser(__doc__, updates=15)
    parser.add_argument("presets", nargs="+", choices=list(ACTIONS))
    parser.add_argument("--components", nargs="+", default=COMPONENTS)
    parser.add_argument("--full", action="store_true", help="actor-critic in float32")
    args = parser.parse_args()
    for preset in args.presets:
        measure(preset, args)


def measure(preset: str, args: argparse.Namespace) -> None:
    """Print the times and memory of the updates of one preset."""
    device = devices.pick_device("auto")
    devices.enable_autotuning(device)
    flags = {"iris.actor_critic.low_precision_conv": not args.full}
    agent = Iris(
        OBS,
        {"action": Space(np.dtype(np.int32), (), 0, ACTIONS[preset])},
        resolve([f"iris_{preset}"], flags=flags).iris,
        BuildOptions(
            device,
            precision=devices.pick_precision(args.precision, device),
            compile=devices.pick_compile(args.compile, device),
        ),
    )
    for component in args.components:
        update = partial(agent.update, component, [make_batch(agent, component)])
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for _ in range(4):  # two eager updates, then the capture
            update()
        wait(device)
        memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        times = [timed(update, args.updates, device) for _ in range(3)]
        rounded = [round(ms, 2) for ms in times]
        print(f"{preset} {component}: {rounded} ms, {memory / 1e9:.2f} GB", flush=True)
        if args.kernels:
            show_kernels(update, args.kernels)


def timed(call: Any, count: int, device: torch.device) -> float:
    """Return the mean time of consecutive calls in milliseconds."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return 1000 * (time.perf_counter() - start) / count


def make_batch(agent: Iris, component: str) -> Batch:
    """Return a random batch with the shape on which a component trains."""
    window, rng = agent.windows[component], np.random.default_rng(0)
    rows = (window.batch, window.length)
    batch = {
        key: space.sample(rng, rows[0] * rows[1]).reshape(*rows, *space.shape)
        for key, space in {**OBS, **agent.act_space}.items()
    }
    batch["is_last"] = batch["is_terminal"] = np.zeros(rows, bool)
    batch["mask"] = np.ones(rows, bool)
    return {key: torch.as_tensor(x, device=agent.device) for key, x in batch.items()}


if __name__ == "__main__":
    main()
