"""Write the episodes of any reader to a folder of NPZ or safetensors files.

Files are written to `DST.partial`, which is renamed to `DST` at the end, so `DST` is
always complete. After an interruption the same command writes only the episodes that
are missing. Several threads work in parallel; compression, which takes most of the
time, releases the GIL.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from reverie.api import UserError
from reverie.datasets.episode_cache import OnBadEpisode
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.readers import Reader
from reverie.datasets.readers.metadata import DatasetMetadata
from reverie.datasets.readers.npz import write_npz_episode
from reverie.datasets.transforms import TransformedReader, Transforms
from reverie.spaces import spaces_to_json
from reverie.storage.atomic import TEMPORARY, make_folder, refuse_link, write_json
from reverie.storage.episodes import write_episode
from reverie.storage.limits import InvalidFile, check_name, read_json
from reverie.storage.os_errors import explain_write_errors

PARTIAL = ".partial"
"""Suffix of a folder that is not complete yet."""
SETTINGS = "settings.json"
"""Settings of an unfinished conversion or split, in its partial folder."""

FILE_SUFFIXES = (".h5", ".hdf5", ".npz", ".parquet", ".pt", ".safetensors", ".zip")
FileFormat = Literal["npz", "safetensors"]

ReportProgress = Callable[[int, int], None]
"""Called with the number of finished episodes and their total."""


@dataclass(frozen=True)
class WriterConfig:
    """How episodes are written."""

    bad: OnBadEpisode = "stop"
    """What to do with episodes that have NaN, wrong lengths or missing keys: `skip` or
    `stop`."""
    jobs: int = 1
    """Number of threads."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"jobs must be at least 1, not {self.jobs}")


@dataclass(frozen=True)
class ConversionResult:
    """Folder with the converted episodes, and the number of episodes."""

    folder: Path
    written: int
    """Episodes that this conversion has written."""
    existing: int
    """Episodes that an earlier, interrupted conversion had written."""
    bad: dict[str, str]
    """Episodes that were skipped, with the reason."""


def convert(
    reader: Reader,
    destination: Path,
    transforms: Transforms | None = None,
    config: WriterConfig | None = None,
    names: Iterable[str] | None = None,
    progress: ReportProgress | None = None,
    format: FileFormat = "npz",
) -> ConversionResult:
    """Write all episodes, or only those in `names`, to a folder that must not exist."""
    config = config or WriterConfig()
    check_new_folder(destination)
    source = TransformedReader(reader, transforms) if transforms else reader
    selected = list(reader.names() if names is None else names)
    partial = destination.with_name(destination.name + PARTIAL)
    start_or_resume(partial, _settings(source, format, selected), destination)
    writer = _EpisodeWriter(source, partial, config, format)
    writer.run(selected, progress or (lambda done, total: None))
    if writer.existing + writer.written == 0:
        shutil.rmtree(partial, ignore_errors=True)
        reasons = (f"{name} {why}" for name, why in writer.bad.items())
        raise UserError(
            f"None of the {len(selected)} episodes of {reader.origin} can be used "
            f"({next(reasons, 'there are none')}).\n"
            "  Fix: `reverie data inspect` lists what is wrong."
        )
    masks = {  # subsets of the episodes that were written
        mask: [name for name in members if name in selected and name not in writer.bad]
        for mask, members in reader.masks.items()
    }
    extra = {"source": reader.origin, "skipped": writer.bad}
    DatasetMetadata(source.obs_space, source.act_space, masks, extra).write(partial)
    finish_folder(partial, destination)
    return ConversionResult(destination, writer.written, writer.existing, writer.bad)


