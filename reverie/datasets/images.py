"""Cropping of images before they reach a network.

Training sequences are cropped at a random position, one per sequence; evaluation and
acting use the center. The training feed, the evaluation and the policy use the same
`ImageCrop`, which is stored in the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reverie.api import Obs, StateDict, UserError
from reverie.spaces import Arrays, Space, Spaces, spaces_from_json, spaces_to_json


@dataclass(frozen=True)
class ImageConfig:
    """Cropping of images."""

    crop: tuple[int, int] = (0, 0)
    """Height and width of the crop in pixels; 0 0 disables cropping."""
    random: bool = True
    """Crop training sequences at a random position instead of the center."""

    def __post_init__(self) -> None:
        if min(self.crop) < 0 or (min(self.crop) == 0) != (max(self.crop) == 0):
            raise ValueError(
                f"crop must be a height and a width above 0, or 0 0, not {self.crop}"
            )


class ImageCrop:
    """Crops the images of an observation space."""

    def __init__(self, config: ImageConfig, input_space: Spaces):
        self.config, self.input_space = config, input_space
        self.keys = [key for key, space in input_space.items() if space.is_image]
        self.obs_space = {k: self._crop_space(k, s) for k, s in input_space.items()}

    def _crop_space(self, key: str, space: Space) -> Space:
        if not space.is_image or not self.enabled:
            return space
        center_offset(space.shape[:2], self.config.crop, key)  # raises if too small
        return Space(np.uint8, (*self.config.crop, space.shape[2]), 0, 256)

    @property
    def enabled(self) -> bool:
        return max(self.config.crop) > 0

    def center_crop(self, obs: Obs) -> Obs:
        """Crop arrays or tensors with any leading axes at the center."""
        if not self.enabled:
            return obs
        h, w = self.config.crop
        cropped = dict(obs)
        for key in self.keys:
            top, left = center_offset(obs[key].shape[-3:-1], (h, w), key)
            image = obs[key][..., top : top + h, left : left + w, :]
            is_tensor = isinstance(image, Tensor)
            cropped[key] = (
                image.contiguous() if is_tensor else np.ascontiguousarray(image)
            )
        return cropped

    def augment(self, batch: Arrays, rng: np.random.Generator) -> Arrays:
        """Crop sequences `(B, T, h, w, c)`, each at its own random position."""
        if not self.enabled or not self.config.random:
            return self.center_crop(batch)
        h, w = self.config.crop
        cropped = dict(batch)
        for key in self.keys:
            x = batch[key]
            num_positions = (x.shape[-3] - h + 1, x.shape[-2] - w + 1)
            tops, lefts = (rng.integers(0, n, len(x)).tolist() for n in num_positions)
            cropped[key] = np.stack(
                [
                    frames[:, top : top + h, left : left + w]
                    for frames, top, left in zip(x, tops, lefts, strict=True)
                ]
            )
        return cropped

    def state_dict(self) -> StateDict:
        return {
            "crop": list(self.config.crop),
            "random": self.config.random,
            "spaces": spaces_to_json(self.input_space),
        }


def load_image_crop(state: StateDict) -> ImageCrop:
    """Return the `ImageCrop` that a `state_dict` describes."""
    height, width = (int(n) for n in state["crop"])
    config = ImageConfig((height, width), bool(state["random"]))
    return ImageCrop(config, spaces_from_json(state["spaces"]))


def center_offset(
    size: tuple[int, ...], crop: tuple[int, int], key: str = "image"
) -> tuple[int, int]:
    """Return the top row and left column of a centered crop.

    Raises `UserError` if the image is smaller than the crop.
    """
    if size[0] < crop[0] or size[1] < crop[1]:
        raise UserError(
            f"{key!r} has {size[0]}x{size[1]} pixels, fewer than the crop of "
            f"{crop[0]}x{crop[1]}.\n  Fix: --offline.images.crop {size[0]} {size[1]}, "
            "or smaller."
        )
    return (size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2


def check_obs_space(images: ImageCrop, obs_space: Spaces, name: str) -> None:
    """Raise `UserError` if `obs_space` does not fit the training data.

    `obs_space` belongs to the dataset or environment `name`. It must have all keys of
    the training data with the same shapes, and may have more keys.
    """
    differences = []
    for key, space in images.input_space.items():
        other = obs_space.get(key)
        if other is None:
            differences.append(
                f"    {key}: trained on {space.shape}, missing in {name}"
            )
        elif other.shape != space.shape or other.is_image != space.is_image:
            differences.append(
                f"    {key}: trained on {space.shape}, {name} has {other.shape}"
            )
    if differences:
        raise UserError(
            f"The observations of {name} differ from the training data:\n"
            + "\n".join(differences)
            + "\n  Fix: use the same keys and sizes (`reverie data convert` renames, "
            "stacks and resizes)."
        )
