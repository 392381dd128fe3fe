"""Recorded episodes to watch: the NPZ files of `reverie data export` and their like.

Files follow dreamerv3-torch, where `action[t]` *led to* row t: ours is one row earlier.
Every tenth file is kept for evaluation. Rewards are the events.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

import numpy as np

from reverie.api import Space, Spaces, UserError, Window
from reverie.data.readers import npz
from reverie.data.sources import EVENT, Arrays, SourceConfig
from reverie.data.sources.maze import Crops


def read_episode(path: Path, window: int) -> Arrays:
    """One file as rows of ours; ValueError says what is wrong with it."""
    data = npz.load(path)
    for key in ("image", "action"):
        if key not in data:
            raise ValueError(f"has no {key!r}, only {', '.join(data) or 'nothing'}")
    image, action = data["image"], data["action"]
    if image.ndim != 4 or image.dtype != np.uint8:
        raise ValueError(
            f"'image' is {image.dtype} {image.shape}, wanted uint8 (T, h, w, c)"
        )
    action = action.reshape(len(action), -1).astype(np.float32)
    if len(action) != len(image):
        raise ValueError(f"'action' has {len(action)} rows, 'image' {len(image)}")
    if not np.isfinite(action).all():
        raise ValueError("'action' has entries that are not finite")
    if len(image) < window:
        raise ValueError(f"has {len(image)} frames, a window has {window}")
    reward = data.get("reward", np.zeros(len(image)))
    taken = np.concatenate([action[1:], np.zeros_like(action[:1])])
    return {"image": image, "action": taken, EVENT: reward != 0}


class Episodes:
    """Windows of recorded episodes, with the actions that were taken."""

    loss: Literal["bernoulli", "gaussian"] = "gaussian"

    def __init__(self, config: SourceConfig, window: Window, seed: int):
        folder, length = (
            Path(config.folder).expanduser(),
            window.context + window.length,
        )
        paths = sorted(folder.glob("*.npz")) if config.folder else []
        if len(paths) < 2:
            raise UserError(
                f"{config.folder!r} holds no two episodes (*.npz).\n  Fix: write some "
                "with `reverie data export LOGDIR FOLDER`, and give --source.folder."
            )
        episodes, wrong = [], []
        for path in paths:
            try:
                episodes.append(read_episode(path, length))
            except ValueError as error:
                wrong.append(f"{path} {error}")
                warnings.warn(f"{wrong[-1]}; skipped", RuntimeWarning, stacklevel=2)
        shapes = {(e["image"].shape[1:], e["action"].shape[1:]) for e in episodes}
        if len(episodes) < 2 or len(shapes) > 1:
            why = wrong[0] if wrong else f"they have several shapes, {sorted(shapes)}"
            raise UserError(
                f"The episodes in {folder} cannot be used: {why}.\n"
                f"  Fix: give episodes of one task with at least {length} frames."
            )
        self.config = config
        ((image, action),) = shapes
        self.obs_space: Spaces = {"image": Space(np.uint8, image, 0, 256)}
        self.act_space: Spaces = {"action": Space(np.float32, action)}
        self._train = Crops([e for i, e in enumerate(episodes) if i % 10], window, seed)
        self._test = Crops(episodes[::10], window, seed)

    def batch(self, step: int) -> Arrays:
        return self._train.batch(step)

    def evaluation(self) -> Arrays:
        return self._test.evaluation(self.config.evaluation)

    def close(self) -> None:
        pass
