"""Run the programs in `benchmarks/` with small sizes, and write their output to files.

    python tools/run_benchmarks.py .local/bench
    python tools/run_benchmarks.py .local/bench replay vta

This checks within minutes on two cores that the programs work. The results in
`benchmarks/README.md` were measured with larger sizes; their commands are there.
Programs that need a GPU are skipped without one. Exits with 1 if a program fails.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
TIMEOUT = 600.0
"""Seconds after which a program has failed."""


class Program(NamedTuple):
    """How this tool runs a benchmark; `{out}` in arguments is the output folder."""

    arguments: str = ""
    gpu_reason: str = ""
    """Why it is skipped without a GPU."""
    skip_reason: str = ""
    """Why it is never run by this tool."""


PROGRAMS = {
    "imports": Program(),
    "crafter_worlds": Program("--worlds 2"),
    "recordings": Program("--episodes 24 --rows 60 --seconds 2"),
    "play_speed": Program("--minutes 0.1"),
    "replay": Program("--capacity 5000 --repeats 20 --resident-steps 20000"),
    "update": Program("debug --updates 5"),
    "vta": Program("--batch 8 --belief 16 --updates 5 --chunk 64"),
    "equal_time": Program(
        "--tasks catch --seconds 15 --seeds 1 --out {out}/equal_time"
    ),
    "scan": Program("--sizes 12m", gpu_reason="it measures CUDA kernels"),
    "iris": Program("crafter", gpu_reason="its networks have the sizes of the paper"),
    "curves": Program(
        "--small --seeds 1 --out {out}/curves --run.steps=2000",
        gpu_reason="it compares training with and without fused kernels",
    ),
    "vta_balls": Program(
        "original --minutes 2 --sequences 64 --out {out}/balls",
        gpu_reason="it trains networks of the original size",
    ),
    "atari100k": Program(skip_reason="its arguments are folders of finished runs"),
    "iris_crafter": Program(skip_reason="its argument is the folder of a finished run"),
}


def skip_reason(program: Program, has_gpu: bool) -> str:
    """Return why a program is not run on this machine; empty if it is run."""
    if program.skip_reason:
        return program.skip_reason
    if program.gpu_reason and not has_gpu:
        return f"it needs a CUDA GPU, because {program.gpu_reason}"
    return ""


def run(name: str, program: Program, out: Path) -> bool:
    """Run a program, print its output and write it to `{out}/{name}.txt`."""
    words = [word.format(out=out) for word in program.arguments.split()]
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *words]
    print(f"== {name}.py {' '.join(words)}".rstrip(), flush=True)
    start, path = time.monotonic(), out / f"{name}.txt"
    with path.open("w") as file:
        try:
            code = subprocess.run(
                command, stdout=file, stderr=subprocess.STDOUT, timeout=TIMEOUT
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    print(path.read_text(), end="")
    seconds = time.monotonic() - start
    if code is None:
        print(f"{name}.py did not end within {TIMEOUT:.0f} s.")
    elif code:
        print(f"{name}.py failed with exit code {code} after {seconds:.0f} s.")
    else:
        print(f"({seconds:.0f} s)")
    return code == 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*", help=", ".join(PROGRAMS))
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(PROGRAMS):
        parser.error(f"unknown benchmarks: {', '.join(sorted(unknown))}")
    args.out.mkdir(parents=True, exist_ok=True)
    has_gpu, failed = torch.cuda.is_available(), []
    for name in args.names or PROGRAMS:
        if reason := skip_reason(PROGRAMS[name], has_gpu):
            print(f"== {name}.py is skipped: {reason}.")
        elif not run(name, PROGRAMS[name], args.out):
            failed.append(name)
    if failed:
        print(f"These benchmarks failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
