"""Recordings of dreamerv3-torch, and an agent with their weights.

A recording NAME is `NAME_latest.pt`, `NAME_config.json` and `NAME.npz`. Sizes, spaces
and settings are read from these files. In the recordings, `action[t]` led to row t.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import torch

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.convert.dreamerv3_torch.weights import import_state
from reverie.nets.rng import Rng
from reverie.run.config import resolve
from reverie.spaces import Space

HERE = Path(__file__).parent
FOLDER = (
    Path(os.environ.get("REVERIE_PARITY_DIR", HERE.parent / "fixtures"))
    / "dreamerv3_torch"
)
NAMES = sorted(p.name[: -len("_config.json")] for p in FOLDER.glob("*_config.json"))

FLAGS = {
    "reward": Space(np.float32),
    "is_first": Space(bool),
    "is_last": Space(bool),
    "is_terminal": Space(bool),
}
NOT_OBSERVED = ("action", "discount", "logprob", *FLAGS)


class Modes(Rng):
    """Returns the most likely values instead of samples."""

    def __init__(self) -> None:
        pass

    def categorical(self, probs):
        return probs.argmax(-1)

    def normal(self, mean, std):
        return mean


class Recording:
    """Inputs and outputs of the original, and an agent with its weights."""

    def __init__(self, folder: Path, name: str):
        config, latest = folder / f"{name}_config.json", folder / f"{name}_latest.pt"
        self.options = json.loads(config.read_text())
        with np.load(folder / f"{name}.npz") as data:
            self.data = {key: data[key] for key in data.files}
        self.inputs = self.under("in/")
        self.obs_space = {
            key: self._space(value)
            for key, value in sorted(self.inputs.items())
            if key not in NOT_OBSERVED
            and not key.startswith("log_")
            and value.ndim > 2  # the original uses no scalars
        }
        self.obs_space |= FLAGS
        count = self.inputs["action"].shape[-1]
        self.is_discrete = self.options["actor"]["dist"].startswith("onehot")
        self.act_space = {"action": Space(np.float32, (count,), -1, 1)}
        if self.is_discrete:
            self.act_space = {"action": Space(np.int32, (), 0, count)}
        self.agent = self._agent(latest, config)
        self.world, self.behaviour = self.agent.world, self.agent.actor_critic
        self.batch = {key: torch.tensor(value) for key, value in self.inputs.items()}
        self.batch["prevact"] = {"action": torch.tensor(self.inputs["action"])}

    def under(self, prefix: str) -> dict[str, np.ndarray]:
        data = self.data.items()
        return {k[len(prefix) :]: v for k, v in data if k.startswith(prefix)}

    def _space(self, value: np.ndarray) -> Space:
        if value.ndim == 5:
            return Space(np.uint8, value.shape[2:])
        return Space(np.float32, value.shape[2:])

    def _agent(self, path: Path, config: Path) -> Dreamer:
        """Build the agent as `--run.from_checkpoint PATH --config CONFIG` does."""
        flags = {"run.from_checkpoint": str(path), "task": "dummy_disc"}
        dreamer = resolve(files=[str(config)], flags=flags).dreamer
        options = BuildOptions(torch.device("cpu"))
        agent = Dreamer(self.obs_space, self.act_space, dreamer, options)
        agent.load_state_dict(import_state(path, agent.state_dict()))
        return agent
