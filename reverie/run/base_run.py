"""`BaseRun`: base class of online and offline training runs.

It opens the run folder, device, checkpoints and logger, and runs updates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reverie.api import Agent, Batch, Extras, Metrics, StateDict, UserError
from reverie.distributed.launch import find_launch
from reverie.log.logger import Logger, make_logger
from reverie.log.messages import print_message
from reverie.log.status import StatusLine
from reverie.log.terminal import Epochs
from reverie.log.timer import Rates, Timer, timed
from reverie.log.usage import Usage
from reverie.replay.buffer import Replay
from reverie.run import checkpoint, device
from reverie.run.checkpoint import Checkpoints
from reverie.run.clock import Clock
from reverie.run.config import Config
from reverie.run.folder import (
    NewFiles,
    check_lock,
    open_run_folder,
    record_end,
    resolve_logdir,
)
from reverie.run.memory import check_memory
from reverie.run.nonfinite import NonfiniteCheck, restart_advice
from reverie.run.policy_copy import PolicyCopy
from reverie.run.precompile import KernelCompiler, start_compiling, stop_early_compiler
from reverie.run.profile import Profiler
from reverie.run.ranks import Leader, make_leader
from reverie.run.repeatable import train_or_abort
from reverie.run.resources import Resources
from reverie.run.signals import Interrupted, Stopper
from reverie.run.warm_up import WarmUp, start_warm_up

SAVING = "saving a checkpoint"
"""Activity that the status line shows while a checkpoint is written."""
NOTICE_SECONDS = 10.0
"""A run that has not stopped this long after a signal prints its activity."""


class BaseRun(Resources):
    """Base class of training runs; subclasses create `agent`, `feed` and `clock`."""

    device: torch.device
    precision: str
    agent: Agent
    feed: Any
    clock: Clock
    logger: Logger
    leader: Leader | None = None
    """Sends commands to the other ranks; None if this process trains alone."""

    def __init__(self, config: Config, profile: int = 0):
        super().__init__()
        self.config = self.saved_config = config
        """`saved_config` is written to the run folder. It differs from `config` only in
        offline runs, where `config` has epochs converted to updates."""
        self.path = resolve_logdir(config.logdir)
        self.stopper = Stopper()
        self.checkpoints = Checkpoints(
            self.path / "ckpt",
            config.run.keep_last,
            config.run.keep_every,
            config.run.keep_epochs,
        )
        self.nonfinite_check = NonfiniteCheck(
            config.run.max_nonfinite, self.checkpoints
        )
        self.logger = Logger([])
        self.profile = profile
        """Number of updates to trace with the profiler; 0 for no trace."""
        self.profiler: Profiler | None = None
        self.compiler: KernelCompiler | None = None
        """Compiles kernels in other processes, until the first update."""
        self.warm_up: WarmUp | None = None
        """Thread that loads kernels, until the first update."""
        self.policy_copy: PolicyCopy | None = None
        """Acts on another device, if `run.policy_devices` is set."""
        self.status = StatusLine("starting", self.print_message)
        self.has_started = False  # True after the first environment step or update
        self._notice_was_shown = False  # the notice of `_stop_notice`
        self.should_save = False
        """True if the run has changed since the last save and its parts are consistent.
        """
        self.was_finished = False
        """True if the restored checkpoint and log are those of a finished run."""
        self._final_metrics: Metrics = {}  # of the last step, written by `finish`

    def print_message(self, text: str) -> None:
        """Print to standard error, after erasing the progress line."""
        self.logger.clear_line()
        print_message(text)

    # Building the parts.

    def _open(self) -> None:
        """Lock the run folder and choose the device."""
        config = self.config
        check_memory(config)
        files = NewFiles(self.path)
        lock = open_run_folder(self.path, self.saved_config)
        self._lock = self._cleanup.enter_context(lock)
        self._cleanup.callback(self._record_end)
        self._cleanup.callback(self._delete_if_not_started, files)
        # While a new run is built, there is nothing to save, so a signal ends it
        # immediately (`can_save` is False). A data-parallel run is not ended this way,
        # because the other ranks may be waiting for this one in a collective.
        is_alone = max(config.processes, find_launch().world_size) == 1
        self.stopper.can_save = bool(self.checkpoints.paths()) or not is_alone
        self._cleanup.enter_context(self.stopper)
        self.status.notice = self._stop_notice
        self._cleanup.enter_context(self.status)
        device.seed_everything(config.seed)
        self.device = device.pick_device(config.device, config.run.train_devices)
        if config.deterministic:
            device.make_deterministic()
        else:
            device.enable_autotuning(self.device)
        device.keep_freed_memory(self.device)
        self.precision = device.pick_precision(config.precision, self.device)

    def _open_log(self, frames: int, render_fps: float = 0) -> None:
        """Create the logger of a run of this many frames, and the timers.

        `render_fps` is the speed of videos, if the environment declares one.
        """
        self.timer, self.rates = Timer(self.config.logger.timer), Rates()
        self.usage = Usage()
        settings = dataclasses.asdict(self.config)
        self.logger = make_logger(
            self.config.logger,
            self.path,
            frames,
            settings,
            render_fps,
            epochs=self._epoch_progress if self.clock.epoch_schedule else None,
        )
        self.logger.timer = self.timer
        if self.profile:
            if not self.agent.windows.keys() - {"report"}:
                raise UserError(
                    "--profile has no effect: this agent does not train.\n"
                    "  Fix: remove --profile, or choose another --agent."
                )
            self.profiler = Profiler(
                self.profile, self.path, self.device, self.timer, self.print_message
            )
            self._cleanup.callback(self.profiler.close)
        self._cleanup.callback(self.logger.close)
        self.status.details = self._details

    def _connect_ranks(self, spaces: Any, folder: Path | None = None) -> None:
        """Build the agent on the other ranks, if this run has several processes.

        `spaces` has `obs_space` and `act_space`. With a run `folder`, the other ranks
        also build environments and replay buffers, if the replay is sharded.
        """
        self.leader = make_leader(
            self.config, self.agent, spaces, self.device, self.precision, folder
        )
        if self.leader:
            self._cleanup.callback(self.leader.close)

    def _start_compiling(self, spaces: Any, num_envs: int) -> None:
        """Start to compile the kernels of the agent, if they are not in the caches."""
        if max(self.config.processes, find_launch().world_size) > 1:
            # Data-parallel runs do not compile in advance, so end the process that the
            # command line may have started for this (`start_compiler_early`).
            stop_early_compiler()
            return
        compile = device.pick_compile(self.config.compile, self.device)
        options = (num_envs, self.device, self.precision, compile)
        self.compiler = start_compiling(self.config, spaces, *options)
        if self.compiler:
            self._cleanup.callback(self.compiler.close)

    def _start_warm_up(self, replay: Replay) -> None:
        """Load the kernels of the first update in a thread, if they are compiled.

        Call it after the weights were loaded. With several ranks, all of them run the
        first update together instead.
        """
        if self.leader is None and self.compiler is None:
            args = self.agent, replay, self.device, self.config.deterministic
            self.warm_up = start_warm_up(*args)
            self._cleanup.callback(self._end_warm_up)

    def _end_warm_up(self) -> None:
        """Wait for the thread that loads kernels, if there is one."""
        warm_up, self.warm_up = self.warm_up, None
        if warm_up:
            warm_up.wait()
            torch.cuda.empty_cache()

    def _prepare_first_update(self) -> None:
        """Wait until kernels are compiled or loaded, and print what was not compiled.

        Does nothing after the first update of this process.
        """
        if self.warm_up:
            self.status.begin("loading kernels")
            self.warm_up.wait(self.stopper.is_set)
            if self.stopper.is_set():
                return  # the thread is ended when the run is closed
            self._end_warm_up()
        if self.compiler is None:
            return
        self.status.begin("compiling kernels")
        compiler, self.compiler = self.compiler, None
        if reason := compiler.wait(self.stopper.is_set):
            self.print_message(
                f"The kernels were not all compiled in advance ({reason}). The others "
                "are compiled when they are first used, which takes longer."
            )

    # Used by the training loops.

    def update(self) -> Metrics | None:
        """Run and time one update of the agent.

        Return None if the run was asked to stop. An update that is running then is
        aborted, if possible, and repeated when the run is resumed.
        """
        if self.compiler or self.warm_up:
            with self.timer("start"):
                self._prepare_first_update()
        if self.stopper.is_set():
            return None
        self.status.begin("update of the agent")
        served = self.feed.served  # rows (time steps) in all batches so far
        if self.policy_copy:
            self.policy_copy.before_update()
        with self.modifying():
            with self.timer("train"):
                metrics = (
                    self.leader.train(self._timed_feed)
                    if self.leader
                    else train_or_abort(self.agent, self._timed_feed, self.device)
                )
            if metrics is None:
                return None
            self.has_started = True
            replayed = self.feed.served - served
            if self.leader and self.leader.other_shards:
                # every rank has sampled as many rows from its own replay buffer
                replayed *= self.leader.group.launch.world_size
            self.rates.add("train", replayed)
            self.clock.add_update()
            if self.profiler:
                self.profiler.count_update(self.clock.updates)
            self.nonfinite_check.check(self.agent, metrics)
        return metrics

    @functools.cached_property
    def _timed_feed(self) -> _TimedFeed:
        # cached: an agent reuses the memory of earlier batches of the same feed object
        return _TimedFeed(self.feed, self.timer)

    @contextlib.contextmanager
    def modifying(self) -> Iterator[None]:
        """Context in which parts of the run change; sets `should_save` at its end.

        After an error inside, the parts may be inconsistent, so the run is not saved.
        """
        self.should_save = False
        yield
        self.should_save = True

    @property
    def is_complete(self) -> bool:
        """True if the run has reached its end."""
        raise NotImplementedError

    @timed("log")
    def write_log(self) -> None:
        """Write the metrics since the last call.

        At the last step, `finish` writes them instead, together with the last report.
        """
        if self.is_complete:
            self._final_metrics = self._run_metrics()
        else:
            self.logger.add(self._run_metrics())
            self.logger.write(self.clock.frames)

    def _write_final_log(self) -> None:
        """Write the metrics of the last step, also if a signal stopped the run."""
        if self.is_complete or self.logger.step != self.clock.frames:
            self.logger.add(self._final_metrics or self._run_metrics())
            self.logger.write(self.clock.frames)

    def _run_metrics(self) -> Metrics:
        """Return rates, timings and usage since the last call."""
        metrics: Metrics = {"train/opt/updates": self.clock.updates}
        if self.clock.epoch_schedule:
            metrics["train/epoch"] = self.clock.epoch_schedule.last_epoch
        for source in (self.rates, self.timer, self.usage):
            metrics |= source.metrics()
        return metrics

    def _details(self) -> str:
        """Return the progress of the run, for the status line."""
        steps = f"step {self.clock.step:,}, {self.clock.updates:,} updates"
        return self._with_epochs(steps)

    def _with_epochs(self, steps: str) -> str:
        """Return `steps`, a text; put the epochs before it if the run counts epochs."""
        if self.clock.epoch_schedule is None:
            return steps
        return f"{self._epoch_progress().describe()}, {steps}"

    def _epoch_progress(self) -> Epochs:
        """Return the progress of a run that counts epochs."""
        schedule = self.clock.epoch_schedule
        assert schedule
        total = (
            self.config.agent_config.epochs if self.clock.ends_after_epochs else None
        )
        return Epochs(schedule.last_epoch, schedule.completed_epochs, total)

    def _stop_notice(self, activity: str) -> str:
        """Return a message if the run has not stopped `NOTICE_SECONDS` after a signal.

        Otherwise, and after the message was shown once, return an empty string.
        """
        if not self.stopper.is_set() or activity == SAVING or self._notice_was_shown:
            return ""
        if time.monotonic() - self.stopper.time < NOTICE_SECONDS:
            return ""
        self._notice_was_shown = True
        return f"The run is saved after the current activity: {self.status.line()}."

    def _record_end(self) -> None:
        """Write to the folder that the run has finished, or the error that ended it."""
        error = self._error
        if error is None and self.is_complete:
            record_end(self.path, None)
        elif isinstance(error, Exception) and not isinstance(error, Interrupted):
            record_end(self.path, error)

    def _check_stopped_early(self) -> None:
        """Raise `Interrupted` if a new run is stopped before its first step."""
        if not self.has_started and not self.checkpoints.paths():
            self.stopper.raise_if_stopped(is_saved=False)

    @property
    def _should_save_at_end(self) -> bool:
        """True if `finish` has to save the run.

        After a signal, it saves only if the run has changed since the last save: saving
        takes minutes for large agents on slow disks.
        """
        return self.should_save or self.is_complete or not self.stopper.is_set()

    def _delete_if_not_started(self, files: NewFiles) -> None:
        """Delete the files of a new run that failed before its first step."""
        if not self.has_started and not self.checkpoints.paths():
            files.delete()

    # Checkpoints.

    def _loop_state(self) -> StateDict:
        """State of the training loop: clock and logger.

        A complete run is saved before `finish` writes its last metrics. `final_log`
        describes this last write: `step` is its step. `due` is True if `write_log` was
        called at this step, so that a longer run would also have written metrics here.
        """
        final = {"step": self.clock.frames, "due": bool(self._final_metrics)}
        return {
            "clock": self.clock.state_dict(),
            "logger": self.logger.state_dict(),
            "final_log": final if self.is_complete else None,
        }

    def _restore_loop(self, state: StateDict) -> None:
        """Restore clock and logger; set `was_finished`."""
        self.clock.load_state_dict(state["clock"])
        final = state["final_log"]
        self.logger.load_state_dict(state["logger"], final)
        has_final_write = self.logger.has_final_write
        self.was_finished = self.is_complete and has_final_write
        if final and final["due"] and not has_final_write and not self.is_complete:
            # The run had reached its end and is now continued, for example with more
            # `run.steps`. The write that was due at its earlier end is not in the
            # files, because the run was killed or the disk was full: write it now.
            self.logger.add(self._run_metrics())
            self.logger.write(final["step"])
        if self.was_finished:
            self.print_message("This run has already finished.")

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint to resume from; None for a new run."""
        newest = self.checkpoints.newest()
        if newest is None and self.checkpoints.quarantine.is_dir():
            raise UserError(
                f"Every checkpoint of {self.path} is damaged.\n"
                "  Fix: choose another --logdir, or delete "
                f"{self.checkpoints.quarantine} to start from scratch in this folder."
            )
        return newest

    def _begin_save(self) -> None:
        """Update the status line; raise if the run folder was deleted or moved."""
        self._end_warm_up()  # it changes and restores parts of the agent
        self.status.begin(SAVING)
        check_lock(self.path, self._lock)

    def agent_state(self) -> StateDict:
        """Return the state of the agent; raise if it is not finite."""
        state = self.leader.state_dict() if self.leader else self.agent.state_dict()
        name = checkpoint.find_nonfinite(state)
        if name:
            remaining, fix = restart_advice(self.checkpoints)
            raise UserError(
                f"The agent's {name} is not finite, so the run was not saved. "
                f"{remaining}\n  Fix: {fix}"
            )
        return state


class _TimedFeed:
    """Wraps a feed and measures the time of sampling and writing back."""

    def __init__(self, feed: Any, timer: Timer):
        self.feed, self.timer = feed, timer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.feed, name)

    @timed("sample")
    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        batch: Batch = self.feed(name) if out is None else self.feed(name, out)
        return batch

    @timed("write_back")
    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        self.feed.write_back(stepid, extras)

    @timed("write_back")
    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        self.feed.prioritize(stepid, priority)
