"""Recorded episodes to watch: whatever `reverie.datasets.readers` can read.

That is the folder of a run with its replay, episodes stored by us, and datasets of
others. NPZ files are read here, because less will do of them: `image` and `action`.
They follow dreamerv3-torch, where `action[t]` *led to* row t: ours is one row earlier.
Every tenth episode is kept for evaluation. Rewards, where there are any, are events.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import problems
from reverie.datasets.readers import Reader, npz, open_reader
from reverie.datasets.sequences import Arrays, Loss, SourceConfig
from reverie.datasets.synthetic.maze import Crops, with_same_events
from reverie.rows import Window
from reverie.spaces import EVENT, Space, Spaces


def read_episode(path: Path, window: int, actions: bool = True) -> Arrays:
    """One file as rows of ours; ValueError says what is wrong with it."""
    data = npz.load(path)
    images = [k for k, v in data.items() if v.dtype == np.uint8 and v.ndim == 4]
    seen = images[0] if len(images) == 1 else "image"
    for key in (seen, "action") if actions else (seen,):
        if key not in data:
            raise ValueError(f"has no {key!r}, only {', '.join(data) or 'nothing'}")
    image = data[seen]
    if image.ndim != 4 or 0 in image.shape[1:] or image.dtype != np.uint8:
        raise ValueError(
            f"{seen!r} is {image.dtype} {image.shape}, wanted uint8 (T, h, w, c)"
        )
    taken = _leading_on(data["action"], len(image)) if actions else None
    if len(image) < window:
        raise ValueError(f"has {len(image)} frames, a window has {window}")
    rows = {seen: image}
    if taken is not None:
        rows["action"] = taken
    if "reward" in data:
        reward = data["reward"]
        if reward.size != len(image) or reward.dtype.kind not in "biuf":
            came = f"{reward.dtype} {reward.shape}"
            raise ValueError(f"'reward' is {came}, wanted {len(image)} numbers")
        if not np.isfinite(reward).all():
            raise ValueError("'reward' has entries that are not finite")
        rows[EVENT] = reward.reshape(len(image)) != 0
    return rows


def _leading_on(action: np.ndarray, frames: int) -> np.ndarray:
    """Actions that led to their rows, as ones that lead to the next."""
    if action.shape[:1] != (frames,) or action.dtype.kind not in "biuf":
        raise ValueError(
            f"'action' is {action.dtype} {action.shape}, wanted numbers in "
            f"{frames} rows"
        )
    action = action.reshape(frames, -1).astype(np.float32)
    if not np.isfinite(action).all():
        raise ValueError("'action' has entries that are not finite")
    return np.concatenate([action[1:], np.zeros_like(action[:1])])


def read_recorded(
    reader: Reader, name: str, key: str, window: int, actions: bool = True
) -> Arrays:
    """One episode of any other kind, of which only one image is of interest."""
    episode = reader.read_some(name, [key])
    spaces = {key: reader.obs_space[key]}
    if wrong := problems({**episode}, spaces, reader.act_space):
        raise ValueError(wrong[0])
    if len(episode[key]) < window:
        raise ValueError(f"has {len(episode[key])} frames, a window has {window}")
    rows = {key: episode[key], EVENT: episode["reward"] != 0}
    return {**rows, **{act: episode[act] for act in reader.act_space if actions}}


def only_image(reader: Reader) -> str:
    images = [key for key, space in reader.obs_space.items() if space.is_image]
    if len(images) != 1:
        found = ", ".join(images) or "none"
        raise UserError(
            f"{reader.origin} should have one image to watch, here are: {found}.\n"
            "  Fix: `reverie data convert` keeps the ones named with --images."
        )
    return images[0]


class Episodes:
    """Windows of recorded episodes, with the actions that were taken (if wanted)."""

    loss: Loss = "gaussian"

    def __init__(self, config: SourceConfig, window: Window, seed: int):
        folder, length = config.folder, window.context + window.length
        if not folder:
            raise UserError(
                "There are no episodes to watch.\n  Fix: give the folder of a run, or "
                "of what `reverie data export LOGDIR FOLDER` wrote, as --source.folder."
            )
        paths = sorted(Path(folder).expanduser().glob("*.npz"))
        readings: dict[str, Callable[[], Arrays]]
        if paths:
            readings = {
                str(path): partial(read_episode, path, length, config.actions)
                for path in paths
            }
        else:
            reader = open_reader(folder)
            key = only_image(reader)
            readings = {
                name: partial(read_recorded, reader, name, key, length, config.actions)
                for name in reader.names()
            }
        episodes, wrong = [], []
        for name, read in readings.items():
            try:
                episodes.append(read())
            except ValueError as error:
                wrong.append(f"{name} {error}")
        if wrong:
            some = f"{len(wrong)} of {len(readings)} episodes are left out"
            warnings.warn(f"{some}: {wrong[0]}", RuntimeWarning, stacklevel=2)
        episodes = with_same_events(episodes)
        shapes = {tuple((k, v.shape[1:]) for k, v in e.items()) for e in episodes}
        if len(episodes) < 2 or len(shapes) > 1:
            why = wrong[0] if wrong else "there are too few"
            if len(shapes) > 1:
                why = f"they have several shapes, {sorted(shapes)}"
            if "no 'action'" in why:
                why += " (--source.actions False does without)"
            raise UserError(
                f"The episodes in {folder} cannot be used: {why}.\n  Fix: mend or "
                "leave out such episodes; two or more of one task are needed, with at "
                f"least {length} frames (fewer with a smaller --vta.world.length)."
            )
        self.config = config
        self.act_space: Spaces = {}
        if paths:
            key = next(iter(episodes[0]))
            shape = {key: value.shape[1:] for key, value in episodes[0].items()}
            self.obs_space: Spaces = {key: Space(np.uint8, shape[key], 0, 256)}
            if config.actions:
                self.act_space["action"] = Space(np.float32, shape["action"])
        else:
            self.obs_space = {key: reader.obs_space[key]}
            if config.actions:
                self.act_space |= reader.act_space
            reader.close()
        self._train = Crops([e for i, e in enumerate(episodes) if i % 10], window, seed)
        self._test = Crops(episodes[::10], window, seed)

    def batch(self, step: int) -> Arrays:
        return self._train.batch(step)

    def evaluation(self) -> Arrays:
        return self._test.evaluation(self.config.evaluation)

    def close(self) -> None:
        pass
