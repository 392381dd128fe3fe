"""Runs the CUDA kernels of the streamed scan on a CPU, compiled with g++.

The source of the kernels is used unchanged, except for the few functions that contain
assembly; `emulated_gpu.h` replaces those. The speed is not related to that of a GPU.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

HEADER = Path(__file__).with_suffix(".h")
ASSEMBLY = (
    *("pack", "to_bf16", "tanh_", "load_weights4"),
    *("allow_next_kernel", "wait_previous_kernel"),
)


class EmulatedKernel:
    """Stand-in for `nvrtc.Kernel`."""

    def __init__(self, library: ctypes.CDLL, name: str, blocks: int, shared: int):
        self.launch = getattr(library, f"launch_{name}")
        self.blocks, self.shared = blocks, shared

    def __call__(
        self, arguments: ctypes.Structure, blocks: int = 0, overlap: bool = True
    ) -> None:
        self.launch(ctypes.byref(arguments), blocks or self.blocks, self.shared)


def compile_kernels(source: str, folder: Path) -> ctypes.CDLL:
    """Compile the kernels into a library with one launch function each."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    for name in ASSEMBLY:
        source = _remove_function(source, rf"DEVICE [\w ]+ {name}\(")
    source = re.sub(r"^DEFINE_LOADS.*", "", source, flags=re.M)
    source = re.sub(
        r"asm volatile\(\s*\"mma.*?\);", _emulated_product, source, flags=re.S
    )
    source = source.replace('_Pragma("unroll")', "").replace("__align__(16)", "")
    source = source.replace("extern __shared__  float sums[];", "auto sums = dynamic;")
    source = source.replace("= dynamic;", "= dynamic_shared;")
    launches = "".join(
        f'static {kind} {name}_arguments; extern "C" void launch_{name}(void* given, '
        f"int blocks, int shared) {{ {name}_arguments = *({kind}*)given; "
        f"run_blocks([] {{ {name}({name}_arguments); }}, blocks, shared); }}\n"
        for name, kind in re.findall(r"KERNEL (\w+)\((\w+) p\)", source)
    )
    text = f'#include "{HEADER}"\n{source}\n{launches}'
    path, library = folder / "kernels.cpp", folder / "kernels.so"
    path.write_text(text)
    options = ["-O1", "-std=c++17", "-shared", "-fPIC", "-w"]
    subprocess.run(["g++", *options, "-o", library, path], check=True)
    return ctypes.CDLL(str(library))


def _remove_function(source: str, pattern: str) -> str:
    """Remove the function whose head matches `pattern`."""
    match = re.search(pattern, source)
    assert match, pattern
    end = source.index("{", match.end()) + 1
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
    return source[: match.start()] + source[end:]


def _emulated_product(match: re.Match[str]) -> str:
    values = re.findall(r'"r"\(((?:[^()]|\([^()]*\))*)\)', match[0])
    return f"matrix_product(c, {', '.join(values)});"
