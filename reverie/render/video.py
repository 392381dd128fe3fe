"""Pictures and films as files: PNG, GIF, and MP4 where an encoder is installed."""

from __future__ import annotations

import importlib.util
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from reverie.api import UserError
from reverie.storage.atomic import write_file

LEGIBLE = 192
"""Pixels the longer side should have at least for a person to see much."""


def write_video(
    path: Path | str, frames: UInt8[np.ndarray, "T h w c"], fps: int = 15
) -> Path:
    """Write a film as the file's ending says: .gif, or .mp4 with `reverie[video]`.

    The file appears whole or not at all.
    """
    path = Path(path)
    if not len(frames):
        raise ValueError(f"{path}: a film needs at least one frame")
    if path.suffix == ".gif":
        return _write(path, encode_gif(frames, fps))
    if path.suffix == ".mp4":
        return _write(path, encode_mp4(frames, fps))
    raise UserError(
        f"Videos are written as .gif or .mp4, not as {path.name!r}.\n"
        f"  Fix: name the file {path.with_suffix('.gif').name}"
    )


def write_image(path: Path | str, image: UInt8[np.ndarray, "h w c"]) -> Path:
    """Write a PNG, whole or not at all."""
    return _write(Path(path), encode_png(image))


def encode_png(image: UInt8[np.ndarray, "h w c"]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(_displayable(image)).save(buffer, "PNG")
    return buffer.getvalue()


def encode_gif(frames: UInt8[np.ndarray, "T h w c"], fps: int = 15) -> bytes:
    """A film that plays forever. Equal frames in a row are stored as one long one."""
    from PIL import Image

    images = [_with_palette(Image.fromarray(_displayable(frame))) for frame in frames]
    buffer = io.BytesIO()
    images[0].save(
        buffer,
        "GIF",
        save_all=True,
        append_images=images[1:],
        duration=max(20, round(1000 / fps)),  # faster, and browsers slow it down
        loop=0,
    )
    return buffer.getvalue()


def encode_mp4(frames: UInt8[np.ndarray, "T h w c"], fps: int = 15) -> bytes:
    if not can_write_mp4():
        raise UserError(
            "Writing .mp4 needs imageio with ffmpeg, which is not installed.\n"
            "  Fix: pip install 'reverie[video]', or write a .gif"
        )
    import tempfile

    imageio: Any = importlib.import_module("imageio.v2")
    even = [(0, 0), (0, frames.shape[1] % 2), (0, frames.shape[2] % 2), (0, 0)]
    frames = np.pad(frames, even, mode="edge")  # the encoder halves both sides
    with tempfile.TemporaryDirectory() as folder:
        film = os.path.join(folder, "film.mp4")
        with imageio.get_writer(
            film, fps=fps, codec="libx264", macro_block_size=1, quality=8
        ) as writer:
            for frame in frames:
                writer.append_data(_rgb(frame))
        return Path(film).read_bytes()


def can_write_mp4() -> bool:
    return all(
        importlib.util.find_spec(name) is not None
        for name in ("imageio", "imageio_ffmpeg")
    )


def enlarge(
    picture: UInt8[np.ndarray, "*b h w c"], at_least: int = LEGIBLE
) -> UInt8[np.ndarray, "*b H W c"]:
    """Repeat pixels until the longer side of an image or film is legible."""
    factor = -(-at_least // max(picture.shape[-3:-1]))
    return picture.repeat(factor, -3).repeat(factor, -2) if factor > 1 else picture


def _displayable(image: np.ndarray) -> np.ndarray:
    """What Pillow takes: h w for one channel, h w 3 or h w 4."""
    if image.shape[-1] == 1:
        return image[..., 0]
    if image.shape[-1] in (3, 4):
        return np.ascontiguousarray(image)
    return _rgb(image)


def _with_palette(image: Any) -> Any:
    """At most 256 colours, exact if the picture has no more.

    Pillow's own way to choose them takes ten times as long.
    """
    if image.mode != "RGB":
        return image
    from PIL import Image

    few = image.getcolors(256)
    if few is None:
        return image.quantize(256, Image.Quantize.FASTOCTREE)
    palette = Image.new("P", (1, 1))
    palette.putpalette([value for _, colour in few for value in colour])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


def _rgb(image: np.ndarray) -> np.ndarray:
    """Three channels: one is repeated, of others the first three are shown."""
    channels = image.shape[-1]
    if channels >= 3:
        return np.ascontiguousarray(image[..., :3])
    return np.repeat(image[..., :1], 3, -1)


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data, sync=False)
    return path
