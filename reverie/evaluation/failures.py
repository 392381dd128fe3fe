"""Saves failed evaluation episodes as recordings that `reverie data` reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from reverie.api import Action, Obs
from reverie.datasets.readers.metadata import FILE_NAME, DatasetMetadata
from reverie.spaces import FLAGS, Spaces, agent_obs_space
from reverie.storage.array_file import SUFFIX
from reverie.storage.episodes import write_episode


class FailureRecorder:
    """Writes the first `count` failed episodes; implements `episodes.EpisodeRecorder`.

    Deletes the episodes of an earlier evaluation in the same folder.
    """

    def __init__(
        self, folder: Path, obs_space: Spaces, act_space: Spaces, envs: int, count: int
    ):
        self.folder, self.count = folder, count
        self.obs_space, self.act_space = agent_obs_space(obs_space), act_space
        self.paths: list[Path] = []
        self._keys = [*self.obs_space, *act_space, *FLAGS]
        self._rows: list[list[dict[str, np.ndarray]]] = [[] for _ in range(envs)]
        self._ended = 0
        for old in (*folder.glob(f"*{SUFFIX}"), folder / FILE_NAME):
            old.unlink(missing_ok=True)

    def add(self, obs: Obs, action: Action) -> None:
        batch = {**obs, **action}
        for index, rows in enumerate(self._rows):
            if obs["is_first"][index]:
                rows.clear()
            rows.append({key: np.array(batch[key][index]) for key in self._keys})

    def end(self, index: int, success: float | None) -> None:
        failed = success is not None and success <= 0
        if failed and len(self.paths) < self.count:
            rows = self._rows[index]
            episode = {key: np.stack([row[key] for row in rows]) for key in self._keys}
            if not self.paths:
                self.folder.mkdir(parents=True, exist_ok=True)
                DatasetMetadata(self.obs_space, self.act_space).write(self.folder)
            name = f"failure_{self._ended:04d}"
            self.paths.append(write_episode(self.folder, name, episode))
        self._ended += 1
