"""The host's side of the persistent scan: what can be checked without a GPU."""

from __future__ import annotations

import ctypes
import re
import threading
import time

import pytest
import torch
from torch import Tensor

from reverie.kernels import nvrtc
from reverie.kernels.scan import loop as scan_loop
from reverie.kernels.scan import scan as fast
from reverie.kernels.scan.persistent import scan as persistent


class Recorder:
    """In the place of a kernel: keeps its arguments, or refuses."""

    def __init__(self, problem: str = ""):
        self.problem, self.seen = problem, []

    def __call__(self, arguments: ctypes.Structure) -> None:
        if self.problem:
            raise nvrtc.Unavailable(self.problem)
        self.seen.append(arguments)


@pytest.fixture
def made(monkeypatch):
    """Weights, inputs and settings of size12m for 32 rows and two steps."""
    monkeypatch.setattr(persistent, "_refused", [])
    deter, units, flat = persistent.DETER, persistent.UNITS, persistent.LOGITS

    def normal(*shape: int) -> Tensor:
        return (0.05 * torch.randn(*shape)).bfloat16()

    rows = torch.ones(units)
    weights = fast.ScanWeights(
        fast.Normed(normal(units, deter), normal(units), rows),
        fast.Normed(normal(units, flat), normal(units), rows),
        fast.Normed(normal(8, 4 * units, units), normal(deter), torch.ones(deter)),
        fast.Dense(normal(8, units, 3 * units), normal(3 * deter)),
        fast.Unbiased(normal(units, deter + 6)[:, :deter], rows),
        fast.Dense(normal(flat, units), normal(flat)),
    )
    inputs = fast.Inputs(
        normal(32, deter),
        normal(32, flat),
        normal(32, 2, units),
        normal(32, 2, units),
        torch.zeros(32, 2, dtype=torch.bool),
        torch.ones(32, 2, persistent.CHOICES, persistent.CLASSES),
    )
    with torch.backends.mkldnn.flags(enabled=False):  # crashes on some processors
        yield weights, inputs, fast.Settings(persistent.CLASSES, 0.01, 1e-4)


def use(monkeypatch, problem: str = "") -> persistent.Kernels:
    found = persistent.Kernels(Recorder(problem), Recorder(problem))
    monkeypatch.setattr(persistent, "kernels", lambda device: found)
    return found


def upstream() -> tuple[Tensor, Tensor, Tensor]:
    flat = persistent.LOGITS
    return tuple(
        torch.randn(32, 2, n).bfloat16() for n in (persistent.DETER, flat, flat)
    )


def structure(name: str, source: str) -> list[tuple[str, type]]:
    """The members of a structure of the CUDA source."""
    body = re.search(rf"struct {name} {{(.*?)}};", source, re.S)[1]
    members: list[tuple[str, type]] = []
    for line in re.sub(r"//.*", "", body).split(";"):
        if "*" in line:
            names = re.sub(r"^\s*(const )?\w+\s*", "", line.strip())
            members += [(x.strip(" *"), ctypes.c_void_p) for x in names.split(",")]
        elif line.strip():
            kind, _, names = line.strip().partition(" ")
            number = {"int": ctypes.c_int, "float": ctypes.c_float}[kind]
            members += [(x.strip(), number) for x in names.split(",")]
    return members


def test_arguments_lie_in_the_order_of_the_source(monkeypatch, made):
    found = use(monkeypatch)
    weights, inputs, settings = made
    tape = persistent.run_forward(*made)
    persistent.run_backward(weights, tape, inputs.reset, upstream(), settings)
    assert found.forward.seen[0]._fields_ == structure("Forward", persistent.source())
    assert found.backward.seen[0]._fields_ == structure("Backward", persistent.source())


def test_rows_are_scanned_sixteen_at_a_time(monkeypatch, made):
    found = use(monkeypatch)
    tape = persistent.run_forward(*made)
    first, second = found.forward.seen
    assert second.gates - first.gates == tape.gates.stride(0) * 2
    assert tape.gates.shape == (2, 2, 16, 3 * persistent.DETER)
    assert second.shares > first.shares
    assert first.obs_stride == persistent.DETER + 6
    assert first.hid == second.hid


def test_what_is_waited_for_starts_empty(monkeypatch, made):
    use(monkeypatch)
    tape = persistent.run_forward(*made)
    units = persistent.UNITS
    for waited in (tape.deters, tape.hid, tape.in1[:, 1:], tape.shared[..., :units]):
        assert (waited.contiguous().view(torch.int32) == persistent.EMPTY).all()
    expected = torch.addmm(made[0].dynin0.bias, made[1].deter, made[0].dynin0.weight.T)
    assert torch.equal(tape.in0[:, 0].flatten(0, 1), expected)


def test_a_refused_launch_falls_back_and_says_so(monkeypatch, made):
    use(monkeypatch, "too many blocks")
    weights, inputs, settings = made
    with pytest.warns(RuntimeWarning, match="too many blocks"):
        tape = persistent.run_forward(*made)
    plain = scan_loop.run_forward(*made)
    assert torch.equal(tape.deters, plain.deters)
    back = (inputs.reset, upstream(), settings)
    slopes = persistent.run_backward(weights, tape, *back)
    goal = scan_loop.run_backward(weights, plain, *back)
    assert torch.equal(slopes.hid, goal.hid)
    assert fast.choose(weights, inputs) is scan_loop


