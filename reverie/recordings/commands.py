"""The commands of `reverie data` on recorded episodes.

Each command is one function that takes the options of the command line, prints what it
wrote and returns an exit code.
"""

from __future__ import annotations

import inspect
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.api import UserError
from reverie.config import check_minimum
from reverie.datasets import statistics
from reverie.datasets.convert import (
    PARTIAL,
    FileFormat,
    WriterConfig,
    check_new_folder,
    convert,
    finish_folder,
    start_or_resume,
)
from reverie.datasets.episode_format import BadEpisode, Episode, is_image
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.inspect import inspect_episodes
from reverie.datasets.joined import join_readers
from reverie.datasets.readers import FolderReader, Reader
from reverie.datasets.readers.key_map import KeyMap
from reverie.datasets.readers.metadata import DatasetMetadata, read_metadata
from reverie.datasets.split import (
    HELD_OUT_FRACTION,
    names_in_mask,
    split_by_mask,
    split_by_seed,
)
from reverie.envs import EnvConfig
from reverie.log.messages import print_message
from reverie.render.channels import cameras_side_by_side
from reverie.render.episode import contact_sheet, draw_episode_curves
from reverie.render.video import upscale, video_suffix, write_image, write_video
from reverie.storage.atomic import atomic_write, make_folder, write_json

SHEET_FRAMES = 32
"""Number of frames on a contact sheet."""


class DataCommand(NamedTuple):
    """One command below `reverie data`."""

    function: Callable[..., int]
    options: type
    positional: tuple[str, ...] = ("PATH",)
    run_settings: tuple[str, ...] = ()
    """Options that are also settings of a run, so that presets may set them."""
    takes_more: bool = False
    """True if there may be more positional arguments than `positional`."""

    @property
    def summary(self) -> str:
        """First line of the docstring of the function."""
        return (inspect.getdoc(self.function) or "").partition("\n")[0]


@dataclass(frozen=True)
class MapOptions:
    """Options of commands that read a dataset without transforms."""

    map: KeyMap = field(default_factory=KeyMap)
    """Layout of HDF5 and NPZ files."""

    def open(self, path: str) -> Reader:
        return open_episodes(path, ReaderConfig(map=self.map))


@dataclass(frozen=True)
class InspectOptions(MapOptions):
    episodes: int = 0
    """Number of episodes to inspect, evenly spaced; 0 for all."""
    out: str = ""
    """PNG file for the contact sheet; default `NAME.png` in the working directory."""

    def __post_init__(self) -> None:
        check_minimum(self, episodes=0)


@dataclass(frozen=True)
class MergeOptions(ReaderConfig, WriterConfig):
    format: FileFormat = "npz"
    """File format: `npz` as in dreamerv3-torch, or `safetensors`, which is larger and
    faster to read."""

    def __post_init__(self) -> None:
        ReaderConfig.__post_init__(self)
        WriterConfig.__post_init__(self)


@dataclass(frozen=True)
class ConvertOptions(MergeOptions):
    first: int = 0
    """Number of episodes to convert, starting with the first; 0 for all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_minimum(self, first=0)


@dataclass(frozen=True)
class SplitOptions(MapOptions, WriterConfig):
    fraction: float = HELD_OUT_FRACTION
    """Fraction of episodes to hold out."""
    seed: int = 0
    """Random seed."""
    mask: tuple[str, ...] = ()
    """Split by two masks of the dataset (named lists of episodes) instead, for training
    and for held-out episodes."""

    def __post_init__(self) -> None:
        WriterConfig.__post_init__(self)
        if len(self.mask) not in (0, 2):
            raise ValueError("mask takes two names, such as `--mask train valid`")
        check_minimum(self, seed=0)


@dataclass(frozen=True)
class DemosOptions:
    task: str = "reach"
    """Task whose environment has an expert policy."""
    episodes: int = 100
    """Number of successful episodes to record."""
    seed: int = 0
    """Random seed."""
    noise: float = 0.0
    """Standard deviation of Gaussian noise added to the expert's actions."""
    env: EnvConfig = field(default_factory=EnvConfig)
    """Settings of the environment."""

    def __post_init__(self) -> None:
        check_minimum(self, seed=0)


@dataclass(frozen=True)
class StatsOptions(MapOptions):
    out: str = ""
    """Output file; default `PATH.stats.npz`, next to the dataset."""
    mask: str = ""
    """Use only the episodes in this mask (a named list of episodes in the dataset)."""


@dataclass(frozen=True)
class ViewOptions(MapOptions):
    episode: str = ""
    """Name of the episode; default the first."""
    out: str = ""
    """Output file: a video (.mp4 or .gif), or a plot of the curves (.png) of an episode
    without images. By default it has the name of the episode and is written to the
    working directory."""
    fps: int = 15
    """Frames per second."""

    def __post_init__(self) -> None:
        check_minimum(self, fps=1)


