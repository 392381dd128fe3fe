"""Resource usage of a run: memory, CPU and GPU."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from reverie.api import Metrics
from reverie.storage.system import peak_memory

GIB = 2**30


class Usage:
    """Metrics `usage/*` of this process and its workers.

    `usage/cpu` is the average number of busy cores since the last call; `*_gb` are GiB
    (2**30 bytes). Without `/proc`, the standard library provides only the peak memory.
    """

    def __init__(self) -> None:
        # wall-clock time and CPU time of this process at the last call
        self._last = time.perf_counter(), sum(os.times()[:2])
        self._has_gpu_utilization = True

    def metrics(self) -> Metrics:
        now, cpu_seconds = time.perf_counter(), sum(os.times()[:2])
        last, last_cpu_seconds = self._last
        self._last = now, cpu_seconds
        cpu = (cpu_seconds - last_cpu_seconds) / max(now - last, 1e-9)
        metrics: Metrics = {"usage/cpu": cpu, **self._memory()}
        if torch.cuda.is_available():
            metrics |= self._cuda()
        return metrics

    def _memory(self) -> Metrics:
        """Return the memory of this process and its workers, and the free memory.

        Memory that processes share is counted once, in `usage/ram_gb`.
        """
        if not Path("/proc/self/statm").exists():
            peak = peak_memory()
            return {} if peak is None else {"usage/ram_peak_gb": peak / GIB}
        metrics = {"usage/ram_gb": _resident_bytes(os.getpid())[0] / GIB}
        workers = _descendants(os.getpid())
        if workers:
            sizes = map(_resident_bytes, workers)
            private = sum(resident - shared for resident, shared in sizes)
            metrics["usage/workers_ram_gb"] = private / GIB
            metrics["usage/workers"] = len(workers)
        free = _available_bytes()
        if free is not None:
            metrics["usage/ram_free_gb"] = free / GIB
        return metrics

    def _cuda(self) -> Metrics:
        metrics: Metrics = {
            "usage/gpu_gb": torch.cuda.memory_allocated() / GIB,
            "usage/gpu_peak_gb": torch.cuda.max_memory_allocated() / GIB,
            "usage/gpu_reserved_gb": torch.cuda.memory_reserved() / GIB,
        }
        torch.cuda.reset_peak_memory_stats()
        if self._has_gpu_utilization:
            try:
                metrics["usage/gpu"] = torch.cuda.utilization() / 100
            except Exception:  # pynvml is missing, or the driver does not allow it
                self._has_gpu_utilization = False
        return metrics


def _resident_bytes(pid: int) -> tuple[int, int]:
    """Resident and shared memory of a process."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:  # the process has ended
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return int(fields[1]) * page, int(fields[2]) * page


def _descendants(pid: int) -> list[int]:
    """Ids of all child processes and their children."""
    pids = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            pids += [child, *_descendants(child)]
    return pids


def _available_bytes() -> int | None:
    """Memory of the machine that processes can still allocate."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