def test_the_way_back_can_be_refused_too(monkeypatch, made):
    weights, inputs, settings = made
    use(monkeypatch, "out of memory")
    plain = scan_loop.run_forward(*made)
    back = (inputs.reset, upstream(), settings)
    tape = fast.Tape(*(x.unflatten(1, (2, 16)).transpose(0, 1) for x in plain))
    with pytest.warns(RuntimeWarning, match="out of memory"):
        slopes = persistent.run_backward(weights, tape, *back)
    goal = scan_loop.run_backward(weights, plain, *back)
    assert torch.equal(slopes.hid.transpose(0, 1).flatten(1, 2), goal.hid)


def test_a_cpu_is_left_to_the_plain_loop(made):
    assert not persistent.fits(made[0], made[1])
    assert fast.choose(made[0], made[1]) is scan_loop


def test_compiled_code_is_kept_by_what_it_depends_on(monkeypatch, tmp_path):
    class Library:
        def nvrtcVersion(self, major, minor):
            return 0

    compiled = []

    def compile_source(source: str, architecture: str) -> bytes:
        compiled.append((source, architecture))
        return b"code of " + source.encode()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", Library)
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    for _ in range(2):
        assert nvrtc._compile_cached("a", "sm_90") == b"code of a"
    assert nvrtc._compile_cached("b", "sm_90") == b"code of b"
    assert compiled == [("a", "sm_90"), ("b", "sm_90")]
    assert len(list(nvrtc.cache_folder().iterdir())) == 2


def test_a_cache_that_cannot_be_written_is_no_obstacle(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"code")

    class Library:
        def nvrtcVersion(self, major, minor):
            return 0

    monkeypatch.setattr(nvrtc, "_nvrtc", Library)
    assert nvrtc._compile_cached("a", "sm_90") == b"code"


def test_errors_of_the_driver_carry_its_words(monkeypatch):
    class Driver:
        def cuSomething(self, *arguments):
            return 3

        def cuGetErrorString(self, code, text):
            text._obj.value = b"not today"
            return 0

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    with pytest.raises(nvrtc.Unavailable, match="cuSomething: not today"):
        nvrtc._call_driver("cuSomething", 1)


def test_a_missing_compiler_is_unavailable(monkeypatch):
    def refuse(name):
        raise OSError(name)

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", refuse)
    with pytest.raises(nvrtc.Unavailable, match="libnvrtc"):
        nvrtc._nvrtc()
    with pytest.raises(nvrtc.Unavailable):
        nvrtc._driver()


class Compiler:
    """In the place of NVRTC: compiles what does not say `bad`."""

    def nvrtcCreateProgram(self, program, source, name, count, headers, names):
        self.source, self.name = source, name
        return 0

    def nvrtcCompileProgram(self, program, count, options):
        self.options = [options[i].decode() for i in range(count)]
        return 6 if b"bad" in self.source else 0

    def nvrtcGetProgramLogSize(self, program, size):
        size._obj.value = 40
        return 0

    def nvrtcGetProgramLog(self, program, log):
        log.value = b"scan.cu(1): error: bad"
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = 4
        return 0

    def nvrtcGetCUBIN(self, program, code):
        code.raw = b"code"
        return 0

    def nvrtcDestroyProgram(self, program):
        return 0


def test_a_compiler_s_complaint_is_passed_on(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: compiler)
    assert nvrtc.compile_source("good", "sm_90") == b"code"
    assert "--gpu-architecture=sm_90" in compiler.options
    with pytest.raises(nvrtc.Unavailable, match="error: bad"):
        nvrtc.compile_source("bad", "sm_90")


class Driver:
    """Takes every call and remembers it."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return 0

        return call


def test_what_was_begun_is_waited_for(monkeypatch):
    compiled = []

    def compile_(source, architecture):
        if source == "bad":
            raise nvrtc.Unavailable("error: bad")
        if threading.current_thread() is threading.main_thread():
            assert (source, architecture) in compiled
        else:
            time.sleep(0.05)
            compiled.append((source, architecture))
        return b"code"

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    monkeypatch.setattr(nvrtc, "_compile_cached", compile_)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = torch.device("cuda", 0)
    nvrtc.compile_in_background(["one", "two", "bad"], device)
    nvrtc.load("one", [], device)
    nvrtc.load("two", [], device)
    assert sorted(compiled) == [("one", "sm_90"), ("two", "sm_90")]
    with pytest.raises(nvrtc.Unavailable, match="error: bad"):
        nvrtc.load("bad", [], device)
    assert not nvrtc._pending


def test_kernels_are_launched_on_the_current_stream(monkeypatch):
    driver = Driver()
    stream = type("Stream", (), {"cuda_stream": 7})()
    monkeypatch.setattr(nvrtc, "_driver", lambda: driver)
    monkeypatch.setattr(nvrtc, "_compile_cached", lambda source, architecture: b"code")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    (handle,) = nvrtc.load("source", ["scan"], torch.device("cuda", 0))
    arguments = nvrtc.make_arguments({"x": torch.zeros(3)}, {"n": 3, "eps": 0.5})

    nvrtc.CooperativeKernel(handle, 128, 256, 1000)(arguments)
    name, (_, *shape, where, _) = driver.calls[-1]
    assert name == "cuLaunchCooperativeKernel"
    assert (shape, where.value) == ([128, 1, 1, 256, 1, 1, 1000], 7)

    nvrtc.OverlappingKernel(handle, 0, 256, 1000)(arguments, 9, overlap=False)
    name, (config, *_) = driver.calls[-1]
    assert name == "cuLaunchKernelEx"
    config = config._obj
    assert (config.gridx, config.blockx, config.stream) == (9, 256, 7)
    assert config.num_attributes == 0
    assert ("cuCtxSetCurrent" in dict(driver.calls)) is True
