"""Steps of agents and latent worlds as pure functions, for `reverie export`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reverie.api import Batch, LatentWorld, State
from reverie.capabilities import ExportStep
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.spaces import Space, Spaces

IS_FIRST = Space(bool)
"""Space of the input `is_first`."""

StepFunction = Callable[[Batch, Any, Rng], tuple[dict[str, Tensor], Any]]
"""Maps inputs, state and random generator to outputs and the next state."""


class StepModule(nn.Module):
    """A step function with the modules that it uses, in evaluation mode."""

    def __init__(self, step: StepFunction, *modules: nn.Module):
        super().__init__()
        self.step, self.parts = step, nn.ModuleList(modules)
        self.eval()

    def forward(
        self, inputs: Batch, state: Any, rng: Rng
    ) -> tuple[dict[str, Tensor], Any]:
        return self.step(inputs, state, rng)


def latent_world_steps(
    world: LatentWorld, obs_space: Spaces, act_space: Spaces
) -> dict[str, ExportStep]:
    """Return the steps `observe`, `imagine` and `decode`, which share one state format.

    `observe` maps an observation, `prevact/KEY` and `is_first` to the next state;
    `imagine` maps actions to the next state, `reward` and `cont`; `decode` returns the
    observation predicted in a state, and an empty state. Worlds without a decoder have
    no step `decode`.
    """
    prevact = {f"prevact/{key}": space for key, space in act_space.items()}

    def observe(inputs: Batch, state: State, rng: Rng) -> tuple[dict[str, Any], State]:
        batch: Batch = {k: inputs[k][:, None] for k in (*obs_space, "is_first")}
        batch["prevact"] = {key: inputs[f"prevact/{key}"][:, None] for key in act_space}
        states = world.observe(state, batch, rng)
        return {}, tree_map(lambda x: x[:, 0], states)

    def imagine(inputs: Batch, state: State, rng: Rng) -> tuple[dict[str, Any], State]:
        rollout = world.imagine(state, lambda _: inputs, 1, rng)
        next_state = tree_map(lambda x: x[:, 1], rollout.states)
        reward, cont = world.reward_and_cont(world.features(next_state))
        return {"reward": reward.float(), "cont": cont.float()}, next_state

    def decode(inputs: Batch, state: State, rng: Rng) -> tuple[dict[str, Any], State]:
        decoded = world.decode(tree_map(lambda x: x[:, None], state))
        return {key: x[:, 0].float() for key, x in decoded.items()}, ()

    functions: dict[str, tuple[StepFunction, Spaces]] = {
        "observe": (observe, {**obs_space, **prevact, "is_first": IS_FIRST}),
        "imagine": (imagine, act_space),
    }
    with torch.no_grad():
        if world.decode(tree_map(lambda x: x[:, None], world.initial(1))):
            functions["decode"] = decode, {}
    assert isinstance(world, nn.Module), "only worlds in PyTorch can be exported"
    return {
        name: ExportStep(StepModule(step, world), inputs, world.initial)
        for name, (step, inputs) in functions.items()
    }
