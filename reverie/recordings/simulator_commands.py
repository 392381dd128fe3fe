"""The commands `reverie data replay` and `reverie data render` (with a simulator)."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reverie.api import UserError
from reverie.config import check_minimum
from reverie.datasets.convert import FileFormat, WriterConfig, convert, refuse_existing
from reverie.datasets.episode_cache import OnBadEpisode
from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.readers import Reader
from reverie.datasets.readers.key_map import KeyMap
from reverie.datasets.robomimic import write_robomimic
from reverie.log.messages import print_message
from reverie.recordings.commands import (
    ProgressBar,
    all_cameras,
    choose_episode,
    print_skipped,
)
from reverie.recordings.simulate import (
    RenderedReader,
    ReplayMode,
    Simulator,
    SimulatorConfig,
    describe_settings,
)
from reverie.render.video import upscale, video_suffix, write_video

DEFAULT_FPS = 15
"""Frames per second of a video if the environment does not state its speed."""


@dataclass(frozen=True)
class SimulatorOptions(SimulatorConfig):
    """Options that both commands have."""

    map: KeyMap = field(default_factory=KeyMap)
    """Layout of the recording."""

    def open(self, path: str, seed: int = 0) -> tuple[Reader, Simulator]:
        """Open a recording and its simulator; print the recorded settings."""
        reader = open_episodes(path, ReaderConfig(map=self.map))
        simulator = Simulator(self, reader, seed)
        if simulator.settings:
            flags = describe_settings(self.task, simulator.settings)
            print_message(f"Settings of the recording: {flags}")
        if simulator.unit_warning:
            warnings.warn(simulator.unit_warning, RuntimeWarning, stacklevel=2)
        return reader, simulator


@dataclass(frozen=True)
class ReplayOptions(SimulatorOptions):
    episode: str = ""
    """Name of the episode; default the first."""
    play: ReplayMode = "actions"
    """Play the recorded `actions` from the first state, or all recorded `states`."""
    seed: int = 0
    """Seed of the environment, for recordings without simulator states."""
    out: str = ""
    """Video file, .mp4 or .gif; default `NAME-replay`, in the working directory."""
    fps: int = 0
    """Frames per second; 0 for the speed of the environment."""

    def __post_init__(self) -> None:
        check_minimum(self, seed=0, fps=0)


@dataclass(frozen=True)
class RenderOptions(SimulatorOptions):
    first: int = 0
    """Number of episodes to render, starting with the first; 0 for all."""
    format: FileFormat = "npz"
    """File format if DST is a folder. If DST ends in .hdf5 or .h5, it is written in
    robomimic's layout."""
    bad: OnBadEpisode = "stop"
    """What to do with episodes that cannot be rendered: `skip` or `stop`."""

    def __post_init__(self) -> None:
        check_minimum(self, first=0)


def replay_command(path: str, options: ReplayOptions) -> int:
    """Play a recorded episode open loop in its simulator, and compare the two.

    Writes a video of recorded and simulated images.
    """
    reader, simulator = options.open(path, options.seed)
    with simulator, contextlib.closing(reader):
        name = choose_episode(reader, options.episode)
        try:
            replay = simulator.replay(name, options.play)
        except BadEpisode as error:
            raise UserError(
                f"{path}: {name} {error}.\n  Fix: choose another with --episode."
            ) from None
        env_fps = round(getattr(simulator.env, "render_fps", 0))
    fps = options.fps or env_fps or DEFAULT_FPS
    print(f"{name} in {options.task}, {options.play}: {replay.describe()}")
    frames = all_cameras(replay.frames())
    if frames is None:
        print("  No video: neither the recording nor the task has images.")
        return 0
    out = Path(options.out or f"{name}-replay.{video_suffix()}").expanduser()
    print(f"  video: {write_video(out, upscale(frames), fps)}")
    return 0


def render_command(path: str, out: str, options: RenderOptions) -> int:
    """Render image observations from the simulator states of a recording."""
    destination = Path(out).expanduser()
    refuse_existing(destination)
    reader, simulator = options.open(path)
    with simulator, contextlib.closing(reader):
        rendered = RenderedReader(reader, simulator)
        names = rendered.names()[: options.first or None]
        bad = _write_episodes(rendered, destination, names, options)
    print_skipped(bad)
    print(f"{len(names) - len(bad)} episodes in {destination}.")
    return 0


def _write_episodes(
    reader: Reader, destination: Path, names: list[str], options: RenderOptions
) -> dict[str, str]:
    """Write episodes as HDF5 or as a folder; return those that were skipped."""
    bar = ProgressBar("rendered")
    bad: dict[str, str] = {}
    if destination.suffix in (".hdf5", ".h5"):
        episodes = _read_each(reader, names, options.bad, bad, bar)
        env_args: Any = json.loads(reader.metadata.get("env_args", "{}"))
        write_robomimic(
            destination,
            episodes,
            reader.act_space,
            masks=reader.masks,
            env_args=env_args,
        )
    else:
        config = WriterConfig(options.bad)
        bad = convert(reader, destination, None, config, names, bar, options.format).bad
    bar.end()
    return bad


def _read_each(
    reader: Reader,
    names: list[str],
    on_bad: OnBadEpisode,
    bad: dict[str, str],
    progress: ProgressBar,
) -> Iterator[tuple[str, Episode]]:
    """Yield the episodes; bad ones raise an error, or are added to `bad`."""
    for done, name in enumerate(names, 1):
        try:
            yield name, reader.read_valid(name)
        except BadEpisode as error:
            if on_bad == "stop":
                raise UserError(
                    f"{reader.origin}: {name} {error}.\n"
                    "  Fix: repair it, or leave out such episodes with --bad skip."
                ) from None
            bad[name] = str(error)
        progress(done, len(names))
