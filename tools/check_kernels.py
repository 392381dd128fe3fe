"""Compile the Triton kernels of an agent for GPUs that this machine does not have.

    python tools/check_kernels.py --configs size12m --task noisycatch
    python tools/check_kernels.py --arch 86 --configs iris_tiny --task catch

One update and one policy step run on the CPU, with kernels that are compiled for the
given compute capabilities instead of being launched, so their outputs are zeros. A
kernel fails the check if Triton cannot compile it, or if it needs more shared memory
than a thread block of that GPU can have. No GPU is needed. Kernels that are compiled by
NVRTC are left out: they are used from compute capability 9 on.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from reverie.bench.update import BenchConfig, make_benchmark
from reverie.cli.train import command_config
from reverie.kernels import accelerate, launch
from reverie.kernels.conv import first_layer, last_layer
from reverie.kernels.norm import norm_linear
from reverie.kernels.recording import CompileOnlyDriver

SHARED_KILOBYTES = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227}
"""Shared memory that a thread block can have, by compute capability."""


class KernelCompiler:
    """Compiles kernels for one compute capability instead of launching them."""

    def __init__(self, capability: int):
        self.capability = capability
        self.shared: Counter[str] = Counter()
        """Largest shared memory of each kernel, in bytes."""
        self.errors: dict[str, str] = {}
        """Why a kernel does not compile, by kernel."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Run the code for this GPU on the CPU, with kernels that return zeros."""
        original_run = JITFunction.run
        driver.set_active(CompileOnlyDriver(GPUTarget("cuda", self.capability, 32)))

        def compile_only(kernel: Any, *args: Any, **options: Any) -> None:
            name = f"{kernel.fn.__module__}.{kernel.fn.__name__}"
            try:
                compiled = original_run(kernel, *args, **options | {"warmup": True})
            except Exception as error:
                self.errors[name] = f"{type(error).__name__}: {error}"[:300]
            else:
                self.shared[name] = max(self.shared[name], compiled.metadata.shared)

        knobs = SimpleNamespace(runtime=SimpleNamespace(interpret=True))
        replacements: list[tuple[Any, str, Any]] = [
            (JITFunction, "run", compile_only),
            (accelerate, "kernels_available", lambda device: True),
            # makes `can_launch` true for tensors on the CPU
            (launch, "triton", SimpleNamespace(**vars(triton) | {"knobs": knobs})),
            *(
                (module, "supports_large_tiles", lambda device: self.capability >= 80)
                for module in (first_layer, last_layer, norm_linear)
            ),
            (torch, "empty", torch.zeros),
            (torch, "empty_like", torch.zeros_like),
            (torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        ]
        with ExitStack() as stack:
            for owner, name, value in replacements:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def report(self) -> bool:
        """Print the shared memory of each kernel; return True if all can be used."""
        limit = SHARED_KILOBYTES[self.capability]
        print(f"sm_{self.capability}: KB of shared memory, at most {limit}")
        for name, size in sorted(self.shared.items()):
            mark = "  too much" if size > limit * 1024 else ""
            print(f"  {name:58} {size / 1024:6.1f}{mark}")
        for name, text in sorted(self.errors.items()):
            print(f"  {name} does not compile: {text}")
        fits = all(size <= limit * 1024 for size in self.shared.values())
        return fits and not self.errors


def run_agent(words: list[str], precision: str) -> None:
    """Run an update, its sections and a policy step of a config once."""
    flags = ["--device", "cpu", "--compile", "step", "--precision", precision]
    config = command_config("train", [*words, *flags])
    config = replace(config, run=replace(config.run, envs=1))
    with make_benchmark(config, BenchConfig(steps=1000)) as benchmark:
        for call in benchmark.calls().values():
            call()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[75, 80, 86, 89])
    options, words = parser.parse_known_args()
    all_usable = True
    for capability in options.arch:
        compiler = KernelCompiler(capability)
        with compiler.active():
            run_agent(words, "float16" if capability < 80 else "bfloat16")
        all_usable &= compiler.report()
    return 0 if all_usable else 1


if __name__ == "__main__":
    sys.exit(main())
