"""Recordings of two implementations of VTA, and worlds with their weights.

Sizes are read from the recordings, so any of the same format will do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch

from reverie.convert.vta.weights import rename_tensors
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.vta.config import VTAConfig
from reverie.worlds.vta.world import VTA

HERE = Path(__file__).parent
FOLDER = Path(os.environ.get("REVERIE_PARITY_DIR", HERE.parent / "fixtures")) / "vta"
MODELS = sorted(path.stem for path in FOLDER.glob("model_*.npz"))


def load(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as data:
        return {key: data[key] for key in data.files}


def under(data: dict, prefix: str) -> dict:
    return {k[len(prefix) :]: v for k, v in data.items() if k.startswith(prefix)}


def tensors(data: dict, prefix: str) -> dict[str, torch.Tensor]:
    return {k: torch.tensor(v) for k, v in under(data, prefix).items()}


def groups(data: dict, prefix: str) -> list[str]:
    """`case0/x`, `case1/x` -> case0, case1."""
    prefixes = {key.split("/")[0] for key in data if "/" in key}
    names = sorted(name for name in prefixes if name.startswith(prefix))
    assert names, f"no recording starts with {prefix}; available: {sorted(prefixes)}"
    return names


class RecordedNoise(Rng):
    """Returns recorded noise, in the order of the calls."""

    def __init__(self, normals=(), uniforms=()):
        self.normals, self.uniforms = list(normals), list(uniforms)

    def normal(self, mean, std):
        noise = self.normals.pop(0).to(mean.device)
        assert noise.shape == mean.shape, (noise.shape, mean.shape)
        return mean + std * noise

    def uniform(self, like):
        noise = self.uniforms.pop(0).to(like.device)
        assert noise.shape == like.shape, (noise.shape, like.shape)
        return noise


class VTARecording:
    """One recorded model: its weights, its inputs and the expected results."""

    def __init__(self, name: str):
        self.data = load(name)
        sizes = json.loads(str(self.data["cfg_json"]))
        self.sizes = sizes
        self.obs = torch.tensor(self.data["in/obs"])
        self.act = torch.tensor(self.data["in/act"])
        self.original = any(".rnn_cell." in key for key in self.data)
        self.context, self.length = sizes["init_size"], sizes["seq_size"]
        image = Space(np.uint8, (*self.obs.shape[-2:], self.obs.shape[2]))
        self.obs_space = {"image": image}
        self.act_space = {}
        if sizes["action_size"]:
            self.act_space["action"] = Space(np.float32, (sizes["action_size"],))
        self.batch = {"image": self.obs, "action": self.act}

    def make_world(self, anneal: float = 0.0, temperature: float | None = None) -> VTA:
        sizes = self.sizes
        beta = sizes["beta"] if temperature is None else temperature
        config = VTAConfig(
            context=self.context,
            length=self.length,
            belief=sizes["belief_size"],
            state=sizes["state_size"],
            layers=sizes["num_layers"],
            bias=not self.original,
            loss="bernoulli" if sizes["loss_type"] == "bce" else "gaussian",
            obs_std=sizes["obs_std"],
            max_segment=sizes["seg_len"],
            max_segments=sizes["seg_num"],
            temperature=beta,
            min_temperature=min(beta, VTAConfig().min_temperature),
            anneal=anneal,
        )
        world = VTA(self.obs_space, self.act_space, config)
        state = world.state_dict()
        for kind in ("param/", "buffer/"):
            ours = rename_tensors(tensors(self.data, kind))
            assert ours.keys() <= state.keys(), ours.keys() - state.keys()
            state |= ours
        world.load_state_dict(state)
        named = rename_tensors(tensors(self.data, "param/"))
        assert named.keys() == dict(world.named_parameters()).keys()
        return world

    def gumbel(self, u: torch.Tensor) -> torch.Tensor:
        """Return the uniform sample that VTA turns into `u`."""
        return (u - 1e-4) / (1 - 2e-4)

    def rng(
        self, prefix: str = "noise/", gumbel: str = "noise/gumbel_u"
    ) -> RecordedNoise:
        normals = [torch.tensor(self.data[f"{prefix}{key}"]) for key in ("z", "s")]
        return RecordedNoise(normals, [self.gumbel(torch.tensor(self.data[gumbel]))])
