"""`reverie envs` and `reverie check-env`: list environments and check one."""

from __future__ import annotations

from reverie.api import UserError
from reverie.cli.arguments import parse_arguments, to_config


def list_envs(argv: list[str]) -> int:
    """List environment suites, their tasks and how to install them."""
    from reverie import envs

    if len(argv) > 1:
        raise UserError(
            f"`reverie envs` takes one suite, not {len(argv)}.\n"
            "  Fix: reverie envs SUITE"
        )
    print(envs.describe_suites(*argv))
    return 0


def check_env(argv: list[str]) -> int:
    """Check an environment for errors."""
    from reverie.datasets.sequences import is_sequence_task
    from reverie.envs import checker

    arguments = parse_arguments(argv, max_positional=1)
    if not arguments.positional:
        raise UserError(
            "`reverie check-env` needs a task.\n  Fix: reverie check-env TASK"
        )
    arguments.flags.append(("task", arguments.positional[0]))
    config = to_config(arguments)
    if is_sequence_task(config.task):
        raise UserError(
            f"Task {config.task} is a sequence dataset and has no environment.\n"
            f"  Fix: reverie train --agent vta --task {config.task}, or choose a task "
            "that `reverie envs` lists."
        )
    env, findings = checker.check_task(config.task, config.env, config.seed)
    print(checker.describe(config.task, env, findings))
    return 2 if any(finding.severity == "error" for finding in findings) else 0
