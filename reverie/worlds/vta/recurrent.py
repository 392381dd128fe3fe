"""VTA in the form of a recurrent world, for agents that act (`dreamer.world vta`).

The upper level has a belief and a state that change only where a segment begins; the
lower level has its own, and begins anew from the upper one there. Both are Gaussian.
Everything else, encoder, decoder and heads, is that of the RSSM.

While training, the flags come from convolutions over time that see the whole sequence;
while acting there is only the present row, so the prior's flag is used, which the lower
level of the row before foresees. Segments may neither be too long nor too many, and
that holds for both detectors, always: their logits are fixed where a limit is reached.
Here the number of segments has the last word (in `vta.py` it is their length).

The flag of a row is about the row itself. Letters of this file: `U` and `Y` belief and
state of the upper level, `C` both together, `D` and `Z` those of the lower one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.api import Batch, Extras, Obs, Rollout, WorldLoss
from reverie.nets.blocks import Linear
from reverie.nets.conv import Decoder, DecoderConfig, Encoder, EncoderConfig
from reverie.nets.distributions import Output
from reverie.nets.gaussian import Gaussian
from reverie.nets.heads import Head, HeadConfig
from reverie.nets.inputs import Concat
from reverie.nets.rng import Rng
from reverie.nets.strided import TimeConvs
from reverie.spaces import Space, Spaces
from reverie.worlds.outcomes import outcome_losses, stack_actions
from reverie.worlds.vta.boundaries import COPY, READ, both_ways, draw_flags, reading
from reverie.worlds.vta.layers import Cell, GaussianHead, Layer

NOISE = 1e-8
"""Gumbel noise is made of uniform numbers this far from 0 and 1."""


@dataclass(frozen=True)
class SegmentsConfig:
    """Sizes and limits of the dynamics; the defaults are the original's."""

    abs_belief: int = 512
    """Width of the upper belief."""
    abs_stoch: int = 32
    """Width of the upper state."""
    obs_belief: int = 512
    """Width of the lower belief."""
    obs_stoch: int = 32
    """Width of the lower state."""
    hidden: int = 512
    """Width of the layers around them."""
    layers: int = 1
    """Hidden convolutions over time of the boundary detector."""
    min_std: float = 0.1
    """Least deviation of a state."""
    max_segment: int = 50
    """Steps after which a segment ends."""
    max_segments: int = 200
    """Segments of an episode after which no further one begins."""
    temperature: float = 1.0
    """Of the flags."""
    force: float = 10.0
    """Logit of a flag that a limit has fixed; 0 for no limits."""
    free_nats: float = 1.0
    """KL of both levels together below which prior and posterior are left alone."""
    dream: Literal["full", "jumpy"] = "full"
    """Dream step by step, or from segment to segment."""
    dream_flags: Literal["prior", "fixed", "none"] = "prior"
    """Where segments of a full dream begin: as foreseen, before a step that would be
    the last of `max_segment`, or never. Each step of a jumpy dream begins one."""
    sees_reward: bool = False
    """Let the boundary detector see rewards besides images."""
    rate: float = 0.0
    """Share of steps at which segments should begin (`loss_scales.boundary_rate`), 0
    for no such wish."""

    def __post_init__(self) -> None:
        sizes = (self.abs_belief, self.abs_stoch, self.obs_belief, self.obs_stoch)
        limits = (self.hidden, self.max_segment, self.max_segments)
        if min(*sizes, *limits) < 1 or self.layers < 0:
            raise ValueError("sizes and limits must be at least 1, and layers 0")
        if self.force < 0:
            raise ValueError("force must be at least 0, which is for no limits")
        above = self.temperature > 0 and self.min_std > 0
        if not above or not 0 <= self.rate < 1 or not self.free_nats >= 0:
            raise ValueError(
                "temperature and min_std must be above 0, free_nats not below it, and "
                "rate between 0 and 1"
            )


class State(NamedTuple):
    abs_belief: Float[Tensor, "*b U"]
    abs_stoch: Float[Tensor, "*b Y"]
    obs_belief: Float[Tensor, "*b D"]
    obs_stoch: Float[Tensor, "*b Z"]
    length: Float[Tensor, "*b"]  # steps in the current segment
    number: Float[Tensor, "*b"]  # segments begun so far
    read: Float[Tensor, "*b"]  # whether this step began one


class Beliefs(NamedTuple):
    """What both levels thought of each step, before and after seeing it."""

    prior_abs: Gaussian
    post_abs: Gaussian
    prior_obs: Gaussian
    post_obs: Gaussian
    prior_flag: Float[Tensor, "*b 2"]
    post_flag: Float[Tensor, "*b 2"]


Policy = Callable[[State], dict[str, Tensor]]


