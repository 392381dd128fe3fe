"""Workers that crash, environments that fail, errors in training, and killed runs.

The signals are real; `tools/kill_test.py` kills whole runs.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from replay_episodes import stored_episodes

from reverie import envs as suites
from reverie.agents.dreamer.agent import Dreamer
from reverie.cli.arguments import parse_arguments
from reverie.cli.train import training_config
from reverie.envs.vector.env_slot import EnvFailure
from reverie.run.factory import FIRST_EVAL_ENV
from reverie.run.folder import read_config
from reverie.run.online_run import OnlineRun
from reverie.run.train import train

ROOT = Path(__file__).resolve().parents[3]


def worker_ids() -> list[int]:
    """Return the process ids of the workers."""
    ids = []
    for entry in Path("/proc").iterdir():
        try:
            status = (entry / "status").read_text()
            command = (entry / "cmdline").read_text()
        except (OSError, UnicodeDecodeError):
            continue
        is_child = f"\nPPid:\t{os.getpid()}\n" in status
        if is_child and "reverie.envs.vector.workers" in command:
            ids.append(int(entry.name))
    return ids


def signal_one_worker(number: int, after: Path) -> threading.Thread:
    """Send a signal to one worker as soon as a file is not empty."""

    def send_signal() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if after.exists() and after.stat().st_size:
                os.kill(worker_ids()[0], number)
                return
            time.sleep(0.02)

    thread = threading.Thread(target=send_signal, daemon=True)
    thread.start()
    return thread


needs_proc = pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs /proc")


@pytest.mark.extended_except("9")
@needs_proc
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_frozen_worker_is_replaced(command, number):
    run = command(
        **{"env.vector.workers": 2, "env.vector.timeout": 2, "run.save_every": 0}
    )
    run.switch("slow")
    run.switch("endless")  # episodes end only after failures
    thread = signal_one_worker(number, run.logdir / "metrics.jsonl")
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
    assert not worker_ids()


@pytest.mark.extended_except("0")
@pytest.mark.parametrize("workers", [0, 2])
def test_failing_environments_stop_the_run_with_a_checkpoint(command, workers):
    flags = {
        "env.vector.workers": workers,
        "env.vector.failures": 2,
        "run.save_every": 0,
    }
    run = command(**flags)
    run.switch("slow")
    metrics = run.logdir / "metrics.jsonl"

    def break_env() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not metrics.exists():
            time.sleep(0.02)
        run.switch("dying" if workers else "broken")

    thread = threading.Thread(target=break_env, daemon=True)
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


def test_a_failing_evaluation_does_not_lose_the_training_before_it(command, capsys):
    run = command(**{"task": "catch", "env.vector.failures": 1, "run.save_every": 0})
    more = {"run.eval_every": 60, "run.eval_envs": 1}
    arguments = parse_arguments(run.words(100, **more)[1:])
    config = training_config(arguments, "train_eval")

    def make_env(index: int):
        if index >= FIRST_EVAL_ENV:
            raise RuntimeError("no licence for the second window")
        return suites.make("catch", config.env, index)

    def make_late(index: int):
        """Make an environment that fails at the first evaluation step."""
        env = suites.make("catch", config.env, index)
        if index >= FIRST_EVAL_ENV:
            env.step = lambda action: make_env(index)
        return env

    with pytest.raises(EnvFailure, match="no licence"):
        train(config, make_late, evaluate=True)
    assert run.newest()[1] == 60
    assert "Saved at agent step 60" in capsys.readouterr().err


def fail(*_, **__):
    raise RuntimeError("something broke")


@pytest.mark.parametrize("place", ["write_log", "update", "weights"])
def test_an_error_saves_the_run_if_its_parts_are_consistent(
    command, place, monkeypatch, capsys
):
    run = command(agent="dreamer")
    assert run.train(100)[0] == 0
    config = training_config(parse_arguments(run.words(200)[1:]))
    if place == "update":  # the weights may be inconsistent
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


def run_kill_test(**options) -> dict:
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


@pytest.mark.extended
def test_kills_during_and_between_saves_lose_no_checkpoint():
    report = run_kill_test(kills=2, inside=1, agent="random", every=300)
    assert report["inside_save"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["disk", "ram"])
def test_a_hundred_kills_lose_no_checkpoint(storage):
    report = run_kill_test(kills=100, inside=30, storage=storage)
    assert report["inside_save"] >= 30
