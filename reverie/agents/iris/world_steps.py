"""Steps of the Δ-IRIS world model, for `reverie export`.

The steps are pure functions without a KV cache: their state is the last frames and
actions, which `imagine` encodes again in every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int, UInt8
from torch import Tensor

from reverie.agents.export_steps import IS_FIRST, StepModule
from reverie.api import Batch
from reverie.capabilities import ExportStep
from reverie.nets.rng import Rng
from reverie.spaces import Space, Spaces
from reverie.worlds.iris.world import IrisFrames, IrisWorld


class FrameContext(NamedTuple):
    """The last frames, black before an episode, and the action chosen in each."""

    image: UInt8[Tensor, "N L h w c"]
    action: Int[Tensor, "N L"]  # index from 0; that of the last frame is not used
    is_real: Bool[Tensor, "N L"]  # False for black frames before the episode

    def reset(self, where: Bool[Tensor, " N"]) -> FrameContext:
        """Remove all frames of the sequences that are True in `where`."""
        keep = ~where
        return FrameContext(
            self.image * keep[:, None, None, None, None],
            self.action * keep[:, None],
            self.is_real & keep[:, None],
        )

    def append(
        self, action: Int[Tensor, " N"], image: UInt8[Tensor, "N h w c"]
    ) -> FrameContext:
        """Set the action of the last frame, append a frame, drop the oldest one."""
        actions = torch.stack([action, torch.zeros_like(action)], 1)
        return FrameContext(
            torch.cat([self.image[:, 1:], image[:, None]], 1),
            torch.cat([self.action[:, 1:-1], actions], 1),
            torch.cat([self.is_real[:, 1:], torch.ones_like(self.is_real[:, :1])], 1),
        )


def iris_world_steps(
    world: IrisWorld, frames: int, image: Space, act_space: Spaces
) -> dict[str, ExportStep]:
    """Return the steps `observe`, `imagine` and `decode` (see `latent_world_steps`).

    `frames` is the number of frames in the context, at least two.
    """
    ((key, space),) = act_space.items()
    low, device = int(space.low), next(world.parameters()).device

    def initial(batch: int) -> FrameContext:
        pixels = torch.as_tensor(image.zeros(batch, frames), device=device)
        actions = torch.zeros(batch, frames, dtype=torch.int64, device=device)
        return FrameContext(pixels, actions, actions.bool())

    # The networks amplify rounding errors in images without contrast, so the tokens of
    # black frames differ between PyTorch and ONNX. The step stores them as constants.
    black = initial(1)
    black_i_token = world.dynamics.embed_frames(black.image[:, :1]).detach()
    black_tokens = world.tokenizer.tokenize(black.image[:, :2], black.action[:, :1])

    def observe(inputs: Batch, state: FrameContext, rng: Rng) -> Any:
        first = inputs["is_first"]
        state = state.reset(first)
        action = torch.where(first, 0, inputs[f"prevact/{key}"].long() - low)
        return {}, state.append(action, inputs[world.key])

    def imagine(inputs: Batch, state: FrameContext, rng: Rng) -> Any:
        action = inputs[key].long() - low
        is_real, past_actions = state.is_real[..., None], state.action[:, :-1]
        i_tokens = world.dynamics.embed_frames(state.image)
        i_tokens = torch.where(is_real, i_tokens, black_i_token)
        tokens = world.tokenizer.tokenize(state.image, past_actions)
        tokens = torch.where(is_real[:, 1:], tokens, black_tokens)
        start = world.state_from_tokens(
            state.image[:, -1], i_tokens, past_actions, tokens
        )
        step = world.step(start, action, rng)
        cont = step.end_logits.float().softmax(-1)[..., 0]
        outputs = {"reward": step.state.reward.float(), "cont": cont}
        return outputs, state.append(action, step.state.image)

    def decode(inputs: Batch, state: FrameContext, rng: Rng) -> Any:
        zero = torch.zeros_like(state.action[:, -1])  # `decode` uses only the image
        newest = IrisFrames(state.image[:, -1], zero.float(), zero.bool())
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
