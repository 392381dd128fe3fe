"""Image and video files: PNG, GIF, and MP4 if an encoder is installed."""

from __future__ import annotations

import importlib.util
import io
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from reverie.api import UserError
from reverie.plugins import install_command
from reverie.render.channels import to_rgb
from reverie.storage.atomic import make_parent, write_file

MIN_SIZE = 192
"""Minimum length of the longer side of an upscaled image, in pixels."""

FPS = 15
"""Default frames per second of a video."""

MIN_SECONDS, PAUSE = 2.0, 1.0
"""Minimum duration of a video, and additional duration of its last frame."""

GIF_FPS = 50
"""Maximum frames per second of a GIF; browsers play faster ones slowly."""


def write_video(
    path: Path | str, frames: UInt8[np.ndarray, "T h w c"], fps: float = FPS
) -> Path:
    """Write a video atomically, as .gif or .mp4 depending on the suffix.

    The video is slowed down to at least two seconds, and pauses on its last frame.
    """
    path = Path(path)
    if not len(frames):
        raise ValueError(f"{path}: a video needs at least one frame")
    if path.suffix == ".gif":
        return _write(path, encode_gif(frames, fps))
    if path.suffix == ".mp4":
        return _write(path, encode_mp4(frames, fps))
    raise UserError(
        f"Videos are written as .gif or .mp4, not as {path.name!r}.\n"
        f"  Fix: name the file {path.with_suffix('.gif').name}"
    )


def write_image(path: Path | str, image: UInt8[np.ndarray, "h w c"]) -> Path:
    """Write a PNG atomically."""
    return _write(Path(path), encode_png(image))


def encode_png(image: UInt8[np.ndarray, "h w c"]) -> bytes:
    buffer = io.BytesIO()
    _to_pillow(image).save(buffer, "PNG")
    return buffer.getvalue()


def encode_gif(
    frames: UInt8[np.ndarray, "T h w c"], fps: float = FPS, colors: int = 256
) -> bytes:
    """Return the content of a GIF that loops; equal frames are merged.

    With fewer than 256 colors, all frames have the same palette, which makes the file
    smaller.
    """
    stride = math.ceil(fps / GIF_FPS)
    frames, fps = frames[::stride], _slow_down(len(frames), fps) / stride
    durations = [round(1000 / fps)] * len(frames)
    durations[-1] += round(1000 * PAUSE)
    images = [_to_pillow(frame) for frame in frames]
    if colors < 256:
        # a palette of about eight frames, evenly spaced
        sample = np.concatenate(frames[:: max(1, len(frames) // 8)])
        palette = _to_pillow(sample).convert("RGB").quantize(colors)
        images = [
            image.convert("RGB").quantize(palette=palette, dither=0) for image in images
        ]
    images = [_with_palette(image) for image in images]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        "GIF",
        save_all=True,
        append_images=images[1:],
        duration=durations,
        loop=0,
    )
    return buffer.getvalue()


def encode_mp4(frames: UInt8[np.ndarray, "T h w c"], fps: float = FPS) -> bytes:
    """Return the content of an MP4 file."""
    if not can_write_mp4():
        raise UserError(
            "Writing .mp4 needs imageio with ffmpeg, which is not installed.\n"
            f"  Fix: {install_command('video')}, or write a .gif"
        )
    imageio: Any = importlib.import_module("imageio.v2")
    # The encoder needs an even width and height.
    padding = [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)]
    fps = _slow_down(len(frames), fps)
    padding[0] = (0, math.ceil(PAUSE * fps))
    frames = np.ascontiguousarray(to_rgb(np.pad(frames, padding, mode="edge")))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "video.mp4"
        with imageio.get_writer(
            str(path), fps=fps, codec="libx264", macro_block_size=1, quality=8
        ) as writer:
            for frame in frames:
                writer.append_data(frame)
        return path.read_bytes()


def _slow_down(frames: int, fps: float) -> float:
    """Reduce the frames per second of a video shorter than `MIN_SECONDS`."""
    return min(fps, frames / MIN_SECONDS)


def can_write_mp4() -> bool:
    """True if the packages that encode MP4 are installed."""
    return all(
        importlib.util.find_spec(name) is not None
        for name in ("imageio", "imageio_ffmpeg")
    )


def video_suffix() -> str:
    """Return `mp4` if it can be written, else `gif`."""
    return "mp4" if can_write_mp4() else "gif"


def upscale(
    images: UInt8[np.ndarray, "*b h w c"], min_size: int = MIN_SIZE
) -> UInt8[np.ndarray, "*b H W c"]:
    """Repeat pixels until the longer side has at least `min_size` pixels."""
    factor = -(-min_size // max(images.shape[-3:-1]))
    return images.repeat(factor, -3).repeat(factor, -2) if factor > 1 else images


def _to_pillow(image: np.ndarray) -> Any:
    """Convert to a Pillow image: gray, RGB, or RGBA for four channels."""
    from PIL import Image

    if image.shape[-1] == 1:
        return Image.fromarray(image[..., 0])
    if image.shape[-1] not in (3, 4):
        image = to_rgb(image)
    return Image.fromarray(np.ascontiguousarray(image))


def _with_palette(image: Any) -> Any:
    """Reduce an RGB image to 256 colors; keep all colors if there are at most 256.

    This is ten times faster than the conversion that Pillow does by default.
    """
    if image.mode != "RGB":
        return image
    from PIL import Image

    colors = image.getcolors(256)
    if colors is None:
        return image.quantize(256, Image.Quantize.FASTOCTREE)
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for _, color in colors for value in color])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


def _write(path: Path, data: bytes) -> Path:
    make_parent(path)
    write_file(path, data, sync=False)
    return path