class _EpisodeWriter:
    """Writes episodes with several threads and a bounded queue."""

    def __init__(
        self,
        source: Reader,
        folder: Path,
        config: WriterConfig,
        format: FileFormat,
    ):
        self.source, self.folder, self.config = source, folder, config
        self.format = format
        self.written = self.existing = 0
        self.bad: dict[str, str] = {}
        self._existing_names = _list_written(folder, format)
        self._stopping = threading.Event()

    def run(self, names: list[str], progress: ReportProgress) -> None:
        """Write the episodes `names` that are not in the folder yet."""
        pending: set[Future[None]] = set()
        done = 0
        with ThreadPoolExecutor(self.config.jobs, "convert") as threads:
            try:
                for name in names:
                    if name in self._existing_names:
                        self.existing, done = self.existing + 1, done + 1
                        continue
                    if len(pending) >= 2 * self.config.jobs:
                        done += self._wait(pending)
                        progress(done, len(names))
                    pending.add(threads.submit(self._write, name))
                while pending:
                    done += self._wait(pending)
                    progress(done, len(names))
            except BaseException:
                self._stopping.set()
                raise
        self.written = done - self.existing - len(self.bad)
        progress(done, len(names))

    def _wait(self, pending: set[Future[None]]) -> int:
        """Wait until an episode is finished; return how many finished in this call."""
        finished, _ = wait(pending, return_when=FIRST_COMPLETED)
        for future in finished:
            pending.discard(future)
            future.result()
        return len(finished)

    def _write(self, name: str) -> None:
        """Read, check and write one episode; called in a thread."""
        if self._stopping.is_set():
            return
        source = self.source
        try:
            check_name(name)
            episode = source.read_valid(name)
        except (BadEpisode, InvalidFile) as error:
            if self.config.bad == "stop":
                raise UserError(
                    f"{source.origin}: {name} {error}.\n  Fix: repair it and run the "
                    "same command again, or leave out such episodes with --bad skip."
                ) from None
            self.bad[name] = str(error)
            return
        if self.format == "npz":
            write_npz_episode(self.folder, name, episode, source.act_space)
        else:
            write_episode(self.folder, name, episode)


def _settings(source: Reader, format: str, names: list[str]) -> dict[str, Any]:
    """Return the settings that must be equal to resume a conversion."""
    return {
        "source": source.origin,
        "options": source.options,
        "format": format,
        "obs": spaces_to_json(source.obs_space),
        "act": spaces_to_json(source.act_space),
        "names": names,
    }


def check_new_folder(destination: Path) -> None:
    """Raise `UserError` if the folder to write exists, or if its name is of a file."""
    if destination.suffix.lower() in FILE_SUFFIXES:
        raise UserError(
            f"The episodes are written to a folder, but {destination.name} is the name "
            f"of a file.\n  Fix: choose another name, such as {destination.stem}."
        )
    refuse_existing(destination)


def refuse_existing(destination: Path) -> None:
    """Raise `UserError` if the destination exists."""
    if destination.exists():
        raise UserError(
            f"{destination} exists already.\n  Fix: remove it, or choose another name."
        )


def start_or_resume(
    partial: Path,
    settings: dict[str, Any],
    destination: Path,
    operation: str = "conversion",
) -> None:
    """Create a partial folder, or check that an existing one has the same settings."""
    path = partial / SETTINGS
    refuse_link(partial)
    if partial.exists():
        try:
            previous = read_json(path)
        except (OSError, ValueError):
            previous = None
        if previous != json.loads(json.dumps(settings)):  # JSON has no tuples
            raise UserError(
                f"{partial} is left over from another {operation} to {destination}.\n"
                "  Fix: repeat that command to finish it, or remove the folder."
            )
        with explain_write_errors(destination):
            # Delete incomplete files, which a killed process has left.
            for temporary in partial.glob(f".*{TEMPORARY}"):
                temporary.unlink()
        return
    make_folder(partial, parents=True)
    write_json(path, settings)


def finish_folder(partial: Path, destination: Path) -> None:
    """Rename a complete partial folder to its final name."""
    with explain_write_errors(destination):
        (partial / SETTINGS).unlink()
        os.replace(partial, destination)


def _list_written(folder: Path, format: str) -> set[str]:
    """Return the names of the episodes in a folder; all files in it are complete."""
    if format == "npz":  # NAME-ROWS.npz
        return {path.stem.rpartition("-")[0] for path in folder.glob("*.npz")}
    # NAME-ROWS-CHECKSUM.safetensors
    return {path.stem.rsplit("-", 2)[0] for path in folder.glob("*.safetensors")}
