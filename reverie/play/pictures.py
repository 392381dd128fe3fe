"""Images of a moment: real, imagined and difference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reverie.api import Obs
from reverie.datasets.images import ImageCrop
from reverie.envs.wrappers import RENDERED
from reverie.play.simulation import Moment
from reverie.render.channels import cameras_side_by_side, to_rgb
from reverie.render.open_loop import error_image
from reverie.spaces import Spaces, agent_obs_space

MAX_VECTOR = 64
"""Entries that are shown of observations without images."""


class Picture(NamedTuple):
    """An image of one pane."""

    pane: str
    """`real`, `model` (several for several rollouts) or `difference`."""
    image: np.ndarray


def show_images(row: Obs, keys: list[str]) -> np.ndarray | None:
    """Return the images of a row next to each other; None if there are none."""
    images = [_to_color(np.asarray(row[key])) for key in keys if key in row]
    if not images:
        return None
    height = images[0].shape[0]
    same = [image for image in images if image.shape[0] == height]
    return np.concatenate(same, 1)


def _to_color(image: np.ndarray) -> np.ndarray:
    if image.shape[-1] % 3 == 0:
        return cameras_side_by_side(image)
    return to_rgb(image, last=True)


class Painter:
    """Selects the image keys of a run and makes the pictures of its moments."""

    def __init__(self, obs_space: Spaces, predicted: list[str], crop: ImageCrop | None):
        spaces = agent_obs_space(obs_space)
        self.images = [key for key, space in spaces.items() if space.is_image]
        self.predicted = [key for key in self.images if key in predicted]
        self.vectors = [
            key for key in spaces if key not in self.images and key in predicted
        ]
        self.crop = crop

    def pictures(self, moment: Moment) -> list[Picture]:
        real, imagined = moment.real, moment.imagined
        pictures = []
        if real is not None:
            row = self._cropped(real)
            keys = self.images or [RENDERED]
            image = show_images(row, keys)
            if image is not None:
                pictures.append(Picture("real", image))
        if imagined is None or not self.predicted:
            return pictures
        rows = imagined if "cont" in imagined else self._cropped(imagined)
        count = len(rows["reward"])
        models = []
        for index in range(count):
            one = {key: rows[key][index] for key in self.predicted}
            image = show_images(one, self.predicted)
            if image is not None:
                models.append(image)
        pictures += [Picture("model", image) for image in models]
        if real is not None and models:
            truth = show_images(self._cropped(real), self.predicted)
            if truth is not None and truth.shape == models[0].shape:
                pictures.append(Picture("difference", error_image(truth, models[0])))
        return pictures

    def vectors_of(self, moment: Moment) -> dict[str, list[float]]:
        """Return the vector observations of `real` and `model`, without images."""
        if self.predicted:
            return {}
        result = {}
        first: Obs | None = None
        if moment.imagined is not None:
            first = {key: value[0] for key, value in moment.imagined.items()}
        for pane, row in (("real", moment.real), ("model", first)):
            if row is not None and all(key in row for key in self.vectors):
                parts = [np.ravel(row[key]).astype(float) for key in self.vectors]
                values = np.concatenate(parts) if parts else np.zeros(0)
                values = np.nan_to_num(values[:MAX_VECTOR])
                result[pane] = [round(float(value), 4) for value in values]
        return result

    def _cropped(self, row: Obs) -> Obs:
        if self.crop is None or not all(key in row for key in self.crop.keys):
            return row
        return self.crop.center_crop(row)
