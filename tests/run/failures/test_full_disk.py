"""Runs on a full disk, simulated with limits of the operating system."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys

import pytest
from full_disk import file_size_limit

FULL = {
    # case: (settings, files next to the environment, limit in bytes, path in the error)
    "checkpoint arrays": ({"agent": "dreamer"}, {}, 30_000, r"ckpt"),
    "checkpoint json": ({}, {"state_size": "50000"}, 40_000, r"ckpt"),
    "replay at a save": ({}, {"pixels": ""}, 20_000, r"replay"),
    "replay while adding": (
        {"replay.storage": "disk", "run.save_every": 0},
        {"pixels": ""},
        20_000,
        r"replay",
    ),
    "config": ({}, {}, 2_000, r"config\.yaml"),
}


@pytest.mark.extended_except("checkpoint json", "replay at a save")
@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_stops_the_run_and_the_last_checkpoint_resumes(command, case):
    flags, files, limit, named = FULL[case]
    run = command(**flags)
    if "replay" in case:
        for name, text in files.items():
            run.switch(name, text)
    assert run.train(200)[0] == 0
    before = run.newest()
    assert before[1] == 200
    for name, text in files.items():
        run.switch(name, text)
    with file_size_limit(limit):
        code, error = run.train(500)
    assert code == 2, error
    messages = [line for line in error.splitlines() if line.startswith("reverie: ")]
    assert len(messages) == 1
    assert re.search(named, messages[0])
    assert "  Fix: free some space" in error
    assert run.newest() == before
    assert not list(run.logdir.rglob("*.tmp"))
    assert not list(run.logdir.rglob(".partial-*"))
    code, error = run.train(500)
    assert code == 0, error
    assert f"Resumed {before[0]}" in error
    assert run.newest()[1] == 500


def test_a_full_disk_at_the_start_is_an_error(command):
    run = command()
    assert run.train(100)[0] == 0
    about = run.logdir / "about.json"
    about.write_text(json.dumps(json.loads(about.read_text()) * 90))
    with file_size_limit(20_000):
        code, error = run.train(200)
    assert code == 2
    assert "about.json" in error
    assert len(json.loads(about.read_text())) == 90
    assert run.train(200)[0] == 0
    assert len(json.loads(about.read_text())) == 91


def test_log_lines_are_written_later_if_the_disk_is_full(command):
    run = command(**{"run.log_every": 2})
    assert run.train(200)[0] == 0
    limit = (run.logdir / "metrics.jsonl").stat().st_size + 2_000
    assert limit > 40_000  # larger than all other files
    with file_size_limit(limit):
        code, error = run.train(260)
    assert code == 0, error
    assert error.count("Writing the jsonl log failed, the run continues") == 1
    assert max(line["step"] for line in run.metrics()) < 250
    assert run.train(300)[0] == 0
    steps = {line["step"] for line in run.metrics()}
    assert steps == set(range(2, 301, 2))


def test_images_are_skipped_if_the_disk_is_full(command, monkeypatch):
    # a GIF needs more than the limit below, an MP4 less
    monkeypatch.setattr("reverie.render.video.can_write_mp4", lambda: False)
    run = command(**{"replay.save": False, "logger.outputs": "jsonl,media"})
    run.switch("pixels")
    with file_size_limit(15_000):
        code, error = run.train(200)
    assert code == 0, error
    assert error.count("Writing the media log failed, the run continues") == 1
    media = run.logdir / "media"
    assert not media.exists() or not list(media.iterdir())
    assert run.train(300)[0] == 0
    assert list(media.glob("*.gif")) or list(media.glob("*.mp4"))


def can_mount() -> bool:
    """True if a temporary file system can be mounted."""
    if shutil.which("unshare") is None:
        return False
    mount = "mount -t tmpfs -o size=1m none /mnt"
    return not subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], capture_output=True
    ).returncode


TRAIN_ON_FULL_DISK = """
import contextlib, io, json, re, sys
from pathlib import Path
from reverie import envs as suites
from reverie.agents.dreamer.agent import Dreamer
from reverie.cli.main import main

disk, words = Path(sys.argv[1]), json.loads(sys.argv[2])
filler = disk / "filler"

def train(steps):
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        code = main([*words, "--run.steps", str(steps)])
    return code, error.getvalue()

code, error = train(40)
assert code == 0, error
attempts, steps = [], 40
for pages in range(64):
    with contextlib.suppress(OSError), open(filler, "wb", 0) as file:
        while True:
            file.write(bytes(4096))
    size = filler.stat().st_size - 4096 * pages
    with open(filler, "rb+") as file:
        file.truncate(max(0, size))
    code, error = train(steps + 200)
    left = [str(path) for path in disk.rglob("*") if ".partial-" in path.name]
    filler.unlink()
    found = train(steps)
    attempts.append({"code": code, "error": error, "left": left, "resumed": found[1]})
    if code == 0:
        break
print(json.dumps(attempts))
"""


@pytest.mark.extended
@pytest.mark.skipif(not can_mount(), reason="needs to mount a small file system")
def test_the_last_checkpoint_survives_a_full_disk_at_any_point(command):
    """Leave one page more free each time, until the run succeeds."""
    # log lines between two saves need more pages than the config
    run = command(**{"run.save_every": 100, "run.log_every": 1, "replay.capacity": 40})
    run.switch("pixels")
    disk = run.folder / "disk"
    disk.mkdir()
    run.flags["logdir"] = disk / "run"
    words = run.words(0)[:-2]  # without the number of steps
    mount = f'mount -t tmpfs -o size=3m none {disk} && exec "$@"'
    python = [sys.executable, "-c", TRAIN_ON_FULL_DISK, str(disk), json.dumps(words)]
    child = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", *python],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    attempts = json.loads(child.stdout)
    assert attempts[-1]["code"] == 0, attempts[-1]
    for attempt in attempts[:-1]:
        assert attempt["code"] == 2, attempt
        assert attempt["error"].count("reverie: ") == 1
        assert "disk is full" in attempt["error"]
        assert "Fix: free some space" in attempt["error"]
        assert not attempt["left"]
        assert "Resumed" in attempt["resumed"]
        assert "damaged" not in attempt["resumed"]
        assert "continues without" not in attempt["resumed"]
    errors = " ".join(attempt["error"] for attempt in attempts)
    for kind in ("config.yaml", "run/ckpt", "run/replay", "the jsonl log failed"):
        assert kind in errors, kind
