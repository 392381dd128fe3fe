"""Benchmark of a short training run: wall time of each part of the loop.

The run is the same as with `reverie train`, but in a temporary folder and without
printed metrics, and ends after a number of updates. It has three phases: startup, until
kernels are compiled and CUDA graphs captured; training; and the end, with the last
checkpoint and report. In each phase, the parts add up to the wall time. With a GPU,
they are times of the host, and waiting for the GPU is a separate part. The fraction of
time in which the GPU computes is measured as well (`gpu_time.py`).
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from reverie.api import Metrics, UserError
from reverie.bench.gpu_time import GPU_WAIT, GpuTime
from reverie.bench.table import format_end_to_end
from reverie.bench.update import (
    BenchConfig,
    device_name,
    machine_lock,
    process_age,
    write_results,
)
from reverie.log.timer import OTHER
from reverie.run import device as devices
from reverie.run.config import Config
from reverie.run.factory import MakeEnv
from reverie.run.folder import resolve_logdir, system_info
from reverie.run.offline.datasets import trains_on_sequences
from reverie.run.online_run import OnlineRun
from reverie.run.signals import Interrupted
from reverie.run.train import train_online

WARMUP_UPDATES = 5
"""Updates of the first phase, in which kernels are built and graphs captured."""

PARTS = {
    "train": "update",
    "policy": "acting",
    "env": "environment",
    "replay_add": "replay",
    "sample": "replay",
    "write_back": "replay",
    "start": "building and starting",
    GPU_WAIT: "waiting for the GPU",
}
"""Part of the wall time for each section of the timer; others keep their name."""
ALL_PARTS = (
    *("building and starting", "update", "acting", "environment", "replay", "log"),
    *("report", "save", "waiting for the GPU", OTHER),
)
"""Parts that are always printed, in this order."""


class Snapshot(NamedTuple):
    """Counters of a run at the end of a phase."""

    seconds: float
    """Since the start of the process, without the wait for the lock."""
    parts: dict[str, float]
    """Seconds by part; their sum is `seconds`."""
    steps: int
    updates: int


class MeasuredRun(OnlineRun):
    """A run that ends after `updates` updates and records the times of its phases.

    `waited`, the seconds spent waiting for other benchmarks on this machine
    (`machine_lock`), is subtracted from all times.
    """

    def __init__(
        self,
        config: Config,
        updates: int,
        make_env: MakeEnv | None = None,
        waited: float = 0.0,
    ):
        super().__init__(config, make_env)
        self.last_update = WARMUP_UPDATES + updates
        self.waited = waited
        self.first_update_s = 0.0
        self.phases: dict[str, Snapshot] = {}
        """Snapshots at the end of each phase."""
        self.gpu_busy_s: float | None = None

    def _open(self) -> None:
        super()._open()
        # seconds before the timer was created; its sections and `other` add up to the
        # time since then
        self._built_s = self._elapsed() - sum(self.timer.breakdown().values())
        self.gpu_time = self._cleanup.enter_context(GpuTime(self.device, self.timer))

    def update(self) -> Metrics | None:
        with self.gpu_time.measure():
            metrics = super().update()
        updates = self.clock.updates
        if updates == 1:
            self.gpu_time.synchronize()
            self.first_update_s = self._elapsed()
        if updates == WARMUP_UPDATES:
            self.gpu_time.restart()
            self._end_phase("start")
        if updates >= self.last_update:
            self.clock.max_steps = self.clock.step  # ends the training loop
        return metrics

    def finish(self) -> None:
        if self.clock.updates > WARMUP_UPDATES:
            self.gpu_busy_s = self.gpu_time.busy_seconds()
            self._end_phase("training")
        super().finish()
        self._end_phase("end")

    def _end_phase(self, name: str) -> None:
        """Record the times since the start of the process."""
        parts = dict.fromkeys(ALL_PARTS, 0.0)
        for section, seconds in self.timer.breakdown().items():
            part = PARTS.get(section, section)
            parts[part] = parts.get(part, 0.0) + seconds
        parts["building and starting"] += self._built_s
        total = sum(parts.values())
        self.phases[name] = Snapshot(total, parts, self.clock.step, self.clock.updates)

    def _elapsed(self) -> float:
        """Seconds since the start of the process, without the wait for the lock."""
        return process_age() - self.waited


def bench_end_to_end(
    config: Config, options: BenchConfig, make_env: MakeEnv | None = None
) -> dict[str, Any]:
    """Measure a whole run, print a table, and write the results as JSON."""
    if options.vary or options.compare:
        raise UserError(
            "--end-to-end cannot be combined with --compare or --bench.vary.\n"
            "  Fix: remove --end-to-end, or the other options."
        )
    if trains_on_sequences(config) or config.agent_config.needs_recordings:
        raise UserError(
            f"The agent {config.agent!r} trains on recorded data, but --end-to-end "
            "measures runs in an environment.\n"
            "  Fix: remove --end-to-end."
        )
    logdir = resolve_logdir(config.logdir)
    logdir.mkdir(parents=True, exist_ok=True)
    with (
        machine_lock(exclusive=True) as waited,
        tempfile.TemporaryDirectory(prefix="end_to_end-", dir=logdir) as folder,
    ):
        outputs = tuple(x for x in config.logger.outputs if x != "terminal")
        logger = replace(config.logger, timer=True, outputs=outputs)
        measured = replace(config, logdir=str(Path(folder) / "run"), logger=logger)
        run = MeasuredRun(measured, options.updates, make_env, waited)
        try:
            train_online(run)
        except Interrupted:
            # `Interrupted` means that the run was saved, but this folder is deleted
            raise KeyboardInterrupt from None
        results = summarize(run)
    print(format_end_to_end(results))
    return write_results(config, options, {"about": system_info(), "results": results})


def summarize(run: MeasuredRun) -> dict[str, Any]:
    """Return the seconds of each phase and part, and rates during training."""
    if "training" not in run.phases:
        raise UserError(
            f"The run ended after {run.clock.updates} updates; at least "
            f"{WARMUP_UPDATES + 1} are needed.\n  Fix: give more --run.steps."
        )
    results: dict[str, Any] = {
        "task": run.config.task,
        "agent": run.config.agent,
        "device": device_name(run.device),
        "precision": run.precision,
        "compile": devices.pick_compile(run.config.compile, run.device),
        "overlap": run.overlap,
        "first_update_s": run.first_update_s,
        "phases": {},
    }
    previous: dict[str, float] = {}
    for name, snapshot in run.phases.items():
        parts = {k: v - previous.get(k, 0.0) for k, v in snapshot.parts.items()}
        results["phases"][name] = {"seconds": sum(parts.values()), "parts_s": parts}
        previous = snapshot.parts
    start, end = run.phases["start"], run.phases["training"]
    seconds, updates = end.seconds - start.seconds, end.updates - start.updates
    results["updates"] = updates
    results["updates_per_s"] = updates / seconds
    results["agent_steps_per_s"] = (end.steps - start.steps) / seconds
    if run.gpu_busy_s is not None:
        results["gpu_busy"] = run.gpu_busy_s / seconds
        results["gpu_ms_per_update"] = 1000 * run.gpu_busy_s / updates
    results["seconds"] = run.phases["end"].seconds
    return results
