"""Choice of device, precision and acceleration; seeds and determinism."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from reverie.api import UserError


def pick_device(name: str) -> torch.device:
    """Return the named device; for `auto` the fastest available one."""
    if name == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device("cuda" if torch.cuda.is_available() else mps)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
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
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {name} is set, but the number of GPUs is "
            f"{torch.cuda.device_count()}.\n  Fix: --device cuda:0."
        )
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """Return the precision; `auto` is `bfloat16` on a CUDA GPU, else `float32`."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"


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

    Its half-precision kernels crash on some virtual machines (illegal instruction). The
    other kernels are slower but work.
    """
    if device.type == "cpu" and precision != "float32":
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def enable_autotuning(device: torch.device) -> None:
    """Let cuDNN benchmark its convolution algorithms and use the fastest."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True


@contextmanager
def autotuning_disabled() -> Iterator[None]:
    """Use the default algorithms of cuDNN within this context.

    For work that runs in parallel with other work, which would disturb the benchmark.
    cuDNN caches its choice by these flags, so the choice does not persist afterwards.
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
    # cuBLAS is deterministic only with this, and reads it when it is first used
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
