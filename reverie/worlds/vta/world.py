"""Variational temporal abstraction: a world that finds its own chapters.

Two levels share the work. The lower one follows frames within a segment, as an RSSM
would. The upper one changes only where a segment begins: there the lower level is
thrown away and starts anew from the upper one. Where segments begin is inferred from
the whole window by convolutions over time, and foreseen, one step ahead, from the lower
level, so that the world can dream without images: frame by frame, or jumping from one
segment to the next.

A window has `T = I + S + I` frames. The first I are context, the next S are modelled,
and the last I are only seen by the encoders:

    frame    0 .. I-1    I .. I+S-1          I+S .. T-1
    flag     READ        READ, then found    READ

An entry of `foreseen`, and of the loss that compares it with what was found, is about
the *next* frame, one of everything else about its own.

Everything that does not depend on the step before is computed for all steps at once:
no posterior sees the belief of its own level, so states are drawn before those are
known, and the loops are left with the products of the recurrent units alone.

Beside this file lie its settings (`vta_config.py`), what it returns (`vta_story.py`),
its images (`vta_pixels.py`) and the steps of its dreams (`vta_dream.py`).

Letters of this file: `I` context, `S` modelled steps, `D` belief, `Z` state, `P` three
times `D`. Kim, Ahn and Bengio, 2019, arXiv 1910.00775.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import Batch, Obs, Rollout, UserError, WorldLoss
from reverie.nets.gaussian import Gaussian
from reverie.nets.gru import GRU, Hold, Route
from reverie.nets.inputs import Concat
from reverie.nets.rng import Rng
from reverie.nets.strided import (
    ImageDecoder,
    ImageEncoder,
    TimeConvs,
    initialize_as_torch,
)
from reverie.spaces import Spaces
from reverie.worlds.outcomes import stack_actions
from reverie.worlds.vta.boundaries import (
    COPY,
    READ,
    annealed,
    both_ways,
    draw_flags,
    entropy,
    limit_segments,
    log_density,
    reading,
)
from reverie.worlds.vta.config import VTAConfig
from reverie.worlds.vta.inference import Chapter, Explained, Story, Watched
from reverie.worlds.vta.pixels import Pixels
from reverie.worlds.vta.rollout import descend, dream_on

NOISE = 1e-4
"""Gumbel noise is made of uniform numbers this far from 0 and 1."""


class Head(nn.Module):
    """A Gaussian whose deviation is between 0 and 1."""

    def __init__(self, inputs: int, units: int):
        super().__init__()
        self.out = nn.Linear(inputs, 2 * units)

    def forward(self, x: Float[Tensor, "*b E"]) -> Gaussian:
        mean, raw = self.out(x).chunk(2, -1)
        return Gaussian(mean, torch.sigmoid(raw))


Policy = Callable[[Chapter], dict[str, Tensor]]


class VTA(nn.Module):
    """The world, for one image key and any actions (or none).

    In training mode flags are drawn, the prior knows the segment limits, batch norm
    sees the batch, and every call of `loss` counts for the temperature. Otherwise flags
    are the likelier ones.
    """

    age: Tensor
    temperature: Tensor

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        config: VTAConfig,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        images = [key for key, space in obs_space.items() if space.is_image]
        if len(images) != 1:
            found = ", ".join(images) or "none"
            raise UserError(
                f"VTA watches exactly one image, here are: {found}.\n"
                "  Fix: leave one image in the observations, uint8 (h, w, colours)."
            )
        (self.key,) = images
        height, side, channels = obs_space[self.key].shape
        if height != side:
            raise UserError(
                f"VTA watches square images, not {height} x {side}.\n"
                "  Fix: resize them; `reverie data convert SRC DST --size 32 32` does "
                "so with recordings."
            )
        self.config, self.dtype = config, dtype
        self.pixels = Pixels(config)
        belief, state = config.belief, config.state
        self.actions = Concat(act_space) if act_space else None
        inputs = self.actions.width if self.actions else 0

        self.enc = ImageEncoder(side, channels, belief, config.bias)
        self.dec = ImageDecoder(side, channels, belief, config.bias)
        self.detector = TimeConvs(belief, belief, config.layers, 2)
        self.foresee = nn.Linear(belief, 2)
        # abs forward, obs forward, abs backward
        self.readers = GRU(belief, belief, 3, dtype)
        self.abs_cell = GRU(state + inputs, belief, dtype=dtype)
        self.obs_cell = (
            None
            if config.static_lower_belief
            else GRU(state + belief, belief, dtype=dtype)
        )
        self.hold = Hold()
        self.abs_feat = nn.Linear(belief + state, belief)
        self.obs_feat = nn.Linear(belief + state, belief)
        self.prior_abs = Head(belief, state)
        self.prior_obs = Head(belief, state)
        self.post_abs = Head(2 * belief, state)
        self.post_obs = Head(2 * belief, state)
        self.register_buffer("age", torch.zeros(()))
        self.register_buffer("temperature", torch.tensor(config.temperature))

    def initialize(self, generator: torch.Generator) -> None:
        initialize_as_torch(self, generator)

    @property
    def width(self) -> int:
        return self.config.belief

    @property
    def image_keys(self) -> Iterable[str]:
        return (self.key,)

    # The verbs of a world

    def initial(self, batch: int) -> Chapter:
        """Before anything was seen; a segment is about to begin."""
        config, like = self.config, self.foresee.weight
        belief = like.new_zeros(batch, config.belief)
        state = like.new_zeros(batch, config.state)
        certain = both_ways(like.new_zeros(batch, 2), 1.0)
        return Chapter(belief, state, belief, state, like.new_zeros(batch), certain)

    def loss(self, state: Any, batch: Batch, rng: Rng) -> WorldLoss:
        """Losses of the modelled frames; a window brings its own context along."""
        if self.training:
            self.grow()
        explained = self.explain(batch, rng)
        story, losses = explained.story, self._weigh(explained.losses)
        read = story.mask[..., READ].detach()
        metrics = {
            "temperature": self.temperature,
            "segments": read.sum(1).mean(),
            "read_chance/post": explained.post_read.mean(),
            "read_chance/prior": explained.prior_read.mean(),
            "read_entropy/post": entropy(explained.post_read).mean(),
            "read_entropy/prior": entropy(explained.prior_read).mean(),
            "elbo": -torch.stack(list(explained.losses.values())).sum(0).mean(),
        }
        metrics |= {f"cost/{key}": x.mean() for key, x in explained.losses.items()}
        metrics = {key: value.detach().clone() for key, value in metrics.items()}
        return WorldLoss(losses, story.chapters, metrics)

    @torch.no_grad()
    def watch(self, batch: Batch, rng: Rng) -> Watched:
        """Explain windows without learning; everything is about its own frame.

        So is the loss of the flags, though they are foreseen one step ahead: the first
        frame, whose flag costs nothing, bears that of the one after the last.
        """
        explained = self.explain(batch, rng)
        story = explained.story
        sure = torch.ones_like(explained.post_read[:, :1])  # the first one always reads
        chance = torch.cat([sure, explained.post_read[:, :-1]], 1)
        foreseen = torch.cat([sure, explained.prior_read[:, :-1]], 1)
        image = self.pixels.shown(explained.image).movedim(-3, -1)
        read = story.mask[..., READ] > 0.5
        losses = self._weigh(explained.losses)
        losses["mask"] = losses["mask"].roll(1, 1)
        return Watched(losses, image, read, chance, foreseen)

    def observe(self, state: Any, batch: Batch, rng: Rng) -> Chapter:
        """The modelled steps of a window."""
        target = self.pixels.prepare(batch[self.key], rng)
        return self.follow(target, batch, rng).chapters

    def imagine(
        self,
        state: Chapter,
        policy: Policy,
        horizon: int,
        rng: Rng,
        *,
        jumpy: bool = False,
    ) -> Rollout:
        """Go on from `state`: frame by frame, or `jumpy`, segment by segment.

        Flags are the likelier ones, states are drawn. An action given by `policy` leads
        to the next step of the dream, which in a jumpy one is the next segment.
        """
        states, actions = [state], [policy(state)]
        for _ in range(horizon):
            states.append(dream_on(self, states[-1], actions[-1], rng, jumpy))
            actions.append(policy(states[-1]))
        stacked = [torch.stack(parts, 1) for parts in zip(*states, strict=True)]
        return Rollout(Chapter(*stacked), stack_actions(actions))

    def decode(self, states: Chapter) -> Obs:
        feat = self.obs_feat(torch.cat([states.obs_belief, states.obs_state], -1))
        image = self.pixels.squash(self._decode(feat))
        return {self.key: self.pixels.shown(image).movedim(-3, -1)}

    def features(self, states: Chapter) -> Float[Tensor, "*b D"]:
        upper = torch.cat([states.abs_belief, states.abs_state], -1)
        feat: Tensor = self.abs_feat(upper)
        return feat

    # Its parts

    def grow(self) -> None:
        """Count one update, and cool the flags accordingly."""
        config = self.config
        self.age += 1
        low, high = config.min_temperature, config.temperature
        self.temperature.copy_(annealed(self.age, high, low, config.anneal))

    def begin(self, images: Tensor, rng: Rng) -> Chapter:
        """Watch some frames, then dream the first step of the segment after them."""
        embed = self._encode(self.pixels.prepare(images, rng))
        abs_fwd, _, _ = self._read(embed, embed.new_zeros(*embed.shape[:2], 2))
        state = self.initial(len(embed))
        return descend(self, state, abs_fwd[:, -1], torch.ones_like(state.read), rng)

    def explain(self, batch: Batch, rng: Rng) -> Explained:
        """Follow a window, draw it again, and say what each step costs."""
        target = self.pixels.prepare(batch[self.key], rng)
        story = self.follow(target, batch, rng)
        context, length = self.config.context, self.config.length
        target = target[:, context : context + length]
        image = self._decode(story.obs_feat)

        ahead = slice(context + 1, context + length + 1)
        foreseen, found = story.foreseen, story.found[:, ahead]
        if self.training:
            config = self.config
            foreseen = limit_segments(
                foreseen, story.mask, config.max_segment, config.max_segments
            )
        sample, heat = story.log_sample[:, ahead], self.temperature
        read = story.mask[..., READ]
        read = read if self.config.kl_to_detector else read.detach()
        losses = {
            "image": self.pixels.compare(image, target),
            "abs": story.post_abs.kl(story.prior_abs) * read,
            "obs": story.post_obs.kl(story.prior_obs),
            "mask": log_density(found, sample, heat)
            - log_density(foreseen, sample, heat),
        }
        prior_read = torch.softmax(foreseen / heat, -1)[..., READ]
        post_read = torch.softmax(found / heat, -1)[..., READ]
        return Explained(
            story, self.pixels.squash(image), losses, prior_read, post_read
        )

    def follow(
        self, target: Float[Tensor, "B T c h w"], batch: Batch, rng: Rng
    ) -> Story:
        """The posterior of a window, and what the prior would have said."""
        config = self.config
        context, length = config.context, config.length
        if target.shape[1] != config.window:
            raise UserError(
                f"A window of {target.shape[1]} frames came, but {context} + {length} "
                f"+ {context} are wanted.\n  Fix: serve windows of {config.window}."
            )
        embed = self._encode(target)
        found = self.detector(embed)
        noise = None
        if self.training:
            if config.random_boundary_steps:
                found = found * (self.age > config.random_boundary_steps)
            noise = rng.uniform(found) * (1 - 2 * NOISE) + NOISE
        mask, log_sample = draw_flags(found, self.temperature, noise)
        edge = reading(mask[:, :context])
        free = mask[:, context + 1 : context + length]
        mask = torch.cat([edge, edge[:, :1], free, edge], 1)  # (B, T, 2)
        abs_fwd, obs_fwd, abs_bwd = self._read(embed, mask)

        now = slice(context, context + length)
        mask = mask[:, now]
        read, copy = mask[..., READ], mask[..., COPY]
        before = abs_fwd[:, context - 1 : context + length - 1]
        post_abs = self.post_abs(torch.cat([before, abs_bwd[:, now]], -1))
        abs_state = self.hold(post_abs.sample(rng), read, copy)
        acted = [abs_state[:, :-1]]
        if self.actions is not None:
            taken = self._acted(batch)[:, context : context + length - 1]
            acted.append(taken)
        gates = self.abs_cell.gates(torch.cat(acted, -1))  # (1, B, S - 1, P)
        start = abs_fwd[:, context - 1]
        route = Route(None, read[None, :, 1:], copy[None, :, 1:])
        moved = self.abs_cell.scan(gates, start[None], route)[0]
        abs_belief = torch.cat([start[:, None], moved], 1)
        abs_feat = self.abs_feat(torch.cat([abs_belief, abs_state], -1))

        post_obs = self.post_obs(torch.cat([obs_fwd[:, now], abs_feat], -1))
        obs_state = post_obs.sample(rng)
        obs_belief = abs_feat
        if self.obs_cell is not None:
            last = F.pad(obs_state[:, :-1], (0, 0, 1, 0))  # by one step
            gates = self.obs_cell.gates(torch.cat([last, abs_feat], -1))
            begun = read[..., None] * abs_feat
            route = Route(None, copy[None], None, begun[None])
            start = torch.zeros_like(abs_feat[None, :, 0])
            obs_belief = self.obs_cell.scan(gates, start, route)[0]
        obs_feat = self.obs_feat(torch.cat([obs_belief, obs_state], -1))
        return Story(
            embed,
            found,
            log_sample,
            abs_fwd,
            abs_bwd,
            obs_fwd,
            mask,
            abs_belief,
            abs_state,
            abs_feat,
            obs_belief,
            obs_state,
            obs_feat,
            self.foresee(obs_feat),
            self.prior_abs(abs_belief),
            post_abs,
            self.prior_obs(obs_belief),
            post_obs,
        )

    def _read(
        self, embed: Float[Tensor, "B T D"], mask: Float[Tensor, "B T 2"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All three encoders, in one loop; the third one runs backwards.

        The first never forgets, the second forgets before the first frame of a segment
        and the third after it.
        """
        copy = mask[..., COPY]
        after = torch.roll(copy, -1, 1)  # backwards, what comes later was before
        keep = torch.stack([torch.ones_like(copy), copy, after])
        start = embed.new_zeros(3, len(embed), self.config.belief)
        gates = self.readers.gates(embed)
        abs_fwd, obs_fwd, abs_bwd = self.readers.scan(gates, start, Route(keep), {2})
        return abs_fwd, obs_fwd, abs_bwd

    def _acted(self, batch: Batch) -> Float[Tensor, "B T A"]:
        """Row t holds the action that was chosen on seeing frame t."""
        assert self.actions is not None
        found = {key: batch[key] for key in self.actions.spaces}
        acted: Tensor = self.actions(found, torch.float32)
        return acted

    def _encode(self, x: Float[Tensor, "B T c h w"]) -> Float[Tensor, "B T D"]:
        frames = x.flatten(0, 1)
        if frames.is_cuda:
            frames = frames.contiguous(memory_format=torch.channels_last)
        with self._precision(frames):
            embed: Tensor = self.enc(frames)
        return embed.float().reshape(*x.shape[:2], -1)

    def _decode(self, feat: Float[Tensor, "*b D"]) -> Float[Tensor, "*b c h w"]:
        with self._precision(feat):
            image: Tensor = self.dec(feat.flatten(0, -2))
        return image.float().reshape(*feat.shape[:-1], *image.shape[1:])

    def _weigh(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        config = self.config
        scales = {
            "abs": config.abs_scale,
            "obs": config.obs_scale,
            "mask": config.mask_scale,
        }
        return {key: scales.get(key, 1.0) * loss for key, loss in losses.items()}

    def _precision(self, x: Tensor) -> AbstractContextManager[Any]:
        """Convolutions may be computed in half precision; nothing else is."""
        half = self.dtype != torch.float32
        return torch.autocast(
            x.device.type,
            self.dtype if half else None,
            enabled=half,
            cache_enabled=False,
        )
