"""`reverie envs` and `reverie check-env`: what there is to act in."""

from __future__ import annotations

from reverie.api import UserError
from reverie.cli.settings import acted_in, read_settings, to_config


def list_envs(arguments: list[str]) -> int:
    from reverie import envs

    if len(arguments) > 1:
        raise UserError("One suite at a time.\n  Fix: reverie envs SUITE")
    print(envs.describe_suites(*arguments))
    return 0


def check_env(arguments: list[str]) -> int:
    from reverie import envs
    from reverie.envs import checker as check
    from reverie.envs.vector.env_slot import summary

    settings = read_settings(arguments, places=1)
    if not settings.places:
        raise UserError("Which task?\n  Fix: reverie check-env TASK")
    settings.flags.append(("task", settings.places[0]))
    config = acted_in(to_config(settings))
    try:
        env = envs.make(config.task, config.env, config.seed)
    except UserError:
        raise
    except Exception as error:  # whatever the code of its author raises
        raise UserError(
            f"{config.task} could not be built: {summary(error)}\n"
            "  Fix: mend that, and check it again."
        ) from error
    try:
        findings = check.check_env(env)
    finally:
        env.close()
    print(check.describe(config.task, env, findings))
    return 2 if any(finding.severity == "error" for finding in findings) else 0
