"""Reader of a folder with one safetensors file per episode (`storage/episodes.py`)."""

from __future__ import annotations

from pathlib import Path

from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.readers import FolderReader
from reverie.storage.array_file import SUFFIX
from reverie.storage.episodes import read_episode


class SafetensorsReader(FolderReader):
    """Reads files `<name>-<rows>-<checksum>.safetensors` and verifies the checksum."""

    def _list_files(self) -> dict[str, Path]:
        files = self.folder.glob(f"*{SUFFIX}")
        return {f.stem.rsplit("-", 2)[0]: f for f in files if f.stem.count("-") >= 2}

    def rows(self, name: str) -> int:
        rows = self.paths[name].stem.rsplit("-", 2)[1]
        if not rows.isdecimal():
            raise BadEpisode(f"has {rows!r} in place of the length in its file name")
        return int(rows)

    def read(self, name: str) -> Episode:
        try:
            return read_episode(self.paths[name])
        except ValueError as error:
            raise BadEpisode(str(error)) from error
