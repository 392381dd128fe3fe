"""Dynamics of the RSSM: sequence model, prior and posterior.

A state has a deterministic part `deter`, the output of a block-diagonal GRU, and a
stochastic part `stoch`: S one-hot samples of K classes. The prior predicts `stoch` from
`deter` alone; the posterior also uses the embedded observation (named `tokens` as in
danijar/dreamerv3).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.api import Policy, Rollout
from reverie.nets.blocks import BlockLinear, Linear, Norm, activation
from reverie.nets.distributions import OneHot
from reverie.nets.inputs import Concat
from reverie.nets.rng import Rng
from reverie.spaces import Spaces
from reverie.worlds.rollout import rollout
from reverie.worlds.rssm.config import RSSMConfig


class RSSMState(NamedTuple):
    """Deterministic and stochastic part of the latent state."""

    deter: Float[Tensor, "*b D"]
    stoch: Float[Tensor, "*b S K"]


class KLTerms(NamedTuple):
    """KL(posterior || prior) with two stop-gradients, and mean entropies of both."""

    dyn: Float[Tensor, "*b"]  # gradient for the prior only
    rep: Float[Tensor, "*b"]  # gradient for the posterior only
    post_entropy: Float[Tensor, ""]
    prior_entropy: Float[Tensor, ""]


class RSSMDynamics(nn.Module):
    """Block-diagonal GRU, prior and posterior, with the names of danijar/dreamerv3.

    `dynin0`, `dynin1` and `dynin2` embed `deter`, `stoch` and actions, `dynhid` and
    `dyngru` compute the next `deter`, `obs` the posterior, and `prior` the prior.
    """

    fast_version = "reverie.worlds.rssm.fast:FastRSSMDynamics"
    fast_cpu_version = "reverie.worlds.rssm.fast_cpu:CpuRSSMDynamics"

    def __init__(self, token_width: int, act_space: Spaces, config: RSSMConfig):
        super().__init__()
        self.config = config
        deter, hidden, blocks = config.deter, config.hidden, config.blocks
        stoch = config.stoch * config.classes
        self.act = activation(config.act)
        self.actions = Concat(act_space)  # converts actions by key to one vector
        self.has_continuous = not all(s.is_discrete for s in act_space.values())
        for i, width in enumerate((deter, stoch, self.actions.width)):
            self._add(f"dynin{i}", Linear(width, hidden), hidden)
        width = deter + 3 * hidden * blocks
        for i in range(config.dynlayers):
            self._add(f"dynhid{i}", BlockLinear(width, deter, blocks), deter)
            width = deter
        self.dyngru = BlockLinear(width, 3 * deter, blocks)
        width = token_width if config.absolute else deter + token_width
        self._add_logits("obs", width, config.obslayers)
        self._add_logits("prior", deter, config.imglayers)

    def initial(self, batch: int, dtype: torch.dtype) -> RSSMState:
        config, device = self.config, self.dyngru.bias.device
        deter = torch.zeros(batch, config.deter, dtype=dtype, device=device)
        shape = (batch, config.stoch, config.classes)
        return RSSMState(deter, torch.zeros(shape, dtype=dtype, device=device))

    def observe(
        self,
        state: RSSMState,
        tokens: Float[Tensor, "B T E"],
        prevact: dict[str, Tensor],
        is_first: Bool[Tensor, "B T"],
        rng: Rng,
    ) -> tuple[RSSMState, Float[Tensor, "B T S K"]]:
        """Return the posterior states of a sequence and their logits."""
        actions = self.embed_action(prevact, is_first, tokens)
        return self.scan(state, tokens, actions, is_first, rng)

    def scan(
        self,
        state: RSSMState,
        tokens: Tensor,
        actions: Tensor,
        is_first: Tensor,
        rng: Rng,
    ) -> tuple[RSSMState, Tensor]:
        """Run `observe` on embedded actions `(B, T, hidden)`."""
        deters, stochs, logits = [], [], []
        (deter, stoch), initial = state, self._initial_values(tokens)
        resets = is_first[..., None].unbind(1)
        steps = zip(tokens.unbind(1), actions.unbind(1), resets, strict=True)
        for token, action, reset in steps:
            deter = torch.where(reset, initial[0], deter)
            stoch = torch.where(reset[..., None], initial[1], stoch)
            deter = self.core(RSSMState(deter, stoch), action)
            logit = self.posterior_logits(deter, token)
            stoch = self.sample(logit, rng)
            deters.append(deter)
            stochs.append(stoch)
            logits.append(logit)
        states = RSSMState(torch.stack(deters, 1), torch.stack(stochs, 1))
        return states, torch.stack(logits, 1)

    def imagine(
        self, state: RSSMState, policy: Policy, horizon: int, rng: Rng
    ) -> Rollout:
        """Roll out the prior with actions of the policy."""

        def step(state: RSSMState, action: dict[str, Tensor]) -> RSSMState:
            deter = self.core(state, self.embed_action(action, None, state.deter))
            return RSSMState(deter, self.sample(self.prior_logits(deter), rng))

        return rollout(state, policy, horizon, step)

    def embed_action(
        self,
        action: dict[str, Tensor],
        is_first: Bool[Tensor, "*b"] | None,
        like: Tensor,
    ) -> Float[Tensor, "*b hidden"]:
        """Embed actions in the dtype of `like`, with zero inputs where `is_first`."""
        x = self.actions(action, like.dtype)
        if is_first is not None:
            x = torch.where(is_first[..., None], 0, x)
        if self.has_continuous:  # limit entries to [-1, 1], as one-hot entries are
            x = x / x.abs().clamp(min=1).detach()
        return self._layer("dynin2", x)

    def core(
        self, state: RSSMState, action: Float[Tensor, "B hidden"]
    ) -> Float[Tensor, "B D"]:
        """Return the next `deter`."""
        blocks, deter = self.config.blocks, state.deter
        in0 = self._layer("dynin0", deter)
        in1 = self._layer("dynin1", state.stoch.flatten(-2))
        # every block reads its slice of `deter`; all blocks share the other inputs
        shared = torch.cat([in0, in1, action], -1)[:, None].expand(-1, blocks, -1)
        slices = deter.reshape(deter.shape[0], blocks, -1)
        x = torch.cat([slices, shared], -1).flatten(-2)
        for i in range(self.config.dynlayers):
            x = self._layer(f"dynhid{i}", x)
        return self.next_deter(x, deter)

    def next_deter(
        self, hidden: Float[Tensor, "B D"], deter: Float[Tensor, "B D"]
    ) -> Float[Tensor, "B D"]:
        """Return the next `deter`. The GRU's reset gate scales the candidate."""
        gates = self.dyngru(hidden).reshape(deter.shape[0], self.config.blocks, 3, -1)
        reset, candidate, update = (gate.flatten(-2) for gate in gates.unbind(-2))
        return update_deter(deter, reset, candidate, update)

    def posterior_logits(
        self, deter: Float[Tensor, "*b D"], token: Float[Tensor, "*b E"]
    ) -> Float[Tensor, "*b S K"]:
        x = token if self.config.absolute else torch.cat([deter, token], -1)
        return self._logits("obs", self.config.obslayers, x)

    def prior_logits(self, deter: Float[Tensor, "*b D"]) -> Float[Tensor, "*b S K"]:
        return self._logits("prior", self.config.imglayers, deter)

    def distribution(self, logits: Float[Tensor, "*b S K"]) -> OneHot:
        """Return the distribution of `stoch`, mixed with a uniform one (`unimix`)."""
        return OneHot(logits, self.config.unimix)

    def sample(
        self, logits: Float[Tensor, "*b S K"], rng: Rng
    ) -> Float[Tensor, "*b S K"]:
        """Sample one-hot vectors, in the dtype of the logits."""
        return self.distribution(logits).sample(rng).to(logits.dtype)

    def kl_terms(
        self, post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"]
    ) -> KLTerms:
        """Compute the KL terms from the logits of posterior and prior."""
        posterior, predicted = self.distribution(post), self.distribution(prior)
        return KLTerms(
            dyn=posterior.detach().kl(predicted),
            rep=posterior.kl(predicted.detach()),
            post_entropy=posterior.entropy().mean(),
            prior_entropy=predicted.entropy().mean(),
        )

    def features(self, states: RSSMState) -> Float[Tensor, "*b F"]:
        """Concatenate `deter` and the flattened `stoch`."""
        return torch.cat([states.deter, states.stoch.flatten(-2)], -1)

    def _initial_values(self, tokens: Float[Tensor, "B T E"]) -> tuple[Any, Any]:
        """Return `deter` and `stoch` at the start of an episode: zero, unless a
        subclass overrides it."""
        return 0, 0

    def _add(self, name: str, layer: nn.Module, width: int) -> None:
        """Add a layer and its norm as submodules, named as in danijar/dreamerv3."""
        self.add_module(name, layer)
        self.add_module(f"{name}norm", Norm(self.config.norm, width))

    def _layer(self, name: str, x: Tensor) -> Tensor:
        """Apply a layer, its norm and the activation function."""
        norm: Norm = getattr(self, f"{name}norm")
        return norm.activate(getattr(self, name)(x), self.act)

    def _add_logits(self, name: str, width: int, layers: int) -> None:
        """Add hidden layers and a layer for the logits of `stoch`."""
        config = self.config
        for i in range(layers):
            self._add(f"{name}{i}", Linear(width, config.hidden), config.hidden)
            width = config.hidden
        shape = (config.stoch, config.classes)
        self.add_module(f"{name}logit", Linear(width, shape, config.outscale))

    def _logits(self, name: str, layers: int, x: Tensor) -> Tensor:
        """Return the logits of `stoch`, with the layers of `_add_logits`."""
        for i in range(layers):
            x = self._layer(f"{name}{i}", x)
        logits: Tensor = getattr(self, f"{name}logit")(x)
        return logits


def joined_features(states: RSSMState) -> Float[Tensor, "*b F"] | None:
    """Return features without a copy; None if the parts are not adjacent in memory."""
    deter, stoch = states.deter, states.stoch.flatten(-2)
    is_adjacent = (
        deter.untyped_storage().data_ptr() == stoch.untyped_storage().data_ptr()
        and stoch.storage_offset() == deter.storage_offset() + deter.shape[-1]
        and deter.stride() == stoch.stride()
        and not deter.requires_grad
    )
    if not is_adjacent:
        return None
    width = deter.shape[-1] + stoch.shape[-1]
    return deter.as_strided((*deter.shape[:-1], width), deter.stride())


def update_deter(
    deter: Tensor, reset: Tensor, candidate: Tensor, update: Tensor
) -> Tensor:
    """Return the next `deter`, given the gates of the GRU before activation."""
    candidate = torch.tanh(torch.sigmoid(reset) * candidate)
    update = torch.sigmoid(update - 1)  # the bias of -1 favors keeping the old `deter`
    return update * candidate + (1 - update) * deter
