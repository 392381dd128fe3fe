"""Small runs on catch: DreamerV3, DreamerV3 with VTA, and Δ-IRIS."""

from __future__ import annotations

from pathlib import Path

import pytest

from reverie.play.load import Playable, load_playable
from reverie.run.config import resolve
from reverie.run.train import train

COMMON = {"task": "catch", "device": "cpu", "logger.outputs": ["jsonl"]}
RUNS = {
    "dreamer": (["debug"], {"run.steps": 40}),
    "vta": (["debug", "vta"], {"run.steps": 40}),
    "iris": (
        ["iris_tiny"],
        {
            "run.envs": 1,
            "iris.schedule.epochs": 1,
            "iris.schedule.collect_epochs": 1,
            "iris.schedule.first_steps": 30,
            "iris.training.tokenizer.batch": 2,
            "iris.training.tokenizer.first_steps": 1,
            "iris.training.world_model.batch": 2,
            "iris.training.world_model.first_steps": 1,
            "iris.training.actor_critic.batch": 2,
            "iris.training.actor_critic.first_steps": 1,
            "iris.actor_critic.horizon": 2,
            "iris.world_model.transformer.layers": 1,
        },
    ),
}
_folders: dict[str, Path] = {}


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A function that trains one of `RUNS` at its first call, and returns its folder.

    Tests must not write into the folder.
    """

    def make(name: str) -> Path:
        if name not in _folders:
            logdir = tmp_path_factory.mktemp("runs") / name
            blocks, flags = RUNS[name]
            config = resolve(blocks, flags={**COMMON, **flags, "logdir": str(logdir)})
            _folders[name] = train(config)
        return _folders[name]

    return make


@pytest.fixture
def parts(run_folder, request) -> Playable:
    """The loaded run that the test names, DreamerV3 by default."""
    playable = load_playable(run_folder(getattr(request, "param", "dreamer")))
    yield playable
    playable.close()
