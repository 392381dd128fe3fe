"""Choose how many runs share a GPU.

`--per-gpu N` starts N processes per GPU, which the GPU time-slices. `--per-gpu auto`
starts one run per GPU and measures it (`runs_per_gpu` has the rule). A machine without
GPUs has `--workers N` runs at the same time, by default one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from reverie.api import UserError
from reverie.campaign.spec import CampaignConfig
from reverie.log.jsonl import METRICS, read_lines
from reverie.log.messages import print_message
from reverie.log.usage import GIB
from reverie.run.processes import visible_gpus

MEASURED_LINES = 3
"""Lines of metrics after which the memory and utilization of a run are measured."""
CONTEXT_GB = 1.0
"""GPU memory of a process that PyTorch does not count: context and kernels."""
MEMORY_SHARE = 0.9
"""Share of the GPU memory that all runs together may use."""
TOTAL_UTILIZATION = 2.0
"""Maximum of the sum of the utilizations of all runs on a GPU, each measured alone.
Utilization counts the time in which any kernel runs, so its sum may exceed 1."""
CORES_PER_RUN = 2
MAX_RUNS = 4
"""Maximum number of runs per GPU."""


class GpuUse(NamedTuple):
    """GPU memory and utilization of one run."""

    memory_gb: float
    utilization: float | None
    """Fraction of the time; None if it is not known (needs `nvidia-ml-py`)."""


class GpuSharing:
    """Chooses `slots`, the number of runs that this machine runs at the same time."""

    def __init__(self, config: CampaignConfig, device: Sequence[str] | None):
        name = device[0] if device else "auto"
        self.gpus = visible_gpus() if name == "auto" else []
        self.uses_gpus = bool(self.gpus)  # one GPU is assigned to each slot
        is_cpu = not self.gpus and not name.startswith("cuda")
        if is_cpu and config.per_gpu != "auto":
            raise UserError(
                f"--per-gpu {config.per_gpu} has no effect: the runs use no GPU here.\n"
                f"  Fix: --workers {config.per_gpu}, for that many runs on the CPU."
            )
        if not is_cpu and config.workers:
            raise UserError(
                f"--workers {config.workers} has no effect: the runs use a GPU.\n"
                f"  Fix: --per-gpu {config.workers}, or --device cpu."
            )
        count = max(1, len(self.gpus))
        self.is_final = is_cpu or config.per_gpu != "auto"
        per_gpu = int(config.per_gpu) if config.per_gpu != "auto" else 1
        self.slots = max(1, config.workers) if is_cpu else per_gpu * count

    def measured_slots(self, folders: Sequence[Path]) -> int:
        """Return the number of slots, which grows once a run has been measured."""
        if not self.is_final:
            measured = [use for path in folders if (use := read_use(path))]
            if measured:
                count = max(1, len(self.gpus))
                total = torch.cuda.get_device_properties(0).total_memory / GIB
                number = runs_per_gpu(measured, total, _cores() / count)
                self.is_final, self.slots = True, number * count
                print_message(f"{number} runs per GPU, after measuring the first run")
        return self.slots


def runs_per_gpu(
    measured: Sequence[GpuUse], total_gb: float, cores_per_gpu: float
) -> int:
    """Return the number of runs per GPU for `--per-gpu auto`.

    It is the smallest of four numbers, but at least 1: the runs that fit into 90 % of
    the memory; the runs whose utilizations add up to 2; one run per two CPU cores; 4.
    """
    memory = max(use.memory_gb for use in measured) + CONTEXT_GB
    limits = [MEMORY_SHARE * total_gb // memory, cores_per_gpu // CORES_PER_RUN]
    known = [use.utilization for use in measured if use.utilization]
    if known:
        limits.append(TOTAL_UTILIZATION // max(known))
    return max(1, min(MAX_RUNS, *map(int, limits)))


def read_use(folder: Path) -> GpuUse | None:
    """Return the peak memory and mean utilization of a run; None if not known yet."""
    lines = [x for x in read_lines(folder / METRICS) if "usage/gpu_reserved_gb" in x]
    if len(lines) < MEASURED_LINES:
        return None
    memory = max(float(line["usage/gpu_reserved_gb"] or 0.0) for line in lines)
    # the first line may be written before the first update
    busy = [float(x["usage/gpu"]) for x in lines[1:] if x.get("usage/gpu") is not None]
    return GpuUse(memory, sum(busy) / len(busy) if busy else None)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
