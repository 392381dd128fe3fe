"""Recorders of evaluation episodes: videos and datasets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.datasets.readers.metadata import FILE_NAME, DatasetMetadata
from reverie.render.channels import cameras_side_by_side
from reverie.render.video import FPS, upscale, video_suffix, write_video
from reverie.spaces import STEP_KEYS, Arrays, Spaces, agent_obs_space
from reverie.storage.array_file import SUFFIX
from reverie.storage.atomic import make_folder
from reverie.storage.episodes import write_episode


class EpisodeRecorder:
    """Writes the first `count` failed episodes and, unless `failed_only`, the first
    `count` episodes of any outcome."""

    failed_only = False

    def __init__(self, folder: Path, keys: Iterable[str], envs: int, count: int):
        self.folder, self.keys, self.count = folder, list(keys), count
        self.paths: list[Path] = []  # files written so far
        self._rows: list[list[Arrays]] = [[] for _ in range(envs)]
        self._ended = self._failed = 0

    def add(self, obs: Obs, action: Action) -> None:
        """Add a row of every environment."""
        if min(self._failed, self._ended) >= self.count:
            return  # nothing more to write
        batch = {**obs, **action}
        for index, rows in enumerate(self._rows):
            if obs["is_first"][index]:
                rows.clear()
            rows.append({key: np.array(batch[key][index]) for key in self.keys})

    def end(self, index: int, success: float | None) -> None:
        """End an episode of one environment, and write it if it is to be recorded.

        Called only for episodes that count in the evaluation.
        """
        failed = success is not None and success <= 0
        any_outcome = not self.failed_only and self._ended < self.count
        if any_outcome or (failed and self._failed < self.count):
            rows = self._rows[index]
            episode = {key: np.stack([row[key] for row in rows]) for key in self.keys}
            self.paths.append(self.write(episode, self._ended, failed))
        self._ended += 1
        self._failed += failed

    def write(self, episode: Arrays, number: int, failed: bool) -> Path:
        """Write an episode, arrays `(T, ...)` by key, and return its path."""
        raise NotImplementedError


class VideoRecorder(EpisodeRecorder):
    """Writes `<number>.mp4` or `<number>_failed.mp4`; GIF if MP4 is not available."""

    def __init__(
        self, folder: Path, obs_space: Spaces, envs: int, count: int, fps: float = FPS
    ):
        self.fps = fps
        images = [key for key, space in obs_space.items() if space.is_image]
        if not images:
            raise UserError(
                "This environment has no images, so no videos can be recorded.\n"
                "  Fix: remove --videos."
            )
        super().__init__(folder, images[:1], envs, count)

    def write(self, episode: Arrays, number: int, failed: bool) -> Path:
        name = f"{number:04d}{'_failed' if failed else ''}.{video_suffix()}"
        video = upscale(cameras_side_by_side(episode[self.keys[0]]))
        return write_video(self.folder / name, video, self.fps)


class DatasetRecorder(EpisodeRecorder):
    """Writes episodes as recordings that `reverie data` and offline training read.

    Deletes the episodes of an earlier evaluation in the same folder.
    """

    stem = "episode"  # first part of file names

    def __init__(
        self, folder: Path, obs_space: Spaces, act_space: Spaces, envs: int, count: int
    ):
        self.metadata = DatasetMetadata(agent_obs_space(obs_space), act_space)
        keys = [*self.metadata.obs_space, *act_space, *STEP_KEYS]
        super().__init__(folder, keys, envs, count)
        for old in (*folder.glob(f"*{SUFFIX}"), folder / FILE_NAME):
            old.unlink(missing_ok=True)

    def write(self, episode: Arrays, number: int, failed: bool) -> Path:
        make_folder(self.folder, parents=True)
        self.metadata.write(self.folder)
        return write_episode(self.folder, f"{self.stem}_{number:04d}", episode)


class FailureRecorder(DatasetRecorder):
    """Writes failed episodes as recordings."""

    failed_only = True
    stem = "failure"
