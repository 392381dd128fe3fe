"""Processes of several runs: cores, GPUs, exit codes and stopping."""

from __future__ import annotations

import os
import signal
import sys
import time

from reverie.run import processes
from reverie.run.processes import describe_exit, slot_environment


def test_slots_divide_cores_and_gpus(monkeypatch):
    for name in processes.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(processes.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(processes.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)), raising=False)
    if sys.platform == "linux":
        assert slot_environment(0, 2)["OMP_NUM_THREADS"] == "3"
        assert slot_environment(0, 1, processes=2)["OMP_NUM_THREADS"] == "3"
    found = [slot_environment(slot, 3).get("CUDA_VISIBLE_DEVICES") for slot in range(3)]
    assert found == ["0", "1", "0"]
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(0, 1)
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(0, 2, gpus=0)
    assert "CUDA_VISIBLE_DEVICES" not in slot_environment(0, 2, gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7,9")
    assert slot_environment(3, 4, gpus=2)["CUDA_VISIBLE_DEVICES"] == "5,7"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert slot_environment(1, 2)["CUDA_VISIBLE_DEVICES"] == "7"
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert "OMP_NUM_THREADS" not in slot_environment(0, 2)


def test_gpus_that_cuda_does_not_find_are_not_assigned(monkeypatch):
    monkeypatch.setattr(processes.torch.cuda, "is_available", lambda: False)
    for value in ("-1", "0", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert processes.visible_gpus() == []


def test_signals_have_a_name():
    assert describe_exit("", -signal.SIGKILL) == "killed by SIGKILL"
    assert describe_exit("", -40) == "killed by signal 40"  # a real-time signal


def test_error_of_a_process_is_its_last_message():
    said = "step 3\nreverie: There is no\nsetting 'x'.\n  Fix: another\n"
    assert describe_exit(said, 2) == "There is no setting 'x'."
    assert describe_exit("Traceback\nValueError: 3\n", 1) == (
        "exit code 1: ValueError: 3"
    )
    assert describe_exit("", 2) == "exit code 2"
    assert describe_exit("", -9) == "killed by SIGKILL"


def test_process_that_does_not_stop_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "SAVE_TIMEOUT", 0.05)
    code = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True)"
    )
    slots = processes.ProcessSlots([sys.executable, "-c", f"{code}; time.sleep(60)"], 1)
    child = slots.start([], tmp_path / "log", 0, {})
    while not (tmp_path / "log").read_text():
        time.sleep(0.01)
    child.stop()
    while child.poll() is None:
        time.sleep(0.01)
    assert child.poll() == -signal.SIGKILL
