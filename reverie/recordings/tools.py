"""What `reverie data` does to recordings: look at them, convert, split, measure, show.

Each verb is one function with the options of its command, and says in the end what is
where.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from reverie.api import UserError
from reverie.datasets import statistics
from reverie.datasets.convert import PARTIAL, PLAN, ConvertConfig, begin, convert
from reverie.datasets.episode_cache import Bad
from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.inspect import survey
from reverie.datasets.readers.hdf5 import KeyMap
from reverie.datasets.readers.metadata import About, read_about
from reverie.datasets.readers.npz import NpzReader
from reverie.datasets.readers.safetensors import StoreReader
from reverie.datasets.reading import Reading, open_mapped
from reverie.datasets.split import FRACTION, masked, split_by_mask, split_by_seed
from reverie.envs import EnvConfig
from reverie.render.episodes import cameras, contact_sheet
from reverie.render.video import can_write_mp4, enlarge, write_image, write_video
from reverie.storage.atomic import atomic_write, write_json

SHEET = 32
"""Frames on a contact sheet."""


class Verb(NamedTuple):
    """A command: what it calls, with which options, after which words."""

    function: Callable[..., int]
    options: type
    places: tuple[str, ...] = ("PATH",)
    shared: tuple[str, ...] = ()
    """Options that are settings of a run as well, so that blocks may set them."""


@dataclass(frozen=True)
class InspectOptions:
    episodes: int = 0
    """How many to look at, spread from first to last; 0 for all."""
    out: str = ""
    """The contact sheet, a PNG; by itself `NAME.png` here."""
    map: KeyMap = field(default_factory=KeyMap)

    def __post_init__(self) -> None:
        if self.episodes < 0:
            raise ValueError(f"episodes counts some, not {self.episodes}")


@dataclass(frozen=True)
class ConvertOptions(Reading):
    format: Literal["npz", "store"] = "npz"
    """NPZ files as dreamerv3-torch writes them, or files of our own, larger and
    faster to read."""
    bad: Bad = "stop"
    """Leave out episodes with NaN, wrong lengths or missing keys, or stop."""
    jobs: int = 1
    """Threads that work side by side."""
    first: int = 0
    """Only the first so many episodes; 0 for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.jobs < 1 or self.first < 0:
            raise ValueError("jobs begin at 1, and first at 0")

    def config(self) -> ConvertConfig:
        return ConvertConfig(self.recipe, self.format, self.bad, self.jobs)


@dataclass(frozen=True)
class SplitOptions:
    fraction: float = FRACTION
    """The share to hold out."""
    seed: int = 0
    mask: tuple[str, ...] = ()
    """Two selections that came with the recordings, to train on and to hold out."""
    bad: Bad = "stop"
    jobs: int = 1
    map: KeyMap = field(default_factory=KeyMap)

    def __post_init__(self) -> None:
        if len(self.mask) not in (0, 2):
            raise ValueError("mask takes two names, such as `--mask train valid`")
        if self.jobs < 1:
            raise ValueError(f"jobs begin at 1, not {self.jobs}")
        if self.seed < 0:
            raise ValueError(f"seed begins at 0, not {self.seed}")


@dataclass(frozen=True)
class DemosOptions:
    task: str = "reach"
    """A task whose environment knows an expert."""
    episodes: int = 100
    seed: int = 0
    noise: float = 0.0
    """Deviation of what is added to the expert's actions."""
    env: EnvConfig = field(default_factory=EnvConfig)

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed begins at 0, not {self.seed}")


@dataclass(frozen=True)
class StatsOptions:
    out: str = ""
    """Where to save them; by itself `PATH.stats.npz`, beside the recordings."""
    mask: str = ""
    """Only the episodes of this selection."""
    map: KeyMap = field(default_factory=KeyMap)


