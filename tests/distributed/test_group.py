"""The rank of a process, and processes that end or hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import hanging_env
import pytest
import torch
from runs import run

from reverie.api import UserError
from reverie.cli.main import main
from reverie.distributed import collective, group, heartbeat
from reverie.distributed.launch import Launch, find_launch
from reverie.run import ranks as run_ranks


def test_the_rank_of_a_process_is_that_of_its_launcher():
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    launch = find_launch({**torchrun, "LOCAL_WORLD_SIZE": "2"})
    assert launch == Launch(3, 4, 1, 2, "torchrun")
    step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"}
    step["SLURM_STEP_TASKS_PER_NODE"] = "4(x2)"
    assert find_launch({**step, "MASTER_ADDR": "node1"}) == Launch(5, 8, 1, 4, "srun")
    assert find_launch(step) == Launch()  # a batch job that is not data-parallel
    assert find_launch({"RANK": "0", "WORLD_SIZE": "1"}) == Launch()
    with pytest.raises(UserError, match="RANK is 4, but WORLD_SIZE is 4"):
        find_launch({"RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(UserError, match="not a number"):
        find_launch({"RANK": "zero", "WORLD_SIZE": "4"})


def open_group(reasons: list[str]) -> group.Group:
    """Open a group with frequent heartbeats, which appends failures to a list."""
    heartbeat.HEARTBEAT_SECONDS = 0.05
    opened = group.Group(find_launch(), reasons.append)
    opened.heartbeat.timeout = 1.0
    return opened


def wait_for_silent_rank() -> list[str]:
    """Wait for rank 1, which stops its heartbeats, until rank 0 reports it."""
    reasons: list[str] = []
    opened = open_group(reasons)
    if opened.launch.rank:
        opened.heartbeat.stop()
    while opened.launch.rank == 0 and not reasons:
        time.sleep(0.05)
    opened.close()
    return reasons


def test_a_rank_without_heartbeats_is_named(ranks):
    reasons, _ = ranks.launch(2, wait_for_silent_rank)
    assert reasons == ["Rank 1 has not responded for 1 s."]


def wait_in_update() -> list[str]:
    """Wait in an update for rank 1, which joins it too late.

    Other ranks have four seconds to join it, also on a busy machine.
    """
    reasons: list[str] = []
    opened = open_group(reasons)
    opened.heartbeat.timeout = 60.0
    with heartbeat.progress.during("an update", 4.0), collective.synchronized():
        while opened.launch.rank == 1 and not reasons:
            time.sleep(0.05)
        collective.all_reduce_with_grad(torch.zeros(1))
        while not reasons:
            time.sleep(0.05)
    opened.close()
    return reasons


def reduce_once() -> None:
    with collective.synchronized():
        collective.all_reduce_with_grad(torch.zeros(1))


def test_one_rank_reports_which_rank_hangs_in_an_update(ranks):
    ranks.run(2, reduce_once)  # operations of other groups are not counted
    reasons = ranks.launch(3, wait_in_update)
    assert sorted(reason for each in reasons for reason in each) == [
        "",
        "",
        "Rank 1 did not complete an update in 4 s.",
    ]


def train_until_failure(logdir: str) -> list[str]:
    """Train in an environment that waits until the run reports that it hangs."""
    reasons: list[str] = []

    def fail(reason: str) -> None:
        reasons.append(reason)
        hanging_env.released.set()

    heartbeat.HEARTBEAT_SECONDS, run_ranks._fail = 0.05, fail
    run(logdir, 40, {"task": "hanging_env:HangingEnv", "run.rank_timeout": 3})
    return reasons


def test_an_environment_that_hangs_is_reported(ranks, tmp_path):
    reasons, _ = ranks.launch(2, train_until_failure, str(tmp_path / "run"))
    assert reasons == ["Rank 0 did not complete an environment step in 3 s."]


def children_of(process: subprocess.Popen) -> list[int]:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(word) for word in path.read_text().split()]


def clean_environment() -> dict[str, str]:
    """Return the environment of this process without the variables of a launcher."""
    names = ("RANK", "WORLD_SIZE")
    return {key: x for key, x in os.environ.items() if key not in names}


@pytest.mark.extended
def test_only_the_rank_with_an_error_prints_it(tmp_path):
    command = [sys.executable, "-m", "reverie", "train", "--configs", "debug"]
    command += ["multicpu", "--task", "catch", "--run.envs", "1"]
    command += ["--replay.ranks", "sharded", "--logdir", str(tmp_path / "run")]
    result = subprocess.run(
        command, env=clean_environment(), capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "run.envs" in result.stderr
    assert result.stderr.count("reverie: ") == 1, result.stderr


@pytest.mark.parametrize(
    ("flags", "count"),
    [
        ("--configs debug", 8),
        ("--configs iris_tiny --iris.training.world_model.batch 5", 5),
        ("--agent vta --task sequences_balls --vta.batch_size 3", 3),
    ],
)
def test_more_processes_than_sequences_are_refused_before_they_start(
    flags, count, monkeypatch, capsys
):
    def start(*arguments):
        raise AssertionError("processes were started")

    monkeypatch.setattr("reverie.run.launcher.run_processes", start)
    monkeypatch.delenv("RANK", raising=False)
    command = ["train", *flags.split(), "--devices", "1000", "--device", "cpu"]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert f"A batch of {count} sequences cannot be divided among 1000" in error
    assert f"Fix: --devices {count}, or" in error


def test_devices_other_than_the_started_processes_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = ["train", "--configs", "debug", "--task", "catch", "--device", "cpu"]
    assert main([*command, "--devices", "3"]) == 2
    assert "started for this run is 2.\n  Fix: remove" in capsys.readouterr().err


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_a_rank_that_is_killed_while_it_starts_is_reported(tmp_path):
    command = [sys.executable, "-m", "reverie", "train", "--configs", "debug"]
    command += ["multicpu", "--task", "catch", "--logdir", str(tmp_path / "run")]
    env = clean_environment()
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    while len(children := children_of(process)) < 2 and process.poll() is None:
        time.sleep(0.01)
    os.kill(children[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.count("Rank 1 was killed by SIGKILL, for example") == 1, errors


@pytest.mark.extended
@pytest.mark.parametrize("sends_to_all", [False, True])
def test_sigint_to_the_command_saves_the_run(tmp_path, sends_to_all):
    """Ctrl-C reaches all processes of a terminal, `kill -INT` only one."""
    command = [sys.executable, "-m", "reverie", "train", "--configs", "debug"]
    command += ["multicpu", "--task", "catch", "--logdir", str(tmp_path / "run")]
    command += ["--run.clock", "steps", "--run.log_every", "10"]
    process = subprocess.Popen(
        command,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    log = tmp_path / "run" / "metrics.jsonl"
    while not log.exists() and process.poll() is None:
        time.sleep(0.1)
    (os.killpg if sends_to_all else os.kill)(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert "Saved. Run the same command again to resume." in errors
    assert "Traceback" not in errors
    assert "connection" not in errors
    assert errors.count("reverie: ") <= 1, errors


@pytest.mark.extended
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("number", "rank", "exit_code", "replay"),
    [
        (signal.SIGKILL, 1, 128 + signal.SIGKILL, "sharded"),
        (signal.SIGSTOP, 0, 2, "shared"),
    ],
)
def test_a_lost_rank_ends_the_run_and_the_run_resumes(
    tmp_path, number, rank, exit_code, replay
):
    logdir = tmp_path / "run"
    command = [sys.executable, "-m", "reverie", "train", "--logdir", str(logdir)]
    settings = ["--configs", "debug", "multicpu", "--task", "gym_CartPole-v1"]
    settings += ["--run.clock", "steps", "--run.save_every", "8"]
    settings += ["--run.rank_timeout", "3", "--replay.ranks", replay]
    env = clean_environment()
    process = subprocess.Popen(
        [*command, *settings], env=env, stderr=subprocess.PIPE, text=True
    )
    while not list(logdir.glob("ckpt/[0-9]*/")) and process.poll() is None:
        time.sleep(0.2)
    os.kill(children_of(process)[rank], number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == exit_code, errors
    assert errors.count("its last checkpoint is intact") == 1, errors
    assert "Traceback" not in errors
    step = max(int(p.name.split("-")[0]) for p in logdir.glob("ckpt/[0-9]*"))
    more = ["--devices", "1"] if replay == "shared" else []
    more += ["--run.steps", str(step + 8)]
    resumed = subprocess.run(
        [*command, *more], env=env, capture_output=True, text=True, check=False
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "Resumed" in resumed.stderr
