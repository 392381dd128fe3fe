"""Behavior cloning solves `reach`: demonstrations, world model and clone, by command.

The target is visible only in the image, so a clone without images gives the success
rate of chance.
"""

from __future__ import annotations

import json

import pytest

from reverie.cli import main as cli

pytestmark = pytest.mark.slow

QUIET = ["--device", "cpu", "--logger.outputs", "jsonl"]


def run(*words):
    assert cli.main([str(word) for word in words]) == 0


def success(logdir, episodes=100):
    run("eval", logdir, "--task", "reach", "--episodes", episodes, "--device", "cpu")
    return json.loads((logdir / "eval.json").read_text())["summary"]["success"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    pytest.importorskip("h5py")
    folder = tmp_path_factory.mktemp("offline")
    run("data", "demos", folder / "reach.hdf5", "--episodes", 1000)
    run("data", "convert", folder / "reach.hdf5", folder / "reach")
    return folder / "reach"


def test_a_clone_on_a_frozen_encoder_reaches_the_target(data, tmp_path):
    world, clone = tmp_path / "world", tmp_path / "clone"
    run(
        "offline",
        "--offline.data",
        data,
        "--logdir",
        world,
        *QUIET,
        "--configs",
        "offline_tiny",
    )
    rows = [json.loads(x) for x in (world / "metrics.jsonl").read_text().splitlines()]
    for key in ("image", "proprio"):
        error = {n: rows[-1][f"report/openloop/{key}/{n}"] for n in ("model", "copy")}
        error["mean"] = rows[-1][f"report/openloop/{key}/mean"]
        assert error["model"] < min(error["copy"], error["mean"]), key
    run(
        "bc",
        "--offline.data",
        data,
        "--bc.run",
        world,
        "--logdir",
        clone,
        *QUIET,
        "--configs",
        "bc_tiny",
    )
    assert success(clone) >= 0.9


def test_a_clone_without_images_does_not(data, tmp_path):
    keys = ["--offline.keys", "proprio"]
    run(
        "bc",
        "--offline.data",
        data,
        *keys,
        "--logdir",
        tmp_path / "run",
        *QUIET,
        "--configs",
        "bc_tiny",
    )
    assert success(tmp_path / "run") < 0.4
