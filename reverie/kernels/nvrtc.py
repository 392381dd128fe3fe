"""Compile CUDA source at first use and launch it, with what PyTorch brings along.

NVRTC, the run-time compiler, comes with every CUDA build of PyTorch; the driver comes
with the GPU. Both are called through ctypes, so no compiler need be installed. Compiled
code is kept in the user's cache folder, under a name made of everything it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

OPTIONS = ("--std=c++17",)
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
EARLY = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Unavailable(Exception):
    """Something is missing or refused; the caller has another way."""


class Kernel:
    """One compiled function, launched with all blocks at once or not at all."""

    def __init__(self, handle: ctypes.c_void_p, blocks: int, threads: int, shared: int):
        self.handle, self.blocks, self.threads = handle, blocks, threads
        self.shared = shared
        _drive("cuFuncSetAttribute", handle, MAX_DYNAMIC_SHARED, shared)

    def __call__(self, arguments: ctypes.Structure) -> None:
        """Launch on PyTorch's current stream."""
        _enter_context()
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        shape = (self.blocks, 1, 1, self.threads, 1, 1, self.shared)
        _drive("cuLaunchCooperativeKernel", self.handle, *shape, stream, pointers)


class EarlyKernel(Kernel):
    """A function whose blocks may start before the kernel before has ended.

    They start as soon as that one agrees; to wait for its end is up to them.
    """

    def __call__(
        self, arguments: ctypes.Structure, blocks: int = 0, early: bool = True
    ) -> None:
        _enter_context()
        stream = torch.cuda.current_stream().cuda_stream
        attributes = (_Attribute * 1)(_Attribute(EARLY, 0, (1,)))
        shape = (blocks or self.blocks, 1, 1, self.threads, 1, 1, self.shared)
        config = _Config(*shape, stream, attributes, int(early))
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _drive("cuLaunchKernelEx", ctypes.byref(config), self.handle, pointers, None)


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int * 16),
    ]


class _Config(ctypes.Structure):
    _fields_ = [
        *((f"grid{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def structure(
    pointers: Mapping[str, Tensor], numbers: Mapping[str, int | float]
) -> ctypes.Structure:
    """A kernel's one argument: its members in the order of the source."""
    kinds = {int: ctypes.c_int, float: ctypes.c_float}
    fields = [
        *((key, ctypes.c_void_p) for key in pointers),
        *((key, kinds[type(value)]) for key, value in numbers.items()),
    ]
    values = (*(value.data_ptr() for value in pointers.values()), *numbers.values())
    made = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    return made(*values)  # type: ignore[no-any-return]


def load(
    source: str, names: Sequence[str], device: torch.device
) -> list[ctypes.c_void_p]:
    """The named functions of `source`, compiled for `device`."""
    if source in _coming:
        _coming.pop(source).result()
    code = _compiled(source, _architecture(device))
    _enter_context()
    module = ctypes.c_void_p()
    _drive("cuModuleLoadData", ctypes.byref(module), code)
    handles = []
    for name in names:
        handle = ctypes.c_void_p()
        _drive("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
        handles.append(handle)
    return handles


_coming: dict[str, Future[bytes]] = {}


def prepare(sources: Iterable[str], device: torch.device) -> None:
    """Begin to compile for later, side by side: one by one would take longer."""
    pool = ThreadPoolExecutor(8, "compile")
    for source in sources:
        _coming[source] = pool.submit(_compiled, source, _architecture(device))
    pool.shutdown(wait=False)


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "reverie" / "kernels"


def compile_source(source: str, architecture: str) -> bytes:
    """Machine code for one architecture, such as `sm_90`."""
    lib = _nvrtc()
    program = ctypes.c_void_p()
    _check(
        lib.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"scan.cu", 0, None, None
        )
    )
    options = [f"--gpu-architecture={architecture}", *OPTIONS]
    flags = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    failed = lib.nvrtcCompileProgram(program, len(options), flags)
    size = ctypes.c_size_t()
    if failed:
        _check(lib.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        _check(lib.nvrtcGetProgramLog(program, log))
        raise Unavailable(f"NVRTC: {log.value.decode(errors='replace')[:2000]}")
    _check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    code = ctypes.create_string_buffer(size.value)
    _check(lib.nvrtcGetCUBIN(program, code))
    lib.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def _compiled(source: str, architecture: str) -> bytes:
    lib = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    parts = (source, architecture, f"{major.value}.{minor.value}", *OPTIONS)
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    path = cache_folder() / f"scan-{architecture}-{digest}.cubin"
    if path.exists():
        return path.read_bytes()
    code = compile_source(source, architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)  # never a half-written file under the final name
    except OSError:
        pass  # a folder that cannot be written costs a second at every start
    return code


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _nvrtc() -> ctypes.CDLL:
    """The library that PyTorch was built with, wherever it was put."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    site = Path(torch.__file__).parent.parent
    found = [
        *site.glob(f"nvidia/*/lib/{name}*"),
        *site.glob(f"torch/lib/libnvrtc*.so.{major}*"),
    ]
    for candidate in (name, *map(str, sorted(found)), "libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise Unavailable(f"{name} was not found")


def _check(code: int) -> None:
    if code:
        raise Unavailable(f"NVRTC answered with error {code}")


def _drive(name: str, *arguments: object) -> None:
    """Call the driver, and turn its errors into ours."""
    driver = _driver()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise Unavailable(f"{name}: {(text.value or b'unknown error').decode()}")


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise Unavailable(str(error)) from error


def _enter_context() -> None:
    """Give this thread PyTorch's context; autograd's threads may not have it yet."""
    current = ctypes.c_void_p()
    _drive("cuCtxGetCurrent", ctypes.byref(current))
    if not current.value:
        index = torch.cuda.current_device()
        _drive("cuDevicePrimaryCtxRetain", ctypes.byref(current), index)
        _drive("cuCtxSetCurrent", current)
