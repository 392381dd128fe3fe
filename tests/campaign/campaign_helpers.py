"""A program that behaves like a run, and campaigns of it.

It counts up to `--steps`, saves the count after every step, and resumes from it. It
fails at its first `--fail` starts.
"""

from __future__ import annotations

import json
from pathlib import Path

from reverie.campaign.queue import QueuedRun
from reverie.campaign.spec import CampaignConfig, CampaignSpec

PROGRAM = """
import fcntl, json, pathlib, signal, sys, time

words = sys.argv[2:]
flags = dict(zip(words[::2], words[1::2]))
folder = pathlib.Path(flags["--logdir"])
folder.mkdir(exist_ok=True)
(folder / "config.yaml").write_text(f"task: {flags['--task']}\\nseed: 0\\n")
lock = (folder / ".lock").open("w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    (folder / "twice").touch()
    sys.exit("two processes use this folder")
signal.signal(15, lambda *_: sys.exit(143))
with (folder / "starts").open("a") as file:
    file.write("x")
if len((folder / "starts").read_text()) <= int(flags.get("--fail", 0)):
    print("reverie: The simulator is", "missing.\\n  Fix: install it", sep="\\n")
    sys.exit(2)
saved = folder / "saved"
count = int(saved.read_text()) if saved.exists() else 0
while count < int(flags.get("--steps", 3)):
    count += 1
    with (folder / "scores.jsonl").open("a") as file:
        file.write(json.dumps({"step": count, "episode/score": count}) + "\\n")
    saved.with_suffix(".tmp").write_text(str(count))
    saved.with_suffix(".tmp").replace(saved)
    time.sleep(float(flags.get("--pace", 0)))
(folder / "about.json").write_text(json.dumps([{"finished": True}]))
"""


def make_run(name: str, **flags: object) -> QueuedRun:
    """Return a run of the program with these flags."""
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    return QueuedRun(name, name, "", 0, ["train", "--task", name, *words], 3)


def make_spec(folder: Path, runs: list[QueuedRun], **changes: object) -> CampaignSpec:
    config = CampaignConfig(tasks=("catch",), logdir=str(folder), **changes)
    return CampaignSpec(config, ((),), {}, runs=tuple(runs))


def starts(folder: Path, name: str) -> int:
    """Return how often a run was started."""
    path = folder / "runs" / name / "starts"
    return len(path.read_text()) if path.exists() else 0


def steps(folder: Path, name: str) -> list[int]:
    """Return the steps that a run has logged."""
    path = folder / "runs" / name / "scores.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]
