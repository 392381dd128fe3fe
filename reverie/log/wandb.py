"""Weights & Biases. `WANDB_PROJECT`, `WANDB_ENTITY` and `WANDB_MODE` mean what they
mean to wandb itself; its files stay inside the logdir."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from reverie.log.packages import need
from reverie.log.record import Record
from reverie.render.video import encode_gif


class Wandb:
    """One W&B run per logdir: a resumed run continues under the same id."""

    name = "wandb"

    def __init__(
        self, logdir: Path, fps: int = 15, settings: dict[str, Any] | None = None
    ):
        wandb = need("wandb", "wandb")
        self.fps = fps
        self._wandb = wandb
        self._scratch = logdir / "wandb"
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "reverie"),
            entity=os.environ.get("WANDB_ENTITY"),
            mode=os.environ.get("WANDB_MODE"),
            dir=str(logdir),
            id=_run_id(logdir),
            name=logdir.name,
            resume="allow",
            config=settings or {},
        )

    def write(self, record: Record) -> None:
        entry: dict[str, Any] = {**record.scalars, **record.texts}
        for name, image in record.images.items():
            entry[name] = self._wandb.Image(_three_channels(image))
        for name, video in record.videos.items():
            path = self._scratch / (name.replace("/", "-") + ".gif")
            path.write_bytes(encode_gif(video, self.fps))
            entry[name] = self._wandb.Video(str(path), format="gif")
        self._run.log(entry, step=record.step)

    def truncate_after(self, step: int) -> None:
        """W&B keeps its first answer for each step and warns about the second."""

    def close(self) -> None:
        self._run.finish()


def _run_id(logdir: Path) -> str:
    """An id that stays with the folder, even when the folder is moved."""
    path = logdir / "wandb" / "run-id.txt"
    if not path.exists():
        seed = os.urandom(16) + str(logdir).encode()
        path.write_text(hashlib.sha256(seed).hexdigest()[:12])
    return path.read_text().strip()


def _three_channels(image: np.ndarray) -> np.ndarray:
    return np.repeat(image, 3, -1) if image.shape[-1] == 1 else image
