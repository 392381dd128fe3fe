"""`reverie draw`: open-loop videos, and figures of segment boundaries."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from reverie import config as configs
from reverie.api import UserError
from reverie.cli.arguments import explain_path_errors, parse_arguments
from reverie.cli.explain import explain

FIGURES = ("boundaries", "openloop")
"""First argument of `reverie draw`: what to draw."""


@dataclass(frozen=True)
class OpenLoopOptions:
    clips: int = 6
    """Number of clips (parts of recorded episodes), shown side by side."""
    observed: int = 16
    """Number of frames of a clip that the world model observes."""
    horizon: int = 48
    """Number of frames that the world model then predicts."""
    fps: float = 15.0
    """Frames per second of the video."""
    seed: int = 0
    """Random seed for the choice of clips and for the sampled predictions."""
    max_kb: int = 0
    """Largest size of a GIF in kB; 0 for no limit. If it is exceeded, the number of
    colors is reduced, then the number of clips."""
    out: str = ""
    """File to write (.gif or .mp4); empty for `eval/openloop` in the run folder."""

    def __post_init__(self) -> None:
        configs.check_minimum(self, clips=1, observed=1, horizon=1, seed=0, max_kb=0)
        if not self.fps > 0:
            raise UserError(f"--fps cannot be {self.fps:g}.\n  Fix: --fps 15")


@dataclass(frozen=True)
class BoundaryOptions:
    idx: int = 0
    """Index of the evaluation sequence to draw."""
    num_samples: int = 10
    """Number of evaluation sequences to load; must be larger than `idx`."""
    out: str = ""
    """Folder for the figures; empty for `eval` in the run folder."""


def draw_help(argv: list[str]) -> str:
    """Return the options of both figures."""
    figures = [("openloop", OpenLoopOptions), ("boundaries", BoundaryOptions)]
    return "\n\n".join(f"Options of {name}\n{explain(cls)}" for name, cls in figures)


def draw(argv: list[str]) -> int:
    """Draw open-loop predictions of a world model, or segment boundaries of VTA."""
    name = argv[0] if argv else ""
    if name not in FIGURES:
        hint = configs.suggest(name, FIGURES)
        problem = f"cannot draw {name!r}.{hint}" if name else "needs a figure to draw."
        raise UserError(
            f"`reverie draw` {problem}\n"
            f"  Fix: choose from {', '.join(FIGURES)}, for example "
            "reverie draw boundaries LOGDIR"
        )
    command = draw_open_loop if name == "openloop" else draw_boundaries
    return command(argv[1:])


def draw_open_loop(argv: list[str]) -> int:
    """Write a video of open-loop predictions (`reverie draw openloop`)."""
    from reverie.evaluation.result import output_folder
    from reverie.play import open_loop
    from reverie.play.load import load_run
    from reverie.render.video import video_suffix
    from reverie.run.package import run_path

    arguments = parse_arguments(argv, max_positional=1)
    if not arguments.positional:
        raise UserError(
            "`reverie draw openloop` needs the folder of a run.\n"
            "  Fix: reverie draw openloop LOGDIR --out dream.gif"
        )
    options = arguments.take_options(OpenLoopOptions)
    logdir = run_path(arguments.positional[0])
    # a file is a checkpoint of another implementation, which has no saved settings
    if not logdir.expanduser().is_file():
        arguments.refuse_presets(
            "Videos are drawn with the settings saved with the run."
        )
    loaded = load_run(logdir, arguments.flags, arguments.presets, arguments.files)
    default = output_folder(loaded.run.folder) / f"openloop.{video_suffix()}"
    path = Path(options.out).expanduser() if options.out else default
    if options.max_kb and path.suffix != ".gif":
        raise UserError(
            f"--max-kb limits the size of a GIF, but {path.name} is not a GIF.\n"
            "  Fix: --out dream.gif, or leave out --max-kb"
        )
    with explain_path_errors(), contextlib.closing(loaded):
        open_loop.draw_open_loop(
            loaded,
            path,
            options.clips,
            options.observed,
            options.horizon,
            options.seed,
            options.fps,
            1000 * options.max_kb,
        )
    print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    return 0


def draw_boundaries(argv: list[str]) -> int:
    """Write figures of segment boundaries (`reverie draw boundaries`)."""
    from reverie.evaluation import draw as figures
    from reverie.run.load import is_foreign_checkpoint

    arguments = parse_arguments(argv, max_positional=1)
    if not arguments.positional:
        raise UserError(
            "`reverie draw boundaries` needs the folder of a run, or a checkpoint of "
            "VTA.\n  Fix: reverie draw boundaries LOGDIR"
        )
    logdir = Path(arguments.positional[0])
    if not is_foreign_checkpoint(logdir, arguments.flags):
        arguments.refuse_presets(
            "Figures are drawn with the settings saved with the run."
        )
    options = arguments.take_options(BoundaryOptions)
    folder = Path(options.out).expanduser() if options.out else None
    with explain_path_errors():
        for path in figures.draw_boundaries(
            logdir,
            options.idx,
            options.num_samples,
            folder,
            arguments.flags,
            arguments.presets,
            arguments.files,
        ):
            print(path)
    return 0
