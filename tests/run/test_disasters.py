"""Full disks, damaged files, dying workers and kills: what a run must survive.

Nothing is patched here: limits are the kernel's, signals are real, and damage is done
to the files themselves.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from full_disk import file_size_limit
from replay_episodes import stored_episodes

from reverie import envs as suites
from reverie.agents.dreamer.agent import Dreamer
from reverie.cli.arguments import parse_arguments
from reverie.cli.main import main
from reverie.cli.train import training_config
from reverie.envs.vector.env_slot import EnvFailure
from reverie.replay.segment_files import listed_files
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.factory import EVAL_SEEDS
from reverie.run.folder import read_config
from reverie.run.online_run import OnlineRun
from reverie.run.train import train
from reverie.storage.array_file import find_corruption

ROOT = Path(__file__).resolve().parents[2]

ENV = '''
"""A world whose size, speed and health are set by files beside it."""
import os
import time
from pathlib import Path

import numpy as np

from reverie.spaces import FLAGS, Space

HERE = Path(__file__).parent


class World:
    act_space = {"action": Space(np.int32, (), 0, 3)}

    def __init__(self):
        self.steps = 0
        self.rng = np.random.default_rng(0)
        kinds = {"reward": np.float32}
        self.obs_space = {key: Space(kinds.get(key, bool)) for key in FLAGS}
        if (HERE / "pixels").exists():
            self.obs_space["image"] = Space(np.uint8, (16, 16, 3))
        else:
            self.obs_space["vector"] = Space(np.float32, 4)

    def reset(self, seed=None):
        self.steps = 0
        return self.row(is_first=True)

    def step(self, action):
        self.steps += 1
        if (HERE / "slow").exists():
            time.sleep(0.002)
        if (HERE / "broken").exists():
            raise RuntimeError("the simulator is broken")
        if (HERE / "dying").exists():
            os._exit(3)
        endless = (HERE / "endless").exists()
        return self.row(is_last=not endless and self.steps >= 20)

    def row(self, is_first=False, is_last=False):
        row = {"reward": np.float32(1), "is_first": is_first, "is_last": is_last}
        for key, space in self.obs_space.items():
            if key not in FLAGS:
                row[key] = space.sample(self.rng) if space.is_image else space.zeros()
        return {**row, "is_terminal": False}

    def close(self):
        pass

    def state_dict(self):
        talk = HERE / "talkative"
        text = "x" * int(talk.read_text()) if talk.exists() else ""
        return {"steps": self.steps, "text": text}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def make_env():
    return World()
'''


class Lab:
    """A run folder, the world it trains in, and the command that trains there."""

    def __init__(self, folder: Path, capsys, **flags):
        self.folder = folder
        self.capsys = capsys
        self.logdir = folder / "run"
        self.module = f"world_{abs(hash(str(folder)))}"
        (folder / f"{self.module}.py").write_text(ENV)
        self.flags = {
            "agent": "random",
            "task": f"{self.module}:make_env",
            "logdir": self.logdir,
            "device": "cpu",
            "run.envs": 2,
            "run.clock": "steps",
            "run.log_every": 50,
            "run.save_every": 100,
            "run.report_every": 0,
            "run.train_ratio": 1,
            "replay.capacity": 160,
            "replay.storage": "ram",
            "logger.outputs": "jsonl",
            **flags,
        }

    def switch(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def words(self, steps: int, command: str = "train", **more) -> list[str]:
        flags = {**self.flags, "run.steps": steps, **more}
        pairs = [w for key, value in flags.items() for w in (f"--{key}", str(value))]
        return [command, "--configs", "debug", *pairs]

    def train(self, steps: int, **more) -> tuple[int, str]:
        code = main(self.words(steps, **more))
        error = self.capsys.readouterr().err
        assert "Traceback" not in error
        return code, error

    def newest(self) -> tuple[str, int]:
        """The newest checkpoint, once it and all it names are found to be whole."""
        path = Checkpoints(self.logdir / "ckpt").newest()
        assert path
        index = checkpoint.read_part(path, "replay")["files"]
        if index is not None:
            for record in listed_files(index):
                assert not record.name or not find_corruption(
                    self.logdir / "replay", record
                )
        return path.name, checkpoint.read_manifest(path)["step"]

    def metrics(self) -> list[dict]:
        lines = (self.logdir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


@pytest.fixture
def lab(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return lambda **flags: Lab(tmp_path, capsys, **flags)


# A full disk.

FULL = {
    # what cannot be written: (settings, files beside the world, limit, what is named)
    "checkpoint arrays": ({"agent": "dreamer"}, {}, 30_000, r"ckpt"),
    "checkpoint json": ({}, {"talkative": "50000"}, 40_000, r"ckpt"),
    "replay at a save": ({}, {"pixels": ""}, 20_000, r"replay"),
    "replay while adding": (
        {"replay.storage": "disk", "run.save_every": 0},
        {"pixels": ""},
        20_000,
        r"replay",
    ),
    "config": ({}, {}, 2_000, r"config\.yaml"),
}


@pytest.mark.parametrize("case", FULL)
def test_a_full_disk_stops_with_a_sentence_and_the_last_save_resumes(lab, case):
    flags, files, limit, named = FULL[case]
    run = lab(**flags)
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
    said = [line for line in error.splitlines() if line.startswith("reverie: ")]
    assert len(said) == 1
    assert re.search(named, said[0])
    assert "  Fix: free some space" in error
    assert run.newest() == before
    assert not list(run.logdir.rglob("*.tmp"))
    assert not list(run.logdir.rglob(".partial-*"))
    code, error = run.train(500)
    assert code == 0, error
    assert f"Resumed {before[0]}" in error
    assert run.newest()[1] == 500


def test_a_full_disk_at_the_notes_of_a_start_stops_with_a_sentence(lab):
    run = lab()
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


def test_a_full_disk_under_the_log_keeps_its_lines_for_later(lab):
    run = lab(**{"run.log_every": 2})
    assert run.train(200)[0] == 0
    limit = (run.logdir / "metrics.jsonl").stat().st_size + 2_000
    assert limit > 40_000  # beyond every other file
    with file_size_limit(limit):
        code, error = run.train(260)
    assert code == 0, error
    assert error.count("The jsonl log fails, the run continues") == 1
    assert max(line["step"] for line in run.metrics()) < 250
    assert run.train(300)[0] == 0
    steps = {line["step"] for line in run.metrics()}
    assert steps == set(range(2, 301, 2))


def test_a_full_disk_under_the_pictures_only_leaves_them_out(lab):
    run = lab(**{"replay.save": False, "logger.outputs": "jsonl,media"})
    run.switch("pixels")
    with file_size_limit(15_000):
        code, error = run.train(200)
    assert code == 0, error
    assert error.count("The media log fails, the run continues") == 1
    media = run.logdir / "media"
    assert not media.exists() or not list(media.iterdir())
    assert run.train(300)[0] == 0
    assert list(media.glob("*.gif")) or list(media.glob("*.mp4"))


def can_mount() -> bool:
    """Whether this machine lets us have a small file system of our own."""
    if shutil.which("unshare") is None:
        return False
    mount = "mount -t tmpfs -o size=1m none /mnt"
    return not subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount], capture_output=True
    ).returncode


SQUEEZE = """
import contextlib, io, json, re, sys
from pathlib import Path
from reverie import envs as suites
from reverie.agents.dreamer.agent import Dreamer
from reverie.cli.main import main

