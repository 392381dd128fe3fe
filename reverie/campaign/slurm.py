"""Workers of a campaign as SLURM jobs, submitted with submitit.

    --slurm jobs=4,partition=gpu,time=240,gpus_per_node=1

Each job is a worker of the campaign and ends when no runs are waiting. Jobs that reach
their time limit are requeued. The process that submits the jobs shows the progress and
replaces jobs that failed or were cancelled, as long as there are more runs to start
than jobs. This process may be killed and started again at any time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reverie.api import UserError
from reverie.campaign import worker
from reverie.campaign.queue import RunStatus
from reverie.campaign.spec import CampaignSpec
from reverie.log.messages import print_message
from reverie.plugins import import_optional
from reverie.storage.atomic import make_folder

SUBMITIT_OPTIONS = (
    *("name", "nodes", "cpus_per_task", "gpus_per_node", "mem_gb", "timeout_min"),
    "stderr_to_stdout",
)
"""Options of submitit that do not begin with `slurm_`."""
LOGS = "slurm"
"""Folder of submitit's files: pickled jobs and their output."""
MAX_FAILED_JOBS = 3
"""Number of consecutive failed jobs after which no more jobs are submitted."""


@dataclass
class WorkerJob:
    """A worker that runs in a job; submitit pickles it."""

    spec: CampaignSpec

    def __call__(self) -> None:
        worker.run_worker(self.spec, wait=False)

    def checkpoint(self) -> Any:
        """Return the job that submitit requeues when the time limit is reached."""
        return _import_submitit().helpers.DelayedSubmission(self)


def _import_submitit() -> Any:
    """Import submitit without its configuration of all loggers."""
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")
    return import_optional("submitit", "slurm", "A campaign with --slurm")


def submit(spec: CampaignSpec) -> list[RunStatus]:
    """Submit jobs until all runs have ended; return their final state."""
    submitit = _import_submitit()
    path = Path(spec.config.logdir)
    make_folder(path / LOGS)
    options = parse_options(spec.config.slurm)
    number = int(options.pop("jobs", 0)) or default_jobs(spec)
    executor = make_executor(submitit, path / LOGS, options)
    job_spec = replace(spec, config=replace(spec.config, slurm=""))
    jobs: list[Any] = []
    failed = 0
    with worker.Monitor(job_spec) as monitor:
        while not monitor.stopper.is_set():
            monitor.scan()
            monitor.progress.show(monitor.statuses)
            ended = [job for job in jobs if job.done()]
            jobs = [job for job in jobs if job not in ended]
            failed = _count_failed(ended, failed)
            to_start = len(monitor.claimable())
            if monitor.all_ended():
                break
            for _ in range(min(number, to_start) - len(jobs)):
                jobs.append(executor.submit(WorkerJob(job_spec)))
                print_message(f"submitted job {jobs[-1].job_id}")
            time.sleep(worker.SCAN_SECONDS)
        statuses = monitor.write_table()
        if monitor.stopper.is_set():
            print_message("The jobs continue; cancel them with `scancel`.")
        monitor.stopper.check()
    return statuses


def parse_options(text: str) -> dict[str, str]:
    """Return the options in `partition=gpu,time=240`."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    wrong = next((name for name, _, value in pairs if not name or not value), None)
    options = {name.strip(): value.strip() for name, _, value in pairs}
    if wrong is not None or not options.get("jobs", "1").isdigit():
        raise UserError(
            f"--slurm {text!r} is not a list of options.\n"
            "  Fix: --slurm jobs=4,partition=gpu,time=240"
        )
    return options


def default_jobs(spec: CampaignSpec) -> int:
    """Return the number of jobs with one GPU that can run all runs at the same time."""
    per_gpu = 1 if spec.config.per_gpu == "auto" else int(spec.config.per_gpu)
    return -(-len(spec.runs) // per_gpu)


def make_executor(submitit: Any, folder: Path, options: dict[str, str]) -> Any:
    """Return submitit's executor; `cluster=local` runs the jobs on this machine."""
    cluster = options.pop("cluster", "slurm")
    named = {
        name
        if name in SUBMITIT_OPTIONS or name.startswith("slurm_")
        else f"slurm_{name}": value
        for name, value in options.items()
    }
    numbers = {k: int(v) if v.isdigit() else v for k, v in named.items()}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**numbers)
    except (TypeError, ValueError, NameError, RuntimeError) as error:
        raise UserError(
            f"submitit does not accept --slurm: {str(error).splitlines()[0]}\n"
            "  Fix: use options of sbatch with underscores, such as "
            "partition=gpu,time=240, on a machine that has the command sbatch."
        ) from None
    return executor


def _count_failed(ended: list[Any], failed: int) -> int:
    """Return the number of consecutive failed jobs; raise if there are too many."""
    for job in ended:
        error = job.exception()
        failed = 0 if error is None else failed + 1
        if failed >= MAX_FAILED_JOBS:
            last = str(error).strip().splitlines()[-1]
            raise UserError(
                f"{failed} consecutive jobs failed: {last}\n"
                f"  Fix: read the output of the job, {job.paths.stderr}"
            )
    return failed