def inspect_command(path: str, options: InspectOptions) -> int:
    """Print a summary of a dataset and its problems (exit code 2 if there are any)."""
    reader = options.open(path)
    report = inspect_episodes(reader, options.episodes)
    print(report.describe())
    name = report.first_valid
    frames = all_cameras(reader.read(name)) if name else None
    if frames is not None:
        out = Path(options.out or f"{_base_name(path)}.png").expanduser()
        try:
            sheet = contact_sheet(upscale(frames, 96), SHEET_FRAMES)
            print(f"  frames of {name}: {write_image(out, sheet)}")
        except OSError as error:
            if options.out:
                raise
            print(f"  No image: {out} cannot be written ({error.strerror}).")
    reader.close()
    return 2 if report.bad else 0


def convert_command(path: str, folder: str, options: ConvertOptions) -> int:
    """Convert a dataset to a folder of episode files."""
    reader = open_episodes(path, options)
    names = reader.names()[: options.first or None]
    return _write_folder(reader, folder, options, names, ProgressBar("converted"))


def merge_command(*arguments: Any) -> int:
    """Write the episodes of several datasets to one folder.

    They must have the same observations and actions after the transforms.
    """
    *paths, folder, options = arguments
    reader = join_readers([open_episodes(path, options) for path in paths])
    return _write_folder(reader, folder, options, None, ProgressBar("merged"))


def _write_folder(
    reader: Reader,
    folder: str,
    options: MergeOptions,
    names: list[str] | None,
    bar: ProgressBar,
) -> int:
    """Write episodes as files, and print their number."""
    out = Path(folder).expanduser()
    result = convert(reader, out, None, options, names, bar, options.format)
    bar.end()
    reader.close()
    print_skipped(result.bad)
    existing = ""
    if result.existing:
        existing = f", {result.existing} of them from an interrupted run"
    count = result.written + result.existing
    print(f"{count} episodes in {result.folder}{existing}.")
    return 0


def split_command(path: str, folder: str, options: SplitOptions) -> int:
    """Write the folders `train` and `eval`, and `split.json` with their episodes.

    Files of NPZ and safetensors datasets are hard-linked, if possible, not copied.
    """
    destination = Path(folder).expanduser()
    check_new_folder(destination)
    reader = options.open(path)
    method: dict[str, Any] = {"fraction": options.fraction, "seed": options.seed}
    if options.mask:
        method = {"mask": list(options.mask)}
        parts = split_by_mask(reader, *options.mask)
    else:
        parts = split_by_seed(reader.names(), options.fraction, options.seed)
    partial = destination.with_name(destination.name + PARTIAL)
    names_by_part = dict(zip(("train", "eval"), parts, strict=True))
    header = {"source": reader.origin, **method}
    settings = {**header, **names_by_part, "options": reader.options}
    start_or_resume(partial, settings, destination, "split")
    for part, names in names_by_part.items():
        if isinstance(reader, FolderReader):
            _link_files(reader, names, partial / part)
        elif not (partial / part).exists():  # not written before an interruption
            bar = ProgressBar(part)
            convert(reader, partial / part, None, options, names, bar)
            bar.end()
        metadata = read_metadata(partial / part)
        bad = metadata.extra.get("skipped", {}) if metadata else {}
        print_skipped(bad)
        names_by_part[part] = [name for name in names if name not in bad]
    write_json(partial / "split.json", {**header, **names_by_part})
    finish_folder(partial, destination)
    reader.close()
    print(
        f"{len(names_by_part['train'])} episodes in {destination / 'train'}, "
        f"{len(names_by_part['eval'])} in {destination / 'eval'}."
    )
    return 0


def stats_command(path: str, options: StatsOptions) -> int:
    """Compute mean, std and range; write them as NPZ, and the mean images as PNG."""
    reader = options.open(path)
    names = names_in_mask(reader, options.mask) if options.mask else reader.names()
    stats = statistics.compute_statistics(reader, names)
    reader.close()
    dataset = Path(path).expanduser()
    if dataset.name in ("", ".."):
        dataset = dataset.resolve()
    default = dataset.with_name(dataset.name + statistics.SUFFIX)
    if ":" in path:  # FORMAT:NAME, which is not a file
        default = Path(_base_name(path) + statistics.SUFFIX)
    out = Path(options.out).expanduser() if options.out else default
    statistics.save_statistics(out, stats)
    print(statistics.format_table(stats))
    print(f"Saved as {out}.")
    mean = {k: s.mean[None] for k, s in stats.items() if s.mean.ndim == 3}
    std = {f"{k} std": stats[k].std[None] for k in mean}
    images = {k: (255 * v).round().astype(np.uint8) for k, v in (mean | std).items()}
    frames = all_cameras(images)
    if frames is not None:
        image = write_image(out.with_suffix(".png"), upscale(frames[0]))
        print(f"Mean and standard deviation of images: {image}")
    return 0


