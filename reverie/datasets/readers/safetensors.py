"""A folder with one safetensors file of ours per episode (`storage/episodes.py`)."""

from __future__ import annotations

import functools
from pathlib import Path

from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.readers import Reader, in_order, infer_spaces
from reverie.datasets.readers.metadata import read_about
from reverie.spaces import Spaces
from reverie.storage.array_file import SUFFIX
from reverie.storage.episodes import read_episode


class StoreReader(Reader):
    """Names and lengths are in the file names; checksums are checked when read."""

    def __init__(self, path: str | Path):
        self.origin = str(path)
        self.folder = Path(path)
        self._paths: dict[str, Path] = {}
        for file in self.folder.glob(f"*{SUFFIX}"):
            if file.stem.count("-") >= 2:  # <id>-<rows>-<checksum>
                self._paths[file.stem.rsplit("-", 2)[0]] = file
        self._names = in_order(self._paths)
        self._about = read_about(self.folder)
        self.masks = self._about.masks if self._about else {}

    def names(self) -> list[str]:
        return list(self._names)

    def path(self, name: str) -> Path:
        return self._paths[name]

    def rows(self, name: str) -> int:
        rows = self._paths[name].stem.rsplit("-", 2)[1]
        if not rows.isdigit():
            raise BadEpisode(f"has no number of rows in its name, but {rows!r}")
        return int(rows)

    def read(self, name: str) -> Episode:
        try:
            return read_episode(self._paths[name])
        except ValueError as error:
            raise BadEpisode(str(error)) from error

    @functools.cached_property
    def _spaces(self) -> tuple[Spaces, Spaces]:
        if self._about:
            return self._about.obs_space, self._about.act_space
        obs, act = infer_spaces(self.origin, self._names, self.read, ["action"])
        return obs, self._counted(act)
