"""What a replay will cost in memory and disk, said before the start."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from reverie.api import UserError
from reverie.replay.columns import RESIDENT, WIDE
from reverie.spaces import Spaces

SHARE = 0.6
"""Part of the available memory a replay may take."""

INDEX = 4 + 8 + 4 + 4
"""Bytes per step of the timeline."""

Storage = Literal["ram", "disk"]


@dataclass(frozen=True)
class Plan:
    """Where a replay will live and what it takes."""

    storage: Storage
    capacity: int
    step_bytes: int
    ram_bytes: int
    disk_bytes: int

    @property
    def sentence(self) -> str:
        where = "in memory" if self.storage == "ram" else "on disk"
        disk = f", {size(self.disk_bytes)} of disk" if self.disk_bytes else ""
        return (
            f"Replay of {self.capacity:,} steps {where}: "
            f"{size(self.step_bytes)} per step, {size(self.ram_bytes)} of memory{disk}"
        )


def make_plan(
    spaces: Spaces,
    extras: Spaces,
    *,
    capacity: int,
    storage: Literal["auto", "ram", "disk"],
    tail: int,
    saves: bool,
    directory: Path | None,
    extra: int = 0,
    least: int = 1,
) -> Plan:
    """Choose the storage and check that it fits; refuse with advice if it does not.

    `extra` counts bytes per step of selectors that remember something; with fewer than
    `least` steps there would be nothing to learn from.
    """
    both = {**spaces, **extras}
    step = sum(space.nbytes for space in both.values())
    wide = sum(space.nbytes for space in both.values() if space.nbytes >= WIDE)
    fresh = sum(space.nbytes for space in extras.values() if space.nbytes >= WIDE)
    index = INDEX + extra
    on_disk = capacity * (step + 8 + 8 + 4)
    ram = Plan(
        "ram",
        capacity,
        step,
        capacity * (step + index),
        on_disk if saves and directory else 0,
    )
    disk = Plan(
        "disk",
        capacity,
        step,
        capacity * (step - wide + index + 4) + tail * wide + RESIDENT,
        on_disk + capacity * fresh,
    )
    memory = available_memory()
    space = free_space(directory) if directory else 0
    if storage == "disk" and directory is None:
        raise UserError(
            "A replay on disk needs a folder.\n  Fix: give --logdir, or "
            "--replay.storage ram"
        )
    problems = {
        "ram": _problem(ram, memory, space),
        "disk": _problem(disk, memory, space) if directory else "it has no folder",
    }
    choices = {"auto": (ram, disk), "ram": (ram,), "disk": (disk,)}[storage]
    for plan in choices:
        if problems[plan.storage] is None:
            return plan
    reasons = "; ".join(f"{p.storage}: {problems[p.storage]}" for p in choices)
    fits = max(_largest(plan, memory, space) for plan in choices)
    fewer = f"--replay.capacity {fits}, " if fits >= least else ""
    other = "" if storage in ("auto", "disk") else ", --replay.storage disk"
    raise UserError(
        f"A replay of {capacity:,} steps ({size(step)} each) does not fit: {reasons}.\n"
        f"  Fix: {fewer}smaller images or latents{other}, or a --logdir on a larger "
        "disk."
    )


def _problem(plan: Plan, memory: int, space: int) -> str | None:
    if plan.ram_bytes > memory * SHARE:
        return (
            f"needs {size(plan.ram_bytes)} of memory, "
            f"{size(memory)} are available and {SHARE:.0%} of them may be used"
        )
    if plan.disk_bytes > space:
        return f"needs {size(plan.disk_bytes)} of disk, {size(space)} are free"
    return None


def _largest(plan: Plan, memory: int, space: int) -> int:
    """About how many steps would fit, rounded down to two digits."""
    share = min(
        memory * SHARE / plan.ram_bytes,
        space / plan.disk_bytes if plan.disk_bytes else 1.0,
    )
    steps = int(plan.capacity * share * 0.95)
    digits = max(0, len(str(steps)) - 2)
    return steps // 10**digits * 10**digits


def available_memory() -> int:
    """Bytes this process may still take, by the machine and by its control group."""
    limits = []
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    limits.append(int(line.split()[1]) * 1024)
    except OSError:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        limits.append(pages // 2)
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            top = Path("/sys/fs/cgroup", limit).read_text().strip()
            now = Path("/sys/fs/cgroup", used).read_text().strip()
            if top.isdigit() and now.isdigit():
                limits.append(max(0, int(top) - int(now)))
        except OSError:
            continue
    return min(limits)


def free_space(directory: Path) -> int:
    """Bytes free where this folder is or will be."""
    at = directory.absolute()
    while not at.exists():
        at = at.parent
    free = shutil.disk_usage(at).free
    held = sum(p.stat().st_size for p in directory.glob("*") if p.is_file())
    return free + held  # what a replay to be resumed takes already


def size(count: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            digits = 0 if count >= 100 or unit == "bytes" else 1
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
