"""Feature extractors for behavior cloning.

`EncoderFeatures` encodes the current observation with the encoder of a world model or a
new encoder. `LatentStateFeatures` computes features of a world model's posterior state.
Both have `keys`, the observation keys in the order in which they enter the network; it
is stored in checkpoints.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import Agent, Batch, LatentWorld, UserError
from reverie.capabilities import HasEncoder, HasWorld, ObsEncoder
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.spaces import Spaces, agent_obs_space


class EncoderFeatures(nn.Module):
    """Embeddings of single observations; the carry is empty."""

    def __init__(self, encoder: ObsEncoder, dtype: torch.dtype):
        super().__init__()
        self.encoder, self.dtype = encoder, dtype
        self.width, self.keys = encoder.width, list(encoder.keys)

    def initial(self, batch: int) -> Any:
        return ()

    def forward(
        self, carry: Any, batch: Batch, rng: Rng
    ) -> tuple[Float[Tensor, "B T F"], Any]:
        return self.encoder(batch, self.dtype).float(), carry


class LatentStateFeatures(nn.Module):
    """Features of posterior states; the carry is the last state."""

    def __init__(self, world: LatentWorld, obs_space: Spaces):
        super().__init__()
        self.world, self.width = world, world.width
        self.keys = sorted(agent_obs_space(obs_space))
        if isinstance(world, HasEncoder):
            self.keys = list(world.encoder.keys)

    def initial(self, batch: int) -> Any:
        return self.world.initial(batch)

    def forward(
        self, carry: Any, batch: Batch, rng: Rng
    ) -> tuple[Float[Tensor, "B T F"], Any]:
        states = self.world.observe(carry, batch, rng)
        last = tree_map(lambda x: x[:, -1], states)
        return self.world.features(states).float(), last


def make_feature_extractor(
    base: Agent, features: str, obs_space: Spaces, dtype: torch.dtype
) -> EncoderFeatures | LatentStateFeatures:
    """Build the feature extractor from the world model of another agent.

    `features` is `encoder` or `state`.
    """
    world = base.world if isinstance(base, HasWorld) else None
    if features == "state" and isinstance(world, LatentWorld):
        return LatentStateFeatures(world, obs_space)
    if features == "encoder" and isinstance(world, HasEncoder):
        return EncoderFeatures(world.encoder, dtype)
    missing = "an encoder" if features == "encoder" else "latent states"
    other = "state" if features == "encoder" else "encoder"
    raise UserError(
        f"The agent of --bc.run has no world model with {missing}.\n"
        f"  Fix: --bc.features {other}, or a run of another agent."
    )


def check_keys(keys: list[str], expected: list[str], source: str) -> None:
    """Raise unless the keys and their order are those that `source` was trained on."""
    if list(keys) == list(expected):
        return
    missing = [key for key in expected if key not in keys]
    extra = [key for key in keys if key not in expected]
    if missing or extra:
        parts = [f"it needs {', '.join(missing)}"] if missing else []
        parts += [f"it does not use {', '.join(extra)}"] if extra else []
        difference = " and ".join(parts)
    else:
        difference = f"it needs the order {', '.join(expected)}, not {', '.join(keys)}"
    raise UserError(
        f"{source} was trained on other observation keys: {difference}.\n"
        f"  Fix: use recordings with the keys {', '.join(expected)}, and list them in "
        "this order if you set --bc.keys."
    )
