"""How fast batches come out of recordings that do not fit in carry.

    python benchmarks/recordings.py [--episodes 60] [--rows 150] [--size 84]

Writes a folder of NPZ episodes, unpacks all of them one after another in one thread
(the raw speed of the format), then cuts training batches with room for a quarter of
them. Both count unpacked bytes per second; an episode that was unpacked serves several
sequences before its place is taken. Exits with 1 if batches come at less than half of
the raw speed, or if more memory is kept than was allowed.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from reverie.datasets.feed import EpisodeCacheConfig, EpisodeFeed
from reverie.datasets.readers import npz, open_reader
from reverie.rows import Window
from reverie.spaces import Space

ACTION = {"action": Space(np.float32, (7,), -1, 1)}
WINDOW = Window(16, 64)
FLOOR = 0.5


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--rows", type=int, default=150)
    parser.add_argument("--size", type=int, default=84)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        return measure(Path(place), options)


def measure(folder: Path, options: argparse.Namespace) -> int:
    rng = np.random.default_rng(0)
    for i in range(options.episodes):
        episode = make_episode(rng, options.rows, options.size)
        npz.write_npz_episode(folder, f"demo_{i}", episode, ACTION)
    packed = sum(path.stat().st_size for path in folder.glob("*.npz"))
    paths = sorted(folder.glob("*.npz"))
    unpack(paths[:2])
    begin = time.perf_counter()
    whole = unpack(paths)
    raw = whole / (time.perf_counter() - begin) / 1e6
    print(
        f"{options.episodes} episodes of {options.rows} rows, {options.size}x"
        f"{options.size}: {whole / 1e6:.0f} MB, packed {packed / 1e6:.0f} MB"
    )
    print(f"raw unpacking, one thread        {raw:8.0f} MB/s")
    good = True
    for words, prefetch, workers in (
        ("batches, one thread", False, 1),
        ("batches, ahead, two threads", True, 2),
    ):
        config = EpisodeCacheConfig(carry=whole / 4 / 2**30, workers=workers)
        feed = EpisodeFeed(
            open_reader(folder), {"train": WINDOW}, config=config, prefetch=prefetch
        )
        for _ in range(3):
            batch = feed("train")
        size = sum(value.nbytes for value in batch.values())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < options.seconds:
            feed("train")
            count += 1
        speed = count * size / (time.perf_counter() - begin) / 1e6
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        kept = feed._train.bytes
        feed.close()
        good &= speed >= FLOOR * raw and kept <= whole / 4
        print(
            f"{words:<32} {speed:8.0f} MB/s, {speed / raw:.2f} of raw, "
            f"{kept / 1e6:.0f} MB kept, peak grew by {grown / 1024:.0f} MB"
        )
    return 0 if good else 1


def make_episode(rng: np.random.Generator, rows: int, size: int) -> dict:
    """A scene that moves, with some noise: it packs to about two thirds."""
    x = np.linspace(0, 6, size)
    phase = np.cumsum(rng.normal(0, 0.1, (rows, 2)), 0)
    waves = np.sin(x + phase[:, :1])[:, None] + np.cos(x + phase[:, 1:])[:, :, None]
    shades = (waves + 2) * 50
    image = shades[..., None] + rng.integers(0, 4, (rows, size, size, 3))
    flags = np.arange(rows)
    action = rng.uniform(-1, 1, (rows, 7)).astype(np.float32)
    action[-1] = 0
    return {
        "image": image.astype(np.uint8),
        "joints": rng.normal(size=(rows, 7)).astype(np.float32),
        "action": action,
        "reward": np.zeros(rows, np.float32),
        "is_first": flags == 0,
        "is_last": flags == rows - 1,
        "is_terminal": flags == rows - 1,
    }


def unpack(paths: list[Path]) -> int:
    return sum(
        value.nbytes for path in paths for value in npz.load_arrays(path).values()
    )


if __name__ == "__main__":
    sys.exit(main())
