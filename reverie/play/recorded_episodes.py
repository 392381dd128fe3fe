"""Recorded episodes of a run: its replay buffer, evaluations, recordings and data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.readers import Reader, evenly_spaced
from reverie.run.config import Config
from reverie.run.offline.datasets import as_paths

RECORDINGS = "recordings"
"""Folder of a run with the episodes that were kept in save mode."""
REAL, IMAGINED = "env", "model"
"""Subfolders of `RECORDINGS`: episodes of the environment and of the world model."""

MAX_LISTED = 200
"""Maximum number of episodes that are listed per source."""


class EpisodeSource(NamedTuple):
    """A place where the episodes of a run are stored."""

    name: str
    path: str
    reader: ReaderConfig | None = None


class RecordedEpisodes:
    """Lists and reads episodes by source and number; files are opened on demand."""

    def __init__(self, folder: Path, config: Config):
        """`folder` and `config` are those of the run."""
        replay = [("replay", folder)] if (folder / "replay").is_dir() else []
        folders = {
            "evaluation": folder / "eval" / "episodes",
            "failures": folder / "eval" / "failures",
            "recordings": folder / RECORDINGS / REAL,
            "imagined": folder / RECORDINGS / IMAGINED,
        }
        self._sources = [EpisodeSource(name, str(path)) for name, path in replay]
        for path in as_paths(config.offline.data):
            name = f"data {Path(path).name}"
            self._sources.append(EpisodeSource(name, path, config.offline.read))
        self._folders = folders
        self._readers: dict[str, Reader] = {}

    def sources(self) -> list[EpisodeSource]:
        """Return the sources that exist now."""
        present = [
            EpisodeSource(name, str(path))
            for name, path in self._folders.items()
            if path.is_dir() and any(path.iterdir())
        ]
        return [*self._sources, *present]

    def table(self) -> list[dict[str, Any]]:
        """Return source, number, name and length of the episodes, last ones first."""
        self._readers.clear()  # files may have been added
        table = []
        for source in self.sources():
            names = self._names(source.name)
            shown = list(enumerate(names))[-MAX_LISTED:]
            for number, name in reversed(shown):
                try:
                    rows = self._open(source.name).rows(name)
                except BadEpisode:
                    continue
                entry = {"source": source.name, "number": number, "name": name}
                table.append({**entry, "rows": rows})
        return table

    def is_empty(self) -> bool:
        return not any(self._names(source.name) for source in self.sources())

    def read(self, source: str, number: int) -> Episode:
        """Return one episode; its bounded actions are scaled to [-1, 1]."""
        names = self._names(source)
        if not 0 <= number < len(names):
            raise UserError(
                f"There is no episode {number} in {source!r}.\n"
                "  Fix: choose an episode from the list."
            )
        try:
            return self._open(source).read(names[number])
        except BadEpisode as error:
            raise UserError(
                f"The episode {names[number]} {error}.\n  Fix: choose another episode."
            ) from None

    def sample(self, rng: np.random.Generator) -> Episode:
        """Return a random episode with at least two rows."""
        for source in self.sources():
            names = self._names(source.name)
            for name in rng.permutation(evenly_spaced(names, 50)).tolist():
                try:
                    episode = self._open(source.name).read(name)
                except BadEpisode:
                    continue
                if len(episode["is_first"]) > 1:
                    return episode
        raise UserError(
            "There is no recorded episode to start from.\n"
            "  Fix: install the simulator of the task, or record episodes with "
            "`reverie eval LOGDIR --keep-episodes`."
        )

    def _names(self, source: str) -> list[str]:
        try:
            return self._open(source).names()
        except UserError:  # for example, the replay buffer is still empty
            return []

    def _open(self, name: str) -> Reader:
        if name not in self._readers:
            for source in self.sources():
                if source.name == name:
                    self._readers[name] = open_episodes(source.path, source.reader)
                    break
            else:
                raise UserError(
                    f"There are no episodes in {name!r}.\n"
                    "  Fix: choose an episode from the list."
                )
        return self._readers[name]
