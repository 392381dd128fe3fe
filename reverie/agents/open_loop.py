"""Open-loop videos of a world model: half of a sequence observed, half predicted."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.api import Batch, LatentWorld, Metrics, State
from reverie.capabilities import HasBoundaries
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.render.open_loop import open_loop_video

MAX_SEQUENCES = 6
"""Sequences shown in a video."""


@torch.no_grad()
def open_loop_videos(
    world: LatentWorld, state: State, batch: Batch, rng: Rng
) -> Metrics:
    """Return a video `openloop/<key>` for every image key.

    The first half of each sequence is reconstructed from posterior states, the second
    half is predicted with the prior and the recorded actions.
    """
    is_first = batch["is_first"]
    count, length = min(MAX_SEQUENCES, len(is_first)), is_first.shape[1]
    half = length // 2
    context = tree_map(lambda x: x[:count, :half], batch)
    actions = tree_map(lambda x: x[:count, half:], batch["prevact"])
    observed = world.observe(tree_map(lambda x: x[:count], state), context, rng)
    # `imagine` also asks for an action in the last state, which has no effect
    steps = [*range(length - half), 0]
    recorded = iter([tree_map(lambda x, t=t: x[:, t], actions) for t in steps])
    start = tree_map(lambda x: x[:, -1], observed)
    rollout = world.imagine(start, lambda _: next(recorded), length - half, rng)
    predicted = tree_map(lambda x: x[:, 1:], rollout.states)
    reconstructions, predictions = world.decode(observed), world.decode(predicted)
    boundaries = None
    if isinstance(world, HasBoundaries):
        parts = [world.boundaries(states) for states in (observed, predicted)]
        boundaries = torch.cat(parts, 1).cpu().numpy()
    videos = {}
    for key in world.image_keys:
        model = to_pixels(torch.cat([reconstructions[key], predictions[key]], 1))
        truth = batch[key][:count].cpu().numpy()
        videos[f"openloop/{key}"] = open_loop_video(
            truth, model, half, boundaries=boundaries
        )
    return videos


def to_pixels(image: Float[Tensor, "*b h w c"]) -> UInt8[np.ndarray, "*b h w c"]:
    """Convert images in [0, 1] to uint8 arrays."""
    pixels: np.ndarray = (image * 255).clamp(0, 255).to(torch.uint8).cpu().numpy()
    return pixels
