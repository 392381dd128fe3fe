"""The frame encoder of Δ-IRIS for other agents, as `capabilities.ObsEncoder`."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.worlds.iris.dynamics import TransformerDynamics


class ITokenEncoder(nn.Module):
    """Encodes frames as the I-tokens of the transformer."""

    def __init__(self, dynamics: TransformerDynamics, key: str):
        super().__init__()
        self.dynamics, self.keys = dynamics, [key]
        self.width = dynamics.config.transformer.width

    def forward(
        self, obs: dict[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        return self.dynamics.embed_frames(obs[self.keys[0]], dtype)