class Dynamics(nn.Module):
    """How both levels go on, with and without a look at the world."""

    def __init__(self, tokens: int, act_space: Spaces, config: SegmentsConfig):
        super().__init__()
        self.config = config
        self.actions = Concat(act_space)
        hidden, acts = config.hidden, self.actions.width
        upper = config.abs_belief + config.abs_stoch
        lower = config.obs_belief + config.obs_stoch
        self.start = nn.Parameter(torch.zeros(config.abs_belief))
        self.foresee_in = Layer(lower, hidden)
        self.foresee_out = Linear(hidden, 2)
        seen = tokens + int(config.sees_reward)
        self.detector = TimeConvs(seen, hidden, config.layers, 2, F.silu)
        self.abs_cell = Cell(config.abs_stoch + acts, hidden, config.abs_belief)
        self.obs_cell = Cell(config.obs_stoch + upper + acts, hidden, config.obs_belief)
        self.begin = Layer(upper, config.obs_belief)

        def head(inputs: int, units: int) -> GaussianHead:
            return GaussianHead(inputs, hidden, units, config.min_std)

        self.prior_abs = head(config.abs_belief, config.abs_stoch)
        self.post_abs = head(config.abs_belief + tokens, config.abs_stoch)
        self.prior_obs = head(config.obs_belief, config.obs_stoch)
        self.post_obs = head(config.obs_belief + upper + tokens, config.obs_stoch)

    def initial(self, batch: int, dtype: torch.dtype) -> State:
        config, device = self.config, self.start.device
        zeros = torch.zeros(batch, device=device)
        widths = (config.abs_stoch, config.obs_belief, config.obs_stoch)
        stoch, belief, lower = (
            torch.zeros(batch, n, dtype=dtype, device=device) for n in widths
        )
        start = self.start.to(dtype).expand(batch, -1)
        return State(start, stoch, belief, lower, zeros, zeros, zeros)

    def embed(self, action: dict[str, Tensor], like: Tensor) -> Float[Tensor, "*b A"]:
        acted: Tensor = self.actions(action, like.dtype)
        return acted

    def foresee(self, state: State) -> Float[Tensor, "*b 2"]:
        """The prior's logits of the next flag, within the limits."""
        lower = torch.cat([state.obs_belief, state.obs_stoch], -1)
        return self.limit(self.foresee_out(self.foresee_in(lower)).float(), state)

    def limit(
        self, logits: Float[Tensor, "*b 2"], state: State
    ) -> Float[Tensor, "*b 2"]:
        """Logits that are fixed where the segments so far leave no choice."""
        config = self.config
        if not config.force:
            return logits
        certain = both_ways(logits, config.force)
        long = (state.length >= config.max_segment)[..., None]
        many = (state.number >= config.max_segments)[..., None]
        return torch.where(many, -certain, torch.where(long, certain, logits))

    def turn(
        self, state: State, mask: Float[Tensor, "B 2"], action: Float[Tensor, "B A"]
    ) -> State:
        """The upper belief and the counters, once the flag is known."""
        read, copy = mask[:, READ], mask[:, COPY]
        new, old = (x[:, None].to(state.abs_belief.dtype) for x in (read, copy))
        inputs = torch.cat([state.abs_stoch, action], -1)
        moved = self.abs_cell(inputs, state.abs_belief)
        return state._replace(
            abs_belief=new * moved + old * state.abs_belief,
            length=read + copy * (state.length + 1),
            number=read * (state.number + 1) + copy * state.number,
            read=read,
        )

    def descend(
        self, state: State, mask: Float[Tensor, "B 2"], action: Float[Tensor, "B A"]
    ) -> tuple[Float[Tensor, "B D"], Float[Tensor, "B C"]]:
        """The lower belief under the upper level of `state`."""
        new, old = (mask[:, i, None].to(action.dtype) for i in (READ, COPY))
        upper = torch.cat([state.abs_belief, state.abs_stoch], -1)
        inputs = torch.cat([state.obs_stoch, upper, action], -1)
        moved = self.obs_cell(inputs, state.obs_belief)
        return new * self.begin(upper) + old * moved, upper

    def observe(
        self,
        state: State,
        tokens: Float[Tensor, "B T E"],
        found: Float[Tensor, "B T 2"] | None,
        prevact: dict[str, Tensor],
        is_first: Bool[Tensor, "B T"],
        rng: Rng,
    ) -> tuple[State, Beliefs]:
        """Posterior states of a sequence; without `found` the prior's flags are used.

        In training mode flags are drawn, otherwise they are the likelier ones.
        """
        dtype = tokens.dtype
        actions = torch.where(is_first[..., None], 0, self.embed(prevact, tokens))
        noise = None
        if self.training:
            noise = rng.uniform(tokens[..., :2].float()).clamp(NOISE, 1 - NOISE)
        fresh = self.initial(len(tokens), dtype)
        states, beliefs = [], []
        for t in range(tokens.shape[1]):
            first, token, action = is_first[:, t], tokens[:, t], actions[:, t]
            state = State(
                *(
                    torch.where(first.reshape(-1, *[1] * (old.ndim - 1)), new, old)
                    for old, new in zip(state, fresh, strict=True)
                )
            )
            prior_flag = self.foresee(state)
            post_flag = prior_flag if found is None else self.limit(found[:, t], state)
            draw = None if noise is None else noise[:, t]
            mask = draw_flags(post_flag, self.config.temperature, draw).mask
            state = self.turn(state, mask, action)
            prior_abs = self.prior_abs(state.abs_belief)
            post_abs = self.post_abs(torch.cat([state.abs_belief, token], -1))
            new, old = mask[:, READ, None], mask[:, COPY, None]
            held = new * post_abs.sample(rng) + old * state.abs_stoch
            state = state._replace(abs_stoch=held.to(dtype))
            belief, upper = self.descend(state, mask, action)
            prior_obs = self.prior_obs(belief)
            post_obs = self.post_obs(torch.cat([belief, upper, token], -1))
            drawn = post_obs.sample(rng).to(dtype)
            state = state._replace(obs_belief=belief, obs_stoch=drawn)
            states.append(state)
            beliefs.append(
                Beliefs(prior_abs, post_abs, prior_obs, post_obs, prior_flag, post_flag)
            )
        return _stack(states), _stack(beliefs)

    def imagine(self, state: State, action: dict[str, Tensor], rng: Rng) -> State:
        """The next state by the priors alone."""
        config, dtype = self.config, state.abs_belief.dtype
        acted = self.embed(action, state.abs_belief)
        mask = self._dream_flag(state, rng)
        if config.dream == "jumpy":
            mask = reading(mask)
        state = self.turn(state, mask, acted)
        new, old = mask[:, READ, None], mask[:, COPY, None]
        drawn = self.prior_abs(state.abs_belief).sample(rng)
        held = (new * drawn + old * state.abs_stoch).to(dtype)
        state = state._replace(abs_stoch=held)
        belief, _ = self.descend(state, mask, acted)
        stoch = self.prior_obs(belief).sample(rng).to(dtype)
        return state._replace(obs_belief=belief, obs_stoch=stoch)

    def _dream_flag(self, state: State, rng: Rng) -> Float[Tensor, "B 2"]:
        config = self.config
        if config.dream == "full" and config.dream_flags == "prior":
            logits, noise = self.foresee(state), None
            if self.training:
                noise = rng.uniform(logits).clamp(NOISE, 1 - NOISE)
            return draw_flags(logits, config.temperature, noise).mask
        read = torch.zeros_like(state.length)
        if config.dream_flags == "fixed":
            read = (state.length >= config.max_segment - 1).float()
        return torch.stack([read, 1 - read], -1)


