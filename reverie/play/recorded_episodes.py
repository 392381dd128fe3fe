"""Lists and reads the recorded episodes of a run.

They come from several sources: the replay buffer, evaluations (`eval/episodes` and
`eval/failures`), episodes that were saved in `reverie play`, and the datasets of an
offline run.
"""

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
"""Folder of a run with the episodes that were saved in `reverie play`."""
REAL, IMAGINED = "env", "model"
"""Subfolders of `RECORDINGS`: episodes in the environment and in the world model."""

MAX_LISTED = 200
"""Maximum number of listed episodes per source; the last ones are listed."""
MAX_SAMPLED = 50
"""Maximum number of episodes of a source among which `sample` chooses."""


class EpisodeSource(NamedTuple):
    """A folder or file with episodes of a run."""

    name: str  # shown on the page
    path: str
    reader: ReaderConfig | None = None
    """How to read a dataset; None for the formats that runs write."""


class RecordedEpisodes:
    """The recorded episodes of a run, by source and number.

    Files are opened when they are needed.
    """

    def __init__(self, folder: Path, config: Config):
        """`folder` and `config` are those of the run."""
        self._sources: list[EpisodeSource] = []
        if (folder / "replay").is_dir():
            self._sources.append(EpisodeSource("replay", str(folder)))
        for path in as_paths(config.offline.data):
            name = f"data {Path(path).name}"
            self._sources.append(EpisodeSource(name, path, config.offline.read))
        # folders that may be created later
        self._folders = {
            "evaluation": folder / "eval" / "episodes",
            "failures": folder / "eval" / "failures",
            "recordings": folder / RECORDINGS / REAL,
            "imagined": folder / RECORDINGS / IMAGINED,
        }
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
        """Return source, number, name and number of rows of each episode.

        The last episodes of a source come first. Unreadable episodes are left out.
        """
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
        """True if no source has an episode."""
        return not any(self._names(source.name) for source in self.sources())

    def read(self, source: str, number: int) -> Episode:
        """Return the episode with this number in `table`.

        Actions with bounds are scaled to [-1, 1].
        """
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
        """Return a random episode with at least two rows, from the first source that
        has one."""
        for source in self.sources():
            names = self._names(source.name)
            for name in rng.permutation(evenly_spaced(names, MAX_SAMPLED)).tolist():
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
        """Return the names of the episodes of a source; none if it is unreadable."""
        try:
            return self._open(source).names()
        except UserError:  # for example, the replay buffer is still empty
            return []

    def _open(self, name: str) -> Reader:
        """Return the reader of the source with this name."""
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
