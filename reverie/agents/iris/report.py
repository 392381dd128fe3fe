"""Reports of Δ-IRIS: losses, codebook statistics, images and videos.

- `reconstruction`: true frames (top), each frame decoded from the true previous frame
  and its Δ-tokens (middle), and their difference (bottom).
- `openloop`: the same, but after the context frames the world model predicts all frames
  from the recorded actions.
- `imagined`: imagined rollouts of the policy, one per column.
- `tokens`: how often each code is used, one row per token position.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from reverie.agents.explore import ENSEMBLE
from reverie.agents.iris.actor_critic import PixelActorCritic
from reverie.agents.iris.explorer import TokenExplorer
from reverie.api import Metrics
from reverie.nets.rng import Rng
from reverie.render.open_loop import open_loop_video
from reverie.worlds.iris.quantizer import entropy_bits
from reverie.worlds.iris.segment import EpisodeSegment
from reverie.worlds.iris.world import IrisWorld

VIDEO_SEQUENCES = 6
"""Sequences shown in a video."""
CODE_PIXELS = 4
"""Side of the square that shows one code in the image of code usage."""


@torch.no_grad()
def report_metrics(
    world: IrisWorld,
    imagination_world: IrisWorld,
    actor_critic: PixelActorCritic,
    explorer: TokenExplorer | None,
    segment: EpisodeSegment,
    rng: Rng,
    tokenizer_length: int,
) -> Metrics:
    """Return losses, codebook statistics and videos of a batch, without training.

    `tokenizer_length` is the number of frames for the tokenizer losses; the dynamics
    losses use as many frames as fit into the context of the transformer.
    """
    max_frames = world.dynamics.config.transformer.blocks
    for_tokenizer = EpisodeSegment(*(x[:, :tokenizer_length] for x in segment))
    for_dynamics = EpisodeSegment(*(x[:, :max_frames] for x in segment))
    tokenizer_loss = world.tokenizer.loss(for_tokenizer, rng, update_codebook=False)
    dynamics_loss = world.dynamics_loss(for_dynamics)
    metrics: Metrics = {}
    components = {
        "tokenizer": (tokenizer_loss.losses, tokenizer_loss.metrics),
        "world_model": (dynamics_loss.losses, dynamics_loss.metrics),
    }
    if explorer:
        tokens = world.tokenizer.tokenize(for_dynamics.image, for_dynamics.action)
        heads = explorer.head_loss(dynamics_loss.states, tokens, for_dynamics)
        components[ENSEMBLE] = heads
    for name, (losses, values) in components.items():
        metrics |= {f"loss/{name}/{k}": x.mean() for k, x in losses.items()}
        metrics |= {f"{name}/{k}": x for k, x in values.items()}

    is_real = for_tokenizer.real[:, :-1] & for_tokenizer.real[:, 1:]
    tokens = tokenizer_loss.states[is_real]
    metrics |= _codebook_metrics(world, tokens)

    shown = EpisodeSegment(
        *(x[:VIDEO_SEQUENCES, :max_frames] for x in align_to_first_frame(segment))
    )
    truth = shown.image.cpu().numpy()
    decoded = world.reconstruct(shown.image, shown.action).cpu().numpy()
    metrics["reconstruction/image"] = open_loop_video(truth, decoded, truth.shape[1])
    context = min(actor_critic.config.burn_in + 1, int(shown.real.sum(1).min()))
    predicted = predict_frames(imagination_world, shown, context, rng).cpu().numpy()
    model = np.concatenate([decoded[:, :context], predicted], 1)
    metrics["openloop/image"] = open_loop_video(truth, model, context)
    rollout = actor_critic.imagine(
        imagination_world, shown.image[:, :context], shown.action[:, :context], rng
    )
    metrics["imagined/image"] = side_by_side(rollout.states.image.cpu().numpy())
    metrics["imagined/reward"] = rollout.states.reward[:, 1:].mean()
    metrics["imagined/ends"] = rollout.states.end.any(1).float().mean()
    return metrics


def _codebook_metrics(world: IrisWorld, tokens: Int[Tensor, "n K"]) -> Metrics:
    """Return entropy and perplexity of the running code usage and of this batch."""
    quantizer = world.tokenizer.quantizer
    counts = F.one_hot(tokens, quantizer.config.codes).sum(0).float()  # (K, codes)
    frequencies = counts.sum(0) / counts.sum().clamp(min=1)
    bits = entropy_bits(quantizer.usage)
    return {
        "codebook/entropy": bits,
        "codebook/perplexity": torch.exp2(bits),
        "codebook/batch_entropy": entropy_bits(frequencies),
        "codebook/batch_perplexity": torch.exp2(entropy_bits(frequencies)),
        "codebook/used": (counts.sum(0) > 0).float().sum(),
        "tokens/usage": usage_image(counts.long().cpu().numpy()),
    }


def align_to_first_frame(segment: EpisodeSegment) -> EpisodeSegment:
    """Shift sequences to start at their first real frame; sort them, longest first.

    Videos then start with an episode, and not with the padding before it.
    """
    count, steps = segment.real.shape
    order = segment.real.sum(1).argsort(descending=True, stable=True)
    first = segment.real[order].long().argmax(1)
    # rows to copy from; those beyond the end of a sequence are replaced by zeros
    index = first[:, None] + torch.arange(steps, device=first.device)
    inside = index < steps

    def shift(x: Tensor) -> Tensor:
        shifted = x[order[:, None], index.clamp(max=steps - 1)]
        mask = inside.reshape(count, steps, *[1] * (x.ndim - 2))
        return torch.where(mask, shifted, 0)

    image, action, reward, end, real = (shift(x) for x in segment)
    return EpisodeSegment(image, action, reward, end.bool(), real.bool())


@torch.no_grad()
def episode_losses(
    world: IrisWorld, segment: EpisodeSegment, lengths: dict[str, int], rng: Rng
) -> tuple[dict[str, Float[Tensor, "B L"]], Bool[Tensor, "B L"]]:
    """Return the losses of all rows of full episodes, and a mask of the valid rows.

    As in the original, episodes are split into chunks of the training length of each
    component (`lengths`); a chunk with a single frame is left out. A transition to the
    next chunk or to the last observation has no loss; it gets the mean of the losses
    before it.
    """
    empty, mask = torch.zeros_like(segment.reward), torch.zeros_like(segment.real)
    losses: dict[str, Tensor] = {}
    has_loss: dict[str, Tensor] = {}
    for component, length in lengths.items():
        for start in range(0, segment.real.shape[1] - 1, length):
            chunk = EpisodeSegment(*(x[:, start : start + length] for x in segment))
            real = chunk.real & (chunk.real.sum(1, keepdim=True) > 1)
            chunk, has_next = chunk._replace(real=real), real[:, :-1] & real[:, 1:]
            # `counted` are the rows over which `scale_by_mask` averages each loss. It
            # multiplies the loss by (number of rows) / (number of counted rows); the
            # line with `numel` removes this factor.
            if component == "tokenizer":
                terms = world.tokenizer.loss(chunk, rng, update_codebook=False).losses
                counted = dict.fromkeys(terms, has_next)
                counted["commit"] = torch.ones_like(has_next)  # includes padding
            else:
                terms = world.dynamics_loss(chunk).losses
                counted = dict.fromkeys(terms, real) | {"latents": real[:, :-1]}
                mask[:, start : start + length] = real
            for name, loss in terms.items():
                rows = counted[name]
                loss = loss * rows.sum().clamp(min=1) / rows.numel()
                key, steps = f"{component}/{name}", slice(start, start + loss.shape[1])
                losses.setdefault(key, empty.clone())[:, steps] = loss
                # a loss of transitions has one row less than the chunk
                valid = has_loss.setdefault(key, torch.zeros_like(segment.real))
                valid[:, steps] = has_next if loss.shape[1] < real.shape[1] else real
    return {k: _fill_with_means(x, has_loss[k]) for k, x in losses.items()}, mask


def _fill_with_means(
    loss: Float[Tensor, "B L"], valid: Bool[Tensor, "B L"]
) -> Float[Tensor, "B L"]:
    """Replace invalid losses by the mean of the valid ones before them."""
    loss = torch.where(valid, loss, 0)
    count, total = valid.long().cumsum(1), loss.cumsum(1)
    return torch.where(valid, loss, total / count.clamp(min=1))


@torch.no_grad()
def predict_frames(
    world: IrisWorld, segment: EpisodeSegment, context: int, rng: Rng
) -> UInt8[Tensor, "N T h w c"]:
    """Predict the frames after the first `context`, with the recorded actions."""
    image, action = segment.image, segment.action
    state = world.state_from_frames(image[:, :context], action[:, : context - 1])
    frames = []
    for t in range(context - 1, image.shape[1] - 1):
        state = world.step(state, action[:, t], rng).state
        frames.append(state.image)
    return torch.stack(frames, 1) if frames else image[:, :0]


def usage_image(counts: Int[np.ndarray, "K N"]) -> UInt8[np.ndarray, "height width 3"]:
    """Draw how often each code is used: one band per token position.

    Unused codes are dark blue; the most frequent code of a band is white.
    """
    positions, codes = counts.shape
    columns = max(1, 2 ** ((codes.bit_length()) // 2))  # a band is about square
    rows = -(-codes // columns)  # rounded up
    padded = np.zeros((positions, rows * columns))
    padded[:, :codes] = counts
    largest = padded.max(1, keepdims=True).clip(1)
    # the square root makes rarely used codes visible
    brightness = np.sqrt(padded / largest).reshape(positions, rows, columns)
    bands = np.zeros((positions, rows + 1, columns, 3))  # a black row after each band
    bands[:, :rows] = brightness[..., None]
    bands[:, :rows, :, 2] = np.maximum(brightness, 0.15)  # blue channel
    image = bands.reshape(-1, columns, 3)[:-1]
    pixels: np.ndarray = np.rint(image * 255).astype(np.uint8)
    return pixels.repeat(CODE_PIXELS, 0).repeat(CODE_PIXELS, 1)


def side_by_side(
    videos: UInt8[np.ndarray, "N T h w c"],
) -> UInt8[np.ndarray, "T h total_width c"]:
    """Join videos horizontally, with a gap of two pixels."""
    gap = [(0, 0), (0, 0), (0, 0), (0, 2), (0, 0)]
    padded = np.pad(videos, gap)
    steps, height, channels = padded.shape[1], padded.shape[2], padded.shape[-1]
    grid = padded.transpose(1, 2, 0, 3, 4).reshape(steps, height, -1, channels)
    return np.ascontiguousarray(grid[:, :, :-2])
