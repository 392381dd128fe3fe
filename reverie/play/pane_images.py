"""Images that the page shows for one step: real, imagined and their difference."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from reverie.api import Obs
from reverie.datasets.images import ImageCrop
from reverie.envs.wrappers import RENDERED
from reverie.play.simulation import StepSnapshot
from reverie.render.channels import cameras_side_by_side, to_rgb
from reverie.render.open_loop import error_image
from reverie.spaces import Spaces, agent_obs_space

MAX_VECTOR = 64
"""Maximum number of entries of vector observations that are shown."""


class PaneImage(NamedTuple):
    """An image of one pane."""

    pane: str
    """`real`, `model` (one image per rollout) or `difference`."""
    image: np.ndarray


def concat_images(row: Obs, keys: list[str]) -> np.ndarray | None:
    """Concatenate the images of a row horizontally; None if there are none.

    Images with another height than the first one are left out.
    """
    images = [_to_color(np.asarray(row[key])) for key in keys if key in row]
    if not images:
        return None
    height = images[0].shape[0]
    same_height = [image for image in images if image.shape[0] == height]
    return np.concatenate(same_height, 1)


def _to_color(image: np.ndarray) -> np.ndarray:
    """Return an image as RGB; several cameras stacked in channels are concatenated."""
    if image.shape[-1] % 3 == 0:
        return cameras_side_by_side(image)
    return to_rgb(image, last=True)


class PaneRenderer:
    """Selects the image keys of a run and renders the panes of its steps."""

    def __init__(self, obs_space: Spaces, predicted: list[str], crop: ImageCrop | None):
        spaces = agent_obs_space(obs_space)
        self.image_keys = [key for key, space in spaces.items() if space.is_image]
        self.predicted_keys = [key for key in self.image_keys if key in predicted]
        self.vector_keys = [
            key for key in spaces if key not in self.image_keys and key in predicted
        ]
        self.crop = crop

    def render(self, snapshot: StepSnapshot) -> list[PaneImage]:
        """Return the images of a step: real, one per rollout, and difference."""
        real, imagined = snapshot.real, snapshot.imagined
        panes = []
        if real is not None:
            row = self._cropped(real)
            keys = self.image_keys or [RENDERED]
            image = concat_images(row, keys)
            if image is not None:
                panes.append(PaneImage("real", image))
        if imagined is None or not self.predicted_keys:
            return panes
        # the first row of a rollout is a real row, without `cont` and not yet cropped
        rows = imagined if "cont" in imagined else self._cropped(imagined)
        count = len(rows["reward"])
        predictions = []
        for index in range(count):
            rollout = {key: rows[key][index] for key in self.predicted_keys}
            image = concat_images(rollout, self.predicted_keys)
            if image is not None:
                predictions.append(image)
        panes += [PaneImage("model", image) for image in predictions]
        if real is not None and predictions:
            truth = concat_images(self._cropped(real), self.predicted_keys)
            if truth is not None and truth.shape == predictions[0].shape:
                panes.append(
                    PaneImage("difference", error_image(truth, predictions[0]))
                )
        return panes

    def observation_vectors(self, snapshot: StepSnapshot) -> dict[str, list[float]]:
        """Return the vector observations of a step by pane (`real`, `model`).

        The result is empty if the world model predicts images, which are shown instead.
        """
        if self.predicted_keys:
            return {}
        result = {}
        rollout: Obs | None = None  # the first one
        if snapshot.imagined is not None:
            rollout = {key: value[0] for key, value in snapshot.imagined.items()}
        for pane, row in (("real", snapshot.real), ("model", rollout)):
            if row is not None and all(key in row for key in self.vector_keys):
                parts = [np.ravel(row[key]).astype(float) for key in self.vector_keys]
                values = np.concatenate(parts) if parts else np.zeros(0)
                values = np.nan_to_num(values[:MAX_VECTOR])
                result[pane] = [round(float(value), 4) for value in values]
        return result

    def _cropped(self, row: Obs) -> Obs:
        if self.crop is None or not all(key in row for key in self.crop.keys):
            return row
        return self.crop.center_crop(row)
