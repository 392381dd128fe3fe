"""Conversion of images with any number of channels to RGB."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8


def to_rgb(
    images: UInt8[np.ndarray, "*b h w c"], last: bool = False
) -> UInt8[np.ndarray, "*b h w 3"]:
    """Return three channels of the images; a single channel is repeated.

    If there are more channels, the first three are used, or the last three if `last`
    (the newest frame of a frame stack).
    """
    if images.shape[-1] >= 3:
        return images[..., -3:] if last else images[..., :3]
    return np.repeat(images[..., -1:] if last else images[..., :1], 3, -1)


def cameras_side_by_side(
    images: UInt8[np.ndarray, "*b h w c"],
) -> UInt8[np.ndarray, "*b h W 3"]:
    """Place cameras that are stacked along the channels next to each other.

    Every three channels are one camera. If the number of channels is not a multiple of
    three, only the first channel is shown, in gray.
    """
    count, remainder = divmod(images.shape[-1], 3)
    if remainder or not count:
        return to_rgb(images[..., :1])
    return np.concatenate(np.split(images, count, -1), -2)
