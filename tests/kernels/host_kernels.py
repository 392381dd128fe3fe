"""Helpers for tests of CUDA kernels: compile them for the CPU, imitate a GPU."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reverie.kernels import nvrtc
from reverie.kernels.norm.cluster_group_norm.launch import SHARED_MEMORY


def host_source(source, packages, header):
    """Replace `bfloat16.cu` and every `device.cu` of these packages by a header."""
    files = [resources.files(package) / "device.cu" for package in packages]
    for file in (resources.files("reverie.kernels") / "bfloat16.cu", *files):
        text = file.read_text()
        assert text in source
        source = source.replace(text, "")
    start = source.index("//")  # after the definitions of sizes
    host = Path(__file__).with_name(header).read_text()
    return source[:start] + host + source[start:]


def compile_for_host(path, *flags):
    """Compile a C++ file to a shared library and load it."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    library = path.with_suffix(".so")
    flags = ["-O1", "-w", "-shared", "-fPIC", *flags]
    subprocess.run([compiler, *flags, path, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def argument_names(source):
    """Return the members of the struct `Arguments` of a CUDA source."""
    body = re.search(r"struct Arguments {(.*?)};", source, re.S)[1]
    return re.findall(r"(\w+)\s*[,;]", re.sub(r"//.*", "", body))


def imitate_hopper(launch, monkeypatch):
    """Make a module see a GPU of compute capability 9; return its properties."""
    gpu = SimpleNamespace(major=9, shared_memory_per_multiprocessor=SHARED_MEMORY)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(launch.fallback, "enabled", False)
    for name in ("_is_available", "load"):  # with empty caches
        uncached = getattr(launch, name).__wrapped__
        monkeypatch.setattr(launch, name, functools.cache(uncached))
    return gpu


def raise_unavailable(*_):
    raise nvrtc.Unavailable("libnvrtc was not found")