def view_command(path: str, options: ViewOptions) -> int:
    """Write a video of one episode, or the curves of an episode without images.

    A video has all cameras next to each other.
    """
    reader = options.open(path)
    name = choose_episode(reader, options.episode)
    try:
        episode = reader.read(name)
    except BadEpisode as error:
        raise UserError(
            f"{path}: {name} {error}.\n  Fix: choose another with --episode."
        ) from None
    reader.close()
    frames = all_cameras(episode)
    suffix = "png" if frames is None else video_suffix()
    out = Path(options.out or f"{name}.{suffix}").expanduser()
    if frames is not None:
        print(write_video(out, upscale(frames), options.fps))
        return 0
    if out.suffix != ".png":
        raise UserError(
            f"{path} has no images, so its curves are written as .png, not as "
            f"{out.name!r}.\n  Fix: --out {out.with_suffix('.png')}"
        )
    keys = [*reader.obs_space, *reader.act_space, "reward"]
    curves = {key: episode[key] for key in keys if key in episode}
    print(write_image(out, draw_episode_curves(curves, name)))
    return 0


def choose_episode(reader: Reader, name: str) -> str:
    """Return `name` if there is such an episode, or the first if it is empty."""
    names = reader.names()
    if not names:
        raise UserError(
            f"{reader.origin} has no episodes.\n  Fix: use a dataset with episodes."
        )
    if name and name not in names:
        raise UserError(
            f"{reader.origin} has no episode {name!r}. It has: "
            f"{', '.join(names[:4])}, ...\n  Fix: --episode {names[0]}"
        )
    return name or names[0]


def demos_command(path: str, options: DemosOptions) -> int:
    """Record successful episodes of an expert policy as HDF5."""
    from reverie.recordings.demonstrate import record_demonstrations

    out, count = Path(path).expanduser(), options.episodes
    rows = record_demonstrations(
        options.task, out, count, options.seed, options.noise, options.env
    )
    print(f"{count} demonstrations of {options.task} with {rows} rows in {out}.")
    return 0


DATA_COMMANDS: dict[str, DataCommand] = {
    "inspect": DataCommand(inspect_command, InspectOptions),
    "convert": DataCommand(convert_command, ConvertOptions, ("SRC", "DST")),
    "merge": DataCommand(
        merge_command, MergeOptions, ("SRC", "SRC", "DST"), takes_more=True
    ),
    "split": DataCommand(split_command, SplitOptions, ("SRC", "DST")),
    "stats": DataCommand(stats_command, StatsOptions),
    "view": DataCommand(view_command, ViewOptions),
    "demos": DataCommand(demos_command, DemosOptions, ("FILE",), ("task", "env")),
}


class ProgressBar:
    """Progress bar on a terminal; in other outputs a line per ten percent."""

    def __init__(self, label: str):
        self.label, self._printed, self._is_tty = label, -1, sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // max(total, 1)
        if self._is_tty:
            bar = "#" * tenths + "." * (10 - tenths)
            print_message(f"\r{self.label} [{bar}] {done}/{total}", end="")
        elif tenths > self._printed:
            self._printed = tenths
            print_message(f"{self.label} {done}/{total}")

    def end(self) -> None:
        if self._is_tty:
            print_message("")


def print_skipped(bad: dict[str, str]) -> None:
    """Print the episodes that were skipped, with the reason."""
    for name, why in bad.items():
        print_message(f"skipped: {name} {why}")


def all_cameras(episode: Episode) -> np.ndarray | None:
    """Return the RGB frames of all cameras next to each other; None without images."""
    views = [
        cameras_side_by_side(value) for value in episode.values() if is_image(value)
    ]
    if not views:
        return None
    height = max(view.shape[1] for view in views)
    padding = [((0, 0), (0, height - view.shape[1]), (0, 0), (0, 0)) for view in views]
    return np.concatenate([np.pad(*x) for x in zip(views, padding, strict=True)], 2)


def _link_files(reader: FolderReader, names: list[str], folder: Path) -> None:
    """Hard-link the files of some episodes; copy them if linking fails."""
    make_folder(folder, parents=True)
    for name in names:
        target = folder / reader.paths[name].name
        if target.exists():
            continue
        source = reader.paths[name].resolve()  # link the file itself, not a symlink
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without hard links
            with atomic_write(target) as temporary:
                shutil.copyfile(source, temporary)
    masks = {m: [n for n in names if n in set(v)] for m, v in reader.masks.items()}
    DatasetMetadata(reader.obs_space, reader.act_space, masks).write(folder)


def _base_name(path: str) -> str:
    """Return the name of a dataset without its folder, format and suffix."""
    return Path(path.rpartition(":")[2]).stem or "recordings"
