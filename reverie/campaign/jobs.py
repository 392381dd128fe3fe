"""Run the workers of a campaign as jobs of SLURM or tasks of Ray.

A campaign is a set of runs: all combinations of tasks, methods and seeds. Each job is a
worker of the campaign and ends when no runs are waiting. The process that submits the
jobs shows the progress. It replaces jobs that failed or were cancelled, if the
remaining jobs are fewer than the runs that are waiting to be started.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any, Protocol

from reverie.api import UserError
from reverie.campaign import worker
from reverie.campaign.queue import RunStatus
from reverie.campaign.spec import CampaignSpec
from reverie.log.messages import print_message

MAX_FAILED_JOBS = 3
"""Number of consecutive failed jobs after which no more jobs are submitted."""


class Job(Protocol):
    """A submitted job."""

    @property
    def job_id(self) -> str: ...
    @property
    def output(self) -> str: ...  # where its output is, for an error message
    def done(self) -> bool: ...
    def exception(self) -> Any: ...  # None if the job has succeeded


def run_jobs(
    spec: CampaignSpec,
    max_jobs: int,
    submit: Callable[[], Job],
    stop: Callable[[list[Job]], None],
) -> list[RunStatus]:
    """Keep up to `max_jobs` jobs queued or running until all runs have ended.

    Return the final status of each run.

    `submit` submits a job; `stop` is called with the jobs if the user stops this
    process.
    """
    jobs: list[Job] = []
    failed = 0
    with worker.Monitor(spec) as monitor:
        while not monitor.stopper.is_set():
            monitor.scan()
            monitor.progress.show(monitor.statuses)
            ended = [job for job in jobs if job.done()]
            jobs = [job for job in jobs if job not in ended]
            failed = _count_failed(ended, failed)
            to_start = len(monitor.claimable())
            if monitor.all_ended():
                break
            for _ in range(min(max_jobs, to_start) - len(jobs)):
                jobs.append(submit())
                print_message(f"submitted job {jobs[-1].job_id}")
            time.sleep(worker.SCAN_SECONDS)
        if monitor.stopper.is_set():
            stop(jobs)
        statuses = monitor.write_table()
        monitor.stopper.raise_if_stopped()
    return statuses


def parse_options(flag: str, text: str, example: str) -> dict[str, str]:
    """Return the options in the value of a flag, such as `partition=gpu,time=240`.

    If the value is not valid, the error shows `example`, a valid one.
    """
    pairs = [part.partition("=") for part in text.split(",") if part]
    wrong = next((name for name, _, value in pairs if not name or not value), None)
    options = {name.strip(): value.strip() for name, _, value in pairs}
    if wrong is not None or not re.fullmatch("0*[1-9][0-9]*", options.get("jobs", "1")):
        raise UserError(
            f"{flag} {text!r} is not a list of options.\n  Fix: {flag} {example}"
        )
    return options


def default_jobs(spec: CampaignSpec) -> int:
    """Return the number of jobs with one GPU that can run all runs at the same time."""
    per_gpu = 1 if spec.config.per_gpu == "auto" else int(spec.config.per_gpu)
    return -(-len(spec.runs) // per_gpu)


def _count_failed(ended: list[Job], failed: int) -> int:
    """Return the number of consecutive failed jobs; raise if there are too many."""
    for job in ended:
        error = job.exception()
        failed = 0 if error is None else failed + 1
        if failed >= MAX_FAILED_JOBS:
            last = (str(error).strip() or repr(error)).splitlines()[-1]
            raise UserError(
                f"{failed} consecutive jobs failed: {last}\n"
                f"  Fix: read the output of the job, {job.output}"
            )
    return failed
