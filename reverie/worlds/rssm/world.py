"""The recurrent state-space model of DreamerV3: encoder, dynamics, decoder, outcomes.

A state has a deterministic half, carried by a block-diagonal GRU, and a stochastic
half, S one-of-K choices. The prior guesses the choices from the deterministic half
alone; the posterior also sees the observation. The world learns to draw what was seen,
to foresee reward and end, and to make prior and posterior agree.

`batch["prevact"]` holds the actions that *led to* each row, by key; every other entry
of a batch belongs to the row itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.api import Batch, Extras, Obs, Rollout, WorldLoss
from reverie.nets import standardize as standard
from reverie.nets.blocks import BlockLinear, Linear, Norm, activation
from reverie.nets.conv import Decoder, DecoderConfig, Encoder, EncoderConfig
from reverie.nets.distributions import OneHot, Output
from reverie.nets.heads import Head, HeadConfig
from reverie.nets.inputs import Concat
from reverie.nets.rng import Rng
from reverie.spaces import Space, Spaces
from reverie.worlds.outcomes import outcome_losses, stack_actions


@dataclass(frozen=True)
class RSSMConfig:
    """Sizes of the dynamics; the defaults are size200m."""

    deter: int = 8192
    """Width of the deterministic half."""
    hidden: int = 1024
    """Width of the layers around it."""
    stoch: int = 32
    """Choices of the stochastic half."""
    classes: int = 64
    """Classes of each choice."""
    blocks: int = 8
    """Blocks of the recurrent layers."""
    dynlayers: int = 1
    """Hidden layers of the recurrent core."""
    obslayers: int = 1
    """Hidden layers of the posterior."""
    imglayers: int = 2
    """Hidden layers of the prior."""
    act: str = "silu"
    """Activation."""
    norm: str = "rms"
    """Norm: rms, layer or none."""
    unimix: float = 0.01
    """Uniform part of every choice."""
    outscale: float = 1.0
    """Scale of the initial output weights."""
    free_nats: float = 1.0
    """KL below which prior and posterior are left alone."""
    absolute: bool = False
    """Let the posterior see only the observation, not the deterministic half."""
    store: str = "float32"
    """Dtype in which the replay keeps `deter`: float32 or float16."""

    def __post_init__(self) -> None:
        sizes = (self.deter, self.hidden, self.stoch, self.classes, self.blocks)
        layers = (self.dynlayers, self.obslayers, self.imglayers)
        if min(sizes) < 1 or min(layers) < 0:
            raise ValueError("sizes must be at least 1, and layers at least 0")
        if not 0 <= self.unimix <= 1:
            raise ValueError("unimix must be from 0 to 1")
        if self.store not in ("float32", "float16"):
            raise ValueError(f"store is float32 or float16, not {self.store!r}")


class State(NamedTuple):
    deter: Float[Tensor, "*b D"]
    stoch: Float[Tensor, "*b S K"]


class Agreement(NamedTuple):
    """How far the prior is from the posterior, and how unsure both are on average."""

    dyn: Float[Tensor, "*b"]
    """The divergence, as the prior learns from it."""
    rep: Float[Tensor, "*b"]
    """The same, as the posterior learns from it."""
    post_entropy: Float[Tensor, ""]
    prior_entropy: Float[Tensor, ""]


Policy = Callable[[State], dict[str, Tensor]]


class Dynamics(nn.Module):
    """How one state follows another, with and without a look at the world."""

    def __init__(self, tokens: int, act_space: Spaces, config: RSSMConfig):
        super().__init__()
        self.config = config
        deter, hidden, blocks = config.deter, config.hidden, config.blocks
        stoch = config.stoch * config.classes
        self.act = activation(config.act)
        self.actions = Concat(act_space)
        self.has_floats = not all(space.is_discrete for space in act_space.values())
        for i, width in enumerate((deter, stoch, self.actions.width)):
            self._add(f"dynin{i}", Linear(width, hidden), hidden)
        width = deter + 3 * hidden * blocks
        for i in range(config.dynlayers):
            self._add(f"dynhid{i}", BlockLinear(width, deter, blocks), deter)
            width = deter
        self.dyngru = BlockLinear(width, 3 * deter, blocks)
        width = tokens if config.absolute else deter + tokens
        self._stack("obs", width, config.obslayers)
        self._stack("prior", deter, config.imglayers)

    @staticmethod
    def twin() -> type[nn.Module]:
        from reverie.worlds.rssm.fast import FastDynamics

        return FastDynamics

    def initial(self, batch: int, dtype: torch.dtype) -> State:
        config, device = self.config, self.dyngru.bias.device
        deter = torch.zeros(batch, config.deter, dtype=dtype, device=device)
        shape = (batch, config.stoch, config.classes)
        return State(deter, torch.zeros(shape, dtype=dtype, device=device))

    def embed(
        self, action: dict[str, Tensor], reset: Bool[Tensor, "*b"] | None, like: Tensor
    ) -> Float[Tensor, "*b H"]:
        """Encode the actions of any number of steps; those before a reset are zero."""
        x = self.actions(action, like.dtype)
        if reset is not None:
            x = torch.where(reset[..., None], 0, x)
        if self.has_floats:  # one-hots are never larger than one
            x = x / x.abs().clamp(min=1).detach()
        return self._layer("dynin2", x)

    def core(self, state: State, action: Float[Tensor, "B H"]) -> Float[Tensor, "B D"]:
        """The block GRU; its reset gate scales the candidate, not the state."""
        blocks, deter = self.config.blocks, state.deter
        x = self.joined(state, action)
        for i in range(self.config.dynlayers):
            x = self._layer(f"dynhid{i}", x)
        gates = self.dyngru(x).reshape(len(deter), blocks, 3, -1)
        reset, candidate, update = (gate.flatten(-2) for gate in gates.unbind(-2))
        candidate = torch.tanh(torch.sigmoid(reset) * candidate)
        update = torch.sigmoid(update - 1)
        return update * candidate + (1 - update) * deter

    def joined(
        self, state: State, action: Float[Tensor, "B H"]
    ) -> Float[Tensor, "B I"]:
        """What each block sees: its own part of `deter`, and all the rest."""
        blocks, deter = self.config.blocks, state.deter
        inputs = [
            self._layer("dynin0", deter),
            self._layer("dynin1", state.stoch.flatten(-2)),
            action,
        ]
        shared = torch.cat(inputs, -1)[:, None].expand(-1, blocks, -1)
        own = deter.reshape(len(deter), blocks, -1)
        return torch.cat([own, shared], -1).flatten(-2)

    def posterior_logits(
        self, deter: Float[Tensor, "*b D"], token: Float[Tensor, "*b E"]
    ) -> Float[Tensor, "*b S K"]:
        x = token if self.config.absolute else torch.cat([deter, token], -1)
        return self._head("obs", self.config.obslayers, x)

    def prior_logits(self, deter: Float[Tensor, "*b D"]) -> Float[Tensor, "*b S K"]:
        return self._head("prior", self.config.imglayers, deter)

    def choose(self, logits: Float[Tensor, "*b S K"]) -> OneHot:
        return OneHot(logits, self.config.unimix)

    def draw(
        self, logits: Float[Tensor, "*b S K"], rng: Rng
    ) -> Float[Tensor, "*b S K"]:
        """One choice for each group, in the dtype of the logits."""
        return self.choose(logits).sample(rng).to(logits.dtype)

    def compare(
        self, post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"]
    ) -> Agreement:
        """How far prior and posterior are apart, in a term for each to learn from."""
        seen, guess = self.choose(post), self.choose(prior)
        return Agreement(
            dyn=seen.detach().kl(guess),
            rep=seen.kl(guess.detach()),
            post_entropy=seen.entropy().mean(),
            prior_entropy=guess.entropy().mean(),
        )

    def observe(
        self,
        state: State,
        tokens: Float[Tensor, "B T E"],
        prevact: dict[str, Tensor],
        is_first: Bool[Tensor, "B T"],
        rng: Rng,
    ) -> tuple[State, Float[Tensor, "B T S K"]]:
        """Posterior states of a sequence, and their logits."""
        actions = self.embed(prevact, is_first, tokens)
        reset = is_first[..., None]
        deters, stochs, logits = [], [], []
        deter, stoch = state
        steps = zip(tokens.unbind(1), actions.unbind(1), reset.unbind(1), strict=True)
        for token, action, start in steps:
            deter = torch.where(start, 0, deter)
            stoch = torch.where(start[..., None], 0, stoch)
            deter = self.core(State(deter, stoch), action)
            logit = self.posterior_logits(deter, token)
            stoch = self.draw(logit, rng)
            deters.append(deter)
            stochs.append(stoch)
            logits.append(logit)
        states = State(torch.stack(deters, 1), torch.stack(stochs, 1))
        return states, torch.stack(logits, 1)

    def imagine(self, state: State, action: dict[str, Tensor], rng: Rng) -> State:
        """The next state by the prior alone."""
        deter = self.core(state, self.embed(action, None, state.deter))
        return State(deter, self.draw(self.prior_logits(deter), rng))

    def dream(
        self, state: State, policy: Policy, horizon: int, rng: Rng
    ) -> tuple[State, list[dict[str, Tensor]]]:
        """Step on by the prior alone; the states, and what was done in each of them."""
        states, actions = [state], [policy(state)]
        for _ in range(horizon):
            states.append(self.imagine(states[-1], actions[-1], rng))
            actions.append(policy(states[-1]))
        deter = torch.stack([state.deter for state in states], 1)
        stoch = torch.stack([state.stoch for state in states], 1)
        return State(deter, stoch), actions

    def features(self, states: State) -> Float[Tensor, "*b F"]:
        return torch.cat([states.deter, states.stoch.flatten(-2)], -1)

    def _add(self, name: str, layer: nn.Module, width: int) -> None:
        self.add_module(name, layer)
        self.add_module(f"{name}norm", Norm(self.config.norm, width))

    def _layer(self, name: str, x: Tensor) -> Tensor:
        return self.act(getattr(self, f"{name}norm")(getattr(self, name)(x)))

    def _stack(self, name: str, width: int, layers: int) -> None:
        config = self.config
        for i in range(layers):
            self._add(f"{name}{i}", Linear(width, config.hidden), config.hidden)
            width = config.hidden
        shape = (config.stoch, config.classes)
        self.add_module(f"{name}logit", Linear(width, shape, config.outscale))

    def _head(self, name: str, layers: int, x: Tensor) -> Tensor:
        for i in range(layers):
            x = self._layer(f"{name}{i}", x)
        logits: Tensor = getattr(self, f"{name}logit")(x)
        return logits


class RSSM(nn.Module):
    """The world as its agent sees it."""

    def __init__(
        self,
        obs_space: Spaces,
        act_space: Spaces,
        *,
        rssm: RSSMConfig,
        enc: EncoderConfig,
        dec: DecoderConfig,
        rewhead: HeadConfig,
        conhead: HeadConfig,
        discount: float,
        reward_grad: bool,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.config, self.dtype = rssm, dtype
        self.discount, self.reward_grad = discount, reward_grad
        stoch = rssm.stoch * rssm.classes
        self.width = rssm.deter + stoch
        self.enc = Encoder(obs_space, enc)
        self.dyn = Dynamics(self.enc.width, act_space, rssm)
        self._by_batch = enc.standard == "batch"
        self.dec = Decoder(obs_space, rssm.deter, stoch, dec)
        self.rew = Head(self.width, rewhead)
        self.con = Head(self.width, conhead)

    @property
    def extras(self) -> Spaces:
        """What the replay keeps of a state: `deter`, and the *index* of each choice.

        One-hots would take K times the memory and say the same.
        """
        config = self.config
        index = np.uint8 if config.classes <= 256 else np.int16
        return {
            "dyn/deter": Space(np.dtype(config.store), (config.deter,)),
            "dyn/stoch": Space(np.dtype(index), (config.stoch,), 0, config.classes),
        }

    def to_replay(self, states: State) -> Extras:
        spaces = self.extras
        store = getattr(torch, spaces["dyn/deter"].dtype.name)
        index = getattr(torch, spaces["dyn/stoch"].dtype.name)
        return {
            "dyn/deter": states.deter.detach().to(store),
            "dyn/stoch": states.stoch.detach().argmax(-1).to(index),
        }

    def from_replay(self, extras: Extras) -> State:
        classes = torch.arange(self.config.classes, device=extras["dyn/stoch"].device)
        stoch = extras["dyn/stoch"].long()[..., None] == classes
        # rows that nobody wrote extras for are zero, as the state before an episode
        stoch &= (extras["dyn/deter"] != 0).any(-1)[..., None, None]
        return State(extras["dyn/deter"].to(self.dtype), stoch.to(self.dtype))

    def initial(self, batch: int) -> State:
        return self.dyn.initial(batch, self.dtype)

    def features(self, states: State) -> Float[Tensor, "*b F"]:
        """What the heads see: the deterministic half first."""
        return self.dyn.features(states)

    def observe(self, state: State, batch: Batch, rng: Rng) -> State:
        # a frame seen alone would be its own mean
        with standard.steady(standard.by_batch(self.enc) if self._by_batch else ()):
            return self._follow(state, batch, rng)[0]

    def imagine(self, state: State, policy: Policy, horizon: int, rng: Rng) -> Rollout:
        states, actions = self.dyn.dream(state, policy, horizon, rng)
        return Rollout(states, stack_actions(actions))

    def outcome(
        self, feat: Float[Tensor, "*b F"]
    ) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
        """The expected reward for arriving in a state, and the chance to go on."""
        return self.rew(feat).pred(), self.con(feat).prob()

    def decode(self, states: State) -> Obs:
        return {key: out.pred() for key, out in self._decode(states).items()}

    def loss(self, state: State, batch: Batch, rng: Rng) -> WorldLoss:
        states, logits = self._follow(state, batch, rng)
        feat = self.features(states)
        seen = feat if self.reward_grad else feat.detach()
        told = self._decode(states), self.rew(seen), self.con(feat)
        losses = outcome_losses(*told, batch, self.discount)

        # two KL terms, so that the prior chases the posterior faster than the reverse
        match = self.dyn.compare(logits, self.dyn.prior_logits(states.deter))
        losses["dyn"] = match.dyn.clamp(min=self.config.free_nats)
        losses["rep"] = match.rep.clamp(min=self.config.free_nats)
        metrics = {"dyn_ent": match.prior_entropy, "rep_ent": match.post_entropy}
        return WorldLoss(losses, states, metrics)

    def parts(self, state: State, batch: Batch, rng: Rng) -> dict[str, Any]:
        """The work of an update in pieces, to be timed."""
        from reverie.worlds.rssm.sections import rssm_sections

        return rssm_sections(self, state, batch, rng)

    @property
    def image_keys(self) -> Iterable[str]:
        """The image keys that `decode` draws."""
        return tuple(self.dec.images)

    def _follow(self, state: State, batch: Batch, rng: Rng) -> tuple[State, Tensor]:
        tokens = self.enc(batch, self.dtype)
        return self.dyn.observe(state, tokens, batch["prevact"], batch["is_first"], rng)

    def _decode(self, states: State) -> dict[str, Output]:
        outs: dict[str, Output] = self.dec(states.deter, states.stoch.flatten(-2))
        return outs
