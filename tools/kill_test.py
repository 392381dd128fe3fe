"""Kill a run many times and check that every restart resumes it.

    python tools/kill_test.py --kills 100 [--agent dreamer] [--storage disk]

Starts `reverie train` with a replay on disk and worker processes in a new folder, kills
it with SIGKILL at random times (sometimes during a save), restarts it, and checks after
each kill that

- there is a complete checkpoint, and its step is not lower than before the kill;
- all replay files listed by that checkpoint exist and match their checksums;
- the number of leftover files and shared memory blocks is bounded.

At the end the run is resumed once more and stopped with SIGTERM. Then

- every start except the first must have resumed, without reporting damaged files;
- the steps in `metrics.jsonl` must increase.

A kill was during a save if the folder has an incomplete save: an incomplete checkpoint
newer than all complete ones, or a replay file that only a save writes, with steps that
no complete checkpoint has. To kill the run during a save, it is stopped with SIGSTOP
when the save begins, and continued if the save was already complete.

Prints a JSON line with the counts; the exit status is 1 if a check has failed.
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
from reverie.storage.array_file import find_corruption

MAX_LEFTOVERS = 16
"""Maximum number of files that no checkpoint lists: segments and extras written since
the last save, files that it replaced, and an incomplete save."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--inside", type=int, default=30, help="number of kills during a save"
    )
    parser.add_argument("--agent", default="dreamer")
    parser.add_argument("--storage", default="disk", choices=["disk", "ram"])
    parser.add_argument("--every", type=int, default=60, help="steps between saves")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logdir", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        logdir = arguments.logdir or Path(scratch) / "run"
        report = KillTest(arguments, logdir).run()
    print(json.dumps(report))
    return 1 if report["problems"] else 0


