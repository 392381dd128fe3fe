"""Measure the time of `import reverie` relative to that of `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 5


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    names = ("pass", "import torch", "import reverie", "from reverie import train")
    for name in names:
        seconds(name)  # warm the file cache
    durations = {name: [] for name in names}
    for _ in range(ROUNDS):
        for name in names:
            durations[name].append(seconds(name))
    empty = statistics.median(durations["pass"])
    torch = statistics.median(durations["import torch"]) - empty
    for name in names[2:]:
        ratio = (statistics.median(durations[name]) - empty) / torch
        print(f"{name:30} {ratio:.2f} of `import torch` ({torch:.2f} s here)")


if __name__ == "__main__":
    main()
