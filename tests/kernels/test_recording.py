"""Recorded kernels are those that a launch would compile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import os, pickle, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from reverie.kernels import nvrtc, recording, sums

vars(recording.nvidia).pop("make_launcher", None)  # needs the CUDA driver
nvrtc.architecture = lambda device: "sm_90"
driver.set_active(recording.CompileOnlyDriver(GPUTarget("cuda", 90, 32)))
kernels, x = [], torch.ones(64, 16)
with recording.record_kernels(kernels.append):
    for _ in range(2):
        assert not sums.sum_rows(x).any()  # not computed, and not uninitialized
    nvrtc.load("source", ["name"], x.device)
    nvrtc.compile_in_background(["source", "other"], x.device)
assert torch.empty.__name__ == "empty"
*names, first, second = [getattr(kernel, "name", kernel) for kernel in kernels]
assert names == ["_sum_rows", "_sum_partials"], names
assert [first.source, second.source] == ["source", "other"]

errors = [recording.compile_kernel(k) for k in pickle.loads(pickle.dumps(kernels))]
assert not any(errors[:2]), errors
assert "NVRTC" in errors[2] or "libnvrtc" in errors[2] or not errors[2], errors
before = set(os.listdir(triton.knobs.cache.dir))
run = JITFunction.run
JITFunction.run = lambda *args, **options: run(*args, **options | {"warmup": True})
sums.sum_rows(x)  # compiles, or finds the kernels in the cache
assert before and set(os.listdir(triton.knobs.cache.dir)) == before
"""


@pytest.mark.extended
def test_recorded_kernels_are_found_in_the_cache(tmp_path):
    env = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    env |= {"XDG_CACHE_HOME": str(tmp_path), "REVERIE_TYPECHECK": "0"}
    command = [sys.executable, "-c", SCRIPT]
    result = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
