"""Steps of the Δ-IRIS world model, for `reverie export`.

A pure step has no KV cache: its state is the last frames and actions, and `imagine`
encodes them again, as `IrisWorld.state_from_frames` does at the start of a rollout.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from reverie.agents.export_steps import IS_FIRST, StepModule
from reverie.api import Batch
from reverie.capabilities import ExportStep
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map, tree_where
from reverie.spaces import Space, Spaces
from reverie.worlds.iris.world import IrisFrames, IrisWorld


class FrameContext(NamedTuple):
    """The last frames, black before an episode, and the action chosen in each."""

    image: UInt8[Tensor, "N L h w c"]
    action: Int[Tensor, "N L"]  # index from 0; that of the last frame is not used

    def append(
        self, action: Int[Tensor, " N"], image: UInt8[Tensor, "N h w c"]
    ) -> FrameContext:
        """Set the action of the last frame, append a frame, drop the oldest one."""
        actions = torch.stack([action, torch.zeros_like(action)], 1)
        return FrameContext(
            torch.cat([self.image[:, 1:], image[:, None]], 1),
            torch.cat([self.action[:, 1:-1], actions], 1),
        )


def iris_world_steps(
    world: IrisWorld, frames: int, image: Space, act_space: Spaces
) -> dict[str, ExportStep]:
    """Return the steps of a world model with a context of at least two frames."""
    ((key, space),) = act_space.items()
    low, device = int(space.low), next(world.parameters()).device

    def initial(batch: int) -> FrameContext:
        pixels = torch.as_tensor(image.zeros(batch, frames), device=device)
        actions = torch.zeros(batch, frames, dtype=torch.int64, device=device)
        return FrameContext(pixels, actions)

    def observe(inputs: Batch, state: FrameContext, rng: Rng) -> Any:
        first = inputs["is_first"]
        state = tree_where(first, tree_map(lambda _: 0, state), state)
        action = torch.where(first, 0, inputs[f"prevact/{key}"].long() - low)
        return {}, state.append(action, inputs[world.key])

    def imagine(inputs: Batch, state: FrameContext, rng: Rng) -> Any:
        action = inputs[key].long() - low
        start = world.state_from_frames(state.image, state.action[:, :-1])
        step = world.step(start, action, rng)
        cont = step.end_logits.float().softmax(-1)[..., 0]
        outputs = {"reward": step.state.reward.float(), "cont": cont}
        return outputs, state.append(action, step.state.image)

    def decode(inputs: Batch, state: FrameContext, rng: Rng) -> Any:
        nothing = torch.zeros_like(state.action[:, -1])
        newest = IrisFrames(state.image[:, -1], nothing.float(), nothing.bool())
        return world.decode(newest), ()

    prevact = {f"prevact/{key}": space}
    functions = {
        "observe": (observe, {world.key: image, **prevact, "is_first": IS_FIRST}),
        "imagine": (imagine, act_space),
        "decode": (decode, {}),
    }
    return {
        name: ExportStep(StepModule(step, world), inputs, initial)
        for name, (step, inputs) in functions.items()
    }
