"""Measure the time of `import reverie` relative to that of `import torch`."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 5
"""Number of measurements, of which the median is printed."""


def seconds(statement: str) -> float:
    """Return the time of a new interpreter that executes a statement."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main() -> None:
    statements = ("pass", "import torch", "import reverie", "from reverie import train")
    for statement in statements:
        seconds(statement)  # warm the file cache
    durations = {statement: [] for statement in statements}
    for _ in range(ROUNDS):
        for statement in statements:
            durations[statement].append(seconds(statement))
    startup = statistics.median(durations["pass"])
    torch = statistics.median(durations["import torch"]) - startup
    for statement in statements[2:]:
        ratio = (statistics.median(durations[statement]) - startup) / torch
        print(f"{statement:30} {ratio:.2f} of `import torch` ({torch:.2f} s here)")


if __name__ == "__main__":
    main()
