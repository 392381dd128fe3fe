"""Take the recorded episodes of a run out, one NPZ file each, for other programs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from reverie.api import UserError
from reverie.datasets.readers import npz
from reverie.replay.buffer import Replay
from reverie.replay.stored_episodes import stored_episodes
from reverie.run import checkpoint
from reverie.run.factory import make_agent
from reverie.run.folder import home_of, read_config, read_spaces


def export_episodes(logdir: Path, folder: Path) -> int:
    """Write every whole episode in the replay of a run's newest checkpoint.

    The files follow dreamerv3-torch: `action[t]` led to row t. `--run.episodes FOLDER`
    reads them back. Returns how many there are.
    """
    if next(folder.glob("*.npz"), None) is not None:
        raise UserError(
            f"{folder} holds episodes already.\n"
            "  Fix: remove them, or name another folder."
        )
    path = checkpoint.locate(logdir)
    home = home_of(path)
    if not (path / "replay.json").is_file():
        raise UserError(
            f"{logdir} has no episodes of its own: it has never acted.\n"
            "  Fix: give the folder of a run that has, such as `reverie train` makes."
        )
    config, spaces = read_config(home), read_spaces(home)
    agent = make_agent(config, spaces, torch.device("cpu"), "float32")
    state = checkpoint.read_part(path, "replay")
    stored = {**spaces.obs_space, **spaces.act_space}
    replay = Replay(
        {key: space for key, space in stored.items() if key[:4] != "log/"},
        agent.extras,
        replace(config.replay, storage="ram"),
        capacity=max(1, int(state["index"]["total"]) - int(state["index"]["first"])),
        streams=config.run.envs,
        windows=agent.windows,
        directory=home / "replay",
        seed=config.seed,
    )
    replay.load(state)
    count = 0
    for count, episode in enumerate(stored_episodes(replay), 1):
        rows = {key: value for key, value in episode.items() if key not in agent.extras}
        npz.write_folder_file(folder, f"episode_{count:06d}", rows, spaces.act_space)
    replay.close()
    if not count:
        raise UserError(
            f"The replay of {logdir} holds no whole episode yet.\n"
            "  Fix: train longer, or raise --replay.capacity."
        )
    return count
