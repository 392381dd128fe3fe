"""A worker of a campaign: claims runs from the queue and runs them as processes.

Every `reverie campaign FOLDER` is a worker, on any machine that shares the folder.
There is no coordinator: workers only read and write the queue (`queue.py`).

logdir/
  campaign.yaml     tasks, seeds, methods and settings
  queue/            state of each run
  workers/          locks of running workers
  runs/NAME/        run folder
  runs/NAME.log     output of the run
  table.txt         state of all runs, and the errors of those that failed
  report.md         scores by task and method (`reverie report`)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from reverie.api import UserError
from reverie.campaign.config_files import check_unchanged
from reverie.campaign.gpu_sharing import GpuSharing
from reverie.campaign.progress import Progress, format_table
from reverie.campaign.queue import Claim, Queue, RunStatus, write_shared
from reverie.campaign.spec import (
    SPEC_FILE,
    CampaignSpec,
    check_extends,
    read_checksums,
)
from reverie.log.messages import print_message
from reverie.run.folder import LOCK, is_locked, read_exit_record, resolve_logdir
from reverie.run.processes import PROGRAM, ProcessSlots, RunProcess, stop_processes
from reverie.run.resources import Resources
from reverie.run.signals import Stopper
from reverie.run.spec_file import code_in_spec
from reverie.run.trust import is_everything_allowed, register
from reverie.storage.atomic import make_folder

POLL_SECONDS = 0.2
"""Time between two checks of the processes."""
SCAN_SECONDS = 2.0
"""Time between two readings of the queue."""
HEARTBEAT_SECONDS = 5.0
"""Time between two heartbeats: changes of the files of claimed runs (`queue.py`)."""
PROBLEM_SECONDS = 60.0
"""Time after which a problem that continues is printed again."""
STOPPED_CODES = (129, 130, 138, 140, 143, 152)
"""Exit codes of a run that was stopped by a signal and saved a checkpoint: 128 plus
the number of SIGHUP, SIGINT, SIGUSR1, SIGUSR2, SIGTERM or SIGXCPU."""


@dataclass
class ClaimedRun:
    """A claimed run and its process."""

    claim: Claim
    folder: Path
    slot: int
    """Index of the slot whose CPU cores and GPU the process uses."""
    process: RunProcess | None = None
    """None while a process that a lost worker started still uses the run folder."""


def create_campaign(spec: CampaignSpec) -> CampaignSpec:
    """Write the files of a campaign, or add its new runs to an existing folder."""
    path = resolve_logdir(spec.config.logdir)
    if (path / "config.yaml").exists():
        raise UserError(
            f"{path} is the folder of a run, not of a campaign.\n"
            "  Fix: choose another --logdir."
        )
    queue = Queue(path)
    check_extends(path, spec.runs, queue.statuses(), spec.is_saved)
    check_unchanged(read_checksums(path))
    make_folder(path, parents=True)
    settings = yaml.safe_load(spec.to_yaml())
    # workers on this machine may then import the modules that the settings name
    register(path, {name for _, name in code_in_spec(settings)})
    write_shared(path / SPEC_FILE, spec.to_yaml())
    queue.add(list(spec.runs))
    return spec.with_folder(path)


def run_worker(
    spec: CampaignSpec, program: Sequence[str] = PROGRAM, wait: bool = True
) -> list[RunStatus]:
    """Claim and execute runs until all have ended; return the state of all runs.

    With `wait`, also wait for the runs of other workers, and take them over if their
    worker is lost. Without it, return as soon as all runs that have not ended are
    executed by other workers whose process is known to be alive.
    """
    with Worker(spec, program) as worker:
        while not worker.stopper.is_set():
            worker.step()
            if worker.is_finished(wait):
                break
            time.sleep(POLL_SECONDS)
        worker.stop_runs()
        statuses = worker.write_table()
        worker.stopper.raise_if_stopped()
    return statuses


class Monitor(Resources):
    """Reads the queue of a campaign and shows its progress; does not run anything."""

    def __init__(self, spec: CampaignSpec):
        super().__init__()
        self.spec, self.config = spec, spec.config
        self.path = resolve_logdir(spec.config.logdir)
        self.queue = Queue(self.path, spec.config.stale_seconds)
        self.stopper = Stopper()
        self.progress = Progress(self.queue, spec.config.retries)
        self.order = {run.name: i for i, run in enumerate(spec.runs)}
        self.statuses: list[RunStatus] = []

    def _open(self) -> None:
        self._cleanup.enter_context(self.stopper)

    def scan(self) -> None:
        """Read the state of all runs of this campaign, in the order of its spec."""
        statuses = [s for s in self.queue.statuses() if s.run.name in self.order]
        self.statuses = sorted(statuses, key=lambda s: self.order[s.run.name])

    def has_ended(self, status: RunStatus) -> bool:
        """True if a run has finished, or has failed too often to be started again."""
        return status.state == "finished" or (
            status.state == "failed" and status.failures > self.config.retries
        )

    def all_ended(self) -> bool:
        """True if all runs have ended; as of the last `scan`."""
        return all(self.has_ended(status) for status in self.statuses)

    def claimable(self) -> list[RunStatus]:
        """Return the runs that can be started; those that failed before come last."""
        found = [
            status
            for status in self.statuses
            if status.state != "running" and not self.has_ended(status)
        ]
        return sorted(found, key=lambda status: status.failures)

    def write_table(self) -> list[RunStatus]:
        """Write `table.txt`, and return the state of all runs."""
        self.scan()
        self.progress.show(self.statuses)
        table = format_table(self.statuses, self.queue, self.config.retries)
        write_shared(self.path / "table.txt", f"{table}\n")
        return self.statuses


class Worker(Monitor):
    """Claims runs and executes them; `step` is one iteration of its loop."""

    def __init__(self, spec: CampaignSpec, program: Sequence[str] = PROGRAM):
        super().__init__(spec)
        self.sharing = GpuSharing(spec.config, spec.device, spec.gpus_per_run)
        gpus = spec.gpus_per_run if self.sharing.assigns_gpus else 0
        count = self.sharing.num_slots
        self.slots = ProcessSlots(program, count, gpus, spec.processes)
        self.runs: list[ClaimedRun] = []
        self._problem_times: dict[tuple[str, str], float] = {}
        self._scan_time = self._heartbeat_time = float("-inf")

    def _open(self) -> None:
        self.queue.open_worker()
        self._cleanup.callback(self.queue.close_worker)
        super()._open()
        self.sharing.open()
        self._cleanup.callback(self.sharing.close)
        self._cleanup.callback(self.stop_runs)

    def step(self) -> None:
        """Write heartbeats, check the processes, and start runs in free slots."""
        self.write_heartbeats()
        ended = self.check_runs()
        now = time.monotonic()
        if ended or now - self._scan_time >= SCAN_SECONDS:
            self._scan_time = now
            self.scan()
            self.start_runs()
            folders = [run.folder for run in self.runs]
            self.slots.grow(self.sharing.update_slots(folders))
            self.progress.show(self.statuses)

    def is_finished(self, wait: bool) -> bool:
        """True if this worker has nothing left to do.

        With `wait`, it continues until all runs have ended, to take over runs whose
        worker is lost. Without it, it does not wait for runs of other workers whose
        process is known to be alive.
        """
        if self.runs or self.claimable():
            return False
        return all(
            self.has_ended(status) or (not wait and self.queue.has_live_worker(status))
            for status in self.statuses
        )

    def start_runs(self) -> None:
        """Claim runs for the free slots, and start them.

        If a config file has changed, no runs are started. Running ones continue, and
        without any, the error is raised.
        """
        claimable = self.claimable()
        if claimable and self.slots.free:
            try:
                check_unchanged(self.spec.config_sha256)
            except UserError as error:
                if not self.runs:
                    raise
                self._print_problem("no other run is started", str(error))
                return
        while claimable and self.slots.free and not self.stopper.is_set():
            status = claimable.pop(0)
            try:
                claim = self.queue.claim(status)
            except (OSError, UserError) as error:  # a full disk: try again later
                self._print_problem(status.run.name, str(error))
                return
            if claim is not None:
                folder = self.queue.run_folder(claim.run.name)
                slot = self.slots.free.pop(0)
                self.runs.append(ClaimedRun(claim, folder, slot))
            self.scan()
        self.check_runs()  # starts their processes

    def write_heartbeats(self) -> None:
        """Write a heartbeat to each claim; kill runs that another worker took over.

        A call within `HEARTBEAT_SECONDS` of the last heartbeat has no effect.
        """
        now = time.monotonic()
        if now - self._heartbeat_time < HEARTBEAT_SECONDS:
            return
        self._heartbeat_time = now
        for run in list(self.runs):
            try:
                is_claimed = self.queue.heartbeat(run.claim)
            except (OSError, UserError) as error:  # a full or unreachable disk
                text = f"the heartbeat was not written. {error}"
                self._print_problem(run.claim.run.name, text)
                continue
            if not is_claimed:
                print_message(f"{run.claim.run.name}: taken over by another worker")
                if run.process is not None:
                    run.process.kill()
                self._free_slot(run)

    def check_runs(self) -> bool:
        """Record the runs that have ended; return True if there are any.

        Also start runs whose folder was in use by another process.
        """
        ended = False
        for run in list(self.runs):
            try:
                if run.process is None:
                    self._start(run)
                elif (code := run.process.poll()) is not None:
                    self._record(run, code)
            except (OSError, UserError) as error:  # a full disk: try again later
                self._print_problem(run.claim.run.name, str(error))
            ended |= run not in self.runs
        return ended

    def stop_runs(self) -> None:
        """Ask all processes to save a checkpoint and exit; record how they ended."""
        processes = [run.process for run in self.runs if run.process is not None]
        stop_processes(processes, POLL_SECONDS, while_waiting=self.write_heartbeats)
        for run in list(self.runs):
            if run.process is None:
                self.queue.end_attempt(run.claim, "stopped")
                self._free_slot(run)
            else:
                self._record(run, run.process.poll() or 0)

    def _start(self, run: ClaimedRun) -> None:
        """Start a run, unless it has finished or another process uses its folder."""
        if read_exit_record(run.folder).finished:
            self.queue.end_attempt(run.claim, "finished")
            self._free_slot(run)
        elif not is_locked(run.folder / LOCK):
            argv = [*run.claim.run.command, "--logdir", str(run.folder)]
            if is_everything_allowed():
                argv.append("--trust")
            log, group = run.folder.with_name(f"{run.folder.name}.log"), self.path.name
            variables = {"WANDB_RUN_GROUP": group, **self.sharing.variables}
            run.process = self.slots.start(argv, log, run.slot, variables)

    def _record(self, run: ClaimedRun, code: int) -> None:
        """Write to the queue how the process of a run ended, and free its slot."""
        assert run.process is not None
        seconds, was_stopped = run.process.seconds, run.process.stop_requested
        if code == 0 and (not was_stopped or read_exit_record(run.folder).finished):
            self.queue.end_attempt(run.claim, "finished", seconds=seconds)
        elif was_stopped or code in STOPPED_CODES:
            self.queue.end_attempt(run.claim, "stopped", seconds=seconds)
        else:
            error = run.process.error_message(code)
            self.queue.end_attempt(run.claim, "failed", error, seconds)
        self._free_slot(run)

    def _print_problem(self, name: str, text: str) -> None:
        """Print a problem of a run, but the same one only once a minute."""
        now, key = time.monotonic(), (name, text)
        if now - self._problem_times.get(key, float("-inf")) >= PROBLEM_SECONDS:
            self._problem_times[key] = now
            print_message(f"{name}: {text}")

    def _free_slot(self, run: ClaimedRun) -> None:
        self.runs.remove(run)
        self.slots.free.append(run.slot)
