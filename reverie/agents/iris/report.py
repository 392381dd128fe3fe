"""What there is to see of Δ-IRIS: how it draws, what it foresees, what it dreams of.

- `reconstruction`: truth above, each frame as drawn from the true one before it and its
  Δ-tokens, and below the difference.
- `openloop`: the same, but after the first frames nothing true is shown: the world goes
  on by itself, with the recorded actions.
- `dream`: what the policy does in the world, one dream per column.
- `tokens`: how often each code was used, one row per place of a token.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from reverie.agents.iris.actor_critic import PixelActorCritic
from reverie.api import Metrics
from reverie.nets.rng import Rng
from reverie.render.open_loop import open_loop_video
from reverie.worlds.iris.quantizer import entropy_bits
from reverie.worlds.iris.segment import EpisodeSegment
from reverie.worlds.iris.world import IrisWorld

SHOWN = 6
"""Sequences in a picture."""
CELL = 4
"""Pixels per code and side in the picture of their use."""


@torch.no_grad()
def look(
    world: IrisWorld,
    dreamt: IrisWorld,
    nets: PixelActorCritic,
    segment: EpisodeSegment,
    rng: Rng,
    length: int,
) -> Metrics:
    """Losses of a batch and pictures; nothing learns from it.

    `length` is that of the tokenizer's sequences; the dynamics see as much as they can.
    """
    short = EpisodeSegment(*(x[:, :length] for x in segment))
    token_loss = world.tokenizer_loss(short, rng, update_codebook=False)
    blocks = world.dynamics.config.transformer.blocks
    fitting = EpisodeSegment(*(x[:, :blocks] for x in segment))
    model_loss = world.dynamics_loss(fitting)
    metrics: Metrics = {}
    parts = {"tokenizer": token_loss, "world_model": model_loss}
    for name, loss in parts.items():
        metrics |= {f"loss/{name}/{k}": x.mean() for k, x in loss.losses.items()}
        metrics |= {f"{name}/{k}": x for k, x in loss.metrics.items()}

    tokens = token_loss.states[short.real[:, :-1] & short.real[:, 1:]]
    codes = world.tokenizer.quantizer.config.codes
    used = F.one_hot(tokens, codes).sum(0).float()  # (K, N)
    share = used.sum(0) / used.sum().clamp(min=1)
    bits = entropy_bits(world.tokenizer.quantizer.usage)
    metrics |= {
        "codebook/entropy": bits,
        "codebook/perplexity": torch.exp2(bits),
        "codebook/batch_entropy": entropy_bits(share),
        "codebook/batch_perplexity": torch.exp2(entropy_bits(share)),
        "codebook/used": (used.sum(0) > 0).float().sum(),
        "tokens/usage": usage_picture(used.long().cpu().numpy()),
    }

    few = EpisodeSegment(*(x[:SHOWN, :blocks] for x in from_first_frames(segment)))
    true = few.image.cpu().numpy()
    drawn = world.reconstruct(few.image, few.action).cpu().numpy()
    metrics["reconstruction/image"] = open_loop_video(true, drawn, true.shape[1])
    context = min(nets.config.burn_in + 1, int(few.real.sum(1).min()))
    ahead = continue_with_actions(dreamt, few, context, rng).cpu().numpy()
    model = np.concatenate([drawn[:, :context], ahead], 1)
    metrics["openloop/image"] = open_loop_video(true, model, context)
    dream = nets.dream(dreamt, few.image[:, :context], few.action[:, :context], rng)
    metrics["dream/image"] = side_by_side(dream.states.image.cpu().numpy())
    metrics["dream/reward"] = dream.states.reward[:, 1:].mean()
    metrics["dream/ends"] = dream.states.end.any(1).float().mean()
    return metrics


def from_first_frames(segment: EpisodeSegment) -> EpisodeSegment:
    """The same stretches, each from its first real frame, the longest first.

    What a picture shows is then an episode, and no dream begins in the dark before one.
    """
    rows, steps = segment.real.shape
    order = segment.real.sum(1).argsort(descending=True, stable=True)
    first = segment.real[order].long().argmax(1)
    at = first[:, None] + torch.arange(steps, device=first.device)
    inside = at < steps

    def moved(x: Tensor) -> Tensor:
        found = x[order[:, None], at.clamp(max=steps - 1)]
        return torch.where(inside.reshape(rows, steps, *[1] * (x.ndim - 2)), found, 0)

    image, action, reward, end, real = (moved(x) for x in segment)
    return EpisodeSegment(image, action, reward, end.bool(), real.bool())


@torch.no_grad()
def episode_losses(
    world: IrisWorld, segment: EpisodeSegment, lengths: dict[str, int], rng: Rng
) -> tuple[dict[str, Float[Tensor, "B L"]], Bool[Tensor, "B L"]]:
    """Losses of what followed each row of whole episodes, and which rows count.

    As in the original, episodes are cut into pieces as long as those trained on, one
    after the other; a single frame at the end is left out. From one piece to the next,
    and into the last observation, nothing is known about the change: the mean of those
    before it stands there.
    """
    empty, counts = torch.zeros_like(segment.reward), torch.zeros_like(segment.real)
    losses: dict[str, Tensor] = {}
    known: dict[str, Tensor] = {}
    for part, length in lengths.items():
        for start in range(0, segment.real.shape[1] - 1, length):
            piece = EpisodeSegment(*(x[:, start : start + length] for x in segment))
            real = piece.real & (piece.real.sum(1, keepdim=True) > 1)
            piece, both = piece._replace(real=real), real[:, :-1] & real[:, 1:]
            if part == "tokenizer":
                found = world.tokenizer_loss(piece, rng, update_codebook=False).losses
                means = dict.fromkeys(found, both)
                means["commit"] = torch.ones_like(both)  # the codebook sees all
            else:
                found = world.dynamics_loss(piece).losses
                means = dict.fromkeys(found, real) | {"latents": real[:, :-1]}
                counts[:, start : start + length] = real
            for name, loss in found.items():
                where = means[name]
                # each is scaled so that its mean is one over the marked entries
                loss = loss * where.sum().clamp(min=1) / where.numel()
                key, rows = f"{part}/{name}", slice(start, start + loss.shape[1])
                losses.setdefault(key, empty.clone())[:, rows] = loss
                marks = known.setdefault(key, torch.zeros_like(segment.real))
                marks[:, rows] = both if loss.shape[1] < real.shape[1] else real
    return {k: _with_means_before(x, known[k]) for k, x in losses.items()}, counts


def _with_means_before(
    loss: Float[Tensor, "B L"], known: Bool[Tensor, "B L"]
) -> Float[Tensor, "B L"]:
    """Where a loss is not known, the mean of what is known before."""
    loss = torch.where(known, loss, 0)
    count, total = known.long().cumsum(1), loss.cumsum(1)
    return torch.where(known, loss, total / count.clamp(min=1))


@torch.no_grad()
def continue_with_actions(
    world: IrisWorld, segment: EpisodeSegment, context: int, rng: Rng
) -> UInt8[Tensor, "N T h w c"]:
    """The frames after the first `context`, dreamt with the recorded actions."""
    image, action = segment.image, segment.action
    state = world.state_from_frames(image[:, :context], action[:, : context - 1])
    frames = []
    for t in range(context - 1, image.shape[1] - 1):
        state = world.step(state, action[:, t], rng).state
        frames.append(state.image)
    return torch.stack(frames, 1) if frames else image[:, :0]


def usage_picture(used: Int[np.ndarray, "K N"]) -> UInt8[np.ndarray, "height width 3"]:
    """How often each code was used: one band per place, bright for often.

    A code nobody uses is dark blue; the most used of a band is white.
    """
    places, codes = used.shape
    columns = max(1, 2 ** ((codes.bit_length()) // 2))
    rows = -(-codes // columns)
    padded = np.zeros((places, rows * columns))
    padded[:, :codes] = used
    most = padded.max(1, keepdims=True).clip(1)
    shade = np.sqrt(padded / most).reshape(places, rows, columns)
    band = np.zeros((places, rows + 1, columns, 3))
    band[:, :rows] = shade[..., None]
    band[:, :rows, :, 2] = np.maximum(shade, 0.15)
    picture = band.reshape(-1, columns, 3)[:-1]
    small: np.ndarray = np.rint(picture * 255).astype(np.uint8)
    return small.repeat(CELL, 0).repeat(CELL, 1)


def side_by_side(
    videos: UInt8[np.ndarray, "N T h w c"],
) -> UInt8[np.ndarray, "T h2 w2 c"]:
    """Several films as one, next to each other with a gap between."""
    gap = [(0, 0), (0, 0), (0, 0), (0, 2), (0, 0)]
    padded = np.pad(videos, gap)
    steps, height, colours = padded.shape[1], padded.shape[2], padded.shape[-1]
    grid = padded.transpose(1, 2, 0, 3, 4).reshape(steps, height, -1, colours)
    return np.ascontiguousarray(grid[:, :, :-2])