disk, words = Path(sys.argv[1]), json.loads(sys.argv[2])
ballast = disk / "ballast"

def train(steps):
    error = io.StringIO()
    with contextlib.redirect_stderr(error):
        code = main([*words, "--run.steps", str(steps)])
    return code, error.getvalue()

code, error = train(40)
assert code == 0, error
seen, steps = [], 40
for pages in range(64):
    with contextlib.suppress(OSError), open(ballast, "wb", 0) as file:
        while True:
            file.write(bytes(4096))
    size = ballast.stat().st_size - 4096 * pages
    with open(ballast, "rb+") as file:
        file.truncate(max(0, size))
    code, error = train(steps + 40)
    left = [str(path) for path in disk.rglob("*") if ".partial-" in path.name]
    ballast.unlink()
    found = train(steps)
    seen.append({"code": code, "error": error, "left": left, "resumed": found[1]})
    if code == 0:
        break
print(json.dumps(seen))
"""


@pytest.mark.skipif(not can_mount(), reason="needs to mount a small file system")
def test_wherever_a_full_disk_stops_a_run_the_last_save_stays(lab):
    """One page more of room each time, until all of it fits."""
    run = lab(**{"run.save_every": 20, "run.log_every": 2, "replay.capacity": 40})
    run.switch("pixels")
    disk = run.folder / "disk"
    disk.mkdir()
    run.flags["logdir"] = disk / "run"
    words = run.words(0)[:-2]  # without the number of steps
    mount = f'mount -t tmpfs -o size=3m none {disk} && exec "$@"'
    python = [sys.executable, "-c", SQUEEZE, str(disk), json.dumps(words)]
    child = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", *python],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr
    seen = json.loads(child.stdout)
    assert seen[-1]["code"] == 0, seen[-1]
    for turn in seen[:-1]:
        assert turn["code"] == 2, turn
        assert turn["error"].count("reverie: ") == 1
        assert "disk is full" in turn["error"]
        assert "Fix: free some space" in turn["error"]
        assert not turn["left"]
        assert "Resumed" in turn["resumed"]
        assert "damaged" not in turn["resumed"]
        assert "continues without" not in turn["resumed"]
    errors = " ".join(turn["error"] for turn in seen)
    for kind in ("config.yaml", "run/ckpt", "run/replay", "The jsonl log fails"):
        assert kind in errors, kind


# Damage.


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def harm(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flipped":
        data[len(data) // 2] ^= 16
        path.write_bytes(data)
    else:
        bomb = pickle.dumps(Bomb(path.parents[3] / "boom"))
        # As long as what it replaces, so that only the content can tell.
        path.write_bytes(bomb.ljust(len(data), b"\0") if how == "pickle" else bomb)


HARMS = ["truncated", "flipped", "missing", "pickle"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *itertools.product(["envs.safetensors", "loop.json"], HARMS),
        ("manifest.json", "truncated"),
        ("manifest.json", "pickle"),
    ],
)
def test_a_damaged_checkpoint_is_put_aside_and_the_one_before_goes_on(lab, name, how):
    run = lab()
    assert run.train(200)[0] == 0
    good, bad = Checkpoints(run.logdir / "ckpt").paths()
    harm(bad / name, how)
    with pytest.warns(UserWarning, match=f"{bad.name} is damaged"):
        code, error = run.train(300)
    assert code == 0, error
    assert f"Resumed {good.name}" in error
    assert (run.logdir / "ckpt" / "quarantine" / bad.name).is_dir()
    assert run.newest()[1] == 300
    assert not list(run.folder.rglob("boom"))


def test_a_planted_pickle_with_a_right_checksum_is_refused(lab):
    run = lab()
    assert run.train(100)[0] == 0
    path = run.logdir / "ckpt" / run.newest()[0]
    harm(path / "envs.safetensors", "pickle")
    facts = json.loads((path / "manifest.json").read_text())
    facts["files"]["envs.safetensors"] = checkpoint._seal(path / "envs.safetensors")
    (path / "manifest.json").write_text(json.dumps(facts))
    code, error = run.train(200)
    assert code == 2
    assert "envs" in error
    assert not list(run.folder.rglob("boom"))


@pytest.mark.parametrize("storage", ["ram", "disk"])
@pytest.mark.parametrize("how", HARMS)
def test_a_damaged_replay_file_is_put_aside_and_its_steps_missed(lab, how, storage):
    run = lab(**{"replay.storage": storage})
    run.switch("pixels")
    assert run.train(200)[0] == 0
    index = checkpoint.read_part(run.logdir / "ckpt" / run.newest()[0], "replay")
    name = listed_files(index["files"])[1].name
    harm(run.logdir / "replay" / name, how)
    with pytest.warns(RuntimeWarning, match=f"{name}.*continues without steps"):
        code, error = run.train(300)
    assert code == 0, error
    assert "Resumed 000000000200" in error
    assert run.newest()[1] == 300
    aside = run.logdir / "replay" / "quarantine" / name
    assert aside.exists() == (how != "missing")
    assert not list(run.folder.rglob("boom"))


def test_without_a_whole_checkpoint_nothing_is_overwritten(lab):
    run = lab()
    assert run.train(200)[0] == 0
    for path in Checkpoints(run.logdir / "ckpt").paths():
        harm(path / "loop.json", "truncated")
    kept = {p.name for p in (run.logdir / "replay").iterdir()}
    with pytest.warns(UserWarning, match="is damaged"):
        code, error = run.train(300)
    assert code == 2
    assert "Every checkpoint" in error
    assert run.train(300)[0] == 2  # nor the next time
    assert {p.name for p in (run.logdir / "replay").iterdir()} == kept
    shutil.rmtree(run.logdir / "ckpt" / "quarantine")
    assert run.train(300)[0] == 0


# Workers.


def workers() -> list[int]:
    """The worker processes of this one."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            about = (entry / "status").read_text()
            command = (entry / "cmdline").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        ours = f"\nPPid:\t{os.getpid()}\n" in about
        if ours and "reverie.envs.vector.workers" in command:
            found.append(int(entry.name))
    return found


