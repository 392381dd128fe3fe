"""Sink for Weights & Biases.

The environment variables of W&B have their usual meaning: `WANDB_PROJECT`,
`WANDB_ENTITY`, `WANDB_NAME`, `WANDB_MODE`, and `WANDB_DIR` (or `WANDB_LOGDIR`), the
folder of the W&B files. Without it, they are stored in the logdir.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from reverie.log.record import Record, Sink
from reverie.plugins import import_optional
from reverie.render.channels import to_rgb
from reverie.render.video import FPS, encode_gif
from reverie.storage.atomic import make_folder, write_file
from reverie.storage.limits import read_bytes

MAX_ID_BYTES = 1000
"""Maximum size of the file with the id of the W&B run."""


class WandbSink(Sink):
    """Logs to one W&B run per logdir; a resumed run continues it.

    W&B ignores data of steps that it already has, and prints a warning.
    """

    name = "wandb"

    def __init__(
        self,
        logdir: Path,
        fps: float = FPS,
        settings: dict[str, Any] | None = None,
        name: str = "",
    ):
        wandb = import_optional("wandb", "wandb", "The wandb log")
        self.fps = fps
        self._wandb = wandb
        self._folder = logdir / "wandb"
        make_folder(self._folder, parents=True)
        self._run = wandb.init(
            project=_from_environment("WANDB_PROJECT") or "reverie",
            entity=_from_environment("WANDB_ENTITY"),
            mode=_from_environment("WANDB_MODE"),
            dir=_from_environment("WANDB_DIR", "WANDB_LOGDIR") or str(logdir),
            id=_run_id(logdir),
            name=_from_environment("WANDB_NAME") or name or logdir.name,
            resume="allow",
            config=settings or {},
        )

    def write(self, record: Record) -> None:
        entry: dict[str, Any] = {**record.scalars, **record.texts}
        for name, image in record.images.items():
            image = to_rgb(image) if image.shape[-1] == 1 else image
            entry[name] = self._wandb.Image(image)
        for name, video in record.videos.items():
            path = self._folder / (name.replace("/", "-") + ".gif")
            write_file(path, encode_gif(video, self.fps), sync=False)
            entry[name] = self._wandb.Video(str(path), format="gif")
        self._run.log(entry, step=record.step)

    def close(self) -> None:
        self._run.finish()


def _from_environment(*variables: str) -> str | None:
    """Return the first of these environment variables that is set and not empty."""
    return next((os.environ[name] for name in variables if os.environ.get(name)), None)


def _run_id(logdir: Path) -> str:
    """Id stored in the logdir, so that it stays the same if the folder is moved."""
    path = logdir / "wandb" / "run-id.txt"
    if not path.exists():
        write_file(path, secrets.token_hex(6).encode())
    return read_bytes(path, MAX_ID_BYTES).decode().strip()
