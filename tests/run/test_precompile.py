"""Kernels are compiled in another process, and a run continues if this fails."""

from __future__ import annotations

import io
import pickle
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from reverie.agents.iris.config import COMPONENTS
from reverie.run import factory, precompile
from reverie.run.base_run import BaseRun
from reverie.run.config import Config, resolve
from reverie.run.online_run import OnlineRun
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
        warm_up=None,
    )
    BaseRun._prepare_first_update(run)
    assert "(out of memory)" in capsys.readouterr().out
    assert run.compiler is None


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


class FakeCompiler:
    def __init__(self):
        self.is_open = True

    def close(self):
        self.is_open = False


def test_the_process_starts_before_pytorch_is_imported_if_no_kernels_are_cached(
    monkeypatch, tmp_path
):
    monkeypatch.setattr(precompile, "KernelCompiler", FakeCompiler)
    monkeypatch.setattr(precompile.os.path, "exists", lambda path: True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    precompile.start_compiler_early()
    compiler = precompile._early_compiler
    assert compiler.is_open
    precompile.stop_early_compiler()
    assert not compiler.is_open
    (tmp_path / "reverie").mkdir()
    precompile.start_compiler_early()
    assert precompile._early_compiler is None


def test_kernels_are_compiled_once_for_the_same_settings(monkeypatch, tmp_path):
    recording = pytest.importorskip("reverie.kernels.recording")
    available = "reverie.kernels.accelerate.kernels_available"
    monkeypatch.setattr(available, lambda device: True)
    monkeypatch.setattr(recording, "marker_folder", lambda: str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "GPU")
    free = [1 << 40]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 40))
    spaces = SimpleNamespace(obs_space={}, act_space={})

    def find_marker(num_envs=1):
        cpu = torch.device("cpu")
        return precompile._find_marker(Config(), spaces, num_envs, cpu, "step")

    marker = find_marker()
    assert marker.parent == tmp_path
    assert find_marker(2) != marker == find_marker()
    free[0] = precompile.MIN_FREE_BYTES - 1
    assert find_marker() is None
    free[0] = 1 << 40
    marker.touch()
    assert find_marker() is None


@pytest.mark.parametrize("agent", ["dreamer", "iris"])
def test_a_policy_step_an_update_and_a_report_are_recorded(
    monkeypatch, tmp_path, agent
):
    recording = pytest.importorskip("reverie.kernels.recording")
    monkeypatch.setattr(recording, "record_kernels", lambda add: nullcontext())
    agents, make_agent = [], factory.make_agent

    def make(*args):
        built = make_agent(*args)
        built.reports, report = 0, built.report

        def count_reports(feed):
            metrics = report(feed)
            built.reports += 1
            return metrics

        built.report = count_reports
        agents.append(built)
        return built

    monkeypatch.setattr(factory, "make_agent", make)
    name = "iris_tiny" if agent == "iris" else "debug"
    config = resolve([name], flags={"task": "catch", "logdir": str(tmp_path)})
    with OnlineRun(config) as run:
        spaces = run.envs.obs_space, run.envs.act_space
    agents.clear()
    request = Request(config, *spaces, 2, "cpu", "float32", str(tmp_path / "marker"))
    precompile.record_agent(request, pytest.fail)
    (built,) = agents
    assert built.reports == 1
    if agent == "dreamer":
        assert built.updates_taken == 1
    else:
        assert all(built.opt[component].step == 1 for component in COMPONENTS)


@pytest.mark.parametrize("problem", ["", "in a worker", "ValueError: no agent"])
def test_the_marker_is_written_if_all_kernels_are_compiled(
    monkeypatch, tmp_path, problem
):
    pytest.importorskip("triton")
    marker, compiled = tmp_path / "folder" / "marker", []

    class Pool:
        def __init__(self, count):
            pass

        def apply_async(self, function, args):
            compiled.extend(args)
            error = problem if args == ["a kernel"] and "worker" in problem else ""
            return SimpleNamespace(get=lambda: error)

    def record_agent(request, add):
        add("a kernel")
        if "agent" in problem:
            raise ValueError("no agent")

    request = Request(*[None] * (len(Request._fields) - 1), str(marker))
    stdin = SimpleNamespace(buffer=io.BytesIO(pickle.dumps(request)))
    monkeypatch.setattr("sys.stdin", stdin)
    context = SimpleNamespace(Pool=Pool)
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
    thread = SimpleNamespace(start=lambda: None)
    monkeypatch.setattr(precompile.threading, "Thread", lambda **options: thread)
    monkeypatch.setattr(precompile, "record_agent", record_agent)
    assert precompile._compile_requested() == problem
    assert compiled[-1] == "a kernel"
    assert marker.exists() == (not problem)
