"""Kill a run again and again, and check that every restart resumes.

    python tools/kill_test.py --kills 100 [--agent dreamer] [--storage disk]

Starts `reverie train` with disk replay and worker environments in a new folder, kills
it with SIGKILL at random moments (a part of them while a save is being written), starts
it again, and checks after each kill that

- a whole checkpoint is there, and its step is never lower than before the kill;
- every replay file that checkpoint lists is there and matches its checksum;
- nothing half-written piles up: files and shared memory stay within bounds;

and at the end, when it is let go on once more and stopped with SIGTERM, that

- every start but the first resumed, and none missed a step or met damage;
- the steps in `metrics.jsonl` only grow.

A kill counts as inside a save if the dead run's folder holds a save that was begun and
not finished: a half-written checkpoint newer than all whole ones, or a replay file that
only a save writes, with steps no whole checkpoint knows. To land there, the run is
stopped (SIGSTOP) when a save shows, looked at, and let go on if the save was over.

Prints one JSON line with the counts; exits 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from reverie.replay.segment_files import listed_files
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.storage.array_file import find_damage

LEFTOVERS = 16
"""Files without a name in any checkpoint that one kill may leave: the segments and
extras since the last save, what the last save replaced, and a save under way."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--inside", type=int, default=30, help="of them inside a save")
    parser.add_argument("--agent", default="dreamer")
    parser.add_argument("--storage", default="disk", choices=["disk", "ram"])
    parser.add_argument("--every", type=int, default=60, help="steps between saves")
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
        inside = steps = leftovers = 0
        shm = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
        largest = 0
        for kill in range(self.arguments.kills):
            aim = inside < self.arguments.inside and kill % 2 == 0
            inside += self._start_and_kill(in_save=aim)
            steps = self._inspect(kill, steps)
            leftovers = max(leftovers, len(_leftovers(self.logdir)))
            size = sum(f.stat().st_size for f in self.logdir.rglob("*") if f.is_file())
            largest = max(largest, size)
            if kill % 10 == 9:
                print(
                    f"{kill + 1} kills, {inside} inside a save, step {steps}, "
                    f"{size / 2**20:.1f} MiB",
                    file=sys.stderr,
                    flush=True,
                )
        steps = self._stop_gently(steps)
        if leftovers > LEFTOVERS:
            self.problems.append(f"{leftovers} files that no checkpoint names")
        if inside < self.arguments.inside:
            self.problems.append(f"only {inside} kills were inside a save")
        left = len(set(os.listdir("/dev/shm")) - shm) if shm else 0
        if left > 2:
            self.problems.append(f"{left} pieces of shared memory left behind")
        return {
            "kills": self.arguments.kills,
            "inside_save": inside,
            "last_step": steps,
            "most_leftovers": leftovers,
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
            "run.save_every": str(self.arguments.every),
            "run.log_every": "50",
            "run.report_every": "0",
            "run.train_ratio": "2",
            "env.vector.workers": "2",
            "replay.storage": self.arguments.storage,
            "replay.capacity": "3000",
        }
        words = [word for key, value in flags.items() for word in (f"--{key}", value)]
        python = "from reverie.cli.main import main; raise SystemExit(main())"
        return [sys.executable, "-c", python, "train", "--configs", "debug", *words]

    def _start_and_kill(self, in_save: bool) -> bool:
        """Start the run, wait for its moment, kill it; whether a save was under way."""
        process = self._start()
        try:
            if in_save:
                self._stop_inside_a_save(process)
            else:
                time.sleep(self.rng.random())
            if process.poll() is not None:
                self.problems.append(f"the run ended by itself: {self._tail()}")
        finally:
            process.kill()  # its workers die with it
            process.wait()
        return is_inside_save(self.logdir)

    def _start(self) -> subprocess.Popen:
        """Start the run and wait for its first save, or it would never advance."""
        ckpt = self.logdir / "ckpt"
        before = {p.name for p in Checkpoints(ckpt).paths()}
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                self._command(), stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + 180
        while process.poll() is None and time.monotonic() < deadline:
            if {p.name for p in Checkpoints(ckpt).paths()} - before:
                break
            time.sleep(0.005)
        return process

    def _stop_inside_a_save(self, process: subprocess.Popen) -> None:
        """Leave the run stopped at a random point of a save, if one comes in time."""
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None:
            # Saves begin with the replay's files and go on with the checkpoint's.
            folder = self.rng.choice(["replay", "ckpt"])
            known = set(os.listdir(self.logdir / folder))
            while set(os.listdir(self.logdir / folder)) <= known:
                if time.monotonic() > until or process.poll() is not None:
                    return
            time.sleep(self.rng.random() * 0.004)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if is_inside_save(self.logdir):
                return
            process.send_signal(signal.SIGCONT)

    def _stop_gently(self, steps: int) -> int:
        """Resume once more, end with SIGTERM, and read what all starts have said."""
        process = self._start()
        process.terminate()
        code = process.wait(120)
        if code != 128 + signal.SIGTERM:
            self.problems.append(f"SIGTERM ended it with {code}: {self._tail()}")
        found = self._inspect(self.arguments.kills, steps)
        said = self.log.read_text(errors="replace")
        resumed = said.count("Resumed ")
        if resumed != self.arguments.kills:
            self.problems.append(f"only {resumed} starts resumed")
        for word in ("damaged", "continues without", "Traceback"):
            if word in said:
                self.problems.append(f"a start said {word!r}: {said[-2000:]}")
        lines = (self.logdir / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line)["step"] for line in lines]
        if logged != sorted(logged):
            self.problems.append("steps in metrics.jsonl go back")
        return found

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
        records = listed_files(index)
        found = {r.name: find_damage(folder, r) for r in records if r.name}
        return [f"{name}: {why}" for name, why in found.items() if why]

    def _tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def is_inside_save(logdir: Path) -> bool:
    """Whether a run that does nothing now was in the middle of a save."""
    checkpoints = Checkpoints(logdir / "ckpt")
    names = [path.name for path in checkpoints.paths()]
    newest = max((int(name.split("-")[1]) for name in names), default=0)
    for path in (logdir / "ckpt").glob(".partial-*"):
        if int(path.name.split("-")[2]) > newest:  # an older one is being deleted
            return True
    if not names:
        return False
    index = checkpoint.read_part(checkpoints.paths()[-1], "replay")
    total = int(index["index"]["total"])
    sizes = _segment_sizes(logdir)
    whole = max(sizes.values(), default=0)
    return any(first + n > total and n < whole for (_, first), n in sizes.items())


def _segment_sizes(logdir: Path) -> dict[tuple[str, int], int]:
    """The number of steps in each replay file; files cut short come from saves."""
    found = {}
    for path in (logdir / "replay").iterdir():
        match = re.match(r"\.?(\d{12})-(\d+)", path.name)
        if match:
            found[path.name, int(match[1])] = int(match[2])
    return found


def _leftovers(logdir: Path) -> list[str]:
    """Files and folders of saves that no whole checkpoint names."""
    named = set()
    for path in Checkpoints(logdir / "ckpt").paths():
        index = checkpoint.read_part(path, "replay")["files"]
        for record in listed_files(index):
            named.add(record.name)
    files = [p.name for p in (logdir / "replay").iterdir() if p.name not in named]
    return [*files, *(p.name for p in (logdir / "ckpt").glob(".partial-*"))]


if __name__ == "__main__":
    sys.exit(main())
