"""How fast the replay is, as a share of a plain copy of the same bytes.

    python benchmarks/replay.py --json .local/replay.json

Samples batches of 16 x 65 steps of 64 x 64 x 3 images with the latents of size12m and
adds rows of 16 environments, in memory and on disk (read from the page cache), beside a
plain copy of as many bytes in the same run; then adds and samples from a full replay on
disk and watches the resident carry. Both sides of a ratio are medians of alternating
turns; on a busy machine look at `best`, the ratio of the fastest turns.
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
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--folder", type=Path, help="where to put the replay on disk")
    parser.add_argument("--capacity", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--resident-steps", type=int, default=200_000)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"threads": torch.get_num_threads()}
    for storage in ("ram", "disk"):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            replay = make_replay(storage, arguments.capacity, Path(folder))
            print(replay.plan.describe())
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
        streams=ENVS,
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
    rows = make_rows()
    while len(replay) < replay.capacity:
        replay.add(rows)
    batch = replay.buffers("train")
    # sixteen sources in turn: like the replay's, their bytes are not in the cache
    twins = [{k: v.copy() for k, v in batch.items()} for _ in range(16)]
    turn = itertools.cycle(twins)
    sample, copy = race(
        lambda: replay.sample("train", out=batch),
        lambda: copy_all(next(turn), batch),
        arguments.repeats,
    )
    report = compare(f"{storage} sample", sample, copy, batch)

    target = {
        k: np.empty((replay.capacity, *v.shape[1:]), v.dtype) for k, v in rows.items()
    }
    at = 0

    def copy_rows() -> None:
        nonlocal at
        at = (at + ENVS) % (replay.capacity - ENVS)
        for key, value in rows.items():
            target[key][at : at + ENVS] = value

    for _ in range(replay.capacity // ENVS):  # touch every page once
        copy_rows()
    turns = 4 * 1024 // ENVS  # whole segments, so that writing them is counted
    add, copy = race(
        lambda: [replay.add(rows) for _ in range(turns)],
        lambda: [copy_rows() for _ in range(turns)],
        max(5, arguments.repeats // 10),
    )
    report |= compare(f"{storage} add", add / turns, copy / turns, rows)
    return report


def measure_memory(replay: Replay, steps: int) -> dict[str, Any]:
    """Resident memory while a full replay takes steps and serves batches."""
    rows = make_rows()
    batch = replay.buffers("train")
    ids = batch["stepid"][:, 1:]
    extras = {key: batch[key][:, 1:] for key in EXTRAS}
    sizes = []
    for turn in range(steps // ENVS):
        replay.add(rows)
        if turn % 8 == 0:
            replay.sample("train", out=batch)
            replay.write_back(ids, extras)
        if turn % (1024 // ENVS * 8) == 0:
            replay.delete_unused_files([])
        if turn % max(1, steps // ENVS // 40) == 0:
            sizes.append(resident())
    half = len(sizes) // 4
    early, late = max(sizes[half : 2 * half]), max(sizes[-half:])
    print(
        f"resident memory over {steps:,} steps of a full replay on disk, at most: "
        f"{early / 1e6:.0f} MB in the second quarter, {late / 1e6:.0f} MB in the last"
    )
    return {"resident_mb": [round(size / 1e6) for size in sizes]}


def race(
    one: Callable[[], object], two: Callable[[], object], repeats: int
) -> tuple[float, float]:
    """Median seconds of both, taken in turns so that noise meets them alike."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, spent in zip((one, two), times, strict=True):
            start = time.perf_counter()
            function()
            spent.append(time.perf_counter() - start)
    print(f"best {min(times[1]) / min(times[0]):.2f}", end=" ")
    return statistics.median(times[0]), statistics.median(times[1])


def copy_all(source: dict[str, np.ndarray], target: dict[str, np.ndarray]) -> None:
    for key, value in source.items():
        np.copyto(target[key], value)


def compare(
    name: str, ours: float, plain: float, data: dict[str, np.ndarray]
) -> dict[str, Any]:
    size = sum(value.nbytes for value in data.values())
    ratio = plain / ours
    print(
        f"{name}: {ours * 1e3:.3f} ms for {size / 1e6:.2f} MB, plain copy "
        f"{plain * 1e3:.3f} ms, ratio {ratio:.2f}"
    )
    key = name.replace(" ", "_")
    return {
        f"{key}_ms": ours * 1e3,
        f"{key}_copy_ms": plain * 1e3,
        f"{key}_ratio": ratio,
    }


def resident() -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