@dataclass(frozen=True)
class ViewOptions:
    episode: str = ""
    """By name; by itself the first."""
    out: str = ""
    """An .mp4 or .gif file; by itself named after the episode, here."""
    fps: int = 15
    map: KeyMap = field(default_factory=KeyMap)

    def __post_init__(self) -> None:
        if self.fps < 1:
            raise ValueError(f"fps begins at 1, not {self.fps}")


def inspect_data(path: str, options: InspectOptions) -> int:
    """Print what is in recordings; 2 if something is wrong with them."""
    reader = open_mapped(path, options.map)
    found = survey(reader, options.episodes)
    print(found.describe())
    frames = _film(reader.read(found.sound)) if found.sound else None
    if frames is not None:
        out = Path(options.out or f"{_name_of(path)}.png").expanduser()
        try:
            sheet = write_image(out, contact_sheet(enlarge(frames, 96), SHEET))
            print(f"  {found.sound} at a glance: {sheet}")
        except OSError as error:
            if options.out:
                raise
            print(f"  No picture: {out} cannot be written ({error.strerror}).")
    reader.close()
    return 2 if found.bad else 0


def convert_data(path: str, folder: str, options: ConvertOptions) -> int:
    destination = Path(folder).expanduser()
    reader = open_mapped(path, options.map)
    names = reader.names()[: options.first or None]
    bar = Progress("converted")
    done = convert(reader, destination, options.config(), names, bar)
    bar.end()
    reader.close()
    for name, why in done.bad.items():
        print(f"left out: {name} {why}", file=sys.stderr)
    before = f", {done.kept} of them earlier" if done.kept else ""
    print(f"{done.written + done.kept} episodes in {done.folder}{before}.")
    return 0


def split_data(path: str, folder: str, options: SplitOptions) -> int:
    """Write `train` and `eval` below a folder, and `split.json`, which says who is who.

    Files of ours are linked where they can be, so a split takes no room.
    """
    destination = Path(folder).expanduser()
    if destination.exists():
        raise UserError(
            f"{destination} exists already.\n  Fix: remove it, or name another folder."
        )
    reader = open_mapped(path, options.map)
    if options.mask:
        parts = split_by_mask(reader, *options.mask)
    else:
        parts = split_by_seed(reader.names(), options.fraction, options.seed)
    partial = destination.with_name(destination.name + PARTIAL)
    how: dict[str, Any] = {"fraction": options.fraction, "seed": options.seed}
    how = {"mask": list(options.mask)} if options.mask else how
    chosen = dict(zip(("train", "eval"), parts, strict=True))
    plan = {"source": reader.origin, **how, **chosen, "settings": reader.settings}
    begin(partial, plan, destination, "split")
    for part, names in chosen.items():
        if isinstance(reader, NpzReader | StoreReader):
            _link(reader, names, partial / part)
        elif not (partial / part).exists():  # else written before an interruption
            bar = Progress(part)
            config = ConvertConfig(bad=options.bad, jobs=options.jobs)
            convert(reader, partial / part, config, names, bar)
            bar.end()
        about = read_about(partial / part)
        bad = about.more.get("left_out", {}) if about else {}
        for name, why in bad.items():
            print(f"left out: {name} {why}", file=sys.stderr)
        chosen[part] = [name for name in names if name not in bad]
    write_json(partial / "split.json", {"source": reader.origin, **how, **chosen})
    (partial / PLAN).unlink()
    os.replace(partial, destination)
    reader.close()
    print(
        f"{len(chosen['train'])} episodes in {destination / 'train'}, "
        f"{len(chosen['eval'])} in {destination / 'eval'}."
    )
    return 0


