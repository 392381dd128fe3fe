"""`reverie campaign`: runs of several tasks, methods and seeds."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.report import ReportOptions, format_report
from reverie.cli.train import command_config
from reverie.log.messages import print_message
from reverie.log.status import StatusLine

if TYPE_CHECKING:
    from reverie.campaign.queue import RunStatus
    from reverie.campaign.spec import CampaignConfig, CampaignSpec

CAMPAIGN_HELP = """\
Runs `reverie train` for all combinations of task, method and seed. Give --configs once
per method: --configs size12m --configs size50m. All other flags are settings of the
runs. A YAML file can have the same options (docs/campaign.md).
"""


def campaign(argv: list[str]) -> int:
    """Train on several tasks, with several methods and seeds."""
    with StatusLine("checking the settings of all runs"):
        file, flags = find_campaign(argv)
        names = dict(configs.parse_flags(flags))
        if "status" in names and str(names["status"] or True).lower() == "true":
            _check_status_flags(names)
            return _print_status(file)
        spec = load_campaign(file, flags)
    return run_campaign(spec)


def find_campaign(argv: list[str]) -> tuple[Path | None, list[str]]:
    """Return the YAML file (None if flags define the campaign), and the flags."""
    from reverie.campaign.spec import SPEC_FILE
    from reverie.run.folder import resolve_logdir

    count = next((i for i, w in enumerate(argv) if w[:2] == "--"), len(argv))
    positional, flags = argv[:count], argv[count:]
    names = dict(configs.parse_flags(flags))
    logdir = names.get("logdir")
    if not positional and "tasks" not in names and isinstance(logdir, str):
        positional = [str(resolve_logdir(logdir))]
    if len(positional) > 1 or not (positional or "tasks" in names):
        raise UserError(
            "`reverie campaign` needs tasks, a YAML file, or the folder of a campaign."
            "\n  Fix: reverie campaign --tasks catch,memory --seeds 2, or "
            "reverie campaign FILE"
        )
    if not positional:
        return None, flags
    path = Path(positional[0]).expanduser()
    if not path.is_dir():
        return path, flags
    if not (path / SPEC_FILE).is_file():
        raise UserError(
            f"{path} is not the folder of a campaign: it has no {SPEC_FILE}.\n"
            "  Fix: give the --logdir of a campaign, or start one with --tasks."
        )
    if logdir is not None and resolve_logdir(str(logdir)) != path.absolute():
        raise UserError(
            f"The campaign in {path} cannot be resumed in another folder, but --logdir "
            f"is {logdir}.\n  Fix: reverie campaign {shlex.quote(str(path))}"
        )
    return path / SPEC_FILE, [*flags, "--logdir", str(path.absolute())]


def load_campaign(file: Path | None, flags: list[str]) -> CampaignSpec:
    """Read a campaign from a file or from flags, and check its settings."""
    from reverie.campaign.queue import QUEUE
    from reverie.campaign.spec import load_spec
    from reverie.run.spec_file import code_in_spec
    from reverie.run.trust import check_trusted

    if file is not None and (file.parent / QUEUE).is_dir():
        # the folder of a campaign may come from another user: check its code
        check_trusted(file.parent, code_in_spec(configs.read_config_file(file)))
    return load_spec(file, flags, command_config)


def run_campaign(spec: CampaignSpec) -> int:
    """Run a worker, or submit workers to SLURM or Ray; then print the report.

    A worker trains one run after the other until all runs of the campaign are done.
    """
    from reverie.campaign import ray_workers, slurm, worker
    from reverie.campaign.gpu_sharing import GpuSharing

    config = spec.config
    # before the folder is created, raise if the options are not valid on this machine
    if config.slurm:
        slurm.check_options(spec)
    elif config.ray:
        ray_workers.open_cluster(config.ray)
    else:
        GpuSharing(config, spec.device, spec.gpus_per_run)
    spec = worker.create_campaign(spec)
    path = Path(spec.config.logdir)
    resume = _resume_command(path, config)
    join = f"reverie campaign {shlex.quote(str(path))}"
    separator = ", or " if join == resume else f": {resume}\n  "
    print_message(
        f"{len(spec.runs)} runs of `reverie train`\n  campaign folder {path}\n"
        f"  resume{separator}start a worker on another machine: {join}"
    )
    if config.slurm:
        statuses = slurm.submit(spec)
    else:
        statuses = ray_workers.submit(spec) if config.ray else worker.run_worker(spec)
    _print_report(path, statuses)
    failed = [status for status in statuses if status.state == "failed"]
    if failed:
        names = "\n".join(f"    {status.run.name}: {status.error}" for status in failed)
        raise UserError(
            f"{len(failed)} of {len(statuses)} runs failed:\n{names}\n"
            "  Fix: correct the cause, then start them again: "
            f"{resume} --retries {max(status.failures for status in failed)}"
        )
    return 0


def _resume_command(path: Path, config: CampaignConfig) -> str:
    """Return the command that resumes a campaign on this machine.

    It contains the options that are not saved in the folder of the campaign.
    """
    from reverie.campaign.spec import MACHINE_OPTIONS, non_default_options

    words = ["reverie", "campaign", str(path)]
    for name, value in non_default_options(config, MACHINE_OPTIONS).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def _check_status_flags(names: Collection[str]) -> None:
    """Raise if flags would have no effect, because --status starts no runs."""
    unused = [name for name in names if name not in ("status", "logdir")]
    if unused:
        raise UserError(
            f"--{unused[0]} has no effect with --status, which starts no runs.\n"
            "  Fix: reverie campaign FOLDER --status"
        )


def _print_status(file: Path | None) -> int:
    """Print the state of all runs of the campaign that this spec file belongs to."""
    from reverie.campaign.progress import format_table
    from reverie.campaign.queue import QUEUE, Queue
    from reverie.campaign.spec import read_saved_options

    if file is None or not (file.parent / QUEUE).is_dir():
        raise UserError(
            "--status needs the folder of a campaign.\n"
            "  Fix: reverie campaign FOLDER --status"
        )
    config = read_saved_options(file)
    queue = Queue(file.parent, config.stale_seconds)
    print(format_table(queue.statuses(), queue, config.retries))
    return 0


def _print_report(path: Path, statuses: list[RunStatus]) -> None:
    """Print and write the table of all runs, and the scores of the finished ones."""
    from reverie.campaign.queue import RUNS, write_shared

    print((path / "table.txt").read_text())
    names = [status.run.name for status in statuses if status.state == "finished"]
    if not names:
        return
    try:
        text = format_report([path / RUNS / name for name in names], ReportOptions())
    except UserError as error:  # no run has finished an episode
        print_message(str(error))
        return
    write_shared(path / "report.md", text)
    print(text)
    print(path / "report.md")
