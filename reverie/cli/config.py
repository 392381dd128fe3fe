"""`reverie config`: print the resolved settings of a run, or explain settings."""

from __future__ import annotations

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import parse_arguments, to_config
from reverie.cli.explain import explain, explain_groups


def show_config(argv: list[str]) -> int:
    """Print the resolved settings, or explain settings."""
    from reverie.run.config import Config

    arguments = parse_arguments(argv)
    if "explain" not in dict(arguments.flags):
        print(configs.dump(to_config(arguments)), end="")
        return 0
    prefix = dict(arguments.flags)["explain"]
    if len(argv) > 2 or isinstance(prefix, list):
        raise UserError(
            "--explain takes one prefix and no other arguments.\n"
            "  Fix: reverie config --explain PREFIX"
        )
    if prefix:
        print(explain(Config, prefix))
    else:
        print(explain_groups(Config))
        print("\n`reverie config --explain PREFIX` lists the settings of a group.")
    return 0
