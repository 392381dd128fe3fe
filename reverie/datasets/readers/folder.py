"""Base class of readers of a folder with one file per episode."""

from __future__ import annotations

from pathlib import Path

from reverie.datasets.readers import Reader, natural_sort
from reverie.datasets.readers.metadata import read_metadata


class FolderReader(Reader):
    """Lists the files of a folder and reads its `dataset.json`, if any."""

    def __init__(self, path: str | Path):
        self.origin = str(path)
        self.folder = Path(path)
        self._paths = self._list_files()
        self._names = natural_sort(self._paths)
        metadata = read_metadata(self.folder)
        self.masks = metadata.masks if metadata else {}
        if metadata:
            self._spaces = metadata.obs_space, metadata.act_space

    def _list_files(self) -> dict[str, Path]:
        """Return the file of each episode by the episode's name."""
        raise NotImplementedError

    def names(self) -> list[str]:
        return list(self._names)

    def path(self, name: str) -> Path:
        """File of an episode."""
        return self._paths[name]
