"""Choice of device, precision and acceleration; seeds and determinism."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from reverie.api import UserError
from reverie.distributed.launch import find_launch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt`, from malloc.h of glibc."""
MMAP_THRESHOLDS = (2**30, 2**25)
"""Values of `M_MMAP_THRESHOLD` to try; old versions of glibc reject values above 32
MiB."""


def pick_device(name: str, train_devices: Sequence[int] = ()) -> torch.device:
    """Return the named device; for `auto`, the fastest available device.

    Each process of a data-parallel run gets its own GPU, with the index in
    `train_devices` if that is given.
    """
    if name == "auto":
        name = "mps" if torch.backends.mps.is_available() else "cpu"
        name = "cuda" if torch.cuda.is_available() else name
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")  # not supported, so an error is raised below
    if device.type not in ("cuda", "cpu", "mps"):
        raise UserError(
            f"There is no device {name!r}.\n  Fix: --device auto, cuda, cpu or mps."
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device {name} is set, but PyTorch finds no CUDA GPU.\n"
            "  Fix: --device cpu, or install a driver and a CUDA build of PyTorch."
        )
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            "--device mps is set, but PyTorch finds no Apple GPU.\n  Fix: --device cpu."
        )
    launch = find_launch()
    if train_devices:
        check_train_devices(train_devices, launch.local_world_size)
        device = torch.device("cuda", train_devices[launch.local_rank])
        torch.cuda.set_device(device)
    elif device.type == "cuda" and launch.world_size > 1:
        device = torch.device("cuda", launch.local_rank)
        if launch.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"{launch.local_world_size} processes were started on this machine, "
                f"but the number of GPUs is {torch.cuda.device_count()}.\n"
                "  Fix: start one process per GPU, or --device cpu."
            )
        torch.cuda.set_device(device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {name} is set, but the number of GPUs is "
            f"{torch.cuda.device_count()}.\n  Fix: --device cuda:0."
        )
    return device


def check_train_devices(indices: Sequence[int], processes: int) -> None:
    """Raise unless `run.train_devices` has one GPU for each process of this machine."""
    if not torch.cuda.is_available():
        raise UserError(
            "run.train_devices names GPUs, but PyTorch finds no CUDA GPU.\n"
            "  Fix: remove --run.train_devices; --devices 2 trains on the CPU."
        )
    names = " ".join(map(str, indices))
    if not len(indices) == len(set(indices)) == processes:
        raise UserError(
            f"run.train_devices is {names}, but must name a GPU for each of the "
            f"{processes} processes on this machine.\n  Fix: --run.train_devices "
            f"{' '.join(map(str, range(processes)))}"
        )
    if not 0 <= min(indices) <= max(indices) < torch.cuda.device_count():
        raise UserError(
            f"run.train_devices is {names}, but the number of GPUs is "
            f"{torch.cuda.device_count()}.\n  Fix: --run.train_devices 0"
        )


def pick_policy_device(names: Sequence[str]) -> torch.device | None:
    """Return the device of `run.policy_devices`; None if it is empty."""
    if not names:
        return None
    if len(names) > 1 or not (names[0] == "cpu" or names[0].isdecimal()):
        raise UserError(
            f"run.policy_devices is {' '.join(names)}, but must be one GPU index or "
            "cpu.\n  Fix: --run.policy_devices 1"
        )
    if names[0] == "cpu":
        return torch.device("cpu")
    if int(names[0]) >= torch.cuda.device_count():
        raise UserError(
            f"run.policy_devices is {names[0]}, but the number of GPUs is "
            f"{torch.cuda.device_count()}.\n  Fix: --run.policy_devices cpu, or remove "
            "it to act on the device that trains."
        )
    return torch.device("cuda", int(names[0]))


def pick_precision(name: str, device: torch.device) -> str:
    """Return the precision.

    `auto` is `bfloat16` on a CUDA GPU, `float16` if its compute capability is below 8.0
    (such GPUs emulate bfloat16), and `float32` on other devices.
    """
    if name != "auto":
        return name
    if device.type != "cuda":
        return "float32"
    major, _ = torch.cuda.get_device_capability(device)
    return "bfloat16" if major >= 8 else "float16"


def pick_compile(name: str, device: torch.device) -> str:
    """Return the acceleration; `auto` is `graph` on a CUDA GPU, else `step`."""
    if name == "auto":
        return "graph" if device.type == "cuda" else "step"
    if name == "graph" and device.type != "cuda":
        raise UserError(
            f"--compile graph needs a CUDA GPU, but this run is on {device.type}.\n"
            "  Fix: --compile auto, step or none."
        )
    return name


def pick_overlap(name: str, device: torch.device, deterministic: bool) -> bool:
    """True if environments step while the agent trains; `auto`: on a CUDA GPU."""
    if name == "auto":
        return device.type == "cuda" and not deterministic
    return name == "on"


def disable_onednn_if_needed(device: torch.device, precision: str) -> None:
    """Disable oneDNN for half precision on a CPU.

    Its half-precision kernels crash on some virtual machines (illegal instruction).
    PyTorch then uses other kernels, which are slower.
    """
    if device.type == "cpu" and precision != "float32":
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def keep_freed_memory(device: torch.device) -> None:
    """Let this process reuse the memory of freed CPU tensors.

    By default, glibc returns the memory of large tensors to the operating system. Every
    update on a CPU allocates them again, and the system must then fill each page with
    zeros. Does nothing on other devices, or with another C library.
    """
    if device.type != "cpu":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # Windows or macOS
        return
    for threshold in MMAP_THRESHOLDS:
        if mallopt(M_MMAP_THRESHOLD, threshold):  # 0 if the value is rejected
            mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
            break


def initialize_in_background(device: torch.device) -> None:
    """Create the CUDA context and load cuBLAS, cuDNN and Triton in a thread.

    The environments can be built at the same time.
    """

    def initialize() -> None:
        # an error is raised again when the main thread uses the device
        with suppress(RuntimeError):
            x = torch.zeros(16, 16, device=device)
            torch.mm(x, x)
            image, weight = torch.zeros(2, 1, 16, 16, 16, device=device).bfloat16()
            torch.nn.functional.conv2d(image, weight[:, :, :3, :3])
        with suppress(ImportError, AttributeError):
            from triton.runtime.cache import triton_key

            triton_key()  # Triton caches this hash of its own files

    if device.type == "cuda":
        threading.Thread(target=initialize, daemon=True).start()


def enable_autotuning(device: torch.device) -> None:
    """Let cuDNN benchmark its convolution algorithms and use the fastest."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True


@contextmanager
def autotuning_disabled() -> Iterator[None]:
    """Use the default algorithms of cuDNN within this context.

    Needed while other work runs on the GPU, which would make the benchmark unreliable.
    cuDNN caches its choices separately for each value of these flags, so code after the
    context is not affected.
    """
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def seed_everything(seed: int) -> None:
    """Seed the global generators; agents and replay have their own generators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def make_deterministic() -> None:
    """Make PyTorch raise errors for nondeterministic operations."""
    # cuBLAS is deterministic only with this variable, which it reads at its first use
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
