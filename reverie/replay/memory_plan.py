"""Memory and disk space that a replay needs, checked before the run starts."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from reverie.api import UserError
from reverie.replay.column_store import MAX_RESIDENT_BYTES, WIDE_BYTES
from reverie.replay.config import Storage
from reverie.rows import Window
from reverie.spaces import Spaces
from reverie.storage.system import physical_memory

MEMORY_FRACTION = 0.6
"""Fraction of the available memory that a replay may take."""

INDEX_BYTES = 4 + 8 + 4 + 4
"""Bytes per step of `StepIndex`: stream, position, and offsets to both neighbors."""

FITTED_DISK_FRACTION = 0.8
"""Fraction of the free disk space that a replay with reduced capacity may take."""

FILE_INDEX_BYTES = 8 + 8 + 4
"""Bytes per step of stream, position and order in a segment file."""


@dataclass(frozen=True)
class MemoryPlan:
    """Where a replay is stored and how much space it needs."""

    storage: Literal["ram", "disk"]
    capacity: int
    step_bytes: int  # bytes of all keys of one step
    ram_bytes: int
    disk_bytes: int
    requested_capacity: int = 0
    """The configured capacity, if it does not fit and was reduced; otherwise 0."""

    @property
    def was_reduced(self) -> bool:
        """True if the capacity is lower than the configured one."""
        return self.requested_capacity > 0

    def describe(self) -> str:
        where = "in memory" if self.storage == "ram" else "on disk"
        disk = f", {format_bytes(self.disk_bytes)} of disk" if self.disk_bytes else ""
        return (
            f"Replay of {self.capacity:,} steps {where}: "
            f"{format_bytes(self.step_bytes)} per step, "
            f"{format_bytes(self.ram_bytes)} of memory{disk}"
        )

    def describe_reduction(self) -> str:
        """Return a sentence about a reduced capacity; empty if it was not reduced."""
        if not self.was_reduced:
            return ""
        return (
            f"A replay of {self.requested_capacity:,} steps does not fit into memory "
            f"or on disk, so its capacity is {self.capacity:,} steps. To set it: "
            "--replay.capacity"
        )


def required_capacity(capacity: int, num_envs: int, windows: dict[str, Window]) -> int:
    """Return the lowest capacity with which a sequence is always stored.

    Raises a `UserError` if `capacity` is lower.
    """
    longest = max((window.span for window in windows.values()), default=1)
    needed = max((longest - 1) * num_envs + 1, num_envs)
    if capacity < needed:
        raise UserError(
            f"A replay of {capacity} steps from {num_envs} environments cannot "
            f"hold a sequence of {longest} steps.\n"
            f"  Fix: --replay.capacity {needed} or more."
        )
    return needed


def make_memory_plan(
    spaces: Spaces,
    extras: Spaces,
    *,
    capacity: int,
    storage: Storage,
    tail: int,
    save: bool,
    directory: Path | None,
    selector_bytes: int = 0,
    min_capacity: int = 1,
    fit: bool = False,
    smaller_extras: str = "",
    memory_fraction: float = 1.0,
) -> MemoryPlan:
    """Choose the storage; raise a UserError with a fix if the replay does not fit.

    `tail` is the number of steps a disk store keeps in memory, `selector_bytes` the
    memory per step of the selectors. With `fit`, a capacity that does not fit is
    reduced, but not below `min_capacity`. `smaller_extras` names a setting that makes
    extras smaller, for the error message. `memory_fraction` is the fraction of the free
    memory and disk space that may be used; other processes of the run use the rest.
    """
    sizes = {key: space.nbytes for key, space in {**spaces, **extras}.items()}
    # bytes per step
    step_bytes = sum(sizes.values())
    extras_bytes = sum(sizes[key] for key in extras)
    wide_bytes = sum(size for size in sizes.values() if size >= WIDE_BYTES)
    wide_extras_bytes = sum(sizes[key] for key in extras if sizes[key] >= WIDE_BYTES)
    index_bytes = INDEX_BYTES + selector_bytes
    file_row_bytes = 4  # of `DiskStore.file_row`

    def plans(capacity: int) -> tuple[MemoryPlan, ...]:
        """Return the plans that `storage` allows, the preferred one first."""
        file_bytes = capacity * (step_bytes + FILE_INDEX_BYTES)
        narrow_bytes = step_bytes - wide_bytes
        ram = MemoryPlan(
            "ram",
            capacity,
            step_bytes,
            capacity * (step_bytes + index_bytes),
            file_bytes if save and directory else 0,
        )
        disk = MemoryPlan(
            "disk",
            capacity,
            step_bytes,
            capacity * (narrow_bytes + index_bytes + file_row_bytes)
            + tail * wide_bytes
            + MAX_RESIDENT_BYTES,
            file_bytes + capacity * wide_extras_bytes,
        )
        return {"auto": (ram, disk), "ram": (ram,), "disk": (disk,)}[storage]

    memory = int(available_memory() * memory_fraction)
    space = int(free_space(directory) * memory_fraction) if directory else 0
    if storage == "disk" and directory is None:
        raise UserError(
            "A replay on disk needs a folder.\n  Fix: give --logdir, or "
            "--replay.storage ram"
        )

    def find_problem(plan: MemoryPlan) -> str | None:
        """Return why a plan cannot be used; None if it can."""
        if plan.storage == "disk" and directory is None:
            return "needs --logdir"
        return _find_problem(plan, memory, space)

    choices = plans(capacity)
    for plan in choices:
        if find_problem(plan) is None:
            return plan
    usable = [p for p in choices if p.storage == "ram" or directory is not None]
    fraction = FITTED_DISK_FRACTION if fit else 1.0
    largest = max(_largest_capacity(p, memory, space * fraction) for p in usable)
    if fit and largest >= min_capacity:
        fitting = [p for p in plans(largest) if find_problem(p) is None]
        if fitting:
            return replace(fitting[0], requested_capacity=capacity)
    reasons = "; ".join(f"{p.storage}: {find_problem(p)}" for p in choices)
    size = format_bytes(step_bytes)
    advice = [f"--replay.capacity {largest}"] if largest >= min_capacity else []
    if extras_bytes:
        size += f", of which {format_bytes(extras_bytes)} are latents of the agent"
    if extras_bytes and smaller_extras:
        advice.append(f"smaller latents ({smaller_extras})")
    if wide_bytes > wide_extras_bytes:
        advice.append("smaller images")
    if storage == "ram":
        advice.append("--replay.storage disk")
    advice.append("a --logdir on a larger disk")
    raise UserError(
        f"A replay of {capacity:,} steps ({size} per step) does not fit: {reasons}.\n"
        f"  Fix: {', or '.join(advice)}."
    )


def _find_problem(plan: MemoryPlan, memory: int, space: int) -> str | None:
    """Return why a plan does not fit into memory or on disk; None if it does."""
    if plan.ram_bytes > memory * MEMORY_FRACTION:
        return (
            f"needs {format_bytes(plan.ram_bytes)} of memory, but "
            f"{format_bytes(memory)} are available, of which {MEMORY_FRACTION:.0%} may "
            "be used"
        )
    if plan.disk_bytes > space:
        needed, free = format_bytes(plan.disk_bytes), format_bytes(space)
        return f"needs {needed} of disk, but {free} are free"
    return None


def _largest_capacity(plan: MemoryPlan, memory: int, space: float) -> int:
    """Return about how many steps would fit, rounded down to two digits.

    The factor 0.95 leaves room for memory that does not depend on the capacity.
    """
    fraction = min(
        memory * MEMORY_FRACTION / plan.ram_bytes,
        space / plan.disk_bytes if plan.disk_bytes else 1.0,
    )
    steps = int(plan.capacity * fraction * 0.95)
    digits = max(0, len(str(steps)) - 2)
    return steps // 10**digits * 10**digits


def available_memory() -> int:
    """Return the bytes that this process can still allocate within cgroup limits."""
    limits = []
    try:
        with open("/proc/meminfo") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    limits.append(int(line.split()[1]) * 1024)
    except OSError:
        limits.append((physical_memory() or sys.maxsize) // 2)
    for limit_file, usage_file in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit = Path("/sys/fs/cgroup", limit_file).read_text().strip()
            usage = Path("/sys/fs/cgroup", usage_file).read_text().strip()
            if limit.isdigit() and usage.isdigit():
                limits.append(max(0, int(limit) - int(usage)))
        except OSError:
            continue
    return min(limits)


def free_space(directory: Path) -> int:
    """Return the free bytes on the disk of this folder, plus the size of its files.

    A resumed run replaces these files.
    """
    parent = directory.absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    return free + sum(p.stat().st_size for p in directory.glob("*") if p.is_file())


def format_bytes(count: float) -> str:
    """Format a number of bytes: 1500 -> 1.5 KB."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1000:
            digits = 0 if count >= 100 or unit == "bytes" else 1
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
