"""Kill a run again and again, and check that every restart resumes.

    python tools/kill_test.py --kills 100 [--agent dreamer] [--storage disk]

Starts `reverie train` with disk replay and worker environments in a new folder, kills
the whole process group with SIGKILL at random moments (a part of them while a save is
being written), starts it again, and checks after each kill that

- a whole checkpoint is there, and its step is never lower than before the kill;
- every replay file that checkpoint lists is there and matches its checksum;
- nothing half-written piles up: files and shared memory stay within bounds.

Prints one JSON line with the counts; exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reverie.data.archive import named_files
from reverie.data.segments import TEMPORARY, problem
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--inside", type=int, default=30, help="of them inside a save")
    parser.add_argument("--agent", default="dreamer")
    parser.add_argument("--storage", default="disk", choices=["disk", "ram"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logdir", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logdir = arguments.logdir or Path(scratch) / "run"
        report = Torture(arguments, logdir).run()
    print(json.dumps(report))
    return 1 if report["problems"] else 0


class Torture:
    """One run folder, killed many times."""

    def __init__(self, arguments: argparse.Namespace, logdir: Path):
        self.arguments = arguments
        self.logdir = logdir
        self.rng = random.Random(arguments.seed)
        self.problems: list[str] = []
        self.log = logdir.with_suffix(".log")

    def run(self) -> dict:
        inside = steps = 0
        shm = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        largest = 0
        for kill in range(self.arguments.kills):
            aim = inside < self.arguments.inside and kill % 2 == 0
            inside += self._start_and_kill(in_save=aim)
            steps = self._inspect(kill, steps)
            size = sum(f.stat().st_size for f in self.logdir.rglob("*") if f.is_file())
            largest = max(largest, size)
            if kill % 10 == 9:
                print(
                    f"{kill + 1} kills, {inside} inside a save, step {steps}, "
                    f"{size / 2**20:.1f} MiB",
                    file=sys.stderr,
                    flush=True,
                )
        left = len(set(os.listdir("/dev/shm")) - shm) if shm else 0
        if left > 2:
            self.problems.append(f"{left} pieces of shared memory left behind")
        return {
            "kills": self.arguments.kills,
            "inside_save": inside,
            "last_step": steps,
            "largest_mib": round(largest / 2**20, 1),
            "shared_memory_left": left,
            "problems": self.problems,
        }

    def _command(self) -> list[str]:
        flags = {
            "agent": self.arguments.agent,
            "task": "dummy_disc",
            "logdir": str(self.logdir),
            "device": "cpu",
            "run.steps": "100000000",
            "run.envs": "4",
            "run.clock": "steps",
            "run.save_every": "100",
            "run.log_every": "200",
            "run.report_every": "0",
            "env.pool.workers": "2",
            "replay.storage": self.arguments.storage,
            "replay.capacity": "3000",
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", value)]
        python = "from reverie.cli import main; raise SystemExit(main())"
        return [sys.executable, "-c", python, "train", "--configs", "debug", *words]

    def _start_and_kill(self, in_save: bool) -> bool:
        """Start the run, wait for its moment, kill it; whether a save was under way."""
        ckpt = self.logdir / "ckpt"
        before = {p.name for p in Checkpoints(ckpt).paths()}
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, start_new_session=True
            )
        caught = False
        try:
            # Wait until this process has saved once, or the run would never advance
            # from kill to kill; then for its moment.
            deadline = time.monotonic() + 180
            while process.poll() is None and time.monotonic() < deadline:
                fresh = {p.name for p in Checkpoints(ckpt).paths()} - before
                if fresh:
                    break
                time.sleep(0.005)
            if in_save:
                until = time.monotonic() + 30
                while time.monotonic() < until and process.poll() is None:
                    if _saving(self.logdir):
                        time.sleep(self.rng.random() * 0.002)
                        caught = True
                        break
            else:
                time.sleep(self.rng.random() * 1.0)
            if process.poll() is not None:
                self.problems.append(f"the run ended by itself: {self._tail()}")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            # Whether the kill came before the save was finished is read off the disk.
            caught = caught and _saving(self.logdir)
        return caught

    def _inspect(self, kill: int, steps: int) -> int:
        checkpoints = Checkpoints(self.logdir / "ckpt")
        newest = checkpoints.newest()
        if newest is None:
            self.problems.append(f"kill {kill}: no whole checkpoint")
            return steps
        found = int(checkpoint.manifest(newest)["step"])
        if found < steps:
            self.problems.append(f"kill {kill}: step went back from {steps} to {found}")
        if len(checkpoints.paths()) > 4:
            self.problems.append(f"kill {kill}: {len(checkpoints.paths())} checkpoints")
        for line in self._missing(newest):
            self.problems.append(f"kill {kill}: {line}")
        return found

    def _missing(self, newest: Path) -> list[str]:
        """Replay files a finished save lists that are gone or changed."""
        index = checkpoint.read_part(newest, "replay")["files"]
        folder = self.logdir / "replay"
        records = [*named_files(index, "rows"), *named_files(index, "notes")]
        found = {r.name: problem(folder, r) for r in records if r.name}
        return [f"{name}: {why}" for name, why in found.items() if why]

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def _saving(logdir: Path) -> bool:
    partial = list((logdir / "ckpt").glob(".partial-*"))
    return bool(partial or list((logdir / "replay").glob(f"*{TEMPORARY}")))


if __name__ == "__main__":
    sys.exit(main())