def strike_one(number: int, after: Path) -> threading.Thread:
    """Send one worker a signal as soon as a file has something in it."""

    def strike() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if after.exists() and after.stat().st_size:
                os.kill(workers()[0], number)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=strike, daemon=True)
    thread.start()
    return thread


needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_killed_or_frozen_is_replaced_and_the_run_ends_well(lab, number):
    run = lab(**{"env.vector.workers": 2, "env.vector.timeout": 2, "run.save_every": 0})
    run.switch("slow")
    run.switch("endless")  # so that only a failure ends an episode
    thread = strike_one(number, run.logdir / "metrics.jsonl")
    code, error = run.train(1000, **{"replay.capacity": 2000})
    thread.join()
    assert code == 0, error
    last = run.metrics()[-1]
    cause = "env/crashes" if number == signal.SIGKILL else "env/timeouts"
    assert last["env/restarts"] == last[cause] == 1
    with OnlineRun(read_config(run.logdir)) as opened:
        opened.start()
        episodes = list(stored_episodes(opened.replay, partial=True))
    ends = [e for e in episodes if e["is_last"].any()]
    assert len(ends) == 1
    assert ends[0]["is_last"].tolist()[-1]
    assert not ends[0]["is_terminal"].any()
    assert sum(len(e["is_first"]) for e in episodes) == 1000
    assert len((run.logdir / "scores.jsonl").read_text().splitlines()) == 1
    assert not workers()