def measure_data(path: str, options: StatsOptions) -> int:
    reader = open_mapped(path, options.map)
    names = masked(reader, options.mask) if options.mask else reader.names()
    found = statistics.measure(reader, names)
    reader.close()
    place = Path(path).expanduser()
    if place.name in ("", ".."):
        place = place.resolve()
    beside = place.with_name(place.name + statistics.SUFFIX)
    if ":" in path:
        beside = Path(_name_of(path) + statistics.SUFFIX)
    out = Path(options.out).expanduser() if options.out else beside
    statistics.save(out, found)
    print(statistics.table(found))
    print(f"Saved as {out}.")
    means = {k: s.mean[None] for k, s in found.items() if s.mean.ndim == 3}
    spread = {f"{k} std": found[k].std[None] for k in means}
    shades = {
        k: (255 * v).round().astype(np.uint8) for k, v in (means | spread).items()
    }
    picture = _film(shades)
    if picture is not None:
        image = write_image(out.with_suffix(".png"), enlarge(picture[0]))
        print(f"Mean and deviation of images: {image}")
    return 0


def view_data(path: str, options: ViewOptions) -> int:
    """Write a film of one episode, all cameras side by side."""
    reader = open_mapped(path, options.map)
    names = reader.names()
    name = options.episode or names[0]
    if name not in names:
        raise UserError(
            f"{path} has no episode {name!r}, but {', '.join(names[:4])}, ...\n"
            f"  Fix: --episode {names[0]}"
        )
    try:
        frames = _film(reader.read(name))
    except BadEpisode as error:
        raise UserError(
            f"{path}: {name} {error}.\n  Fix: choose another with --episode."
        ) from None
    reader.close()
    if frames is None:
        raise UserError(
            f"{path} has no images to show.\n"
            "  Fix: `reverie data inspect` tells what it has."
        )
    ending = "mp4" if can_write_mp4() else "gif"
    out = Path(options.out or f"{name}.{ending}").expanduser()
    print(write_video(out, enlarge(frames), options.fps))
    return 0


def record_demos(path: str, options: DemosOptions) -> int:
    from reverie.recordings.demonstrate import demonstrate

    out, count = Path(path).expanduser(), options.episodes
    rows = demonstrate(
        options.task, out, count, options.seed, options.noise, options.env
    )
    print(f"{count} demonstrations of {options.task} with {rows} rows in {out}.")
    return 0


VERBS: dict[str, Verb] = {
    "inspect": Verb(inspect_data, InspectOptions),
    "convert": Verb(convert_data, ConvertOptions, ("SRC", "DST")),
    "split": Verb(split_data, SplitOptions, ("SRC", "DST")),
    "stats": Verb(measure_data, StatsOptions),
    "view": Verb(view_data, ViewOptions),
    "demos": Verb(record_demos, DemosOptions, ("FILE",), ("task", "env")),
}


class Progress:
    """A line on the terminal, or one now and then where there is none."""

    def __init__(self, word: str):
        self.word, self._said, self._tty = word, -1, sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        if self._tty:
            bar = "#" * tenth + "." * (10 - tenth)
            print(f"\r{self.word} [{bar}] {done}/{total}", end="", file=sys.stderr)
        elif tenth > self._said:
            self._said = tenth
            print(f"{self.word} {done}/{total}", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._tty:
            print(file=sys.stderr)


def _film(episode: Episode) -> np.ndarray | None:
    """Every camera of an episode side by side, in three channels."""
    pictures = (v for v in episode.values() if v.dtype == np.uint8 and v.ndim == 4)
    views = [cameras(value) for value in pictures]
    if not views:
        return None
    tallest = max(view.shape[1] for view in views)
    below = [((0, 0), (0, tallest - view.shape[1]), (0, 0), (0, 0)) for view in views]
    return np.concatenate([np.pad(*x) for x in zip(views, below, strict=True)], 2)


def _link(reader: NpzReader | StoreReader, names: list[str], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        target = folder / reader.path(name).name
        if target.exists():
            continue
        source = reader.path(name).resolve()  # a link to a link would be one as well
        try:
            os.link(source, target)
        except OSError:  # another disk, or one without links
            with atomic_write(target) as temporary:
                shutil.copyfile(source, temporary)
    masks = {m: [n for n in names if n in set(v)] for m, v in reader.masks.items()}
    About(reader.obs_space, reader.act_space, masks).write(folder)


def _name_of(path: str) -> str:
    return Path(path.rpartition(":")[2]).stem or "recordings"
