"""Workers of a campaign as tasks of a Ray cluster.

    --ray address=auto,jobs=4,num_gpus=1,num_cpus=4

Ray starts a task on a machine with enough free CPUs and GPUs. When the process that
submits the tasks is stopped, it cancels them; the workers then save their runs and end.
If this process is killed or a machine fails, other workers or a later command take over
the runs (`queue.py`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from reverie.api import UserError
from reverie.campaign import worker
from reverie.campaign.jobs import Job, default_jobs, parse_options, run_jobs
from reverie.campaign.queue import RunStatus
from reverie.campaign.spec import CampaignSpec
from reverie.log.messages import print_message
from reverie.plugins import import_optional
from reverie.run.actors.ray_transport import (
    check_reachable,
    first_line,
    keep_signal_handlers,
)
from reverie.run.processes import PROGRAM
from reverie.run.signals import Interrupted

EXAMPLE = "address=auto,jobs=4,num_gpus=1,num_cpus=4"
OPTIONS = ("address", "jobs", "num_gpus", "num_cpus")
STOP_SECONDS = 120.0
"""Time to wait for workers that save their runs when they are stopped."""


class RayJob:
    """A submitted Ray task, with the interface of `jobs.Job`."""

    def __init__(self, ray: Any, future: Any):
        self.ray, self.future = ray, future
        self.job_id = future.hex()[:8]
        self.output = "in the folder /tmp/ray/session_latest/logs of its machine"

    def done(self) -> bool:
        ready, _ = self.ray.wait([self.future], timeout=0)
        return bool(ready)

    def exception(self) -> Any:
        try:
            self.ray.get(self.future)
        except self.ray.exceptions.RayError as error:
            return error
        return None


def work(spec: CampaignSpec, program: Sequence[str]) -> None:
    """Run a worker of the campaign. Executed by Ray, in a process of the cluster."""
    # a cancelled worker has saved its runs, so the task is not marked as failed
    with contextlib.suppress(Interrupted):
        worker.run_worker(spec, program, wait=False)


def open_cluster(text: str) -> Any:
    """Connect to the cluster in the options of `--ray`; return the module `ray`."""
    options = parse_ray_options(text)
    ray = import_optional("ray", "ray", "A campaign with --ray")
    if not ray.is_initialized():
        connect(ray, options.get("address", "auto"))
    return ray


def submit(spec: CampaignSpec, program: Sequence[str] = PROGRAM) -> list[RunStatus]:
    """Submit tasks until all runs have ended; return the final state of all runs."""
    ray = open_cluster(spec.config.ray)
    options = parse_ray_options(spec.config.ray)
    number = int(options.get("jobs", 0)) or default_jobs(spec)
    has_gpus = ray.cluster_resources().get("GPU", 0) > 0
    num_cpus = float(options.get("num_cpus", 1))
    num_gpus = float(options.get("num_gpus", has_gpus * _gpus_per_worker(spec)))
    check_resources(ray, options.get("address", "auto"), CPU=num_cpus, GPU=num_gpus)
    remote: Any = ray.remote(work).options(
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        max_retries=0,
        scheduling_strategy="SPREAD",
    )
    # each task is a worker that executes runs as processes of its machine, not on Ray
    job_spec = replace(spec, config=replace(spec.config, ray=""))

    def submit_task() -> RayJob:
        return RayJob(ray, remote.remote(job_spec, program))

    def stop(jobs: list[Job]) -> None:
        print_message("stopping the workers")
        futures = [job.future for job in jobs if isinstance(job, RayJob)]
        for future in futures:
            # has the effect of SIGINT (Ctrl-C) in the process of the worker
            ray.cancel(future, force=False)
        if futures:
            ray.wait(futures, num_returns=len(futures), timeout=STOP_SECONDS)

    try:
        return run_jobs(job_spec, number, submit_task, stop)
    finally:
        ray.shutdown()


def _gpus_per_worker(spec: CampaignSpec) -> int:
    return 0 if spec.device == "cpu" else spec.gpus_per_run


def check_resources(ray: Any, address: str, **needed: float) -> None:
    """Print a message if no machine has the resources that a worker reserves.

    Such a machine may join later, but not if Ray was started for this command: raise.
    """
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for name, number in needed.items():
        most = max((machine.get(name, 0.0) for machine in machines), default=0.0)
        if number <= most:
            continue
        problem = (
            f"The number of {name}s that each worker reserves is {number:g}, but no "
            f"machine of the Ray cluster has more than {most:g}."
        )
        if address == "local":
            option = f"num_{name.lower()}s={most:g} in the options of --ray"
            raise UserError(f"{problem}\n  Fix: {option}, or fewer --devices per run.")
        print_message(f"{problem} The workers start when such a machine joins.")


def parse_ray_options(text: str) -> dict[str, str]:
    """Return the options of `--ray`; raise if one is unknown or not a number."""
    options = parse_options("--ray", text, EXAMPLE)
    for name, value in options.items():
        is_number = value.replace(".", "", 1).isdigit()
        if name not in OPTIONS or not (name == "address" or is_number):
            raise UserError(
                f"--ray {name}={value} is not an option of a campaign on Ray.\n"
                f"  Fix: --ray {EXAMPLE}"
            )
    return options


def connect(ray: Any, address: str) -> None:
    """Connect to a Ray cluster; `local` starts Ray on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"address": address}
    if address == "local":
        options["include_dashboard"] = False
    try:
        check_reachable(address)
        with keep_signal_handlers():
            ray.init(**options, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(
            f"Could not connect to Ray at {address}: {first_line(error)}\n"
            "  Fix: `ray start --head` on the first machine, `ray start "
            "--address=HOST:6379` on the others; or --ray address=local, to start Ray "
            "on this machine."
        ) from error
