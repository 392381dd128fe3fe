"""Reader of LeRobot datasets, as `lerobot:ID` or by folder.

A frame has `observation.*`, the `action` taken there, and in some datasets
`next.reward` and `next.done`, the result of that action. There is no frame after the
last action, so the last observation is repeated, which keeps the last reward and
terminal flag.
Images are floats in [0, 1], channels first, and are converted to uint8, channels last.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, from_steps
from reverie.datasets.readers import Reader, as_bad_episode

PREFIX = "observation."


class LeRobotReader(Reader):
    """Reads the episodes of one dataset, named by their numbers."""

    bounds_entry = "`action` in its meta/stats.json"

    def __init__(self, path: str):
        self.origin = str(path)
        self.masks: dict[str, list[str]] = {}
        self._data = _load(str(path))
        ranges = enumerate(_frame_ranges(self._data))
        self._frame_ranges = {f"episode_{i}": frames for i, frames in ranges}
        self._names = list(self._frame_ranges)

    def rows(self, name: str) -> int:
        start, stop = self._frame_ranges[name]
        return stop - start + 1

    def read(self, name: str) -> Episode:
        with as_bad_episode("LeRobot"):
            return self._read(*self._frame_ranges[name])

    def _read(self, start: int, stop: int) -> Episode:
        """Read the episode with the frames `start` to `stop - 1` of the dataset."""
        frames = [self._data[i] for i in range(start, stop)]
        if not frames:
            raise BadEpisode("is empty")
        keys = [key for key in frames[0] if key.startswith(PREFIX)]
        obs = {_short_name(key): _convert_images(_stack(frames, key)) for key in keys}
        steps = len(frames)
        reward, done = (
            _stack(frames, key).reshape(steps, -1)[:, 0]
            if key in frames[0]
            else np.zeros(steps, np.float32)
            for key in ("next.reward", "next.done")
        )
        obs = {key: np.concatenate([v, v[-1:]]) for key, v in obs.items()}
        action = _stack(frames, "action")
        if action.ndim == 1 and action.dtype.kind == "f":  # a single entry is a scalar
            action = action[:, None]
        return from_steps(obs, {"action": action}, reward, done)

    def _declared_bounds(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the range of all actions, if it is recorded and exceeds [-1, 1]."""
        stats = getattr(getattr(self._data, "meta", None), "stats", None) or {}
        if not {"min", "max"} <= dict(stats.get("action", {})).keys():
            return None
        low, high = (np.asarray(stats["action"][k], np.float32) for k in ("min", "max"))
        return None if low.min() >= -1 and high.max() <= 1 else (low, high)


def _short_name(key: str) -> str:
    """Shorten `observation.images.top` to `top`, and `observation.state` to `state`."""
    return key.removeprefix(PREFIX).removeprefix("images.")


def _stack(frames: list[dict[str, Any]], key: str) -> np.ndarray:
    """Return the values of one key in all frames as an array."""
    return np.stack([np.asarray(frame[key]) for frame in frames])


def _convert_images(value: np.ndarray) -> np.ndarray:
    """Convert images to uint8, channels last; return other arrays unchanged."""
    if value.ndim != 4:
        return value
    if value.shape[1] in (1, 3) and value.shape[3] not in (1, 3):
        value = np.moveaxis(value, 1, 3)
    if value.dtype.kind == "f":
        value = np.clip(value * 255, 0, 255).round().astype(np.uint8)
    return np.ascontiguousarray(value)


def _frame_ranges(data: Any) -> list[tuple[int, int]]:
    """Return the first frame and one past the last frame of every episode.

    LeRobot before 0.4 stores them in the dataset object, later versions in `meta`.
    """
    index = getattr(data, "episode_data_index", None)
    if index is not None:
        pairs = zip(index["from"], index["to"], strict=True)
    else:
        table = data.meta.episodes
        first, last = table["dataset_from_index"], table["dataset_to_index"]
        pairs = zip(first, last, strict=True)
    return [(int(start), int(stop)) for start, stop in pairs]


def _load(path: str) -> Any:
    """Open a dataset with LeRobot, as `LeRobotDataset`."""
    name = path.removeprefix("lerobot:")
    try:
        try:
            from lerobot.datasets.lerobot_dataset import LeRobotDataset
        except ImportError:  # before version 0.3.2
            from lerobot.common.datasets.lerobot_dataset import LeRobotDataset
    except ImportError:
        raise UserError(
            f"The dataset {name!r} needs the package 'lerobot', which is not installed."
            "\n  Fix: pip install lerobot, in a separate virtual environment with "
            "Reverie: packages of other extras may be incompatible."
        ) from None
    try:
        if path.startswith("lerobot:"):
            return LeRobotDataset(name)
        return LeRobotDataset(Path(path).name, root=Path(path))
    except Exception as error:  # the files of a dataset are read by LeRobot
        raise UserError(
            f"LeRobot cannot open {name!r} ({error}).\n"
            "  Fix: check the name, and that it was downloaded."
        ) from None
