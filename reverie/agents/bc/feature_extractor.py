"""What a cloned policy sees of an observation.

`EncoderEyes` are an encoder, of a world or of their own: what is seen now. `StateEyes`
are a whole world: what it believes after everything seen and done so far. Both say in
which order they read their keys (`order`), which is kept with their weights.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import Batch, UserError
from reverie.nets.encoder import Encoder
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.spaces import Spaces, agent_obs_space


class EncoderEyes(nn.Module):
    """Only what is seen now."""

    def __init__(self, encoder: Any, dtype: torch.dtype):
        super().__init__()
        self.encoder, self.dtype = encoder, dtype
        self.width = int(encoder.width)

    @property
    def order(self) -> list[str]:
        return [*self.encoder.imgkeys, *self.encoder.veckeys]

    def initial(self, batch: int) -> Any:
        return ()

    def forward(
        self, carry: Any, batch: Batch, rng: Rng
    ) -> tuple[Float[Tensor, "B T F"], Any]:
        return self.encoder(batch, self.dtype).float(), carry


class FrameEncoder(nn.Module):
    """The part of a world that turns frames into tokens (`embed_frames`)."""

    def __init__(self, part: Any, key: str, shape: tuple[int, ...]):
        super().__init__()
        self.part, self.imgkeys, self.veckeys = part, [key], list[str]()
        blank = torch.zeros(1, *shape, dtype=torch.uint8)
        blank = blank.to(next(part.parameters()).device)
        with torch.no_grad():
            self.width = part.embed_frames(blank, torch.float32).shape[-1]

    def forward(
        self, obs: dict[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        tokens: Tensor = self.part.embed_frames(obs[self.imgkeys[0]], dtype)
        return tokens


class StateEyes(nn.Module):
    """The state of a world that follows what is seen and done."""

    def __init__(self, world: Any, obs_space: Spaces):
        super().__init__()
        self.world, self.width = world, int(world.width)
        encoder = getattr(world, "enc", None)
        self.order = sorted(agent_obs_space(obs_space))
        if isinstance(encoder, Encoder):
            self.order = [*encoder.imgkeys, *encoder.veckeys]

    def initial(self, batch: int) -> Any:
        return self.world.initial(batch)

    def forward(
        self, carry: Any, batch: Batch, rng: Rng
    ) -> tuple[Float[Tensor, "B T F"], Any]:
        states = self.world.observe(carry, batch, rng)
        last = tree_map(lambda x: x[:, -1], states)
        return self.world.features(states).float(), last


def eyes_of(agent: Any, see: str, obs_space: Spaces) -> EncoderEyes | StateEyes:
    """The eyes of an agent: its world's encoder, or its whole world."""
    world: Any = getattr(agent, "world", None)
    if see == "state" and all(
        hasattr(world, verb) for verb in ("initial", "observe", "features")
    ):
        return StateEyes(world, obs_space)
    encoder = getattr(world, "enc", None)
    if see == "encoder" and isinstance(encoder, Encoder):
        return EncoderEyes(encoder, agent.dtype)
    part = getattr(world, "dynamics", None)
    if see == "encoder" and hasattr(part, "embed_frames"):
        return EncoderEyes(FrameEncoder(part, world.key, world.shape), world.dtype)
    other = "state" if see == "encoder" else "encoder"
    raise UserError(
        f"The world of this agent has no {see} to clone on.\n"
        f"  Fix: --bc.see {other}, or the world of another agent."
    )


def check_order(mine: list[str], saved: list[str], what: str) -> None:
    """Raise unless keys are read in the order in which they were learnt."""
    if list(mine) == list(saved):
        return
    missing = [key for key in saved if key not in mine]
    extra = [key for key in mine if key not in saved]
    if missing or extra:
        parts = [f"it has {', '.join(missing)} besides" if missing else ""]
        parts += [f"it knows no {', '.join(extra)}" if extra else ""]
        why = " and ".join(part for part in parts if part)
    else:
        why = f"the order was {', '.join(saved)}, now it is {', '.join(mine)}"
    raise UserError(
        f"{what} does not read the same keys: {why}.\n"
        f"  Fix: give recordings with the keys {', '.join(saved)}; if you name them, "
        "in this order."
    )
