"""Write the episodes that a user saves in `reverie play`, as datasets and videos."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from reverie.api import Obs
from reverie.datasets.readers.metadata import DatasetMetadata
from reverie.play.recorded_episodes import IMAGINED, REAL, RECORDINGS
from reverie.render.video import FPS, upscale, video_suffix, write_video
from reverie.spaces import STEP_KEYS, Spaces, agent_obs_space
from reverie.storage.episodes import write_episode


def save_episode(
    folder: Path,
    rows: Sequence[Obs],
    obs_space: Spaces,
    act_space: Spaces,
    frames: Sequence[np.ndarray],
    imagined: bool,
    fps: float,
) -> list[Path]:
    """Write an episode and a video of its `frames`; return the paths of the files.

    Episodes of the environment and of the world model are separate datasets, because
    imagined rows are predictions.
    """
    kind = IMAGINED if imagined else REAL
    target = folder / RECORDINGS / kind
    metadata = DatasetMetadata(agent_obs_space(obs_space), act_space)
    spaces = {**metadata.obs_space, **act_space}
    episode = {
        key: np.stack([np.asarray(row[key]) for row in rows]).astype(space.dtype)
        for key, space in spaces.items()
    }
    episode |= {
        key: np.stack([np.asarray(row[key]) for row in rows]) for key in STEP_KEYS
    }
    episode["reward"] = episode["reward"].astype(np.float32)
    target.mkdir(parents=True, exist_ok=True)
    metadata.write(target)
    number = len(list(target.glob("episode_*")))
    name = f"episode_{number:04d}"
    paths = [write_episode(target, name, episode)]
    if frames:
        video = folder / "media" / RECORDINGS / f"{kind}_{number:04d}.{video_suffix()}"
        paths.append(write_video(video, upscale(np.stack(frames)), fps or FPS))
    return paths


def complete_rows(rows: Sequence[Obs], act_space: Spaces, terminal: bool) -> list[Obs]:
    """Return the rows with the flags and actions that a replay buffer would store.

    The reward of the first row and the actions of the last row are zero.
    """
    result = []
    for number, row in enumerate(rows):
        is_last = number == len(rows) - 1
        flags = {
            "reward": np.float32(row["reward"] if number else 0.0),
            "is_first": np.bool_(number == 0),
            "is_last": np.bool_(is_last),
            "is_terminal": np.bool_(is_last and terminal),
        }
        actions = {
            key: space.zeros() if is_last else np.asarray(row[key], space.dtype)
            for key, space in act_space.items()
        }
        result.append({**row, **flags, **actions})
    return result
