"""Fail when too little of the package is tested.

    python tools/coverage_floors.py .local/coverage.json

The core as a whole must reach 90 %, each of its modules 80 %. Outside the core are only
the modules listed below, whose packages a developer install does not bring.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path

CORE_FLOOR = 90.0
MODULE_FLOOR = 80.0

SUITES_OUTSIDE = [
    "bsuite",
    "craftax",
    "dmc",
    "dmlab",
    "loconav",
    "memorymaze",
    "metaworld",
    "minecraft",
    "minigrid",
    "mujoco",
    "procgen",
    "robosuite",
]
"""Simulators that are heavy, or whose pins clash with the developer install."""

OUTSIDE = (
    *(f"reverie/envs/suites/{suite}*" for suite in SUITES_OUTSIDE),
    # GPU twins: compared with their plain parts where there is a GPU.
    "reverie/kernels/*",
)


def shortfalls(report: dict) -> list[str]:
    """What lies below its floor, one sentence each, from coverage's JSON report."""
    covered = total = 0
    low = []
    for path, entry in sorted(report["files"].items()):
        path = Path(path).as_posix()
        if any(fnmatch.fnmatch(path, pattern) for pattern in OUTSIDE):
            continue
        summary = entry["summary"]
        covered += summary["covered_lines"]
        total += summary["num_statements"]
        if summary["num_statements"] and summary["percent_covered"] < MODULE_FLOOR:
            lines = _ranges(entry.get("missing_lines", []))
            low.append(
                f"{path}: {summary['percent_covered']:.1f} % is below "
                f"{MODULE_FLOOR:.0f} %; never run: lines {lines}"
            )
    percent = 100 * covered / total if total else 0.0
    if percent < CORE_FLOOR:
        low.append(
            f"the core: {percent:.1f} % of {total} lines is below {CORE_FLOOR:.0f} %"
        )
    return low


def _ranges(lines: list[int]) -> str:
    spans: list[list[int]] = []
    for line in lines:
        if spans and line == spans[-1][1] + 1:
            spans[-1][1] = line
        else:
            spans.append([line, line])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def main(argv: list[str]) -> int:
    path = Path(argv[0])
    if not path.is_file():
        print(f"{path} is missing. Fix: run `make pytest` first.")
        return 2
    report = json.loads(path.read_text())
    low = shortfalls(report)
    if low:
        print("Coverage floors not reached:", *low, sep="\n  ")
        return 1
    print(f"Coverage floors reached ({report['totals']['percent_covered']:.1f} %).")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
