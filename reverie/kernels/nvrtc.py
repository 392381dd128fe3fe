"""Compile CUDA source at run time with NVRTC and launch the compiled kernels.

Every CUDA build of PyTorch includes NVRTC, the run-time compiler, and every GPU machine
has the CUDA driver. Both are called through ctypes, so no CUDA toolkit has to be
installed. Compiled code is stored in the user's cache folder, under a hash of
everything it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

OPTIONS = ("--std=c++17",)
"""Compiler options of NVRTC."""
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class Unavailable(Exception):
    """NVRTC is missing, or compiling or launching failed; callers use other kernels."""


class Fallback:
    """Flag that is set when kernels fail; then their callers use slower kernels."""

    def __init__(self, operation: str):
        self.operation, self.enabled = operation, False

    def enable(self, error: Unavailable) -> None:
        self.enabled = True
        warnings.warn(
            f"Using slower kernels for {self.operation}: {error}.", stacklevel=2
        )


class Kernel:
    """A compiled CUDA kernel and its launch configuration.

    `blocks` is the default grid size, `threads` the block size, and `shared` the
    dynamic shared memory of a block in bytes. All blocks of a `cooperative` kernel run
    at the same time, so they can wait for each other.
    """

    def __init__(
        self,
        handle: ctypes.c_void_p,
        blocks: int,
        threads: int,
        shared: int,
        cooperative: bool = False,
    ):
        self.handle, self.blocks, self.threads = handle, blocks, threads
        self.shared, self.cooperative = shared, cooperative
        call_driver("cuFuncSetAttribute", handle, MAX_DYNAMIC_SHARED, shared)

    def __call__(
        self, arguments: ctypes.Structure, blocks: int = 0, overlap: bool = False
    ) -> None:
        """Launch the kernel on PyTorch's current stream.

        `blocks` replaces the default grid size, unless it is 0. With `overlap`
        (programmatic dependent launch), blocks may start before the previous kernel of
        the stream ends, as soon as that kernel allows it; the code of this kernel must
        then wait for the end of the previous one.
        """
        _ensure_context()
        stream = torch.cuda.current_stream().cuda_stream
        kind = COOPERATIVE if self.cooperative else PROGRAMMATIC_SERIALIZATION
        attributes = (_LaunchAttribute * 1)(_LaunchAttribute(kind, 0, (1,)))
        shape = (blocks or self.blocks, 1, 1, self.threads, 1, 1, self.shared)
        count = int(self.cooperative or overlap)
        config = _LaunchConfig(*shape, stream, attributes, count)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        call_driver(
            "cuLaunchKernelEx", ctypes.byref(config), self.handle, pointers, None
        )


class _LaunchAttribute(ctypes.Structure):
    """The struct `CUlaunchAttribute` of the CUDA driver."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("padding", ctypes.c_int),
        ("value", ctypes.c_int * 16),
    ]


class _LaunchConfig(ctypes.Structure):
    """The struct `CUlaunchConfig` of the CUDA driver."""

    _fields_ = [
        *((f"grid{axis}", ctypes.c_uint) for axis in "xyz"),
        *((f"block{axis}", ctypes.c_uint) for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def make_arguments(
    pointers: Mapping[str, Tensor | None], numbers: Mapping[str, int | float]
) -> ctypes.Structure:
    """Return the argument struct of a kernel; None becomes a null pointer.

    Pointers and numbers must be in the order of the struct in the CUDA source.
    """
    ctypes_by_type = {int: ctypes.c_int, float: ctypes.c_float}
    fields = [
        *((key, ctypes.c_void_p) for key in pointers),
        *((key, ctypes_by_type[type(value)]) for key, value in numbers.items()),
    ]
    addresses = (0 if x is None else x.data_ptr() for x in pointers.values())
    struct = type("Arguments", (ctypes.Structure,), {"_fields_": fields})
    return struct(*addresses, *numbers.values())  # type: ignore[no-any-return]


def read_source(constants: Mapping[str, int], *files: str) -> str:
    """Return CUDA files as one source, which defines the constants as macros.

    Paths are relative to this folder; `bfloat16.cu` is always the first file.
    """
    defines = (f"#define {key} {value}" for key, value in constants.items())
    folder = resources.files(__package__)
    texts = (folder.joinpath(file).read_text() for file in ("bfloat16.cu", *files))
    return "\n".join([*defines, *texts])


def load(
    source: str, names: Sequence[str], device: torch.device
) -> list[ctypes.c_void_p]:
    """Compile `source` for `device` and return handles of the named functions."""
    if (pending := _pending.pop(source, None)) is not None:
        pending.result()
    code = compile_cached(source, architecture(device))
    _ensure_context()
    module = ctypes.c_void_p()
    call_driver("cuModuleLoadData", ctypes.byref(module), code)
    handles = []
    for name in names:
        handle = ctypes.c_void_p()
        call_driver("cuModuleGetFunction", ctypes.byref(handle), module, name.encode())
        handles.append(handle)
    return handles


_pending: dict[str, Future[bytes]] = {}
"""Sources that are being compiled in the background."""


def compile_in_background(sources: Iterable[str], device: torch.device) -> None:
    """Start compiling sources in parallel threads; `load` waits for its source."""
    pool = ThreadPoolExecutor(8, "compile")
    for source in sources:
        _pending[source] = pool.submit(compile_cached, source, architecture(device))
    pool.shutdown(wait=False)


def cache_folder() -> Path:
    """Return the folder of compiled CUDA kernels."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "reverie" / "kernels"


def compile_source(source: str, architecture: str) -> bytes:
    """Compile with NVRTC; return machine code for an architecture such as `sm_90`."""
    lib = _nvrtc()
    program = ctypes.c_void_p()
    _check(
        lib.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None
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


def compile_cached(source: str, architecture: str) -> bytes:
    """Return machine code from the cache folder; compile and store it if missing."""
    lib = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    key = (source, architecture, f"{major.value}.{minor.value}", *OPTIONS)
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:24]
    path = cache_folder() / f"{architecture}-{digest}.cubin"
    if path.exists():
        return path.read_bytes()
    code = compile_source(source, architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)  # atomic: other processes never read a partial file
    except OSError:
        pass  # without a writable cache, every start compiles again
    return code


def architecture(device: torch.device) -> str:
    """Return the compute capability of a GPU as NVRTC names it, such as `sm_90`."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _nvrtc() -> ctypes.CDLL:
    """Return the NVRTC library of PyTorch's CUDA version."""
    major = (torch.version.cuda or "0").split(".")[0]
    name = f"libnvrtc.so.{major}"
    site = Path(torch.__file__).parent.parent
    installed = [
        *site.glob(f"nvidia/*/lib/{name}*"),
        *site.glob(f"torch/lib/libnvrtc*.so.{major}*"),
    ]
    for candidate in (name, *map(str, sorted(installed)), "libnvrtc.so"):
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise Unavailable(f"{name} was not found")


def _check(code: int) -> None:
    """Raise `Unavailable` if a function of NVRTC returned an error code."""
    if code:
        raise Unavailable(f"NVRTC returned error {code}")


def call_driver(name: str, *arguments: object) -> None:
    """Call a function of the CUDA driver; raise `Unavailable` if it fails."""
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


def _ensure_context() -> None:
    """Bind PyTorch's CUDA context to this thread; autograd threads may lack it."""
    current = ctypes.c_void_p()
    call_driver("cuCtxGetCurrent", ctypes.byref(current))
    if not current.value:
        index = torch.cuda.current_device()
        call_driver("cuDevicePrimaryCtxRetain", ctypes.byref(current), index)
        call_driver("cuCtxSetCurrent", current)