@pytest.mark.parametrize("pool", [0, 2])
def test_environments_that_fail_for_good_stop_the_run_with_a_checkpoint(lab, pool):
    flags = {"env.vector.workers": pool, "env.vector.failures": 2, "run.save_every": 0}
    run = lab(**flags)
    run.switch("slow")
    metrics = run.logdir / "metrics.jsonl"

    def break_it() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not metrics.exists():
            time.sleep(0.02)
        run.switch("dying" if pool else "broken")

    thread = threading.Thread(target=break_it, daemon=True)
    thread.start()
    code, error = run.train(2000)
    thread.join()
    assert code == 2, error
    assert "failed 2 times in a row" in error
    assert "Fix: `reverie check-env TASK`" in error
    name, step = run.newest()
    assert 0 < step < 2000
    assert f"Saved at agent step {step}; the same command resumes." in error
    for name in ("dying", "broken", "slow"):
        (run.folder / name).unlink(missing_ok=True)
    code, error = run.train(2000)
    assert code == 0, error
    assert f"at agent step {step}." in error
    assert run.newest()[1] == 2000
    assert not np.isnan(run.metrics()[-2]["episode/score"])


# Errors that end a run.


def test_failing_evaluations_do_not_cost_the_training_before_them(lab, capsys):
    run = lab(**{"task": "catch", "env.vector.failures": 1, "run.save_every": 0})
    more = {"run.eval_every": 60, "run.eval_envs": 1}
    config = training_config(parse_arguments(run.words(100, **more)[1:]))

    def make_env(index: int):
        if index >= EVAL_SEEDS:
            raise RuntimeError("no licence for the second window")
        return suites.make("catch", config.env, index)

    def late(index: int):
        """Builds, and fails at the first step of an evaluation."""
        env = suites.make("catch", config.env, index)
        if index >= EVAL_SEEDS:
            env.step = lambda action: make_env(index)
        return env

    with pytest.raises(EnvFailure, match="no licence"):
        train(config, late, evaluate=True)
    assert run.newest()[1] == 60
    assert "Saved at agent step 60" in capsys.readouterr().err


def fail(*_, **__):
    raise RuntimeError("something broke")


@pytest.mark.parametrize("place", ["write_log", "update", "weights"])
def test_a_run_that_an_error_ends_saves_itself_if_its_parts_are_sound(
    lab, place, monkeypatch, capsys
):
    run = lab(agent="dreamer")
    assert run.train(100)[0] == 0
    config = training_config(parse_arguments(run.words(200)[1:]))
    if place == "update":  # weights may be half new
        monkeypatch.setattr(Dreamer, "train", fail)
    else:
        monkeypatch.setattr(OnlineRun, "write_log", fail)
    if place == "weights":
        monkeypatch.setattr(
            Dreamer, "state_dict", lambda self: {"enc": torch.tensor([np.nan])}
        )
    with pytest.raises(RuntimeError, match="something broke"):
        train(config)
    error = capsys.readouterr().err
    assert run.newest()[1] == (150 if place == "write_log" else 100)
    assert ("Saved at agent step 150" in error) == (place == "write_log")
    assert ("could not be saved" in error) == (place == "weights")


# Kills.


def kill_again_and_again(**options) -> dict:
    words = [w for key, value in options.items() for w in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "kill_test.py"), *words],
        capture_output=True,
        text=True,
    )
    report = json.loads(done.stdout)
    assert not report["problems"], report
    assert done.returncode == 0, done.stderr
    return report


def test_kills_inside_and_between_saves_lose_nothing_saved():
    report = kill_again_and_again(kills=2, inside=1, agent="random", every=300)
    assert report["inside_save"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["disk", "ram"])
def test_a_hundred_kills_lose_nothing_saved(storage):
    report = kill_again_and_again(kills=100, inside=30, storage=storage)
    assert report["inside_save"] >= 30
