"""Compiling CUDA source with NVRTC and launching it, without a GPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from reverie.kernels import nvrtc


class Library:
    """Stand-in for NVRTC that only has a version."""

    def nvrtcVersion(self, major, minor):
        return 0


def test_compiled_code_is_cached_by_everything_it_depends_on(monkeypatch, tmp_path):
    compiled = []

    def compile_source(source: str, architecture: str) -> bytes:
        compiled.append((source, architecture))
        return b"code of " + source.encode()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "_nvrtc", Library)
    monkeypatch.setattr(nvrtc, "compile_source", compile_source)
    for _ in range(2):
        assert nvrtc.compile_cached("a", "sm_90") == b"code of a"
    assert nvrtc.compile_cached("b", "sm_90") == b"code of b"
    assert compiled == [("a", "sm_90"), ("b", "sm_90")]
    assert len(list(nvrtc.cache_folder().iterdir())) == 2


def test_an_unwritable_cache_folder_is_ignored(monkeypatch, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(nvrtc, "compile_source", lambda *args: b"code")

    monkeypatch.setattr(nvrtc, "_nvrtc", Library)
    assert nvrtc.compile_cached("a", "sm_90") == b"code"


def test_driver_errors_contain_the_message_of_the_driver(monkeypatch):
    class Driver:
        def cuSomething(self, *arguments):
            return 3

        def cuGetErrorString(self, code, text):
            text._obj.value = b"out of memory"
            return 0

    monkeypatch.setattr(nvrtc, "_driver", Driver)
    with pytest.raises(nvrtc.Unavailable, match="cuSomething: out of memory"):
        nvrtc.call_driver("cuSomething", 1)


def test_missing_libraries_raise_unavailable(monkeypatch):
    def fail(name):
        raise OSError(name)

    monkeypatch.setattr(nvrtc.ctypes, "CDLL", fail)
    with pytest.raises(nvrtc.Unavailable, match="libnvrtc"):
        nvrtc._nvrtc()
    with pytest.raises(nvrtc.Unavailable):
        nvrtc._driver()


class Compiler:
    """Stand-in for NVRTC: compiles every source that does not contain `bad`."""

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
        log.value = b"kernels.cu(1): error: bad"
        return 0

    def nvrtcGetCUBINSize(self, program, size):
        size._obj.value = len(b"code")
        return 0

    def nvrtcGetCUBIN(self, program, code):
        code.raw = b"code"
        return 0

    def nvrtcDestroyProgram(self, program):
        return 0


def test_compiler_errors_contain_the_log(monkeypatch):
    compiler = Compiler()
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: compiler)
    assert nvrtc.compile_source("good", "sm_90") == b"code"
    assert "--gpu-architecture=sm_90" in compiler.options
    with pytest.raises(nvrtc.Unavailable, match="error: bad"):
        nvrtc.compile_source("bad", "sm_90")


class Driver:
    """Stand-in for the CUDA driver that records all calls."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, arguments))
            return 0

        return call


def test_load_waits_for_compilation_in_the_background(monkeypatch):
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
    monkeypatch.setattr(nvrtc, "compile_cached", compile_)
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
    monkeypatch.setattr(nvrtc, "compile_cached", lambda source, architecture: b"code")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    (handle,) = nvrtc.load("source", ["scan"], torch.device("cuda", 0))
    arguments = nvrtc.make_arguments({"x": torch.zeros(3)}, {"n": 3, "eps": 0.5})

    nvrtc.Kernel(handle, 128, 256, 1000, cooperative=True)(arguments)
    nvrtc.Kernel(handle, 0, 256, 1000)(arguments, 9)
    nvrtc.Kernel(handle, 8, 256, 1000)(arguments, overlap=True)
    launches = [given[0]._obj for name, given in driver.calls if "Launch" in name]
    shapes = [(x.gridx, x.blockx, x.shared, x.stream) for x in launches]
    assert shapes == [(blocks, 256, 1000, 7) for blocks in (128, 9, 8)]
    attributes = [[y.id for y in x.attributes[: x.num_attributes]] for x in launches]
    assert attributes == [[nvrtc.COOPERATIVE], [], [nvrtc.PROGRAMMATIC_SERIALIZATION]]
    assert "cuCtxSetCurrent" in dict(driver.calls)
