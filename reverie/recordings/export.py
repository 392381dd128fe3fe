"""Export the episodes in the replay buffer of a run as NPZ files."""

from __future__ import annotations

from pathlib import Path

from reverie.api import UserError
from reverie.datasets.episodes import open_episodes
from reverie.datasets.readers.metadata import DatasetMetadata
from reverie.datasets.readers.npz import write_npz_episode
from reverie.run.load import open_run


def export_episodes(logdir: Path, folder: Path) -> int:
    """Write every complete episode in the replay buffer of a run.

    Files have the layout of dreamerv3-torch and are read with `--run.episodes FOLDER`.
    Returns the number of episodes.
    """
    if next(folder.glob("*.npz"), None) is not None:
        raise UserError(
            f"{folder} already contains episodes.\n"
            "  Fix: remove them, or choose another folder."
        )
    run_folder = open_run(logdir).folder
    if next((run_folder / "replay").glob("*.safetensors"), None) is None:
        raise UserError(
            f"{logdir} has no saved replay buffer.\n"
            "  Fix: use a run of `reverie train` without --replay.save False."
        )
    reader = open_episodes(run_folder)
    names = reader.names()
    if not names:
        raise UserError(
            f"The replay buffer of {logdir} has no complete episode yet.\n"
            "  Fix: train longer, or raise --replay.capacity."
        )
    for number, name in enumerate(names, 1):
        episode = reader.read(name)
        write_npz_episode(folder, f"episode_{number:06d}", episode, reader.act_space)
    DatasetMetadata(reader.obs_space, reader.act_space).write(folder)
    return len(names)
