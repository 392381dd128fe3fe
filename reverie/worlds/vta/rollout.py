"""How VTA goes on without images, by its priors alone.

Flags are the likelier ones, states are drawn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from reverie.nets.rng import Rng
from reverie.worlds.vta.boundaries import COPY, READ
from reverie.worlds.vta.inference import Chapter

if TYPE_CHECKING:
    from reverie.worlds.vta.world import VTA


def dream_on(
    world: VTA, state: Chapter, action: dict[str, Tensor], rng: Rng, jumpy: bool
) -> Chapter:
    """The next step; `jumpy`, the first one of the next segment."""
    logits = state.foreseen
    read = (logits[:, READ] >= logits[:, COPY]).to(state.read.dtype)
    read = torch.ones_like(read) if jumpy else read
    acted = [state.abs_state]
    if world.actions is not None:
        acted.append(world.actions(action, torch.float32))
    gates = world.abs_cell.gates(torch.cat(acted, -1))
    moved = world.abs_cell.step(gates, state.abs_belief[None])[0]
    belief = torch.where(read[:, None] > 0, moved, state.abs_belief)
    return descend(world, state, belief, read, rng)


def descend(
    world: VTA,
    state: Chapter,
    abs_belief: Float[Tensor, "B D"],
    read: Float[Tensor, " B"],
    rng: Rng,
) -> Chapter:
    """Draw both states, given the upper belief and whether a segment begins."""
    begins = read[:, None] > 0
    drawn = world.prior_abs(abs_belief).sample(rng)
    abs_state = torch.where(begins, drawn, state.abs_state)
    feat = world.abs_feat(torch.cat([abs_belief, abs_state], -1))
    obs_belief = feat
    if world.obs_cell is not None:
        gates = world.obs_cell.gates(torch.cat([state.obs_state, feat], -1))
        moved = world.obs_cell.step(gates, state.obs_belief[None])[0]
        obs_belief = torch.where(begins, feat, moved)
    obs_state = world.prior_obs(obs_belief).sample(rng)
    seen = world.obs_feat(torch.cat([obs_belief, obs_state], -1))
    return Chapter(
        abs_belief, abs_state, obs_belief, obs_state, read, world.foresee(seen)
    )
