"""Traces of some updates and of the loop around them, with `torch.profiler`.

The trace can be opened with Perfetto (https://ui.perfetto.dev) and with the profiler
plug-in of TensorBoard. The sections of the run's timer are regions of the trace.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from reverie.log.timer import Timer

FOLDER = "profile"
"""Folder of the traces in the run folder."""
WARMUP_UPDATES = 5
"""Updates before the trace, in which kernels are compiled and CUDA graphs captured."""
REGIONS = {"train": "update"}
"""Timer sections that have another name in the trace."""


class Profiler:
    """Writes a trace of `updates` updates, after `WARMUP_UPDATES` of this process."""

    def __init__(
        self,
        updates: int,
        run_folder: Path,
        device: torch.device,
        timer: Timer,
        print_message: Callable[[str], None],
    ):
        self.updates, self.device, self.timer = updates, device, timer
        self.folder, self.print_message = run_folder / FOLDER, print_message
        self._count = 0  # updates of this process
        self._last = 0  # number of the last update in the run
        self._profile: Any = None
        self._is_done = False

    def count_update(self, update: int) -> None:
        """Start or stop recording after an update, given its number in the run."""
        self._count, self._last = self._count + 1, update
        if self._count == WARMUP_UPDATES:
            self._start()
        elif self._count == WARMUP_UPDATES + self.updates:
            self._write(self.updates)

    def close(self) -> None:
        """Write the trace of a run that stopped early, or print that there is none."""
        if self._is_done:
            return
        recorded = self._count - WARMUP_UPDATES
        if self._profile is not None and recorded > 0:
            self._write(recorded)
            return
        if self._profile is not None:
            self._profile.stop()
        self.print_message(
            f"No trace was written: it starts after {WARMUP_UPDATES} updates, and the "
            f"run ended after {self._count}.\n  Fix: give more --run.steps."
        )

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self.device)
        self._profile = profile(activities=activities)
        self._profile.start()
        self.timer.region = region

    def _write(self, updates: int) -> None:
        """Stop recording and write the trace; the run continues if this fails."""
        self._is_done = True
        self.timer.region = nullcontext
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._profile.stop()
        first = self._last - updates + 1
        path = self.folder / f"updates-{first}-{self._last}.pt.trace.json"
        try:
            self.folder.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            self.print_message(f"warning: The trace could not be written: {error}")
        else:
            self.print_message(f"Trace of {updates} updates: {path}")
        self._profile = None


def region(name: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows a section of the timer in the trace."""
    return record_function(REGIONS.get(name, name))
