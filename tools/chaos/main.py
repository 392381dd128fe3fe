"""The command line of `tools/chaos.py`."""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from chaos import shim
from chaos.sections import Result, Section, format_table, run_section

TRIALS = 100
"""Trials of a section if neither `--trials` nor `--minutes` is given."""
PRELOADED = "REVERIE_CHAOS_PRELOADED"
"""Environment variable of the process that was started with the shim (`shim.py`)."""
PRELOADED_MODULES = (
    "torch._inductor",  # imported by deterministic runs
    "reverie.cli.main",
    "reverie.evaluation.boundaries",
    "reverie.evaluation.episodes",
    "reverie.evaluation.recordings",
    "reverie.recordings.commands",
    "reverie.run.offline.train",
    "reverie.run.python",
    "reverie.run.train",
)
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    scratch = Path(tempfile.mkdtemp(prefix="reverie-chaos-", dir=memory_folder()))
    try:
        if sys.platform.startswith("linux") and PRELOADED not in os.environ:
            return start_with_shim(argv, scratch)
        results = run_sections(arguments, scratch, load_sections())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(format_table(results), flush=True)
    return 1 if any(result.failed for result in results) else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    sections = load_sections()
    names = "\n".join(f"  {s.name:<14} {s.summary}" for s in sections)
    parser = argparse.ArgumentParser(
        prog="tools/chaos.py",
        description="Inject faults into runs and check that nothing is lost.",
        epilog=f"sections:\n{names}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    choices = ["all", *(section.name for section in sections)]
    parser.add_argument("section", choices=choices, metavar="SECTION")
    parser.add_argument("--trials", type=int, help="number of trials per section")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--only", type=int, help="run only the trial with this index")
    arguments = parser.parse_args(argv)
    if arguments.trials is not None and arguments.trials < 1:
        parser.error("--trials must be at least 1")
    return arguments


def load_sections() -> list[Section]:
    """Return all sections, without importing torch."""
    from chaos import commands, disks, environments, files, signals, soak

    modules = (disks, environments, signals, files, commands, soak)
    return [section for module in modules for section in module.SECTIONS]


def start_with_shim(argv: Sequence[str], scratch: Path) -> int:
    """Start this program again with the shim loaded, if it can be built."""
    library, reason = shim.build(scratch)
    if reason:
        print(f"Sections with faults of file calls are skipped: {reason}.", flush=True)
    variables = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), PRELOADED: "1"}
    if library:
        variables["LD_PRELOAD"] = str(library)
    pid = os.spawnve(
        os.P_NOWAIT, sys.executable, [sys.executable, *_program(argv)], variables
    )
    try:
        _, status = os.waitpid(pid, 0)
    except KeyboardInterrupt:
        _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _program(argv: Sequence[str]) -> list[str]:
    return [str(Path(__file__).resolve().parents[1] / "chaos.py"), *argv]


def memory_folder() -> str | None:
    """Return a folder in memory, where fsync takes no time; None if there is none."""
    folder = "/dev/shm"
    if not os.access(folder, os.W_OK) or shutil.disk_usage(folder).free < 2 << 30:
        return None
    return folder


def import_for_trials() -> None:
    """Import the modules of all commands, so that forked processes start fast."""
    import torch

    for module in PRELOADED_MODULES:
        importlib.import_module(module)
    torch.set_num_threads(1)


def run_sections(
    arguments: argparse.Namespace, scratch: Path, sections: Sequence[Section]
) -> list[Result]:
    """Run one or all sections; each gets an equal part of the remaining time."""
    import_for_trials()
    for variable in ("HOME", "XDG_STATE_HOME", "TMPDIR"):
        (scratch / variable.lower()).mkdir()
        os.environ[variable] = str(scratch / variable.lower())
    os.environ["WANDB_MODE"] = "disabled"
    chosen = [s for s in sections if arguments.section in ("all", s.name)]
    minutes = arguments.minutes
    trials = arguments.trials or (10**6 if minutes else TRIALS)
    indices = range(trials) if arguments.only is None else [arguments.only]
    end = time.monotonic() + (minutes * 60 if minutes else 10**9)
    results = []
    for position, section in enumerate(chosen):
        now = time.monotonic()
        deadline = now + (end - now) / (len(chosen) - position)
        result = run_section(
            section, scratch, arguments.seed, indices, deadline, report
        )
        results.append(result)
        count = f"{sum(result.trials.values())} trials, {result.failed} failures"
        state = f"skipped: {result.skipped}" if result.skipped else count
        report(f"{section.name}: {state}, {result.seconds:.0f} s")
    return results


def report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
