"""Writes videos of evaluation episodes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.render.channels import cameras_side_by_side
from reverie.render.video import can_write_mp4, upscale, write_video
from reverie.spaces import Spaces

FPS = 15


class VideoRecorder:
    """Writes the first `count` episodes, and the first `count` failed episodes.

    Files are named `<number>.mp4` or `<number>_failed.mp4`, GIF if MP4 is not
    available. Implements `episodes.EpisodeRecorder`.
    """

    def __init__(self, folder: Path, obs_space: Spaces, envs: int, count: int):
        images = [key for key, space in obs_space.items() if space.is_image]
        if not images:
            raise UserError(
                "This environment has no images, so no videos can be recorded.\n"
                "  Fix: remove --videos."
            )
        self.folder, self.key, self.count = folder, images[0], count
        self.paths: list[Path] = []
        self._frames: list[list[np.ndarray]] = [[] for _ in range(envs)]
        self._ended = self._failed = 0

    def add(self, obs: Obs, action: Action) -> None:
        rows = zip(self._frames, obs[self.key], obs["is_first"], strict=True)
        for frames, image, is_first in rows:
            if is_first:
                frames.clear()
            frames.append(image.copy())

    def end(self, index: int, success: float | None) -> None:
        frames = self._frames[index]
        failed = success is not None and success <= 0
        if self._ended < self.count or (failed and self._failed < self.count):
            suffix = "mp4" if can_write_mp4() else "gif"
            name = f"{self._ended:04d}{'_failed' if failed else ''}.{suffix}"
            video = upscale(cameras_side_by_side(np.stack(frames)))
            self.paths.append(write_video(self.folder / name, video, FPS))
        self._ended += 1
        self._failed += failed
