"""One step of the VTA prior: boundary flags are the mode, states are sampled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from reverie.nets.rng import Rng
from reverie.worlds.vta.boundaries import COPY, UPDATE
from reverie.worlds.vta.states import VTAState

if TYPE_CHECKING:
    from reverie.worlds.vta.world import VTA


def prior_step(
    world: VTA, state: VTAState, action: dict[str, Tensor], rng: Rng, jumpy: bool
) -> VTAState:
    """Return the next state; if `jumpy`, the first state of the next segment."""
    logits = state.next_flag_logits
    boundary = (logits[:, UPDATE] >= logits[:, COPY]).to(state.boundary.dtype)
    boundary = torch.ones_like(boundary) if jumpy else boundary
    inputs = [state.abs_state]
    if world.actions is not None:
        inputs.append(world.actions(action, torch.float32))
    gates = world.abs_cell.gates(torch.cat(inputs, -1))
    updated = world.abs_cell.step(gates, state.abs_belief[None])[0]
    belief = torch.where(boundary[:, None] > 0, updated, state.abs_belief)
    return sample_levels(world, state, belief, boundary, rng)


def sample_levels(
    world: VTA,
    state: VTAState,
    abs_belief: Float[Tensor, "B D"],
    boundary: Float[Tensor, " B"],
    rng: Rng,
) -> VTAState:
    """Sample upper and lower state that follow `state`, given the upper belief."""
    begins = boundary[:, None] > 0
    sample = world.prior_abs(abs_belief).sample(rng)
    abs_state = torch.where(begins, sample, state.abs_state)
    abs_feat = world.abs_feat(torch.cat([abs_belief, abs_state], -1))
    obs_belief = abs_feat
    if world.obs_cell is not None:
        gates = world.obs_cell.gates(torch.cat([state.obs_state, abs_feat], -1))
        updated = world.obs_cell.step(gates, state.obs_belief[None])[0]
        obs_belief = torch.where(begins, abs_feat, updated)
    obs_state = world.prior_obs(obs_belief).sample(rng)
    obs_feat = world.obs_feat(torch.cat([obs_belief, obs_state], -1))
    return VTAState(
        abs_belief, abs_state, obs_belief, obs_state, boundary, world.foresee(obs_feat)
    )
