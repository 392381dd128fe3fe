"""Processes that train on a CPU reuse the memory of freed tensors."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest
import torch

from reverie.run import device as devices
from reverie.run.device import keep_freed_memory

PROGRAM = """
import resource
import sys

import torch

from reverie.run.device import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory(torch.device("cpu"))
for i in range(24):
    if i == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**22)  # 16 MiB
    torch.ones(2**23)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    command = [sys.executable, "-c", PROGRAM, mode]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(result.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_memory_is_allocated_again_with_few_page_faults():
    # the heap may still grow once, depending on the addresses of other allocations
    assert 4 * page_faults("keep") < page_faults("default")


class FakeLibrary:
    """A C library that records calls of `mallopt`."""

    def __init__(self, limit: int):
        self.limit, self.calls = limit, []

    def mallopt(self, parameter: int, value: int) -> int:
        self.calls.append((parameter, value))
        return int(parameter != devices.M_MMAP_THRESHOLD or value <= self.limit)


@pytest.mark.parametrize("limit", [2**30, 2**25])
def test_old_versions_of_glibc_get_a_smaller_threshold(monkeypatch, limit):
    library = FakeLibrary(limit)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    keep_freed_memory(torch.device("cpu"))
    *_, accepted, trim = library.calls
    assert accepted == (devices.M_MMAP_THRESHOLD, limit)
    assert trim[0] == devices.M_TRIM_THRESHOLD


@pytest.mark.parametrize("error", [OSError, TypeError, None])
def test_other_devices_and_c_libraries_are_left_unchanged(monkeypatch, error):
    def load(name: None) -> object:
        if error:
            raise error
        return object()  # without `mallopt`

    monkeypatch.setattr(ctypes, "CDLL", load)
    keep_freed_memory(torch.device("cpu"))
    monkeypatch.setattr(ctypes, "CDLL", None)
    keep_freed_memory(torch.device("cuda"))