class SegmentWorld(nn.Module):
    """The world as its agent sees it."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        *,
        segments: SegmentsConfig,
        enc: EncoderConfig,
        dec: DecoderConfig,
        rewhead: HeadConfig,
        conhead: HeadConfig,
        discount: float,
        reward_grad: bool,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.config, self.dtype = segments, dtype
        self.discount, self.reward_grad = discount, reward_grad
        deter = segments.abs_belief + segments.obs_belief
        stoch = segments.abs_stoch + segments.obs_stoch
        self.width = deter + stoch
        self.enc = Encoder(obs_space, enc)
        self.dyn = Dynamics(self.enc.width, act_space, segments)
        self.dec = Decoder(obs_space, deter, stoch, dec)
        self.rew = Head(self.width, rewhead)
        self.con = Head(self.width, conhead)

    @property
    def extras(self) -> Spaces:
        config, number = self.config, np.dtype(np.float32)
        sizes = {
            "abs_belief": (config.abs_belief,),
            "abs_stoch": (config.abs_stoch,),
            "obs_belief": (config.obs_belief,),
            "obs_stoch": (config.obs_stoch,),
            "length": (),
            "number": (),
            "read": (),
        }
        return {f"dyn/{key}": Space(number, shape) for key, shape in sizes.items()}

    def to_replay(self, states: State) -> Extras:
        found = states._asdict()
        return {f"dyn/{key}": value.detach().float() for key, value in found.items()}

    def from_replay(self, extras: Extras) -> State:
        values = [extras[f"dyn/{key}"] for key in State._fields]
        counters = values[4:]
        return State(*(value.to(self.dtype) for value in values[:4]), *counters)

    def initial(self, batch: int) -> State:
        return State(*(x.detach().clone() for x in self.dyn.initial(batch, self.dtype)))

    def features(self, states: State) -> Float[Tensor, "*b F"]:
        """What the heads see: the upper level first."""
        return torch.cat(states[:4], -1)

    def boundaries(self, states: State) -> Bool[Tensor, "*b"]:
        """Where segments begin."""
        return states.read > 0.5

    def observe(self, state: State, batch: Batch, rng: Rng) -> State:
        """Posterior states, with the likelier flags: those foreseen if there is but
        one row, else those found by looking at all of them."""
        was_training = self.training
        self.eval()
        try:
            return self._follow(state, batch, rng)[0]
        finally:
            self.train(was_training)

    def imagine(self, state: State, policy: Policy, horizon: int, rng: Rng) -> Rollout:
        states, actions = [state], [policy(state)]
        for _ in range(horizon):
            states.append(self.dyn.imagine(states[-1], actions[-1], rng))
            actions.append(policy(states[-1]))
        return Rollout(_stack(states), stack_actions(actions))

    def outcome(
        self, feat: Float[Tensor, "*b F"]
    ) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
        """The expected reward for arriving in a state, and the chance to go on."""
        return self.rew(feat).pred(), self.con(feat).prob()

    def decode(self, states: State) -> Obs:
        return {key: out.pred() for key, out in self._decode(states).items()}

    def loss(self, state: State, batch: Batch, rng: Rng) -> WorldLoss:
        states, beliefs = self._follow(state, batch, rng)
        feat = self.features(states)
        seen = feat if self.reward_grad else feat.detach()
        told = self._decode(states), self.rew(seen), self.con(feat)
        losses = outcome_losses(*told, batch, self.discount)
        losses |= belief_losses(states, beliefs, self.config)
        metrics = {
            "boundary_ratio": states.read.mean(),
            "prior_abs_ent": beliefs.prior_abs.entropy().mean(),
            "post_abs_ent": beliefs.post_abs.entropy().mean(),
            "prior_obs_ent": beliefs.prior_obs.entropy().mean(),
            "post_obs_ent": beliefs.post_obs.entropy().mean(),
        }
        return WorldLoss(losses, states, metrics)

    @property
    def image_keys(self) -> Iterable[str]:
        """The image keys that `decode` draws."""
        return tuple(self.dec.images)

    def _follow(self, state: State, batch: Batch, rng: Rng) -> tuple[State, Beliefs]:
        tokens = self.enc(batch, self.dtype)
        found = None
        if tokens.shape[1] > 1:
            seen = tokens.float()
            if self.config.sees_reward:
                seen = torch.cat([seen, batch["reward"].float()[..., None]], -1)
            found = self.dyn.detector(seen)
        return self.dyn.observe(
            state, tokens, found, batch["prevact"], batch["is_first"], rng
        )

    def _decode(self, states: State) -> dict[str, Output]:
        deter = torch.cat([states.abs_belief, states.obs_belief], -1)
        stoch = torch.cat([states.abs_stoch, states.obs_stoch], -1)
        outs: dict[str, Output] = self.dec(deter, stoch)
        return outs


def belief_losses(
    states: State, beliefs: Beliefs, config: SegmentsConfig
) -> dict[str, Tensor]:
    """Priors towards posteriors, and back; the upper level counts where it is read.

    The flags' prior follows the detector, which itself learns only from what its flags
    are good for.
    """
    prior_abs, post_abs, prior_obs, post_obs, prior_flag, post_flag = beliefs
    dyn_abs = post_abs.detach().kl(prior_abs)
    rep_abs = post_abs.kl(prior_abs.detach())
    dyn_obs = post_obs.detach().kl(prior_obs)
    rep_obs = post_obs.kl(prior_obs.detach())
    found = torch.softmax(post_flag, -1)
    foreseen = torch.softmax(prior_flag, -1)
    sure = found.detach()
    gap = torch.log(sure + 1e-8) - torch.log(foreseen + 1e-8)
    losses = {
        "dyn": (states.read * dyn_abs + dyn_obs).clamp(min=config.free_nats),
        "rep": (states.read * rep_abs + rep_obs).clamp(min=config.free_nats),
        "boundary": (sure * gap).sum(-1),
    }
    if config.rate:
        losses["boundary_rate"] = rate_loss(found[..., READ], config.rate)
    return losses


def rate_loss(chance: Float[Tensor, "*b"], rate: float) -> Float[Tensor, "*b"]:
    """How far the chance of a boundary is from the wished rate, in nats."""
    chance = chance.clamp(1e-6, 1 - 1e-6)
    read = chance * torch.log(chance / rate)
    return read + (1 - chance) * torch.log((1 - chance) / (1 - rate))


Steps = TypeVar("Steps", bound=tuple[Any, ...])


def _stack(rows: list[Steps]) -> Steps:
    """NamedTuples of single steps as one of sequences."""
    kind, parts = type(rows[0]), zip(*rows, strict=True)
    return kind(
        *(
            _stack(list(part)) if isinstance(part[0], tuple) else torch.stack(part, 1)
            for part in parts
        )
    )