class KillTest:
    """Kills the run of one folder many times."""

    def __init__(self, arguments: argparse.Namespace, logdir: Path):
        self.arguments = arguments
        self.logdir = logdir
        self.rng = random.Random(arguments.seed)
        self.problems: list[str] = []
        self.log = logdir.with_suffix(".log")

    def run(self) -> dict:
        """Kill and resume the run; return the counts and problems."""
        during_save = last_step = leftovers = 0  # kills, step and number of files
        shm = "/dev/shm"  # folder of shared memory blocks
        has_shm = os.path.isdir(shm)
        blocks_before = set(os.listdir(shm)) if has_shm else set()
        largest = 0  # size of the run folder in bytes
        for kill in range(self.arguments.kills):
            in_save = during_save < self.arguments.inside and kill % 2 == 0
            during_save += self._start_and_kill(in_save)
            last_step = self._check(kill, last_step)
            leftovers = max(leftovers, len(_leftovers(self.logdir)))
            size = sum(f.stat().st_size for f in self.logdir.rglob("*") if f.is_file())
            largest = max(largest, size)
            if kill % 10 == 9:
                print(
                    f"{kill + 1} kills, {during_save} during a save, step {last_step}, "
                    f"{size / 2**20:.1f} MiB",
                    file=sys.stderr,
                    flush=True,
                )
        last_step = self._resume_and_terminate(last_step)
        if leftovers > MAX_LEFTOVERS:
            self.problems.append(f"{leftovers} files that no checkpoint lists")
        if during_save < self.arguments.inside:
            self.problems.append(f"only {during_save} kills were during a save")
        new_blocks = set(os.listdir(shm)) - blocks_before if has_shm else set()
        if len(new_blocks) > 2:
            self.problems.append(f"{len(new_blocks)} leftover shared memory blocks")
        return {
            "kills": self.arguments.kills,
            "inside_save": during_save,
            "last_step": last_step,
            "most_leftovers": leftovers,
            "largest_mib": round(largest / 2**20, 1),
            "shared_memory_left": len(new_blocks),
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
            "env.vector.workers": "2",
            "replay.storage": self.arguments.storage,
            "replay.capacity": "3000",
        }
        if self.arguments.agent != "random":  # which is not trained
            flags["run.train_ratio"] = "2"
        arguments = [item for k, value in flags.items() for item in (f"--{k}", value)]
        python = "from reverie.cli.main import main; raise SystemExit(main())"
        return [sys.executable, "-c", python, "train", "--configs", "debug", *arguments]

    def _start_and_kill(self, in_save: bool) -> bool:
        """Start the run and kill it; return True if that was during a save."""
        process = self._start()
        try:
            if in_save:
                self._stop_during_save(process)
            else:
                time.sleep(self.rng.random())
            if process.poll() is not None:
                self.problems.append(
                    f"the run ended before it was killed: {self._log_tail()}"
                )
        finally:
            process.kill()  # also ends its workers
            process.wait()
        return has_incomplete_save(self.logdir)

    def _start(self) -> subprocess.Popen:
        """Start the run and wait for its next save, so that each start advances it."""
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

    def _stop_during_save(self, process: subprocess.Popen) -> None:
        """Stop the run at a random time during a save; give up after a minute."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            # A save writes the files of the replay first, then those of the checkpoint.
            folder = self.rng.choice(["replay", "ckpt"])
            existing = set(os.listdir(self.logdir / folder))
            while set(os.listdir(self.logdir / folder)) <= existing:
                if time.monotonic() > deadline or process.poll() is not None:
                    return
            time.sleep(self.rng.random() * 0.004)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if has_incomplete_save(self.logdir):
                return
            process.send_signal(signal.SIGCONT)

    def _resume_and_terminate(self, last_step: int) -> int:
        """Resume once more, stop with SIGTERM, and check the output of all starts."""
        process = self._start()
        process.terminate()
        code = process.wait(120)
        if code != 128 + signal.SIGTERM:
            self.problems.append(
                f"exit status {code} after SIGTERM: {self._log_tail()}"
            )
        last_step = self._check(self.arguments.kills, last_step)
        output = self.log.read_text(errors="replace")
        resumed = output.count("Resumed ")
        if resumed != self.arguments.kills:
            self.problems.append(f"only {resumed} starts resumed")
        for text in ("damaged", "continues without", "Traceback"):
            if text in output:
                self.problems.append(f"the output has {text!r}: {output[-2000:]}")
        lines = (self.logdir / "metrics.jsonl").read_text().splitlines()
        logged = [json.loads(line)["step"] for line in lines]
        if logged != sorted(logged):
            self.problems.append("steps in metrics.jsonl decrease")
        return last_step

    def _check(self, kill: int, last_step: int) -> int:
        """Check the newest checkpoint; return its step."""
        checkpoints = Checkpoints(self.logdir / "ckpt")
        newest = checkpoints.newest()
        if newest is None:
            self.problems.append(f"kill {kill}: no complete checkpoint")
            return last_step
        step = int(checkpoint.read_manifest(newest)["step"])
        if step < last_step:
            self.problems.append(
                f"kill {kill}: step decreased from {last_step} to {step}"
            )
        if len(checkpoints.paths()) > 4:
            self.problems.append(f"kill {kill}: {len(checkpoints.paths())} checkpoints")
        for damage in self._verify(newest):
            self.problems.append(f"kill {kill}: {damage}")
        return step

    def _verify(self, newest: Path) -> list[str]:
        """Return the replay files of a checkpoint that are missing or damaged."""
        manifest = checkpoint.read_part(newest, "replay")["files"]
        folder = self.logdir / "replay"
        damages = {r.name: find_corruption(folder, r) for r in listed_files(manifest)}
        return [f"{name}: {damage}" for name, damage in damages.items() if damage]

    def _log_tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


def has_incomplete_save(logdir: Path) -> bool:
    """True if a run that is stopped or killed has an incomplete save."""
    checkpoints = Checkpoints(logdir / "ckpt")
    names = [path.name for path in checkpoints.paths()]
    newest = max((int(name.split("-")[1]) for name in names), default=0)
    for path in (logdir / "ckpt").glob(".partial-*"):
        if int(path.name.split("-")[2]) > newest:  # older ones are being deleted
            return True
    if not names:
        return False
    replay = checkpoint.read_part(checkpoints.paths()[-1], "replay")
    total = int(replay["index"]["total"])
    sizes = _segment_sizes(logdir)
    full_size = max(sizes.values(), default=0)
    return any(first + n > total and n < full_size for (_, first), n in sizes.items())


def _segment_sizes(logdir: Path) -> dict[tuple[str, int], int]:
    """Return the number of steps of each replay file, by name and first step.

    Only saves write files that are shorter than a full segment.
    """
    sizes = {}
    for path in (logdir / "replay").iterdir():
        match = re.match(r"\.?(\d{12})-(\d+)", path.name)
        if match:
            sizes[path.name, int(match[1])] = int(match[2])
    return sizes


def _leftovers(logdir: Path) -> list[str]:
    """Return files and folders that no complete checkpoint lists."""
    listed = set()
    for path in Checkpoints(logdir / "ckpt").paths():
        manifest = checkpoint.read_part(path, "replay")["files"]
        listed |= {record.name for record in listed_files(manifest)}
    files = [p.name for p in (logdir / "replay").iterdir() if p.name not in listed]
    return [*files, *(p.name for p in (logdir / "ckpt").glob(".partial-*"))]


if __name__ == "__main__":
    sys.exit(main())
