"""What to make of the keys of an episode: choose, order, stack, flip and resize.

The same recipe serves a conversion (`datasets/convert.py`) and reading on the fly
(`datasets/reading.py`), so both give the same episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.readers import Reader
from reverie.spaces import FLAGS, Space, Spaces

IMAGE, AUX = "image", "aux_"


@dataclass(frozen=True)
class Recipe:
    images: tuple[str, ...] = ()
    """Cameras to stack along the channels as `image`, in this order."""
    vectors: tuple[str, ...] = ()
    """Vectors to keep, in this order. With neither these nor cameras all keys stay."""
    aux: tuple[str, ...] = ()
    """Vectors to keep as `aux_NAME`: seen by an encoder, never to be predicted."""
    flip: tuple[str, ...] = ()
    """Cameras whose frames are upside down."""
    size: tuple[int, int] = (0, 0)
    """Height and width for every image; 0 0 leaves them alone."""

    @property
    def chooses(self) -> bool:
        return bool(self.images or self.vectors or self.aux)

    @property
    def wanted(self) -> list[str]:
        """The keys it names, each once."""
        return [*dict.fromkeys((*self.images, *self.vectors, *self.aux, *self.flip))]

    def spaces(self, obs_space: Spaces, origin: str) -> Spaces:
        """The observations that come of it; says what is missing or does not fit."""
        if missing := [key for key in self.wanted if key not in obs_space]:
            raise UserError(
                f"{origin} has no {', '.join(missing)}, but {', '.join(obs_space)}.\n"
                "  Fix: choose from these, with --images, --vectors, --aux and --flip."
            )
        for key in (*self.images, *self.flip):
            if not obs_space[key].is_image:
                raise UserError(
                    f"{key!r} of {origin} is no image, but {obs_space[key].dtype} "
                    f"{obs_space[key].shape}.\n  Fix: choose cameras for --images."
                )
        shapes = {key: obs_space[key].shape for key in self.images}
        if len({self._sized(shape)[:2] for shape in shapes.values()}) > 1:
            raise UserError(
                f"The cameras of {origin} differ in size: {shapes}.\n"
                "  Fix: bring them to one with --size 84 84."
            )
        if not self.chooses:
            return {key: self._space(space) for key, space in obs_space.items()}
        found: Spaces = {}
        if self.images:
            shape = self._sized(shapes[self.images[0]])
            channels = sum(shape[-1] for shape in shapes.values())
            found[IMAGE] = Space(np.dtype(np.uint8), (*shape[:2], channels), 0, 256)
        found |= {key: obs_space[key] for key in self.vectors}
        return found | {f"{AUX}{key}": obs_space[key] for key in self.aux}

    def apply(self, episode: Episode, act_space: Spaces) -> Episode:
        """The episode as the recipe says; `BadEpisode` if a key is not there."""
        rest = {k: episode[k] for k in (*act_space, *FLAGS) if k in episode}
        rest |= {k: v for k, v in episode.items() if k.startswith("log/")}
        seen = {k: v for k, v in episode.items() if k not in rest}
        if missing := [key for key in self.wanted if key not in seen]:
            raise BadEpisode(f"has no {', '.join(map(repr, missing))}")
        seen = {key: self._view(key, value) for key, value in seen.items()}
        if not self.chooses:
            return {**seen, **rest}
        chosen: Episode = {}
        if self.images:
            frames = [seen[key] for key in self.images]
            if len({value.shape[:3] for value in frames}) > 1:
                shapes = {key: seen[key].shape[1:] for key in self.images}
                raise BadEpisode(f"has cameras of several sizes, {shapes}")
            chosen[IMAGE] = np.ascontiguousarray(np.concatenate(frames, -1))
        chosen |= {key: seen[key] for key in self.vectors}
        chosen |= {f"{AUX}{key}": seen[key] for key in self.aux}
        return {**chosen, **rest}

    def _view(self, key: str, value: np.ndarray) -> np.ndarray:
        if value.dtype != np.uint8 or value.ndim != 4:
            return value
        if key in self.flip:
            value = value[:, ::-1]
        if any(self.size) and value.shape[1:3] != self.size:
            value = np.stack([resize(frame, self.size) for frame in value])
        return np.ascontiguousarray(value)

    def _sized(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*self.size, *shape[2:]) if any(self.size) else shape

    def _space(self, space: Space) -> Space:
        if not space.is_image:
            return space
        return Space(space.dtype, self._sized(space.shape), 0, 256)


ROBOMIMIC = Recipe(
    images=("agentview_image",),
    vectors=(
        "robot0_joint_pos",
        "robot0_joint_vel",
        "robot0_gripper_qpos",
        "robot0_gripper_qvel",
    ),
    aux=("robot0_joint_pos_sin", "robot0_joint_pos_cos"),
)
"""What world models of one arm are usually shown of robomimic's demonstrations."""


class Prepared(Reader):
    """The episodes of another reader, as a recipe makes them."""

    def __init__(self, reader: Reader, recipe: Recipe):
        self.inner, self.recipe = reader, recipe
        self.origin, self.masks = reader.origin, reader.masks
        seen = recipe.spaces(reader.obs_space, reader.origin)
        self._spaces = seen, reader.act_space

    @property
    def settings(self) -> dict[str, Any]:
        return self.inner.settings

    def names(self) -> list[str]:
        return self.inner.names()

    def rows(self, name: str) -> int:
        return self.inner.rows(name)

    def read(self, name: str) -> Episode:
        recipe, inner = self.recipe, self.inner
        some = recipe.chooses
        episode = inner.read_some(name, recipe.wanted) if some else inner.read(name)
        return recipe.apply(episode, self.act_space)

    def close(self) -> None:
        self.inner.close()


def resize(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """An image (h w c) in another size, with every pixel of the old one counted."""
    from PIL import Image

    height, width = size
    layers = [
        np.asarray(
            Image.fromarray(np.ascontiguousarray(image[..., c])).resize(
                (width, height), Image.Resampling.BILINEAR
            )
        )
        for c in range(image.shape[-1])
    ]
    return np.stack(layers, -1)
