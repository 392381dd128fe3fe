"""The RSSM's dynamics on a GPU: the same layers with what surrounds them fused.

Recorded sequences go through the rearranged scan (`nets/fast/scan.py`), dreams through
the same steps as in `rssm.py` with one kernel after each product.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from reverie.nets.blocks import BlockLinear, Linear, Norm
from reverie.nets.dice import Dice
from reverie.nets.fast.choice import agree, sample_choice
from reverie.nets.fast.gru import gru_gates
from reverie.nets.fast.launch import can_launch
from reverie.nets.fast.norm_act import is_fusable, layer_norm_act
from reverie.nets.fast.scan import Dense, Normed, ScanWeights, Unbiased, scan
from reverie.worlds.rssm import Agreement, Dynamics, State


class FastDynamics(Dynamics):
    dynin0: Linear
    dynin1: Linear
    dynhid0: BlockLinear
    obs0: Linear
    obslogit: Linear
    dynin0norm: Norm
    dynin1norm: Norm
    dynhid0norm: Norm
    obs0norm: Norm

    def core(self, state: State, action: Float[Tensor, "B H"]) -> Float[Tensor, "B D"]:
        deter = state.deter
        if torch.is_grad_enabled() or not can_launch(deter.device, deter.dtype):
            return super().core(state, action)
        x = self.joined(state, action)
        for i in range(self.config.dynlayers):
            x = self._layer(f"dynhid{i}", x)
        blocks, (weight, bias) = self.config.blocks, self.dyngru.cast(x.dtype)
        rows = x.reshape(len(x), blocks, -1).transpose(0, 1)
        return gru_gates(torch.bmm(rows, weight), bias, deter)

    def compare(
        self, post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"]
    ) -> Agreement:
        if not can_launch(post.device, post.dtype):
            return super().compare(post, prior)
        dyn, rep, post_entropy, prior_entropy = agree(post, prior, self.config.unimix)
        return Agreement(dyn, rep, post_entropy.mean(), prior_entropy.mean())

    def draw(
        self, logits: Float[Tensor, "*b S K"], dice: Dice
    ) -> Float[Tensor, "*b S K"]:
        if torch.is_grad_enabled() or not can_launch(logits.device, logits.dtype):
            return super().draw(logits, dice)
        return sample_choice(logits, dice.clocks(logits), self.config.unimix)

    def observe(
        self,
        state: State,
        tokens: Float[Tensor, "B T E"],
        prevact: dict[str, Tensor],
        is_first: Bool[Tensor, "B T"],
        dice: Dice,
    ) -> tuple[State, Float[Tensor, "B T S K"]]:
        if tokens.shape[1] == 1 or not self._is_usual(tokens):
            return super().observe(state, tokens, prevact, is_first, dice)
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
        clocks = dice.clocks(torch.empty(shape, device=tokens.device))
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

    def _layer(self, name: str, x: Tensor) -> Tensor:
        layer, norm = getattr(self, name), getattr(self, f"{name}norm")
        return layer_norm_act(layer, norm, self.act, x)

    def _is_usual(self, x: Tensor) -> bool:
        """Whether the dynamics have the layers that the scan was written for."""
        config = self.config
        layers = (config.dynlayers, config.obslayers) == (1, 1)
        usual = layers and not config.absolute
        return usual and is_fusable(self.dynin0norm, self.act, x.dtype)
