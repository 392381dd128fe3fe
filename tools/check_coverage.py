"""Check the test coverage of the package.

    python tools/check_coverage.py .local/covered.json

The core as a whole must reach 90 %, and each of its modules 80 %. Only the modules in
`EXCLUDED` are not part of the core.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path

MIN_CORE = 90.0
MIN_MODULE = 80.0
"""Minimum coverage of all modules together and of each module, in percent."""

EXCLUDED_SUITES = ("dmc", "loconav") if sys.version_info >= (3, 13) else ()
"""Suites that the tests of a developer install cannot run: labmaze, which they need,
has no wheels for newer versions of Python. Simulators that are not part of the install
are replaced by fakes in the tests."""

EXCLUDED = (
    *(f"reverie/envs/suites/{suite}*" for suite in EXCLUDED_SUITES),
    # tested on GPUs only
    "reverie/kernels/*",
    # need Ray, which is not part of the install; tested by `make test-scale`
    "reverie/campaign/ray_workers.py",
    "reverie/run/actors/ray_transport.py",
)


def find_uncovered(report: dict) -> list[str]:
    """Return a message for each module below the minimum in a JSON coverage report."""
    covered = total = 0
    messages = []
    for path, entry in sorted(report["files"].items()):
        path = Path(path).as_posix()
        if any(fnmatch.fnmatch(path, pattern) for pattern in EXCLUDED):
            continue
        summary = entry["summary"]
        covered += summary["covered_lines"]
        total += summary["num_statements"]
        if summary["num_statements"] and summary["percent_covered"] < MIN_MODULE:
            lines = _format_lines(entry.get("missing_lines", []))
            messages.append(
                f"{path}: {summary['percent_covered']:.1f} % is below "
                f"{MIN_MODULE:.0f} %; missing lines {lines}"
            )
    percent = 100 * covered / total if total else 0.0
    if percent < MIN_CORE:
        messages.append(
            f"the core: {percent:.1f} % of {total} lines is below {MIN_CORE:.0f} %"
        )
    return messages


def _format_lines(lines: list[int]) -> str:
    """Format sorted line numbers as ranges, such as `3-7, 12`."""
    ranges: list[list[int]] = []
    for line in lines:
        if ranges and line == ranges[-1][1] + 1:
            ranges[-1][1] = line
        else:
            ranges.append([line, line])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def main(argv: list[str]) -> int:
    path = Path(argv[0])
    if not path.is_file():
        print(f"{path} does not exist.\n  Fix: make pytest")
        return 2
    report = json.loads(path.read_text())
    messages = find_uncovered(report)
    if messages:
        print("The test coverage is too low:", *messages, sep="\n  ")
        return 1
    print(f"Test coverage is sufficient ({report['totals']['percent_covered']:.1f} %).")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
