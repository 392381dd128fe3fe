"""The RSSM's dynamics on a GPU: the same layers with what surrounds them fused.

Recorded sequences go through the rearranged scan (`kernels/scan/scan.py`), dreams
through the same steps as in `rssm.py` with one kernel after each product.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from reverie.kernels.heads.choice import agree, sample_choice
from reverie.kernels.launch import can_launch
from reverie.kernels.norm.rms_norm import (
    is_fusable,
    linear_norm_act,
    rms_norm_silu,
    rms_norm_silu_blocks,
)
from reverie.kernels.scan.gru_gates import gru_gates
from reverie.kernels.scan.scan import Dense, Normed, ScanWeights, Unbiased, scan
from reverie.nets.blocks import BlockLinear, Linear, Norm
from reverie.nets.rng import Rng
from reverie.worlds.rssm.world import Agreement, Dynamics, Policy, State


class FastDynamics(Dynamics):
    dynin0: Linear
    dynin1: Linear
    dynhid0: BlockLinear
    dynin2: Linear
    obs0: Linear
    obslogit: Linear
    dynin0norm: Norm
    dynin1norm: Norm
    dynhid0norm: Norm
    dynin2norm: Norm
    obs0norm: Norm

    def dream(
        self, state: State, policy: Policy, horizon: int, rng: Rng
    ) -> tuple[State, list[dict[str, Tensor]]]:
        """The plain one, with every state written to its place among the features."""
        deter = state.deter
        if torch.is_grad_enabled() or not self._is_usual(deter):
            return super().dream(state, policy, horizon, rng)
        config = self.config
        width = config.deter + config.stoch * config.classes
        room = deter.new_empty(len(deter), horizon + 1, width)
        states = self._apart(room)
        places = [self._apart(room[:, t]) for t in range(horizon + 1)]
        for mine, given in zip(places[0], state, strict=True):
            mine.copy_(given)
        actions = [policy(places[0])]
        for before, after in pairwise(places):
            self._dream_on(before, actions[-1], after, rng)
            actions.append(policy(after))
        return states, actions

    def features(self, states: State) -> Float[Tensor, "*b F"]:
        """Both halves at once, without copying them if they lie side by side."""
        deter, stoch = states.deter, states.stoch.flatten(-2)
        adjacent = (
            deter.untyped_storage().data_ptr() == stoch.untyped_storage().data_ptr()
            and stoch.storage_offset() == deter.storage_offset() + deter.shape[-1]
            and deter.stride() == stoch.stride()
            and not deter.requires_grad
        )
        if not adjacent:
            return super().features(states)
        width = deter.shape[-1] + stoch.shape[-1]
        return deter.as_strided((*deter.shape[:-1], width), deter.stride())

    def compare(
        self, post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"]
    ) -> Agreement:
        if not can_launch(post.device, post.dtype):
            return super().compare(post, prior)
        dyn, rep, post_entropy, prior_entropy = agree(post, prior, self.config.unimix)
        return Agreement(dyn, rep, post_entropy.mean(), prior_entropy.mean())

    def draw(
        self, logits: Float[Tensor, "*b S K"], rng: Rng
    ) -> Float[Tensor, "*b S K"]:
        if torch.is_grad_enabled() or not can_launch(logits.device, logits.dtype):
            return super().draw(logits, rng)
        return sample_choice(logits, rng.clocks(logits), self.config.unimix)

    def observe(
        self,
        state: State,
        tokens: Float[Tensor, "B T E"],
        prevact: dict[str, Tensor],
        is_first: Bool[Tensor, "B T"],
        rng: Rng,
    ) -> tuple[State, Float[Tensor, "B T S K"]]:
        if tokens.shape[1] == 1 or not self._is_usual(tokens):
            return super().observe(state, tokens, prevact, is_first, rng)
        config, dtype = self.config, tokens.dtype
        actions = self.embed(prevact, is_first, tokens)
        weight, bias = self.obs0.cast(dtype)
        own, others = weight[:, : config.deter], weight[:, config.deter :]
        weights = ScanWeights(
            dynin0=Normed(*self.dynin0.cast(dtype), self.dynin0norm.scale),
            dynin1=Normed(*self.dynin1.cast(dtype), self.dynin1norm.scale),
            dynhid0=Normed(*self.dynhid0.cast(dtype), self.dynhid0norm.scale),
            dyngru=Dense(*self.dyngru.cast(dtype)),
            obs0=Unbiased(own, self.obs0norm.scale),
            obslogit=Dense(*self.obslogit.cast(dtype)),
        )
        shape = (*is_first.shape, config.stoch, config.classes)
        clocks = rng.clocks(torch.empty(shape, device=tokens.device))
        deters, stochs, logits = scan(
            weights,
            *state,
            actions,
            F.linear(tokens, others, bias),
            is_first,
            clocks,
            config.unimix,
            self.dynin0norm.eps,
        )
        return State(deters, stochs), logits

    def _dream_on(
        self, before: State, action: dict[str, Tensor], after: State, rng: Rng
    ) -> None:
        config, deter = self.config, before.deter
        blocks, dtype, rows = config.blocks, deter.dtype, len(deter)
        shared = torch.cat(
            [
                self._layer("dynin0", deter),
                self._layer("dynin1", before.stoch.flatten(-2)),
                self._embed_drawn(action, deter),
            ],
            -1,
        )
        weight, bias = self.dynhid0.cast(dtype)
        own, others = weight[:, : config.deter // blocks], weight[:, -shared.shape[1] :]
        x = torch.bmm(shared.expand(blocks, -1, -1), others)
        x.baddbmm_(deter.view(rows, blocks, -1).transpose(0, 1), own)
        norm = self.dynhid0norm
        x = rms_norm_silu_blocks(x, norm.scale, norm.eps, bias)
        weight, bias = self.dyngru.cast(dtype)
        gates = torch.bmm(x.view(rows, blocks, -1).transpose(0, 1), weight)
        gru_gates(gates, bias, deter, out=after.deter)
        logits = self.prior_logits(after.deter)
        sample_choice(logits, rng.clocks(logits), config.unimix, out=after.stoch)

    def _embed_drawn(self, action: dict[str, Tensor], like: Tensor) -> Tensor:
        """Encode actions of the policy; a lone choice picks a column of the weights."""
        spaces = list(self.actions.spaces.values())
        simple = len(spaces) == 1 and spaces[0].is_discrete and not spaces[0].shape
        if not simple or spaces[0].low.any():
            return self.embed(action, None, like)
        weight, bias = self.dynin2.cast(like.dtype)
        (chosen,) = action.values()
        norm = self.dynin2norm
        return rms_norm_silu(weight.T[chosen], norm.scale, norm.eps, bias)

    def _apart(self, room: Float[Tensor, "*b F"]) -> State:
        """Features as the two halves they consist of."""
        config = self.config
        deter, stoch = room[..., : config.deter], room[..., config.deter :]
        shape = (*stoch.shape[:-1], config.stoch, config.classes)
        return State(deter, stoch.view(shape))

    def _layer(self, name: str, x: Tensor) -> Tensor:
        layer, norm = getattr(self, name), getattr(self, f"{name}norm")
        return linear_norm_act(layer, norm, self.act, x)

    def _is_usual(self, x: Tensor) -> bool:
        """Whether the dynamics have the layers that the scan was written for."""
        config = self.config
        layers = (config.dynlayers, config.obslayers) == (1, 1)
        usual = layers and not config.absolute
        return usual and is_fusable(self.dynin0norm, self.act, x.dtype)
