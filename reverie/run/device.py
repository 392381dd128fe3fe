"""Where the arithmetic happens, and how exactly."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from reverie.api import UserError

PRECISIONS = ("auto", "float32", "bfloat16", "float16")


def pick_device(name: str) -> torch.device:
    """The named device, or for `auto` the best one here."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    kind = name.split(":")[0]
    if kind == "tpu":
        raise UserError(
            "Reverie does not support TPUs.\n  Fix: --device cuda, cpu or mps."
        )
    if kind not in ("cuda", "cpu", "mps"):
        raise UserError(
            f"There is no device {name!r}.\n  Fix: --device auto, cuda, cpu or mps."
        )
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "--device cuda was asked for, but PyTorch finds no CUDA GPU here.\n"
            "  Fix: --device cpu, or install a driver and a CUDA build of PyTorch."
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError(
            "--device mps was asked for, but PyTorch finds no Apple GPU here.\n"
            "  Fix: --device cpu."
        )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(
            f"{name!r} is no device name.\n  Fix: write --device cuda:0, for example."
        ) from None
    if kind == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"--device {name} was asked for, but there are {torch.cuda.device_count()} "
            "GPUs here.\n  Fix: --device cuda:0."
        )
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """`bfloat16` on a CUDA GPU and `float32` elsewhere, unless said otherwise."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"


def pick_compile(name: str, device: torch.device) -> str:
    """`graph` on a CUDA GPU and `step` elsewhere, unless said otherwise."""
    if name == "auto":
        return "graph" if device.type == "cuda" else "step"
    if name == "graph" and device.type != "cuda":
        raise UserError(
            f"--compile graph needs a CUDA GPU, but this run is on {device.type}.\n"
            "  Fix: --compile auto, step or none."
        )
    return name


def pick_overlap(name: str, device: torch.device, deterministic: bool) -> bool:
    """Whether to act while training, which only a GPU does in parallel by itself."""
    if name == "auto":
        return device.type == "cuda" and not deterministic
    return name == "on"


def avoid_crashes(device: torch.device, precision: str) -> None:
    """Keep half precision on a CPU away from oneDNN.

    Its kernels for it end the process on some virtual machines (an illegal
    instruction, which no program can catch). Plain ones are slow, but right.
    """
    if device.type == "cpu" and precision != "float32":
        torch.backends.mkldnn.set_flags(False)  # type: ignore[no-untyped-call]


def be_quick(device: torch.device) -> None:
    """Let cuDNN try which of its algorithms is the fastest for each convolution."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True


@contextmanager
def not_choosing() -> Iterator[None]:
    """Let cuDNN take its first suggestions for a while, and forget them afterwards.

    For work beside others, in whose company the fastest cannot be found. What it once
    chose it keeps for the same settings, so these differ from the usual ones.
    """
    cudnn: Any = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def seed_everything(seed: int) -> None:
    """Seed the global generators; agents and replay have their own besides."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def be_deterministic() -> None:
    """Have PyTorch refuse any operation whose result can vary between runs."""
    # cuBLAS repeats itself only with this, which it reads when it is first used
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
