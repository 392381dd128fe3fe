"""Kernels are compiled in another process, and a run continues if this fails."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch

from reverie.run import precompile
from reverie.run.base_run import BaseRun
from reverie.run.config import Config
from reverie.run.precompile import KernelCompiler, Request, start_compiling

ANSWERS = {
    'import pickle, sys; pickle.load(sys.stdin.buffer); print(\'{"error": ""}\')': "",
    'print(\'{"error": "no space left"}\')': "no space left",
    "raise SystemExit(1)": "the process ended",
    "print('not JSON')": "the process ended",
}


@pytest.mark.parametrize("code", ANSWERS)
def test_the_answer_of_the_compiling_process(monkeypatch, code):
    monkeypatch.setattr(precompile, "START_CODE", code)
    compiler = KernelCompiler()
    compiler.send(Request(*[None] * len(Request._fields)))
    assert compiler.wait(lambda: False) == ANSWERS[code]
    assert compiler.process.poll() is not None


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(precompile, "START_CODE", "import time; time.sleep(1000)")
    monkeypatch.setattr(precompile, "MAX_SECONDS", 0.2)
    compiler = KernelCompiler()
    assert "more than 0 seconds" in compiler.wait(lambda: False)
    assert compiler.process.poll() is not None
    stopped = KernelCompiler()
    assert stopped.wait(lambda: True) == ""  # the run was asked to stop
    assert stopped.process.poll() is not None


def test_a_run_prints_why_kernels_were_not_compiled(capsys):
    run = SimpleNamespace(
        compiler=SimpleNamespace(wait=lambda should_stop: "out of memory"),
        status=SimpleNamespace(begin=lambda activity: None),
        stopper=SimpleNamespace(is_set=lambda: False),
        print_message=print,
    )
    BaseRun._wait_for_kernels(run)
    assert "(out of memory)" in capsys.readouterr().out


def test_nothing_is_started_without_a_gpu(monkeypatch):
    monkeypatch.setattr(precompile, "KernelCompiler", None)  # would fail if called
    cpu = torch.device("cpu")
    assert start_compiling(Config(), None, 1, cpu, "float32", "step") is None


def test_a_request_that_cannot_be_pickled_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(precompile, "START_CODE", "input()")
    monkeypatch.setattr(precompile, "_find_marker", lambda *_: tmp_path / "marker")
    spaces = SimpleNamespace(obs_space=lambda: 0, act_space={})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(spaces.obs_space)
    cpu = torch.device("cpu")
    assert start_compiling(Config(), spaces, 1, cpu, "float32", "step") is None
