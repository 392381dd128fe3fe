"""Runs that several test files use: a world model, a clone and a sequence run."""

from __future__ import annotations

import pytest
from offline_helpers import settings, write_reach
from sequence_helpers import vta_settings

from reverie.run.offline.train import offline
from reverie.run.train import train


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recordings")
    write_reach(folder, 12)
    return folder


@pytest.fixture(scope="session")
def world(data, tmp_path_factory):
    """Return a run of Dreamer's world model on cropped images."""
    flags = {"offline.images.crop": (14, 14)}
    return offline(settings(data, tmp_path_factory.mktemp("world") / "run", **flags))


@pytest.fixture(scope="session")
def clone(data, world, tmp_path_factory):
    """Return a behavior cloning run on the encoder of the world model."""
    logdir = tmp_path_factory.mktemp("clone") / "run"
    return offline(settings(data, logdir, "bc", **{"bc.run": str(world)}))


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return a run of VTA on bouncing balls."""
    return train(vta_settings(tmp_path_factory.mktemp("sequences") / "run"))
