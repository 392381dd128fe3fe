"""Workers of a campaign as SLURM jobs, submitted with submitit.

    --slurm jobs=4,partition=gpu,time=240,gpus_per_node=1

Jobs that reach their time limit are requeued. The process that submits the jobs may be
killed and started again at any time (`jobs.py`).
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reverie.api import UserError
from reverie.campaign import worker
from reverie.campaign.jobs import Job, default_jobs, parse_options, run_jobs
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
EXAMPLE = "jobs=4,partition=gpu,time=240"


@dataclass
class WorkerJob:
    """A worker that runs in a job; submitit pickles it."""

    spec: CampaignSpec

    def __call__(self) -> None:
        worker.run_worker(self.spec, wait=False)

    def checkpoint(self) -> Any:
        """Return the job that submitit requeues when the time limit is reached."""
        return _import_submitit().helpers.DelayedSubmission(self)


class SlurmJob:
    """A job of submitit, with the interface of `jobs.Job`."""

    def __init__(self, job: Any):
        self.job, self.job_id = job, str(job.job_id)
        self.output = str(job.paths.stderr)

    def done(self) -> bool:
        return bool(self.job.done())

    def exception(self) -> Any:
        return self.job.exception()


def _import_submitit() -> Any:
    """Import submitit without its configuration of all loggers."""
    os.environ.setdefault("SUBMITIT_LOG_LEVEL", "NOCONFIG")
    return import_optional("submitit", "slurm", "A campaign with --slurm")


def check_options(spec: CampaignSpec) -> None:
    """Raise if the options are not valid, or jobs cannot be submitted from here."""
    options = parse_options("--slurm", spec.config.slurm, EXAMPLE)
    options.pop("jobs", None)
    # with `cluster=local`, submitit creates the folder at once
    with tempfile.TemporaryDirectory() as folder:
        make_executor(_import_submitit(), Path(folder), options)


def submit(spec: CampaignSpec) -> list[RunStatus]:
    """Submit jobs until all runs have ended; return their final state."""
    submitit = _import_submitit()
    path = Path(spec.config.logdir)
    make_folder(path / LOGS)
    options = parse_options("--slurm", spec.config.slurm, EXAMPLE)
    number = int(options.pop("jobs", 0)) or default_jobs(spec)
    executor = make_executor(submitit, path / LOGS, options)
    # each job is a worker that executes runs as processes of its machine
    job_spec = replace(spec, config=replace(spec.config, slurm=""))

    def submit_job() -> SlurmJob:
        try:
            return SlurmJob(executor.submit(WorkerJob(job_spec)))
        except (OSError, RuntimeError) as error:  # of sbatch
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"The SLURM job could not be submitted: {reason}\n"
                "  Fix: correct the options of --slurm, then run the same command "
                "again. Jobs that were submitted before continue."
            ) from None

    def leave_running(_: list[Job]) -> None:
        print_message("The jobs continue; cancel them with `scancel`.")

    return run_jobs(job_spec, number, submit_job, leave_running)


def make_executor(submitit: Any, folder: Path, options: dict[str, str]) -> Any:
    """Return submitit's executor; `cluster=local` runs the jobs on this machine."""
    cluster = options.pop("cluster", "slurm")
    prefixed = {
        name
        if name in SUBMITIT_OPTIONS or name.startswith("slurm_")
        else f"slurm_{name}": value
        for name, value in options.items()
    }
    parameters = {name: _parse_value(value) for name, value in prefixed.items()}
    try:
        executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        executor.update_parameters(**parameters)
    except (TypeError, ValueError, NameError, RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UserError(
            f"submitit does not accept --slurm: {reason}\n"
            "  Fix: use options of sbatch with underscores, such as "
            "partition=gpu,time=240, on a machine that has the command sbatch."
        ) from None
    return executor


def _parse_value(text: str) -> int | bool | str:
    """Convert numbers, `true` and `false`."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isdigit() else text
