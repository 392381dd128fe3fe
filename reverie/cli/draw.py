"""`reverie draw`: figures of what an agent learned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import parse_arguments, path_errors

FIGURES = ("boundaries",)


@dataclass(frozen=True)
class DrawOptions:
    idx: int = 0
    """Index of the evaluation sequence to draw."""
    num_samples: int = 10
    """Number of evaluation sequences to load; must be above `idx`."""
    out: str = ""
    """Folder for the figures; empty for `eval` in the run folder."""


def draw(words: list[str]) -> int:
    """Draw the segment boundaries that an agent found."""
    from reverie.evaluation.draw import draw_boundaries
    from reverie.run.load import is_imported

    name = words[0] if words else ""
    if name not in FIGURES:
        raise UserError(
            f"`reverie draw` has no figure {name!r}.{configs.suggest(name, FIGURES)}\n"
            f"  Fix: choose from {', '.join(FIGURES)}, for example "
            "reverie draw boundaries LOGDIR"
        )
    arguments = parse_arguments(words[1:], max_positional=1)
    if not arguments.positional:
        raise UserError(
            "`reverie draw boundaries` needs the folder of a run, or a checkpoint of "
            "VTA.\n  Fix: reverie draw boundaries LOGDIR"
        )
    logdir = Path(arguments.positional[0])
    if not is_imported(logdir, arguments.flags):
        arguments.refuse_blocks(
            "Figures are drawn with the settings saved with the run."
        )
    options = arguments.take_options(DrawOptions)
    folder = Path(options.out).expanduser() if options.out else None
    with path_errors():
        for path in draw_boundaries(
            logdir,
            options.idx,
            options.num_samples,
            folder,
            arguments.flags,
            arguments.blocks,
            arguments.files,
        ):
            print(path)
    return 0
