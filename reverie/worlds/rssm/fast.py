"""GPU version of the RSSM dynamics, built from fused kernels.

`observe` runs the posterior scan of `kernels/scan/posterior.py`. Imagination loops over
steps as in `dynamics.py`, with one fused kernel after each matrix product.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from reverie.api import Policy, Rollout
from reverie.kernels.heads.onehot import onehot_kl, sample_onehot
from reverie.kernels.launch import cached_padded_weights, can_launch
from reverie.kernels.norm.rms_norm import (
    is_fusable,
    linear_norm_act,
    rms_norm_silu,
    rms_norm_silu_blocks,
)
from reverie.kernels.scan.block_gru import block_gru_gates
from reverie.kernels.scan.posterior import posterior_scan, select_implementation
from reverie.kernels.scan.tensors import (
    ForwardPass,
    ScanInputs,
    ScanSettings,
    ScanWeights,
)
from reverie.nets.blocks import BlockLinear, Linear, Norm
from reverie.nets.rng import Rng
from reverie.nets.streams import SideStream, on_stream, wait_for
from reverie.worlds.rollout import stack_actions
from reverie.worlds.rssm.dynamics import KLTerms, RSSMDynamics, RSSMState

NOISE = SideStream("noise")
"""Stream on which noise for samples is drawn."""


class FastRSSMDynamics(RSSMDynamics):
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

    def imagine(
        self, state: RSSMState, policy: Policy, horizon: int, rng: Rng
    ) -> Rollout:
        """Roll out the prior, writing each state into one tensor of features."""
        deter = state.deter
        if torch.is_grad_enabled() or not self._has_fused_layers(deter):
            return super().imagine(state, policy, horizon, rng)
        config = self.config
        width = config.deter + config.stoch * config.classes
        feat = deter.new_empty(len(deter), horizon + 1, width)
        steps = [self._split(feat[:, t]) for t in range(horizon + 1)]
        for target, source in zip(steps[0], state, strict=True):
            target.copy_(source)
        with cached_padded_weights():
            actions = [policy(steps[0])]
            for previous, following in pairwise(steps):
                self._imagine_step(previous, actions[-1], rng, out=following)
                actions.append(policy(following))
        return Rollout(self._split(feat), stack_actions(actions))

    def features(self, states: RSSMState) -> Float[Tensor, "*b F"]:
        """Concatenate `deter` and `stoch`, without a copy if adjacent in memory."""
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

    def kl_terms(
        self, post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"]
    ) -> KLTerms:
        if not can_launch(post.device, post.dtype):
            return super().kl_terms(post, prior)
        dyn, rep, post_entropy, prior_entropy = onehot_kl(
            post, prior, self.config.unimix
        )
        return KLTerms(dyn, rep, post_entropy.mean(), prior_entropy.mean())

    def sample(
        self, logits: Float[Tensor, "*b S K"], rng: Rng
    ) -> Float[Tensor, "*b S K"]:
        if torch.is_grad_enabled() or not can_launch(logits.device, logits.dtype):
            return super().sample(logits, rng)
        return sample_onehot(logits, rng.exponential(logits), self.config.unimix)

    def scan(
        self, state: RSSMState, tokens: Tensor, actions: Tensor, reset: Tensor, rng: Rng
    ) -> tuple[RSSMState, Tensor]:
        if tokens.shape[1] == 1 or not self._has_fused_layers(tokens):
            return super().scan(state, tokens, actions, reset, rng)
        config, dtype = self.config, tokens.dtype
        weight, bias = self.obs0.cast(dtype)
        deter_weight, token_weight = weight.tensor_split([config.deter], 1)
        weights = ScanWeights(
            *(*self.dynin0.cast(dtype), self.dynin0norm.scale),
            *(*self.dynin1.cast(dtype), self.dynin1norm.scale),
            *(*self.dynhid0.cast(dtype), self.dynhid0norm.scale),
            *self.dyngru.cast(dtype),
            *(deter_weight, self.obs0norm.scale),
            *self.obslogit.cast(dtype),
        )
        shape = (*reset.shape, config.stoch, config.classes)
        # the values are drawn below, if an implementation supports these shapes
        noise = torch.empty(shape, device=tokens.device)
        projected = F.linear(tokens, token_weight, bias)
        stoch = state.stoch.flatten(1)
        inputs = ScanInputs(state.deter, stoch, actions, projected, reset, noise)
        settings = ScanSettings(config.classes, config.unimix, self.dynin0norm.eps)
        forward = ForwardPass(weights, inputs, settings)
        implementation = select_implementation(forward)
        if implementation is None:
            return super().scan(state, tokens, actions, reset, rng)
        inputs = inputs._replace(noise=rng.exponential(noise))
        forward = ForwardPass(weights, inputs, settings)
        deter, stoch, logits = posterior_scan(implementation, forward)
        return RSSMState(deter, stoch), logits

    def _imagine_step(
        self, state: RSSMState, action: dict[str, Tensor], rng: Rng, out: RSSMState
    ) -> None:
        """Write the next state into the tensors of `out`."""
        config, deter = self.config, state.deter
        blocks, dtype, rows = config.blocks, deter.dtype, len(deter)
        with on_stream(deter, NOISE):  # in parallel with the layers below
            noise = rng.exponential(out.stoch)
        shared = torch.cat(
            [
                self._layer("dynin0", deter),
                self._layer("dynin1", state.stoch.flatten(-2)),
                self._embed_policy_action(action, deter),
            ],
            -1,
        )
        weight, bias = self.dynhid0.cast(dtype)
        deter_weight, shared_weight = weight.tensor_split([config.deter // blocks], 1)
        x = torch.bmm(shared.expand(blocks, -1, -1), shared_weight)
        x.baddbmm_(deter.view(rows, blocks, -1).transpose(0, 1), deter_weight)
        norm = self.dynhid0norm
        x = rms_norm_silu_blocks(x, norm.scale, norm.eps, bias)
        weight, bias = self.dyngru.cast(dtype)
        gates = torch.bmm(x.view(rows, blocks, -1).transpose(0, 1), weight)
        block_gru_gates(gates, bias, deter, out=out.deter)
        logits = self.prior_logits(out.deter)
        wait_for(deter, NOISE)
        sample_onehot(logits, noise, config.unimix, out=out.stoch)

    def _embed_policy_action(self, action: dict[str, Tensor], like: Tensor) -> Tensor:
        """Embed imagined actions; a single discrete action selects a weight column."""
        spaces = list(self.actions.spaces.values())
        is_scalar = len(spaces) == 1 and spaces[0].is_discrete and not spaces[0].shape
        if not is_scalar or spaces[0].low.any():
            return self.embed_action(action, None, like)
        weight, bias = self.dynin2.cast(like.dtype)
        (index,) = action.values()
        norm = self.dynin2norm
        return rms_norm_silu(weight.T[index], norm.scale, norm.eps, bias)

    def _split(self, feat: Float[Tensor, "*b F"]) -> RSSMState:
        """Return `deter` and `stoch` as views of concatenated features."""
        config = self.config
        deter, stoch = feat[..., : config.deter], feat[..., config.deter :]
        shape = (*stoch.shape[:-1], config.stoch, config.classes)
        return RSSMState(deter, stoch.view(shape))

    def _layer(self, name: str, x: Tensor) -> Tensor:
        layer, norm = getattr(self, name), getattr(self, f"{name}norm")
        return linear_norm_act(layer, norm, self.act, x)

    def _has_fused_layers(self, x: Tensor) -> bool:
        """True if the kernels support the configured layers, norm and dtype."""
        config = self.config
        layers = (config.dynlayers, config.obslayers) == (1, 1)
        supported = layers and not config.absolute
        return supported and is_fusable(self.dynin0norm, self.act, x.dtype)
