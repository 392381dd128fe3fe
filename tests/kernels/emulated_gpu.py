"""Runs the CUDA kernels of the streamed scan on a CPU, compiled with g++.

The kernels' source is taken as it is, but for the few functions that are assembly; they
come from `emulated_gpu.h`. This is slow, and says nothing about speed.
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
    *("pack", "narrow", "tanh_", "weights4", "fresh4", "fresh1"),
    *("let_next_come", "await_last"),
)


class Emulated:
    """In the place of a kernel."""

    def __init__(self, library: ctypes.CDLL, name: str, blocks: int, shared: int):
        self.launch = getattr(library, f"launch_{name}")
        self.blocks, self.shared = blocks, shared

    def __call__(
        self, arguments: ctypes.Structure, blocks: int = 0, overlap: bool = True
    ) -> None:
        self.launch(ctypes.byref(arguments), blocks or self.blocks, self.shared)


def compile_kernels(source: str, folder: Path) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    for name in ASSEMBLY:
        source = _without(source, rf"DEVICE [\w ]+ {name}\(")
    source = re.sub(r"asm volatile\(\s*\"mma.*?\);", _product, source, flags=re.S)
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


def _without(source: str, pattern: str) -> str:
    """Leave out one function, braces and all."""
    match = re.search(pattern, source)
    assert match, pattern
    end = source.index("{", match.end()) + 1
    depth = 1
    while depth:
        depth += {"{": 1, "}": -1}.get(source[end], 0)
        end += 1
    return source[: match.start()] + source[end:]


def _product(match: re.Match[str]) -> str:
    values = re.findall(r'"r"\(((?:[^()]|\([^()]*\))*)\)', match[0])
    return f"matrix_product(c, {', '.join(values)});"
