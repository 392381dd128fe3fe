"""Sink that writes images and videos to `<logdir>/media`."""

from __future__ import annotations

from pathlib import Path

from reverie.log.record import Record, Sink
from reverie.render.video import FPS, upscale, video_suffix, write_image, write_video


class MediaSink(Sink):
    """Writes PNG and GIF files (MP4 if an encoder is installed).

    `train/openloop/image` at step 5000 becomes
    `media/train-openloop-image-000000005000.gif`. The newest `keep` files of each name
    are kept. A resumed run overwrites the files of the steps that it repeats.
    """

    name = "media"

    def __init__(self, logdir: Path, fps: float = FPS, keep: int = 10):
        self.folder = logdir / "media"
        self.fps = fps
        self.keep = keep
        self.video_suffix = f".{video_suffix()}"

    def write(self, record: Record) -> None:
        for name, image in record.images.items():
            write_image(self._path(name, record.step, ".png"), upscale(image))
            self._delete_old(name)
        for name, video in record.videos.items():
            path = self._path(name, record.step, self.video_suffix)
            write_video(path, upscale(video), self.fps)
            self._delete_old(name)

    def _path(self, name: str, step: int, suffix: str) -> Path:
        return self.folder / f"{_file_stem(name)}-{step:012d}{suffix}"

    def _delete_old(self, name: str) -> None:
        digits = "[0-9]" * 12
        files = sorted(self.folder.glob(f"{_file_stem(name)}-{digits}.*"))
        for path in files[: max(0, len(files) - self.keep)]:
            path.unlink(missing_ok=True)


def _file_stem(name: str) -> str:
    return "".join(c if c.isalnum() or c in "_-." else "-" for c in name)
