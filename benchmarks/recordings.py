"""Measure the throughput of batches from a dataset that does not fit in memory.

    python benchmarks/recordings.py [--episodes 60] [--rows 150] [--size 84]

Writes a folder of NPZ episodes, decompresses all of them in one thread (the raw speed
of the format), then samples training batches with a cache for a quarter of them. Both
are in decompressed bytes per second; a cached episode is used for several sequences.
Exits with 1 if batches come at less than half of the raw speed, or if the cache exceeds
its limit.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from reverie.datasets.episode_cache import EpisodeCacheConfig
from reverie.datasets.episodes import open_episodes
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.readers.npz import load_arrays, write_npz_episode
from reverie.rows import Window
from reverie.spaces import Space

ACTION = {"action": Space(np.float32, (7,), -1, 1)}
WINDOW = Window(16, 64)
"""Batches of 16 sequences of 64 rows."""
MIN_SPEED = 0.5
"""Minimum speed of batches, relative to the raw speed."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--size", type=int, default=84)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return measure(Path(folder), options)


def measure(folder: Path, options: argparse.Namespace) -> int:
    """Write episodes, print the speeds, and return the exit code."""
    rng = np.random.default_rng(0)
    for i in range(options.episodes):
        episode = make_episode(rng, options.rows, options.size)
        write_npz_episode(folder, f"demo_{i}", episode, ACTION)
    compressed = sum(path.stat().st_size for path in folder.glob("*.npz"))
    paths = sorted(folder.glob("*.npz"))
    decompress(paths[:2])  # warm-up
    start = time.perf_counter()
    total = decompress(paths)
    raw = total / (time.perf_counter() - start) / 1e6
    print(
        f"{options.episodes} episodes of {options.rows} rows, {options.size}x"
        f"{options.size}: {total / 1e6:.0f} MB, compressed {compressed / 1e6:.0f} MB"
    )
    print(f"raw decompression, one thread    {raw:8.0f} MB/s")
    passed = True
    for label, prefetch, workers in (
        ("batches, one thread", False, 1),
        ("batches, prefetch, two threads", True, 2),
    ):
        config = EpisodeCacheConfig(memory=total / 4 / 2**30, workers=workers)
        feed = EpisodeFeed(
            open_episodes(folder), {"train": WINDOW}, config=config, prefetch=prefetch
        )
        for _ in range(3):
            batch = feed("train")
        size = sum(value.nbytes for value in batch.values())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < options.seconds:
            feed("train")
            count += 1
        speed = count * size / (time.perf_counter() - start) / 1e6
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        cached = feed._train.bytes
        feed.close()
        passed &= speed >= MIN_SPEED * raw and cached <= total / 4
        print(
            f"{label:<32} {speed:8.0f} MB/s, {speed / raw:.2f} of raw, "
            f"{cached / 1e6:.0f} MB cached, peak grew by {grown / 1024:.0f} MB"
        )
    return 0 if passed else 1


def make_episode(rng: np.random.Generator, rows: int, size: int) -> dict:
    """Return moving waves with noise, which compress to about two thirds."""
    x = np.linspace(0, 6, size)
    phase = np.cumsum(rng.normal(0, 0.1, (rows, 2)), 0)
    waves = np.sin(x + phase[:, :1])[:, None] + np.cos(x + phase[:, 1:])[:, :, None]
    brightness = (waves + 2) * 50
    image = brightness[..., None] + rng.integers(0, 4, (rows, size, size, 3))
    index = np.arange(rows)
    action = rng.uniform(-1, 1, (rows, 7)).astype(np.float32)
    action[-1] = 0
    return {
        "image": image.astype(np.uint8),
        "joints": rng.normal(size=(rows, 7)).astype(np.float32),
        "action": action,
        "reward": np.zeros(rows, np.float32),
        "is_first": index == 0,
        "is_last": index == rows - 1,
        "is_terminal": index == rows - 1,
    }


def decompress(paths: list[Path]) -> int:
    """Read files; return the number of decompressed bytes."""
    return sum(value.nbytes for path in paths for value in load_arrays(path).values())


if __name__ == "__main__":
    sys.exit(main())
