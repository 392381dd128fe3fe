"""Films of episodes that are played: the first ones, and the first that fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.render.channels import cameras_side_by_side
from reverie.render.video import can_write_mp4, upscale, write_video
from reverie.spaces import Spaces

FPS = 15


class Films:
    """Writes `<number>.<ending>`, and `<number>_failed.<ending>`, as episodes end.

    Up to `count` of all episodes, and up to `count` of those that failed.
    """

    def __init__(self, folder: Path, obs_space: Spaces, envs: int, count: int):
        images = [key for key, space in obs_space.items() if space.is_image]
        if not images:
            raise UserError(
                "This environment shows no images to film.\n  Fix: leave out --videos."
            )
        self.folder, self.key, self.count = folder, images[0], count
        self.paths: list[Path] = []
        self._frames: list[list[np.ndarray]] = [[] for _ in range(envs)]
        self._ended = self._failed = 0

    def add(self, obs: Obs, action: Action) -> None:
        """What all environments show now; what is done about it is not filmed."""
        rows = zip(self._frames, obs[self.key], obs["is_first"], strict=True)
        for frames, image, first in rows:
            if first:  # also where nobody asked for the episode before
                frames.clear()
            frames.append(image.copy())

    def end(self, index: int, success: float | None) -> None:
        """The episode of one environment is over."""
        frames = self._frames[index]
        failed = success is not None and success <= 0
        if self._ended < self.count or (failed and self._failed < self.count):
            ending = "mp4" if can_write_mp4() else "gif"
            name = f"{self._ended:04d}{'_failed' if failed else ''}.{ending}"
            film = upscale(cameras_side_by_side(np.stack(frames)))
            self.paths.append(write_video(self.folder / name, film, FPS))
        self._ended += 1
        self._failed += failed
