"""Write the episodes of any reader as a folder of ours: whole or not at all.

Files go to `DST.partial` beside the destination, which takes its name when the last one
is there, so nobody meets half a dataset. The same command after an interruption goes on
with the episodes that are still missing. Several threads work side by side: packing,
which takes most of the time, lets them.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from reverie.api import UserError
from reverie.datasets.episode_cache import Bad
from reverie.datasets.episode_format import BadEpisode, problems
from reverie.datasets.readers import Reader, npz
from reverie.datasets.readers.metadata import About
from reverie.datasets.transforms import Prepared, Recipe
from reverie.spaces import Spaces
from reverie.storage.atomic import TEMPORARY, write_json
from reverie.storage.episodes import write_episode

PARTIAL = ".partial"
PLAN = "plan.json"

Progress = Callable[[int, int], None]
"""Told how many episodes of how many are done."""


@dataclass(frozen=True)
class ConvertConfig:
    """How recordings become a folder of ours."""

    recipe: Recipe = field(default_factory=Recipe)
    format: Literal["npz", "store"] = "npz"
    """NPZ files as dreamerv3-torch writes them, or files of our own, larger and
    faster to read."""
    bad: Bad = "stop"
    """Leave out episodes with NaN, wrong lengths or missing keys, or stop."""
    jobs: int = 1
    """Threads that work side by side."""

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError("jobs must be at least 1")


@dataclass(frozen=True)
class Converted:
    """What came of a conversion."""

    folder: Path
    written: int
    kept: int
    """Episodes that an earlier, interrupted conversion had written."""
    bad: dict[str, str]
    """Those that were left out, and why."""


def convert(
    reader: Reader,
    destination: Path,
    config: ConvertConfig | None = None,
    names: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> Converted:
    """Write the episodes (or those named) to a folder that does not exist yet."""
    config = config or ConvertConfig()
    if destination.exists():
        raise UserError(
            f"{destination} exists already.\n  Fix: remove it, or name another folder."
        )
    source = Prepared(reader, config.recipe)
    chosen = list(reader.names() if names is None else names)
    partial = destination.with_name(destination.name + PARTIAL)
    begin(partial, _plan(source, config, chosen), destination)
    writer = _Writer(source, partial, config)
    writer.run(chosen, progress or (lambda done, total: None))
    if writer.kept + writer.written == 0:
        shutil.rmtree(partial)
        name, why = next(iter(writer.bad.items()), ("none", "is there"))
        raise UserError(
            f"None of the {len(chosen)} episodes of {reader.origin} can be used "
            f"({name} {why}).\n  Fix: see what is wrong with `reverie data inspect`."
        )
    masks = {
        mask: [name for name in members if name in chosen and name not in writer.bad]
        for mask, members in reader.masks.items()
    }
    more = {"source": reader.origin, "left_out": writer.bad}
    About(source.obs_space, source.act_space, masks, more).write(partial)
    (partial / PLAN).unlink()
    destination.parent.mkdir(parents=True, exist_ok=True)
    os.replace(partial, destination)
    return Converted(destination, writer.written, writer.kept, writer.bad)


class _Writer:
    """Writes episodes with several threads, a few ahead of those being finished."""

    def __init__(self, source: Prepared, folder: Path, config: ConvertConfig):
        self.source, self.folder, self.config = source, folder, config
        self.written = self.kept = 0
        self.bad: dict[str, str] = {}
        self._there = _written(folder, config.format)
        self._stopping = threading.Event()

    def run(self, names: list[str], progress: Progress) -> None:
        waiting: set[Future[None]] = set()
        done = 0
        with ThreadPoolExecutor(self.config.jobs, "convert") as threads:
            try:
                for name in names:
                    if name in self._there:
                        self.kept, done = self.kept + 1, done + 1
                        continue
                    if len(waiting) >= 2 * self.config.jobs:
                        done += self._collect(waiting)
                        progress(done, len(names))
                    waiting.add(threads.submit(self._one, name))
                while waiting:
                    done += self._collect(waiting)
                    progress(done, len(names))
            except BaseException:
                self._stopping.set()
                raise
        self.written = done - self.kept - len(self.bad)
        progress(done, len(names))

    def _collect(self, waiting: set[Future[None]]) -> int:
        finished, _ = wait(waiting, return_when=FIRST_COMPLETED)
        for future in finished:
            waiting.discard(future)
            future.result()
        return len(finished)

    def _one(self, name: str) -> None:
        if self._stopping.is_set():
            return
        source = self.source
        try:
            episode = source.read(name)
            if wrong := problems(episode, source.obs_space, source.act_space):
                raise BadEpisode("; ".join(wrong))
        except BadEpisode as error:
            if self.config.bad == "stop":
                raise UserError(
                    f"{source.origin}: {name} {error}.\n  Fix: mend it and run the "
                    "same command again, or leave such episodes out with --bad skip."
                ) from None
            self.bad[name] = str(error)
            return
        if self.config.format == "npz":
            npz.write_folder_file(self.folder, name, episode, source.act_space)
        else:
            write_episode(self.folder, name, episode)


def _plan(source: Prepared, config: ConvertConfig, names: list[str]) -> dict[str, Any]:
    """What must be the same for a conversion to go on."""
    return {
        "source": source.origin,
        "settings": source.settings,
        "recipe": {k: list(v) for k, v in asdict(config.recipe).items()},
        "format": config.format,
        "obs": _described(source.obs_space),
        "act": _described(source.act_space),
        "names": names,
    }


def _described(spaces: Spaces) -> list[list[Any]]:
    return [[key, space.to_json()] for key, space in spaces.items()]


def begin(
    partial: Path, plan: dict[str, Any], destination: Path, what: str = "conversion"
) -> None:
    """Begin a folder, or go on with one that was begun by the same plan."""
    path = partial / PLAN
    if partial.exists():
        try:
            before = json.loads(path.read_text())
        except (OSError, ValueError):
            before = None
        if before != json.loads(json.dumps(plan)):
            raise UserError(
                f"{partial} was left behind by another {what} to {destination}.\n"
                "  Fix: repeat that command to finish it, or remove the folder."
            )
        for half in partial.glob(f".*{TEMPORARY}"):  # of a process that was killed
            half.unlink()
        return
    partial.mkdir(parents=True)
    write_json(path, plan)


def _written(folder: Path, format: str) -> set[str]:
    """Episodes that are there already; files appear whole, or not at all."""
    if format == "npz":
        return {path.stem.rpartition("-")[0] for path in folder.glob("*.npz")}
    return {path.stem.rsplit("-", 2)[0] for path in folder.glob("*.safetensors")}
