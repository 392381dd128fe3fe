"""Words of other programs' command lines, and what they are called here.

Each module describes one implementation of an algorithm: its programs, preset blocks
and flags. `reverie/cli/originals.py` translates command lines with these tables when a
command is not valid here; the pages `docs/coming-from-*.md` explain the differences.
"""

from reverie.convert.command_lines.tables import Block, Flag, Original, Program

__all__ = ["Block", "Flag", "Original", "Program", "originals"]


def originals() -> tuple[Original, ...]:
    """Return the tables of all implementations."""
    from reverie.convert.command_lines import (
        delta_iris,
        dreamerv3,
        dreamerv3_torch,
        vta,
    )

    return (
        dreamerv3.ORIGINAL,
        dreamerv3_torch.ORIGINAL,
        delta_iris.ORIGINAL,
        vta.ORIGINAL,
    )
