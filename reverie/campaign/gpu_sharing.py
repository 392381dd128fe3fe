"""Choose how many runs share a GPU.

`--per-gpu N` starts N processes per GPU. With NVIDIA MPS (`mps.py`) their kernels run
at the same time; without it, the processes take turns. `--per-gpu auto` starts one run
per GPU and measures it (`runs_per_gpu` has the rule). A machine without GPUs has
`--workers N` runs at the same time, by default one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from reverie.api import UserError
from reverie.campaign.mps import MpsDaemon, MpsUnavailable
from reverie.campaign.spec import CampaignConfig
from reverie.log.jsonl import METRICS, read_lines
from reverie.log.messages import print_message
from reverie.log.usage import GIB
from reverie.run.processes import cpu_cores, visible_gpus

MIN_LINES = 3
"""Lines of `metrics.jsonl` that are needed to measure the GPU usage of a run."""
CONTEXT_GIB = 1.0
"""GPU memory of each process that PyTorch does not count: CUDA context, kernels."""
MEMORY_FRACTION = 0.9
"""Fraction of the GPU memory that all runs together may use."""
TOTAL_UTILIZATION = 2.0
"""Maximum sum of the utilizations of the runs on a GPU; the utilization of a run is
measured while no other run uses the GPU. The sum may exceed 1, because a kernel that
runs may use only a part of the GPU. There is no such limit with MPS, where runs that
each have a utilization of 1 are faster together."""
MIN_CORES = 2
"""Minimum number of CPU cores for each process of a run."""
MAX_RUNS = 4
"""Maximum number of runs per GPU."""


class GpuUsage(NamedTuple):
    """Peak GPU memory and mean GPU utilization of one run."""

    memory_gib: float
    utilization: float | None
    """Fraction of the time in which a kernel runs; None without `nvidia-ml-py`."""


class GpuSharing:
    """Chooses `num_slots`, the number of runs at the same time on this machine.

    `device` is the setting `device` of the runs. `gpus_per_run` is the number of
    processes of a run, each of which uses a GPU.
    """

    def __init__(
        self, config: CampaignConfig, device: str = "auto", gpus_per_run: int = 1
    ):
        self.gpus = visible_gpus() if device == "auto" else []
        self.assigns_gpus = bool(self.gpus)  # False if --device selects one GPU
        is_cpu = not self.gpus and not device.startswith("cuda")
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
        if 0 < len(self.gpus) < gpus_per_run:
            raise UserError(
                f"Each run has {gpus_per_run} processes, with one GPU each, but the "
                f"number of GPUs is {len(self.gpus)}.\n"
                f"  Fix: --devices {len(self.gpus)}, or --device cpu."
            )
        self.gpus_per_run = gpus_per_run
        count = max(1, len(self.gpus) // gpus_per_run)
        self.gpu_sets = count
        """Number of sets of GPUs; each run uses one set, with a GPU per process."""
        self.is_fixed = is_cpu or config.per_gpu != "auto"  # `num_slots` is final
        per_gpu = int(config.per_gpu) if config.per_gpu != "auto" else 1
        self.num_slots = max(1, config.workers) if is_cpu else per_gpu * count
        self.shares_gpus = not is_cpu and config.per_gpu != "1"
        if not config.mps and not self.shares_gpus:
            raise UserError(
                "--mps False has no effect: the runs do not share a GPU.\n"
                "  Fix: remove it, or use --per-gpu 2 for two runs per GPU."
            )
        self.mps = MpsDaemon() if self.shares_gpus and config.mps else None

    def open(self) -> None:
        """Start MPS if it was requested; print the reason if it is not available."""
        if self.mps is not None:
            try:
                self.mps.open()
            except MpsUnavailable as error:
                print_message(f"runs on the same GPU take turns, without MPS: {error}")
                self.mps = None

    def close(self) -> None:
        if self.mps is not None:
            self.mps.close()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the runs."""
        return self.mps.variables if self.mps is not None else {}

    def update_slots(self, folders: Sequence[Path]) -> int:
        """Return the number of slots; with `auto`, measure the runs in these folders.

        The number is increased once, as soon as a run has logged enough.
        """
        if not self.is_fixed:
            measured = [use for path in folders if (use := read_gpu_usage(path))]
            if measured:
                total = torch.cuda.get_device_properties(0).total_memory / GIB
                cores = cpu_cores() / (self.gpu_sets * self.gpus_per_run)
                per_gpu = runs_per_gpu(measured, total, cores, self.mps is not None)
                self.is_fixed, self.num_slots = True, per_gpu * self.gpu_sets
                plural = "s" * (per_gpu > 1)
                print_message(
                    f"{per_gpu} run{plural} per GPU, after measuring the first run"
                )
        return self.num_slots


def runs_per_gpu(
    measured: Sequence[GpuUsage],
    total_gib: float,
    cores_per_gpu: float,
    with_mps: bool = False,
) -> int:
    """Return the number of runs per GPU for `--per-gpu auto`.

    It is the smallest of four numbers, but at least 1: the runs that fit into 90 % of
    the memory; one run per two CPU cores; 4; and, without MPS, the runs whose
    utilizations add up to 2.
    """
    memory = max(use.memory_gib for use in measured) + CONTEXT_GIB
    limits = [MEMORY_FRACTION * total_gib // memory, cores_per_gpu // MIN_CORES]
    known = [use.utilization for use in measured if use.utilization]
    if known and not with_mps:
        limits.append(TOTAL_UTILIZATION // max(known))
    return max(1, min(MAX_RUNS, *map(int, limits)))


def read_gpu_usage(folder: Path) -> GpuUsage | None:
    """Read the GPU usage from the log of a run; None if it has too few lines."""
    lines = [x for x in read_lines(folder / METRICS) if "usage/gpu_reserved_gb" in x]
    if len(lines) < MIN_LINES:
        return None
    memory = max(float(line["usage/gpu_reserved_gb"] or 0.0) for line in lines)
    # the first line may be written before the first update
    used = [float(x["usage/gpu"]) for x in lines[1:] if x.get("usage/gpu") is not None]
    return GpuUsage(memory, sum(used) / len(used) if used else None)
