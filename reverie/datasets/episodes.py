"""Open recorded episodes of any format; used by every command that reads episodes.

`open_episodes` detects the format of a path, applies the key map and the transforms,
and returns a `Reader`. So training reads the same episodes from a path as from the
output of `reverie data convert` for this path.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from reverie.api import UserError
from reverie.datasets.action_units import ConvertedActionsReader, normalize_actions
from reverie.datasets.episode_format import LOG, BadEpisode, Episode, check_episode
from reverie.datasets.readers import Reader, find_reader_type, make_reader
from reverie.datasets.readers.key_map import KeyMap
from reverie.datasets.transforms import ROBOMIMIC, TransformedReader, Transforms
from reverie.spaces import STEP_KEYS, Spaces


@dataclass(frozen=True)
class ReaderConfig(Transforms):
    """How recorded episodes are read."""

    like: Literal["", "robomimic"] = ""
    """`robomimic`: use robomimic's usual observations of single-arm tasks for each of
    `images`, `vectors` and `aux` that is empty."""
    action_bounds: tuple[float, float] = (0.0, 0.0)
    """Lower and upper bound of continuous actions in the environment's own units, for
    data that does not store its bounds; 0 0 uses the bounds in the data."""
    map: KeyMap = field(default_factory=KeyMap)
    """Layout of HDF5 and NPZ files."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.action_bounds
        if low > high or (low == high and low):
            raise ValueError(
                f"action_bounds must be a lower and a higher number, or 0 0, not "
                f"{low} {high}"
            )

    @property
    def transforms(self) -> Transforms:
        """The transforms to apply, with the observations of `like` filled in."""
        default = ROBOMIMIC if self.like else Transforms()
        return Transforms(
            self.images or default.images,
            self.vectors or default.vectors,
            self.aux or default.aux,
            self.flip,
            self.size,
        )


def open_episodes(
    path: str | Path,
    config: ReaderConfig | None = None,
    *,
    spaces: tuple[Spaces, Spaces] | None = None,
    incomplete: bool = False,
) -> Reader:
    """Open a file, folder or dataset id of any format in `READERS`.

    Bounded continuous actions are scaled to [-1, 1] (see `action_units.py`).

    `spaces` are the expected observation and action spaces; NPZ files use them to
    decode actions, because they do not store whether an action is discrete.
    `incomplete` also accepts NPZ files without actions, rewards or flags.
    """
    config = config or ReaderConfig()
    if config.map != KeyMap() and "map" not in find_reader_type(path)[1].options:
        raise UserError(
            f"A key map describes HDF5 and NPZ files, and {path} is neither.\n"
            "  Fix: leave out the --map (or --offline.read.map) options."
        )
    reader = make_reader(path, map=config.map, spaces=spaces, incomplete=incomplete)
    reader = normalize_actions(reader, config.action_bounds)
    transforms = config.transforms
    return (
        reader if transforms == Transforms() else TransformedReader(reader, transforms)
    )


def iterate_episodes(
    path: str | Path,
    obs_space: Spaces,
    act_space: Spaces,
    config: ReaderConfig | None = None,
) -> Iterator[tuple[str, Episode]]:
    """Yield name and episode for every episode that matches the spaces.

    Used to fill a replay buffer. Actions are converted to the units of `act_space`.
    Other episodes are skipped with a warning.
    """
    episodes = open_episodes(path, config, spaces=(obs_space, act_space))
    reader = ConvertedActionsReader(episodes, act_space, "the environment")
    if reader.unit_warning:
        warnings.warn(reader.unit_warning, RuntimeWarning, stacklevel=2)
    wanted = {
        key: space
        for key, space in {**obs_space, **act_space}.items()
        if key not in STEP_KEYS and not key.startswith(LOG)
    }
    errors = []
    for name in reader.names():
        try:
            episode = reader.read(name)
            episode = {
                key: value.astype(wanted[key].dtype, copy=False)
                if key in wanted
                else value
                for key, value in episode.items()
                if key in wanted or key in STEP_KEYS or key.startswith(LOG)
            }
            check_episode(episode, obs_space, act_space)
        except BadEpisode as error:
            errors.append(f"{name} {error}")
            message = f"{reader.origin}: {errors[-1]}; skipped"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            continue
        yield name, episode
    reader.close()
    if len(errors) == len(reader.names()):
        raise UserError(
            f"None of the {len(errors)} episodes in {path} can be used "
            f"({next(iter(errors), 'there are none')}).\n"
            "  Fix: check that they were recorded in this task."
        )
