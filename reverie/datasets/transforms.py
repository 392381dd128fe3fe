"""Transforms of recorded episodes: select, order, stack, flip and resize keys.

The same `Transforms` are applied by `reverie data convert` and when episodes are read
during training, so both give the same episodes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode, is_image
from reverie.datasets.readers import Reader, WrappedReader
from reverie.spaces import STEP_KEYS, Space, Spaces

IMAGE, AUX = "image", "aux_"
"""Key of the stacked images, and prefix of the keys of `Transforms.aux`."""


@dataclass(frozen=True)
class Transforms:
    """Which observations to keep, and how to change them."""

    images: tuple[str, ...] = ()
    """Cameras to stack along the channel axis as `image`, in this order."""
    vectors: tuple[str, ...] = ()
    """Vectors to keep, in this order. If `images`, `vectors` and `aux` are all empty,
    every observation is kept."""
    aux: tuple[str, ...] = ()
    """Vectors to keep as `aux_NAME`: inputs of the encoder that are not
    reconstructed."""
    flip: tuple[str, ...] = ()
    """Cameras whose frames are stored upside down."""
    size: tuple[int, int] = (0, 0)
    """Height and width to resize images to; 0 0 keeps their size."""

    def __post_init__(self) -> None:
        if min(self.size) < 0 or (0 in self.size and max(self.size)):
            raise ValueError(
                f"size must be a height and a width above 0, or 0 0, not {self.size}"
            )

    @property
    def selects_keys(self) -> bool:
        """True if only some observations are kept."""
        return bool(self.images or self.vectors or self.aux)

    @property
    def input_keys(self) -> list[str]:
        """The observations that these transforms name, without repetition."""
        return [*dict.fromkeys((*self.images, *self.vectors, *self.aux, *self.flip))]

    def output_space(self, obs_space: Spaces, origin: str) -> Spaces:
        """Return the observation space after the transforms; raise `UserError` if they
        cannot be applied."""
        if missing := [key for key in self.input_keys if key not in obs_space]:
            raise UserError(
                f"{origin} has no {', '.join(missing)}. It has: "
                f"{', '.join(obs_space)}.\n"
                "  Fix: select from these with --images, --vectors, --aux and --flip."
            )
        for key in (*self.images, *self.flip):
            if not obs_space[key].is_image:
                raise UserError(
                    f"{key!r} of {origin} is not an image: {obs_space[key].dtype} "
                    f"{obs_space[key].shape}.\n  Fix: select cameras with --images."
                )
        shapes = {key: obs_space[key].shape for key in self.images}
        if len({self._resized(shape)[:2] for shape in shapes.values()}) > 1:
            raise UserError(
                f"The cameras of {origin} differ in size: {shapes}.\n"
                "  Fix: resize them, as in --size 84 84."
            )
        if not self.selects_keys:
            return {key: self._resized_space(space) for key, space in obs_space.items()}
        output: Spaces = {}
        if self.images:
            shape = self._resized(shapes[self.images[0]])
            channels = sum(shape[-1] for shape in shapes.values())
            output[IMAGE] = Space(np.dtype(np.uint8), (*shape[:2], channels), 0, 256)
        output |= {key: obs_space[key] for key in self.vectors}
        return output | {f"{AUX}{key}": obs_space[key] for key in self.aux}

    def apply(self, episode: Episode, act_space: Spaces) -> Episode:
        """Return the transformed episode; raise `BadEpisode` if a key is missing."""
        others = {k: episode[k] for k in (*act_space, *STEP_KEYS) if k in episode}
        others |= {k: v for k, v in episode.items() if k.startswith("log/")}
        obs = {k: v for k, v in episode.items() if k not in others}
        if missing := [key for key in self.input_keys if key not in obs]:
            raise BadEpisode(f"has no {', '.join(map(repr, missing))}")
        obs = {key: self._flip_and_resize(key, value) for key, value in obs.items()}
        if not self.selects_keys:
            return {**obs, **others}
        selected: Episode = {}
        if self.images:
            frames = [obs[key] for key in self.images]
            if len({value.shape[:3] for value in frames}) > 1:
                shapes = {key: obs[key].shape[1:] for key in self.images}
                raise BadEpisode(f"has cameras of different sizes, {shapes}")
            selected[IMAGE] = np.ascontiguousarray(np.concatenate(frames, -1))
        selected |= {key: obs[key] for key in self.vectors}
        selected |= {f"{AUX}{key}": obs[key] for key in self.aux}
        return {**selected, **others}

    def _flip_and_resize(self, key: str, value: np.ndarray) -> np.ndarray:
        if not is_image(value):
            return value
        if key in self.flip:
            value = value[:, ::-1]
        if any(self.size) and value.shape[1:3] != self.size:
            value = np.stack([resize(frame, self.size) for frame in value])
        return np.ascontiguousarray(value)

    def _resized(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an image after it is resized."""
        return (*self.size, *shape[2:]) if any(self.size) else shape

    def _resized_space(self, space: Space) -> Space:
        if not space.is_image:
            return space
        return Space(space.dtype, self._resized(space.shape), 0, 256)


ROBOMIMIC = Transforms(
    images=("agentview_image",),
    vectors=(
        "robot0_joint_pos",
        "robot0_joint_vel",
        "robot0_gripper_qpos",
        "robot0_gripper_qvel",
    ),
    aux=("robot0_joint_pos_sin", "robot0_joint_pos_cos"),
)
"""The observations of one arm in robomimic that world models are usually trained on."""


class TransformedReader(WrappedReader):
    """Reads the episodes of another reader and applies `Transforms`."""

    def __init__(self, reader: Reader, transforms: Transforms):
        super().__init__(reader)
        self.transforms = transforms
        obs_space = transforms.output_space(reader.obs_space, reader.origin)
        self._spaces = obs_space, reader.act_space

    @property
    def options(self) -> dict[str, Any]:
        transforms = {k: list(v) for k, v in asdict(self.transforms).items()}
        return {**self.inner.options, "transforms": transforms}

    def read(self, name: str) -> Episode:
        transforms, inner = self.transforms, self.inner
        if transforms.selects_keys:
            episode = inner.read_keys(name, transforms.input_keys)
        else:
            episode = inner.read(name)
        return transforms.apply(episode, self.act_space)

    def read_keys(self, name: str, keys: Collection[str]) -> Episode:
        return self.read(name)


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize an image `(h, w, c)` with Pillow's antialiased bilinear filter."""
    from PIL import Image

    height, width = size
    channels = [
        np.asarray(
            Image.fromarray(np.ascontiguousarray(image[..., c])).resize(
                (width, height), Image.Resampling.BILINEAR
            )
        )
        for c in range(image.shape[-1])
    ]
    return np.stack(channels, -1)
