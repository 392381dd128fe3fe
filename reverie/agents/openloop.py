"""What a world foresees: watch half of a sequence, then dream on."""

from __future__ import annotations

from typing import Any

import torch

from reverie.api import Batch, Metrics
from reverie.nets.rng import Rng
from reverie.nets.tree import tree_map
from reverie.render.open_loop import open_loop_video

SEQUENCES = 6
"""How many of a batch are shown."""


@torch.no_grad()
def openloop(world: Any, state: Any, batch: Batch, rng: Rng) -> Metrics:
    """A video per image key; the second half is dreamt, with the recorded actions."""
    count, length = min(SEQUENCES, len(batch["is_first"])), batch["is_first"].shape[1]
    half = length // 2
    seen = tree_map(lambda x: x[:count, :half], batch)
    actions = tree_map(lambda x: x[:count, half:], batch["prevact"])
    states = world.observe(tree_map(lambda x: x[:count], state), seen, rng)
    steps = [*range(length - half), 0]  # the last one is chosen but never taken
    known = iter([tree_map(lambda x, t=t: x[:, t], actions) for t in steps])
    start = tree_map(lambda x: x[:, -1], states)
    dream = world.imagine(start, lambda _: next(known), length - half, rng)
    before = world.decode(states)
    after = world.decode(tree_map(lambda x: x[:, 1:], dream.states))
    videos, marks = {}, None
    if hasattr(world, "boundaries"):  # a world that knows where segments begin
        both = (states, tree_map(lambda x: x[:, 1:], dream.states))
        begins = torch.cat([world.boundaries(each) for each in both], 1)
        marks = begins.cpu().numpy()
    for key in world.image_keys:
        model = torch.cat([before[key], after[key]], 1) * 255
        shades = model.clamp(0, 255).to(torch.uint8).cpu().numpy()
        true = batch[key][:count].cpu().numpy()
        videos[f"openloop/{key}"] = open_loop_video(
            true, shades, half, boundaries=marks
        )
    return videos
