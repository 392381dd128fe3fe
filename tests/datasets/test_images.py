"""Image crops: random in training, centered elsewhere, restored from a checkpoint."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.datasets.images import (
    ImageConfig,
    ImageCrop,
    center_offset,
    check_obs_space,
    load_image_crop,
)
from reverie.spaces import Space


def spaces(side=84, channels=3):
    return {
        "image": Space(np.uint8, (side, side, channels)),
        "proprio": Space(np.float32, (2,)),
    }


def numbered(*shape):
    """Images with the row in channel 0 and the column in channel 1 of each pixel."""
    image = np.zeros(shape, np.uint8)
    image[..., 0] = np.arange(shape[-3])[:, None]
    image[..., 1] = np.arange(shape[-2])
    return image


def test_the_center_crop_of_84_pixels_to_78_starts_at_3():
    assert center_offset((84, 84), (78, 78)) == (3, 3)
    images = ImageCrop(ImageConfig((78, 78)), spaces())
    assert images.obs_space["image"].shape == (78, 78, 3)
    cut = images.center_crop(
        {"image": numbered(2, 84, 84, 3), "proprio": np.ones((2, 2))}
    )
    assert cut["image"].shape == (2, 78, 78, 3)
    assert cut["image"].flags.c_contiguous
    assert tuple(cut["image"][0, 0, 0]) == (3, 3, 0)
    assert cut["proprio"].shape == (2, 2)
    tensor = images.center_crop({"image": torch.as_tensor(numbered(5, 84, 84, 3))})[
        "image"
    ]
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(tensor[:2].numpy(), cut["image"])


def test_a_crop_larger_than_the_image_is_an_error():
    with pytest.raises(UserError, match=r"64x64 pixels, fewer than the crop of 78x78"):
        ImageCrop(ImageConfig((78, 78)), spaces(64))
    with pytest.raises(ValueError, match="crop must be"):
        ImageConfig((78, 0))


def test_training_crops_differ_between_sequences_but_not_over_time():
    images = ImageCrop(ImageConfig((78, 78)), spaces())
    batch = {"image": numbered(40, 3, 84, 84, 3)}
    cut = images.augment(batch, np.random.default_rng(0))["image"]
    corners = cut[:, :, 0, 0, :2]
    assert (corners == corners[:, :1]).all()
    places = {tuple(corner) for corner in corners[:, 0]}
    assert len(places) > 10
    assert {row for row, _ in places} == set(range(7))  # both ends are reached
    again = images.augment(batch, np.random.default_rng(0))["image"]
    np.testing.assert_array_equal(cut, again)
    centered = ImageCrop(ImageConfig((78, 78), random=False), spaces())
    fixed = centered.augment(batch, np.random.default_rng(0))["image"]
    assert {tuple(c) for c in fixed[:, 0, 0, 0, :2]} == {(3, 3)}


def test_without_a_crop_batches_are_unchanged():
    images = ImageCrop(ImageConfig(), spaces())
    batch = {"image": numbered(1, 1, 84, 84, 3)}
    assert images.augment(batch, np.random.default_rng(0)) is batch
    assert images.obs_space == spaces()


def test_the_crop_is_restored_from_its_state():
    images = ImageCrop(ImageConfig((78, 70)), spaces())
    state = json.loads(json.dumps(images.state_dict()))
    again = load_image_crop(state)
    assert again.config == images.config
    assert list(again.input_space.items()) == list(images.input_space.items())


def test_differences_from_the_training_observations_are_listed():
    images = ImageCrop(ImageConfig(), spaces(64))
    other = {"image": Space(np.uint8, (84, 84, 3))}
    with pytest.raises(UserError, match="differ from the training data") as error:
        check_obs_space(images, other, "robosuite_Lift")
    assert "image: trained on (64, 64, 3)" in str(error.value)
    assert "proprio: trained on (2,), missing in robosuite_Lift" in str(error.value)
    check_obs_space(images, {**spaces(64), "more": Space(np.float32)}, "anything")
