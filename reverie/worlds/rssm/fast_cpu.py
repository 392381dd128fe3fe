"""CPU version of the RSSM dynamics, for small models.

`observe` runs the posterior scan of `kernels/scan/cpu.py`. Imagination without
gradients prepares the weights once, looks up the contribution of a discrete action in a
table, and writes all states into one tensor of features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from reverie.api import Policy, Rollout
from reverie.kernels.heads.onehot_cpu import onehot_kl
from reverie.kernels.scan import cpu
from reverie.nets.blocks import BlockLinear, Linear, Norm
from reverie.nets.rng import Rng
from reverie.worlds.rollout import stack_actions
from reverie.worlds.rssm.dynamics import (
    KLTerms,
    RSSMDynamics,
    RSSMState,
    joined_features,
)

MAX_TABLE_CLASSES = 256
"""Maximum number of classes of an action whose contributions are put in a table."""


class CpuRSSMDynamics(RSSMDynamics):
    """`RSSMDynamics` with fewer operations per step, for the configs it supports."""

    # layers that `RSSMDynamics` adds by name
    dynin0: Linear
    dynin1: Linear
    dynhid0: BlockLinear
    obs0: Linear
    obslogit: Linear
    dynin0norm: Norm
    dynin1norm: Norm
    dynhid0norm: Norm
    obs0norm: Norm

    def scan(
        self, state: RSSMState, tokens: Tensor, actions: Tensor, reset: Tensor, rng: Rng
    ) -> tuple[RSSMState, Tensor]:
        if tokens.shape[1] == 1 or not self._is_supported(tokens):
            return super().scan(state, tokens, actions, reset, rng)
        config = self.config
        shape = (config.stoch, config.classes)

        def sample(logits: Tensor) -> Tensor:
            return self.sample(logits.view(-1, *shape), rng).flatten(1)

        obs, obs_tokens = self.obs0.weight.tensor_split([config.deter], 1)
        weights = self._small_weights(obs)
        inputs = cpu.SmallInputs(
            state.deter,
            state.stoch.flatten(1),
            self._hid_inputs(actions),
            F.linear(tokens, obs_tokens, self.obs0.bias),
        )
        constants = cpu.ScanConstants(
            reset, sample, config.classes, config.unimix, self.dynin0norm.eps
        )
        deter, stoch, logits = cpu.posterior_scan(weights, inputs, constants)
        sequence = (*reset.shape, *shape)
        return RSSMState(deter, stoch.view(sequence)), logits.view(sequence)

    def imagine(
        self, state: RSSMState, policy: Policy, horizon: int, rng: Rng
    ) -> Rollout:
        # an exported step has a horizon of 1 and cannot contain operations with `out`
        supported = horizon > 1 and self._is_supported(state.deter)
        if torch.is_grad_enabled() or not supported:
            return super().imagine(state, policy, horizon, rng)
        config, eps = self.config, self.dynin0norm.eps
        rows, stoch_width = len(state.deter), config.stoch * config.classes
        new, blocks = state.deter.new_empty, config.blocks
        feat = new(rows, horizon + 1, config.deter + stoch_width)
        parts = feat.tensor_split([config.deter], -1)
        deters, stochs = (x.unbind(1) for x in parts)
        deters[0].copy_(state.deter)
        stochs[0].copy_(state.stoch.flatten(1))
        weights = self._small_weights(self.obs0.weight[:, : config.deter])
        in_pre = new(rows, 2, config.hidden)
        hid_in, hid = new(rows, len(weights.hid)), new(rows, config.deter)
        gates = new(blocks, rows, weights.gates.shape[2])
        hid_inputs = self._hid_inputs_of_actions()
        shape = (config.stoch, config.classes)
        states = [
            RSSMState(deter, stoch.view(-1, *shape))
            for deter, stoch in zip(deters, stochs, strict=True)
        ]
        actions = [policy(states[0])]
        for t in range(horizon):
            deter, following = deters[t], deters[t + 1]
            cpu.embed_state(weights, eps, deter, stochs[t], in_pre, hid_in)
            torch.addmm(hid_inputs(actions[-1]), hid_in, weights.hid, out=hid)
            x = cpu.by_block(cpu.norm_silu(hid, weights.hid_scale, eps), blocks)
            torch.baddbmm(weights.gates_bias, x, weights.gates, out=gates)
            out = cpu.by_block(following, blocks)
            cpu.next_deter(gates, cpu.by_block(deter, blocks), out)
            sample = self.sample(self.prior_logits(following), rng)
            states[t + 1].stoch.copy_(sample)
            actions.append(policy(states[t + 1]))
        states_by_step = RSSMState(parts[0], parts[1].view(rows, -1, *shape))
        return Rollout(states_by_step, stack_actions(actions))

    def kl_terms(
        self, post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"]
    ) -> KLTerms:
        dtypes = {torch.float32, post.dtype, prior.dtype}
        if not self.config.unimix or len(dtypes) > 1:
            return super().kl_terms(post, prior)
        return KLTerms(*onehot_kl(post, prior, self.config.unimix))

    def features(self, states: RSSMState) -> Float[Tensor, "*b F"]:
        """Concatenate `deter` and `stoch`, without a copy if adjacent in memory."""
        joined = joined_features(states)
        return super().features(states) if joined is None else joined

    def _hid_inputs_of_actions(self) -> Callable[[dict[str, Tensor]], Tensor]:
        """Return a function that maps actions of the policy to `hid_inputs`."""
        like, (space, *others) = self.dynin0.weight, self.actions.spaces.values()

        def embed(action: dict[str, Tensor]) -> Tensor:
            return self._hid_inputs(self.embed_action(action, None, like))

        is_index = space.is_discrete and not (others or space.shape or space.low.any())
        if not is_index or space.classes > MAX_TABLE_CLASSES:
            return embed
        # one row per class, and one for missing actions, whose index is -1
        onehot = torch.eye(space.classes + 1, space.classes, dtype=like.dtype)
        table = self._hid_inputs(self._layer("dynin2", onehot))

        def look_up(action: dict[str, Tensor]) -> Tensor:
            (index,) = action.values()
            return embed(action) if index.is_floating_point() else table[index]

        return look_up

    def _hid_inputs(self, actions: Float[Tensor, "*b U"]) -> Float[Tensor, "*b D"]:
        """Return the product of embedded actions with `dynhid0`, and the bias."""
        weight = self.dynhid0.weight[:, -self.config.hidden :]
        return F.linear(actions, weight.transpose(0, 1).flatten(1).T, self.dynhid0.bias)

    def _small_weights(self, obs: Tensor) -> cpu.SmallWeights:
        """Return the weights in the layout of the CPU scan."""
        config = self.config
        width = config.deter // config.blocks
        hid = self.dynhid0.weight
        shared = hid[:, width : width + 2 * config.hidden].transpose(0, 1).flatten(1)
        return cpu.SmallWeights(
            *(self.dynin0.weight.T, self.dynin0.bias),
            *(self.dynin1.weight.T, self.dynin1.bias),
            torch.stack([self.dynin0norm.scale, self.dynin1norm.scale]),
            torch.cat([cpu.dense_blocks(hid[:, :width]), shared]),
            self.dynhid0norm.scale,
            self.dyngru.weight,
            cpu.gates_bias(self.dyngru.bias, config.blocks),
            *(obs.T, self.obs0norm.scale),
            *(self.obslogit.weight.T, self.obslogit.bias),
        )

    def _is_supported(self, x: Tensor) -> bool:
        """True if the CPU scan supports the configured layers and the dtype of `x`."""
        config = self.config
        return (
            (config.dynlayers, config.obslayers) == (1, 1)
            and not config.absolute
            and config.deter <= cpu.MAX_DETER
            and config.unimix > 0  # otherwise probabilities are clamped
            and self.dynin0norm.kind == "rms"
            and self.act is F.silu
            and x.dtype == self.dynin0.weight.dtype
        )
