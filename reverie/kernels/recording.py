"""Record the kernels that code would launch, and compile them in other processes.

A kernel is compiled when it is first launched. Threads cannot compile several kernels
in parallel, because Triton's compiler holds the GIL, but processes can.
`record_kernels` calls a function for every kernel that is needed, and launches none of
them. Triton and NVRTC store compiled kernels on disk, where other processes find them.
"""

from __future__ import annotations

import json
import os
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from reverie.kernels import nvrtc


class TritonKernel(NamedTuple):
    """A Triton function with the types and constants that it is compiled for."""

    module: str
    name: str
    signature: dict[str, Any]  # types of the arguments
    constants: dict[Any, Any]  # values of compile-time constants
    attributes: dict[Any, Any]  # what is known of arguments, such as their alignment
    options: dict[str, Any]  # of the compiler, such as `num_warps`
    target: Any  # Triton's description of the GPU

    def compile(self) -> None:
        """Compile the kernel and the C code that launches it."""
        function = pkgutil.resolve_name(f"{self.module}:{self.name}")
        parts = (self.signature, self.constants, self.attributes)
        source = ASTSource(function, *parts)
        kernel = triton.compile(source, target=self.target, options=self.options)
        # Triton 3.6 also builds a C extension for every signature, with the C compiler;
        # later versions need none.
        if hasattr(nvidia, "make_launcher"):
            nvidia.CudaLauncher(source, kernel.metadata)


class CudaSource(NamedTuple):
    """CUDA source that is compiled by NVRTC."""

    source: str
    architecture: str

    def compile(self) -> None:
        nvrtc.compile_cached(self.source, self.architecture)


class LauncherUtilities(NamedTuple):
    """Functions with which Triton calls the CUDA driver.

    In some versions of Triton they are a C extension, which has to be compiled.
    """

    def compile(self) -> None:
        nvidia.CudaUtils()


RecordedKernel = TritonKernel | CudaSource | LauncherUtilities


class CompileOnlyDriver:
    """Triton driver of a process that compiles for a GPU without using it."""

    def __init__(self, target: Any):
        self.target = target

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return int(self.target.arch)  # only a key of Triton's cache in memory

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def record_kernels(add: Callable[[RecordedKernel], None]) -> Iterator[None]:
    """Context in which kernels are passed to `add` instead of being launched.

    Results of kernels are zeros: new tensors are filled with them, so that values that
    are used as indices are in range. The context replaces functions of PyTorch and
    Triton in the whole process.
    """
    launch, target = JITFunction.run, driver.active.get_current_target()
    recorded: set[tuple[Any, ...]] = set()

    def skip_launch(kernel: Any, *args: Any, **options: Any) -> None:
        # in Triton, "warmup" means to compile the kernel and not to launch it
        launch(kernel, *args, **options | {"warmup": True})

    def record_triton(*, key: Any, fn: Any, compile: Any, **others: Any) -> bool:
        identity = fn.module, fn.name, str(key)
        if identity not in recorded:
            recorded.add(identity)
            options = json.loads(compile["specialization_data"])["options"]
            options = {k: _as_tuple(value) for k, value in options.items()}
            parts = compile["signature"], compile["constants"], compile["configs"][0]
            add(TritonKernel(fn.module, fn.name, *parts, options, target))
        return True  # tells Triton not to compile the kernel

    def record_cuda(sources: Iterable[str], device: torch.device) -> None:
        for source in sources:
            if (source,) not in recorded:
                recorded.add((source,))
                add(CudaSource(source, nvrtc.architecture(device)))

    def load(source: str, names: Sequence[str], device: torch.device) -> list[Any]:
        record_cuda([source], device)
        return [None for _ in names]

    replacements: list[tuple[Any, str, Any]] = [
        (JITFunction, "run", skip_launch),
        (triton.knobs.runtime, "jit_cache_hook", record_triton),
        (nvrtc, "load", load),
        (nvrtc, "compile_in_background", record_cuda),
        (nvrtc, "call_driver", lambda name, *arguments: None),
        (torch, "empty", _zeroed(torch.empty)),
        (torch, "empty_like", _zeroed(torch.empty_like)),
        (torch.Tensor, "new_empty", _zeroed(torch.Tensor.new_empty)),
    ]
    with ExitStack() as stack:
        for owner, name, value in replacements:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _zeroed(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a function that allocates a tensor and fills it with zeros."""

    def allocate_zeros(*args: Any, **options: Any) -> torch.Tensor:
        with torch.no_grad():
            return allocate(*args, **options).zero_()

    return allocate_zeros


def _as_tuple(value: Any) -> Any:
    """Undo the conversion of tuples to lists by JSON."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def compile_kernel(kernel: RecordedKernel) -> str:
    """Compile a kernel to the caches on disk; return an error message, if any.

    For worker processes: Triton cannot launch kernels afterwards.
    """
    try:
        if isinstance(kernel, TritonKernel):
            driver.set_active(CompileOnlyDriver(kernel.target))
        kernel.compile()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def marker_folder() -> str:
    """Return the folder with a file for each config whose kernels are all compiled."""
    return os.path.join(triton.knobs.cache.dir, "reverie")
