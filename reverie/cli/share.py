"""`reverie pack` and `reverie push`: share a trained agent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reverie.api import UserError
from reverie.cli.arguments import explain_path_errors, parse_arguments


def pack(argv: list[str]) -> int:
    """Write a trained agent as one file, without replay buffer and optimizer."""
    from reverie.results.pack import open_for_package, write_package_file

    arguments = parse_arguments(argv, max_positional=2)
    arguments.refuse_presets(
        "`reverie pack` uses the settings saved with the run.", False
    )
    arguments.refuse_other_flags("reverie pack", ())
    if len(arguments.positional) != 2:
        raise UserError(
            "`reverie pack` needs the folder of a run, and the file to write.\n"
            "  Fix: reverie pack LOGDIR agent.reverie"
        )
    logdir, path = map(Path, arguments.positional)
    run = open_for_package(logdir)
    with explain_path_errors():
        print(_with_size(write_package_file(run, path.expanduser())))
    return 0


def _with_size(path: Path) -> str:
    """Return a path with the size of its file."""
    return f"{path} ({path.stat().st_size / 1e6:.1f} MB)"


@dataclass(frozen=True)
class PushOptions:
    dry_run: str = ""
    """Write the files to this folder instead of uploading them."""
    private: bool = False
    """Make the repository private if it is created."""
    video: bool = True
    """Play an episode and write it as `replay.mp4`; as GIF if MP4 cannot be encoded."""


def push(argv: list[str]) -> int:
    """Upload a trained agent to the Hugging Face Hub, with a model card and a video."""
    from reverie.results.push import push as upload
    from reverie.results.push import write_repository

    arguments = parse_arguments(argv, max_positional=2)
    arguments.refuse_presets(
        "`reverie push` uses the settings saved with the run.", False
    )
    options = arguments.take_options(PushOptions)
    arguments.refuse_other_flags(
        "reverie push", tuple(PushOptions.__dataclass_fields__)
    )
    if len(arguments.positional) != 2:
        raise UserError(
            "`reverie push` needs the folder of a run, and a repository on the Hub.\n"
            "  Fix: reverie push LOGDIR user/name"
        )
    logdir, name = arguments.positional
    if options.dry_run:
        folder = Path(options.dry_run).expanduser()
        with explain_path_errors():
            write_repository(Path(logdir), name, folder, options.video)
        print(folder)
    else:
        print(upload(Path(logdir), name, options.private, options.video))
    return 0
