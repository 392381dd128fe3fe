"""Measure the speed of the replay buffer, relative to plain copies of as many bytes.

    python benchmarks/replay.py --json .local/replay.json

Samples batches of 16 x 65 steps with 64 x 64 x 3 images and the latents of size12m, and
adds rows of 16 environments, in memory and on disk (from the page cache). Ratios are
medians of alternating repetitions; on a busy machine use `best`, the ratio of the
fastest repetitions. Then measures the resident memory of a full replay on disk.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.rows import Window
from reverie.spaces import Space

ENVS = 16
"""Number of environments."""
WINDOW = Window(16, 64, context=1)
SPACES = {
    "image": Space(np.dtype(np.uint8), (64, 64, 3)),
    "action": Space(np.dtype(np.int32), (), 0, 17),
    "reward": Space(np.dtype(np.float32)),
    "is_first": Space(np.dtype(bool)),
    "is_last": Space(np.dtype(bool)),
    "is_terminal": Space(np.dtype(bool)),
}
EXTRAS = {
    "dyn/deter": Space(np.dtype(np.float32), (2048,)),
    "dyn/stoch": Space(np.dtype(np.float32), (32, 16)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="file to write the results to")
    parser.add_argument("--folder", type=Path, help="folder for the replay on disk")
    parser.add_argument("--capacity", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--resident-steps", type=int, default=200_000)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    for storage in ("ram", "disk"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            replay = make_replay(storage, arguments.capacity, Path(folder))
            print(replay.memory_plan.describe())
            results |= measure(replay, storage, arguments)
            if storage == "disk":
                results |= measure_memory(replay, arguments.resident_steps)
            replay.close()
        del replay
        gc.collect()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def make_replay(storage: str, capacity: int, folder: Path) -> Replay:
    config = ReplayConfig(storage=storage, online=False)  # type: ignore[arg-type]
    return Replay(
        SPACES,
        EXTRAS,
        config,
        capacity=capacity,
        num_envs=ENVS,
        windows={"train": WINDOW},
        directory=folder,
        seed=0,
    )


def make_rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: s.sample(rng, ENVS) for k, s in {**SPACES, **EXTRAS}.items()}


def measure(
    replay: Replay, storage: str, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Fill the replay; return the times of `sample`, `add` and plain copies."""
    rows = make_rows()
    while len(replay) < replay.capacity:
        replay.add(rows)
    batch = replay.empty_batch("train")
    # Sixteen sources, so that their bytes are not in the CPU cache, as in the replay.
    copies = [{k: v.copy() for k, v in batch.items()} for _ in range(16)]
    sources = itertools.cycle(copies)
    sample, copy = median_times(
        lambda: replay.sample("train", out=batch),
        lambda: copy_all(next(sources), batch),
        arguments.repeats,
    )
    report = compare(f"{storage} sample", sample, copy, batch)

    target = {
        k: np.empty((replay.capacity, *v.shape[1:]), v.dtype) for k, v in rows.items()
    }
    position = 0

    def copy_rows() -> None:
        nonlocal position
        position = (position + ENVS) % (replay.capacity - ENVS)
        for key, value in rows.items():
            target[key][position : position + ENVS] = value

    for _ in range(replay.capacity // ENVS):  # allocate every page
        copy_rows()
    adds = 4 * 1024 // ENVS  # full segments, so that writing files is included
    add, copy = median_times(
        lambda: [replay.add(rows) for _ in range(adds)],
        lambda: [copy_rows() for _ in range(adds)],
        max(5, arguments.repeats // 10),
    )
    report |= compare(f"{storage} add", add / adds, copy / adds, rows)
    return report


def measure_memory(replay: Replay, steps: int) -> dict[str, Any]:
    """Return the resident memory while rows are added to and sampled from a replay.

    The replay is full. Latents are written back after sampling, as in training.
    """
    rows = make_rows()
    batch = replay.empty_batch("train")
    ids = batch["stepid"][:, 1:]
    extras = {key: batch[key][:, 1:] for key in EXTRAS}
    sizes = []
    for step in range(steps // ENVS):
        replay.add(rows)
        if step % 8 == 0:
            replay.sample("train", out=batch)
            replay.write_back(ids, extras)
        if step % (1024 // ENVS * 8) == 0:
            replay.delete_unused_files([])
        if step % max(1, steps // ENVS // 40) == 0:
            sizes.append(resident())
    quarter = len(sizes) // 4
    early, late = max(sizes[quarter : 2 * quarter]), max(sizes[-quarter:])
    print(
        f"maximum resident memory over {steps:,} steps of a full replay on disk: "
        f"{early / 1e6:.0f} MB in the second quarter, {late / 1e6:.0f} MB in the last"
    )
    return {"resident_mb": [round(size / 1e6) for size in sizes]}


def median_times(
    one: Callable[[], object], two: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Return the median times of two functions.

    They are called alternately, so that other load affects both of them.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, seconds in zip((one, two), times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    print(f"best {min(times[1]) / min(times[0]):.2f}", end=" ")
    return statistics.median(times[0]), statistics.median(times[1])


def copy_all(source: dict[str, np.ndarray], target: dict[str, np.ndarray]) -> None:
    for key, value in source.items():
        np.copyto(target[key], value)


def compare(
    name: str, replay: float, copy: float, data: dict[str, np.ndarray]
) -> dict[str, Any]:
    """Print and return the time of the replay, of plain copies, and their ratio."""
    size = sum(value.nbytes for value in data.values())
    ratio = copy / replay
    print(
        f"{name}: {replay * 1e3:.3f} ms for {size / 1e6:.2f} MB, plain copy "
        f"{copy * 1e3:.3f} ms, ratio {ratio:.2f}"
    )
    key = name.replace(" ", "_")
    return {
        f"{key}_ms": replay * 1e3,
        f"{key}_copy_ms": copy * 1e3,
        f"{key}_ratio": ratio,
    }


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
