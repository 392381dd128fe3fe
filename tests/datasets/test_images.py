"""Crops: anywhere in training, in the middle elsewhere, and the same after a reload."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from reverie.api import UserError
from reverie.datasets.images import ImageConfig, Images, fit, offsets, read_images
from reverie.spaces import Space


def spaces(side=84, channels=3):
    return {
        "image": Space(np.uint8, (side, side, channels)),
        "proprio": Space(np.float32, (2,)),
    }


def numbered(*shape):
    """Images whose pixels say where they are: row in channel 0, column in channel 1."""
    image = np.zeros(shape, np.uint8)
    image[..., 0] = np.arange(shape[-3])[:, None]
    image[..., 1] = np.arange(shape[-2])
    return image


def test_the_middle_of_84_pixels_begins_3_in():
    assert offsets((84, 84), (78, 78)) == (3, 3)
    images = Images(ImageConfig((78, 78)), spaces())
    assert images.obs_space["image"].shape == (78, 78, 3)
    cut = images.middle({"image": numbered(2, 84, 84, 3), "proprio": np.ones((2, 2))})
    assert cut["image"].shape == (2, 78, 78, 3)
    assert cut["image"].flags.c_contiguous
    assert tuple(cut["image"][0, 0, 0]) == (3, 3, 0)
    assert cut["proprio"].shape == (2, 2)
    tensor = images.middle({"image": torch.as_tensor(numbered(5, 84, 84, 3))})["image"]
    assert tensor.is_contiguous()
    np.testing.assert_array_equal(tensor[:2].numpy(), cut["image"])


def test_a_frame_that_is_too_small_is_refused():
    with pytest.raises(UserError, match=r"64x64 pixels, too few for a crop of 78x78"):
        Images(ImageConfig((78, 78)), spaces(64))
    with pytest.raises(ValueError, match="crop takes"):
        ImageConfig((78, 0))


def test_training_crops_vary_by_sequence_but_not_over_time():
    images = Images(ImageConfig((78, 78)), spaces())
    batch = {"image": numbered(40, 3, 84, 84, 3)}
    cut = images.anywhere(batch, np.random.default_rng(0))["image"]
    corners = cut[:, :, 0, 0, :2]
    assert (corners == corners[:, :1]).all()
    places = {tuple(corner) for corner in corners[:, 0]}
    assert len(places) > 10
    assert {row for row, _ in places} == set(range(7))  # both ends are reached
    again = images.anywhere(batch, np.random.default_rng(0))["image"]
    np.testing.assert_array_equal(cut, again)
    still = Images(ImageConfig((78, 78), random=False), spaces())
    fixed = still.anywhere(batch, np.random.default_rng(0))["image"]
    assert {tuple(c) for c in fixed[:, 0, 0, 0, :2]} == {(3, 3)}


def test_without_a_crop_nothing_is_touched():
    images = Images(ImageConfig(), spaces())
    batch = {"image": numbered(1, 1, 84, 84, 3)}
    assert images.anywhere(batch, np.random.default_rng(0)) is batch
    assert images.obs_space == spaces()


def test_a_checkpoint_brings_back_the_same_preparation():
    images = Images(ImageConfig((78, 70)), spaces())
    state = json.loads(json.dumps(images.state_dict()))
    again = read_images(state)
    assert again.config == images.config
    assert list(again.raw.items()) == list(images.raw.items())


def test_differences_between_what_was_learnt_and_what_is_shown_are_listed():
    images = Images(ImageConfig(), spaces(64))
    other = {"image": Space(np.uint8, (84, 84, 3))}
    with pytest.raises(UserError, match="does not show") as error:
        fit(images, other, "robosuite_Lift")
    assert "image: (64, 64, 3) was learnt" in str(error.value)
    assert "proprio: (2,) was learnt, robosuite_Lift has none" in str(error.value)
    fit(images, {**spaces(64), "more": Space(np.float32)}, "anything")
