"""Timers, rates and resource usage."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from reverie.log import timer as timer_module
from reverie.log import usage as usage_module
from reverie.log.timer import Rates, Timer
from reverie.log.usage import Usage


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(timer_module.time, "perf_counter", lambda: now[0])
    return now


def test_sections_are_averaged_and_reset(clock):
    timer = Timer()
    for seconds in (1.0, 3.0):
        with timer("policy"):
            clock[0] += seconds
    clock[0] += 4
    assert timer.metrics() == {
        "timer/policy/avg_ms": 2000.0,
        "timer/policy/max_ms": 3000.0,
        "timer/policy/share": 0.5,
    }
    assert timer.metrics() == {}


def test_a_section_that_raises_is_still_timed(clock):
    timer = Timer()
    with pytest.raises(KeyError), timer("env"):
        raise KeyError
    assert "timer/env/avg_ms" in timer.metrics()


def test_a_timer_can_be_disabled():
    timer = Timer(enabled=False)
    with timer("policy"):
        pass
    assert timer.metrics() == {}


def test_breakdown_counts_nested_sections_once_and_adds_up(clock):
    timer = Timer()
    clock[0] += 1
    with timer("train"):
        clock[0] += 2
        with timer("sample"):
            clock[0] += 4
        clock[0] += 8
        with timer("sample"):
            clock[0] += 16
    timer.metrics()  # the breakdown is that of the whole time
    clock[0] += 32
    assert timer.breakdown() == {"sample": 20.0, "train": 10.0, "other": 33.0}


def test_breakdown_has_only_the_thread_of_the_timer(clock):
    timer = Timer()

    def work():
        with timer("policy"):
            clock[0] += 1

    with timer("train"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert timer.breakdown() == {"train": 1.0, "other": 0.0}
    assert timer.metrics()["timer/policy/avg_ms"] == 1000.0


def test_rates_are_per_second_and_zero_without_events(clock):
    rates = Rates()
    rates.add("policy", 16)
    rates.add("policy", 16)
    clock[0] += 4
    assert rates.metrics() == {"fps/policy": 8.0}
    clock[0] += 1
    assert rates.metrics() == {"fps/policy": 0.0}


def test_usage_has_memory_and_cpu():
    metrics = Usage().metrics()
    assert all(key.startswith("usage/") for key in metrics)
    assert metrics["usage/cpu"] >= 0
    memory = metrics.get("usage/ram_gb", metrics.get("usage/ram_peak_gb"))
    assert 0.01 < memory < 1000


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_usage_counts_worker_processes():
    code = "import time; x = bytearray(50_000_000); print(flush=True); time.sleep(60)"
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        worker.stdout.readline()
        metrics = Usage().metrics()
        assert metrics["usage/workers"] >= 1
        assert metrics["usage/workers_ram_gb"] > 50_000_000 / 2**30
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    assert usage_module._resident_bytes(worker.pid) == (0, 0)


def test_usage_has_the_gpu_if_there_is_one(monkeypatch):
    cuda = usage_module.torch.cuda
    calls = []

    def utilization():
        calls.append(1)
        raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "memory_allocated", lambda: 2**30)
    monkeypatch.setattr(cuda, "max_memory_allocated", lambda: 2**31)
    monkeypatch.setattr(cuda, "memory_reserved", lambda: 2**32)
    monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(cuda, "utilization", utilization)
    usage = Usage()
    assert usage.metrics()["usage/gpu_peak_gb"] == 2.0
    assert "usage/gpu" not in usage.metrics()
    assert len(calls) == 1
