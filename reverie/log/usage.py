"""How much of the machine the run takes: memory, processor, accelerator."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path

import torch

from reverie.api import Metrics

GIB = 2**30


class Usage:
    """`usage/*`: what this process and its workers use, since last asked.

    `usage/cpu` counts cores: 1.5 means one and a half were busy. Where there is no
    `/proc` only what the standard library knows is reported.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter(), sum(os.times()[:2])
        self._knows_gpu = True

    def metrics(self) -> Metrics:
        now, busy = time.perf_counter(), sum(os.times()[:2])
        then, before = self._last
        self._last = now, busy
        result: Metrics = {"usage/cpu": (busy - before) / max(now - then, 1e-9)}
        result |= self._memory()
        if torch.cuda.is_available():
            result |= self._cuda()
        return result

    def _memory(self) -> Metrics:
        proc = Path("/proc")
        if not (proc / "self/statm").exists():
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            unit = 1 if sys.platform == "darwin" else 1024
            return {"usage/ram_peak_gb": peak * unit / GIB}
        result = {"usage/ram_gb": _resident(os.getpid())[0] / GIB}
        workers = _descendants(os.getpid())
        if workers:
            own = sum(resident - shared for resident, shared in map(_resident, workers))
            result["usage/workers_ram_gb"] = own / GIB
            result["usage/workers"] = len(workers)
        free = _available()
        if free is not None:
            result["usage/ram_free_gb"] = free / GIB
        return result

    def _cuda(self) -> Metrics:
        result: Metrics = {
            "usage/gpu_gb": torch.cuda.memory_allocated() / GIB,
            "usage/gpu_peak_gb": torch.cuda.max_memory_allocated() / GIB,
            "usage/gpu_reserved_gb": torch.cuda.memory_reserved() / GIB,
        }
        torch.cuda.reset_peak_memory_stats()
        if self._knows_gpu:
            try:
                result["usage/gpu"] = torch.cuda.utilization() / 100
            except Exception:
                # the package that knows is not installed, or the driver will not tell
                self._knows_gpu = False
        return result


def _resident(pid: int) -> tuple[int, int]:
    """Resident bytes of a process, and how many of them it shares."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:  # it has just ended
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return int(fields[1]) * page, int(fields[2]) * page


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = [int(child) for child in path.read_text().split()]
        except OSError:
            continue
        for child in children:
            found += [child, *_descendants(child)]
    return found


def _available() -> int | None:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
