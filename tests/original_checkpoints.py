"""Checkpoints as other implementations write them, with recorded weights."""

from __future__ import annotations

import json
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
import yaml
from gymnasium.spaces import Box, Dict, Discrete

FIXTURES = Path(__file__).parent / "fixtures"
STAMP = "20250101T000000F000000"


def load(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(FIXTURES / f"{name}.npz"))


def iris_state() -> OrderedDict[str, torch.Tensor]:
    """Return a state dict of Δ-IRIS for images of 16 x 16 and five actions."""
    found = OrderedDict()
    for part in ("tokenizer", "world_model"):
        for key, value in load(f"delta_iris/{part}_params").items():
            if not key.startswith("classes/"):
                found[f"{part}.{key}"] = torch.tensor(value)
    for key, value in load("delta_iris/actor_critic_two_hot_params").items():
        found[f"actor_critic.{key}"] = torch.tensor(value)
    return found


def write_iris(folder: Path) -> Path:
    """Write the checkpoint of a run folder of Δ-IRIS."""
    path = folder / "checkpoints" / "last.pt"
    path.parent.mkdir(parents=True)
    torch.save(iris_state(), path)
    return path


def write_vta(folder: Path, name: str = "main_bce") -> Path:
    """Write `model_best.pt` of the port, or of the authors (`orig_mse`)."""
    arrays = load(f"vta/model_{name}")
    names = [key for key in arrays if key.startswith(("param/", "buffer/"))]
    state = {key.partition("/")[2]: torch.tensor(arrays[key]) for key in names}
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "model_best.pt")
    return folder / "model_best.pt"


def dreamerv3_options() -> dict[str, Any]:
    """Return the nested options of the agent of `write_dreamerv3`."""
    meta = json.loads((FIXTURES / "dreamerv3" / "disc_meta.json").read_text())
    options: dict[str, Any] = {}
    for name, value in meta["config"].items():
        *groups, leaf = name.split(".")
        inner = options
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[leaf] = value
    return options


def write_dreamerv3(folder: Path, **options: Any) -> Path:
    """Write a run folder of the original DreamerV3; with options also their file."""
    path = folder / "ckpt" / STAMP / "agent.pkl"
    path.parent.mkdir(parents=True)
    data = {"params": load("dreamerv3/disc_params"), "counters": {"updates": 3}}
    path.write_bytes(pickle.dumps(data))
    (folder / "ckpt" / "latest").write_text(STAMP)
    if options:
        text = yaml.safe_dump({**options, "agent": dreamerv3_options()})
        (folder / "config.yaml").write_text(text)
    return path


class NoiseEnv(gymnasium.Env):
    """Random observations; episodes of five steps with a reward for action 1."""

    def __init__(self, side: int, actions: int, **spaces: gymnasium.Space):
        image = Box(0, 255, (side, side, 3), np.uint8)
        self.observation_space = Dict({"image": image, **spaces})
        self.action_space = Discrete(actions)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.time += 1
        reward = float(action == 1)
        return self.observation_space.sample(), reward, self.time == 5, False, {}


def iris_env() -> NoiseEnv:
    return NoiseEnv(16, 5)


def dreamerv3_env() -> NoiseEnv:
    vector, height = (Box(-9, 9, shape, np.float32) for shape in ((5,), ()))
    return NoiseEnv(32, 6, vector=vector, height=height, token=Discrete(7))
