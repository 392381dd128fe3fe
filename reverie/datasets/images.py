"""What happens to images between a recording, or a camera, and a network.

Frames are cropped: anywhere while training, one place per sequence, and in the middle
wherever something is measured or done. The same object serves the training feed, the
evaluation and the policy in a simulator, and a checkpoint keeps it, so that nobody can
forget to crop, or crop twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from reverie.api import Obs, StateDict, UserError
from reverie.spaces import Space, Spaces
from reverie.storage.array_file import Arrays


@dataclass(frozen=True)
class ImageConfig:
    """How images are prepared."""

    crop: tuple[int, int] = (0, 0)
    """Height and width to cut images to; 0 0 for whole ones."""
    random: bool = True
    """Whether training sequences are cut in a random place; all else in the middle."""

    def __post_init__(self) -> None:
        if min(self.crop) < 0 or (min(self.crop) == 0) != (max(self.crop) == 0):
            raise ValueError(
                f"crop takes a height and a width above 0, or 0 0, not {self.crop}"
            )


class Images:
    """Prepares the images of these spaces."""

    def __init__(self, config: ImageConfig, obs_space: Spaces):
        self.config, self.raw = config, obs_space
        self.keys = [key for key, space in obs_space.items() if space.is_image]
        self.obs_space = {key: self._after(key, s) for key, s in obs_space.items()}

    def _after(self, key: str, space: Space) -> Space:
        if not space.is_image or not self.crops:
            return space
        offsets(space.shape[:2], self.config.crop, key)
        return Space(np.uint8, (*self.config.crop, space.shape[2]), 0, 256)

    @property
    def crops(self) -> bool:
        return max(self.config.crop) > 0

    def middle(self, obs: Obs) -> Obs:
        """Arrays or tensors, with any leading axes, cut in the middle."""
        if not self.crops:
            return obs
        h, w = self.config.crop
        cut = dict(obs)
        for key in self.keys:
            top, left = offsets(obs[key].shape[-3:-1], (h, w), key)
            piece = obs[key][..., top : top + h, left : left + w, :]
            is_tensor = isinstance(piece, Tensor)
            cut[key] = piece.contiguous() if is_tensor else np.ascontiguousarray(piece)
        return cut

    def anywhere(self, batch: Arrays, rng: np.random.Generator) -> Arrays:
        """Sequences `(B, T, h, w, c)`, each cut in a place of its own."""
        if not self.crops or not self.config.random:
            return self.middle(batch)
        h, w = self.config.crop
        cut = dict(batch)
        for key in self.keys:
            x = batch[key]
            free = (x.shape[-3] - h + 1, x.shape[-2] - w + 1)
            tops, lefts = (rng.integers(0, n, len(x)).tolist() for n in free)
            cut[key] = np.stack(
                [
                    row[:, top : top + h, left : left + w]
                    for row, top, left in zip(x, tops, lefts, strict=True)
                ]
            )
        return cut

    def state_dict(self) -> StateDict:
        return {
            "crop": list(self.config.crop),
            "random": self.config.random,
            "spaces": {key: space.to_json() for key, space in self.raw.items()},
            "order": list(self.raw),
        }


def read_images(state: StateDict) -> Images:
    """What `state_dict` was made of."""
    height, width = (int(n) for n in state["crop"])
    config = ImageConfig((height, width), bool(state["random"]))
    spaces = {key: Space.from_json(state["spaces"][key]) for key in state["order"]}
    return Images(config, spaces)


def offsets(
    size: tuple[int, ...], crop: tuple[int, int], key: str = "image"
) -> tuple[int, int]:
    """Top and left of the middle."""
    if size[0] < crop[0] or size[1] < crop[1]:
        raise UserError(
            f"{key!r} has {size[0]}x{size[1]} pixels, too few for a crop of "
            f"{crop[0]}x{crop[1]}.\n  Fix: --offline.images.crop {size[0]} {size[1]}, "
            "or smaller."
        )
    return (size[0] - crop[0]) // 2, (size[1] - crop[1]) // 2


def fit(images: Images, obs_space: Spaces, what: str) -> None:
    """Raise unless an environment or a recording shows what was prepared for."""
    wrong = []
    for key, space in images.raw.items():
        other = obs_space.get(key)
        if other is None:
            wrong.append(f"    {key}: {space.shape} was learnt, {what} has none")
        elif other.shape != space.shape or other.is_image != space.is_image:
            wrong.append(
                f"    {key}: {space.shape} was learnt, {what} has {other.shape}"
            )
    if wrong:
        raise UserError(
            f"{what} does not show what was learnt from:\n"
            + "\n".join(wrong)
            + "\n  Fix: give one with the same keys and sizes (`reverie data convert` "
            "renames, stacks and resizes)."
        )
