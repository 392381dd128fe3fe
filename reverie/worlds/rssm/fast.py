"""GPU version of the RSSM dynamics, built from fused kernels.

`observe` runs the posterior scan of `kernels/scan/posterior.py`.

Imagination loops over steps as in `dynamics.py`. It consists of many small kernels,
each of which waits for the previous one. To have fewer of them, norm, matrix product
and sampling are fused, and inputs of the hidden layer `dynhid0` that do not depend on
the action are computed on a side stream (`HIDDEN_INPUTS`), in parallel with prior and
policy.

Shapes: N states, deterministic size D = G * W (G blocks of W values, I inputs each),
S stochastic variables with K classes (SK = S * K), hidden size H (H2 = 2 * H), A
discrete actions.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from reverie.api import Policy, Rollout
from reverie.kernels.heads import sample_layer as sampling
from reverie.kernels.heads.onehot import onehot_kl, sample_onehot
from reverie.kernels.launch import cached_padded_weights, can_launch
from reverie.kernels.norm.norm_linear import is_linear_fusable, norm_silu_linear
from reverie.kernels.norm.rms_norm import (
    is_fusable,
    linear_norm_act,
    rms_norm_silu,
    rms_norm_silu_blocks,
)
from reverie.kernels.scan.block_gru import block_gru_gates
from reverie.kernels.scan.imagination import embed_deter_stoch, norm_silu_actions
from reverie.kernels.scan.posterior import posterior_scan, select_implementation
from reverie.kernels.scan.tensors import (
    ForwardPass,
    ScanInputs,
    ScanSettings,
    ScanWeights,
)
from reverie.nets.blocks import BlockLinear, Linear, Norm
from reverie.nets.rng import Rng
from reverie.nets.streams import NOISE, SideStream, on_stream, wait_for
from reverie.worlds.rollout import stack_actions
from reverie.worlds.rssm.dynamics import (
    KLTerms,
    RSSMDynamics,
    RSSMState,
    joined_features,
)

HIDDEN_INPUTS = SideStream("hidden inputs")
"""Stream for the products of the hidden layer `dynhid0` with inputs that do not
depend on the action: `deter`, and the outputs of `dynin0` and `dynin1`."""

MAX_TABLE_ACTIONS = 256
"""Maximum number of discrete actions whose embeddings are precomputed in a table."""


class _HiddenWeights(NamedTuple):
    """Weights of the hidden layer `dynhid0` and its inputs, for all steps."""

    deter: Float[Tensor, "G I W"]
    """For the inputs of each block from `deter`."""
    shared: Float[Tensor, "G H2 W"]
    """For the inputs from `dynin0` and `dynin1`."""
    action: Float[Tensor, "G H W"]
    """For the embedded actions."""
    table: Float[Tensor, "G A W"] | None
    """Products of `action` and the embeddings of all discrete actions, or None."""
    stoch: Float[Tensor, "SK H"] | None
    """Transposed weights of `dynin1`, whose rows are selected by class indices. None if
    the prior is not fused (`_has_fused_prior`): only a fused prior returns indices."""


class _PartialHidden(NamedTuple):
    """Tensors of the side stream, referenced so that their memory is not reused."""

    hidden: Float[Tensor, "G N W"]
    """Output of `dynhid0` without bias. It begins as the product of `deter`. The
    products of the shared inputs and, if there is no `table`, of the embedded action
    are added in place."""
    in0: Float[Tensor, "N H"]
    """Output of `dynin0` without bias."""
    classes: Int[Tensor, "N S"] | None
    """Sampled class indices of `stoch`."""


class FastRSSMDynamics(RSSMDynamics):
    """`RSSMDynamics` with fused kernels, for the configs that they support."""

    # layers that `RSSMDynamics` adds by name
    dynin0: Linear
    dynin1: Linear
    dynhid0: BlockLinear
    dynin2: Linear
    obs0: Linear
    obslogit: Linear
    priorlogit: Linear
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
        # An output layer of the policy whose weights are padded to a multiple of eight
        # outputs (`padded_linear`) is padded once per rollout instead of at each step.
        with cached_padded_weights():
            actions = self._imagine_steps(steps, policy, rng)
        return Rollout(self._split(feat), stack_actions(actions))

    def features(self, states: RSSMState) -> Float[Tensor, "*b F"]:
        """Concatenate `deter` and `stoch`, without a copy if adjacent in memory."""
        joined = joined_features(states)
        return super().features(states) if joined is None else joined

    def kl_terms(
        self, post: Float[Tensor, "*b S K"], prior: Float[Tensor, "*b S K"]
    ) -> KLTerms:
        if not can_launch(post.device, post.dtype):
            return super().kl_terms(post, prior)
        dyn, rep, post_entropy, prior_entropy = onehot_kl(
            post, prior, self.config.unimix
        )
        return KLTerms(dyn, rep, post_entropy.mean(), prior_entropy.mean())

    def next_deter(
        self,
        hidden: Float[Tensor, "B D"],
        deter: Float[Tensor, "B D"],
        out: Float[Tensor, "B D"] | None = None,
    ) -> Float[Tensor, "B D"]:
        """Return the next `deter`, in `out` if it is given."""
        if torch.is_grad_enabled() or not self._has_fused_layers(deter):
            assert out is None  # only imagination with fused layers passes it
            return super().next_deter(hidden, deter)
        weight, bias = self.dyngru.cast(hidden.dtype)
        slices = hidden.view(len(hidden), self.config.blocks, -1).transpose(0, 1)
        return block_gru_gates(torch.bmm(slices, weight), bias, deter, out)

    def sample(
        self, logits: Float[Tensor, "*b S K"], rng: Rng
    ) -> Float[Tensor, "*b S K"]:
        if torch.is_grad_enabled() or not can_launch(logits.device, logits.dtype):
            return super().sample(logits, rng)
        # a sample is the class with the largest probability / exponential noise
        return sample_onehot(logits, rng.exponential(logits), self.config.unimix)

    def scan(
        self, state: RSSMState, tokens: Tensor, actions: Tensor, reset: Tensor, rng: Rng
    ) -> tuple[RSSMState, Tensor]:
        if tokens.shape[1] == 1 or not self._has_fused_layers(tokens):
            return super().scan(state, tokens, actions, reset, rng)
        config, dtype = self.config, tokens.dtype
        # `cast` returns (weight, bias) of a layer in this dtype
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

    def _imagine_steps(
        self, steps: list[RSSMState], policy: Policy, rng: Rng
    ) -> list[dict[str, Tensor]]:
        """Write all states after the first one, and return the actions."""
        deter = steps[0].deter
        weights = self._hidden_weights(deter.dtype)
        partial_hidden = self._project_deter(deter, weights)
        self._add_shared_inputs(steps[0], partial_hidden, weights)
        actions = [policy(steps[0])]
        for previous, following in pairwise(steps):
            with on_stream(deter, NOISE):  # in parallel with the layers below
                noise = rng.exponential(following.stoch)
            wait_for(deter, HIDDEN_INPUTS)
            hidden = self._add_action(partial_hidden, actions[-1], weights)
            self.next_deter(hidden, previous.deter, out=following.deter)
            has_next = following is not steps[-1]
            if has_next:
                partial_hidden = self._project_deter(following.deter, weights)
            classes = self._write_stoch(following.deter, noise, out=following.stoch)
            if has_next:
                partial_hidden = partial_hidden._replace(classes=classes)
                self._add_shared_inputs(following, partial_hidden, weights)
            actions.append(policy(following))
        # With a horizon of zero, the loop has not waited for the work that was started
        # on the side stream before it.
        wait_for(deter, HIDDEN_INPUTS)
        return actions

    def _hidden_weights(self, dtype: torch.dtype) -> _HiddenWeights:
        """Return the weights of `dynhid0` by input, prepared once per rollout."""
        config = self.config
        width, hidden = config.deter // config.blocks, config.hidden
        weight, _ = self.dynhid0.cast(dtype)
        split = [width, width + 2 * hidden]
        deter, shared, action = weight.tensor_split(split, 1)
        table = stoch = None
        spaces = self.actions.spaces.values()
        if (
            self._has_index_action()
            and sum(space.classes for space in spaces) <= MAX_TABLE_ACTIONS
        ):
            weight, bias = self.dynin2.cast(dtype)
            norm = self.dynin2norm
            embeds = rms_norm_silu(weight.T, norm.scale, norm.eps, bias)
            table = torch.bmm(embeds.expand(config.blocks, -1, -1), action)
        if self._has_fused_prior(dtype):
            stoch = self.dynin1.cast(dtype)[0].T.contiguous()
        return _HiddenWeights(deter, shared, action, table, stoch)

    def _project_deter(
        self, deter: Float[Tensor, "N D"], weights: _HiddenWeights
    ) -> _PartialHidden:
        """Multiply `deter` with the weights of `dynhid0`, on the side stream."""
        with on_stream(deter, HIDDEN_INPUTS):
            slices = deter.view(len(deter), self.config.blocks, -1).transpose(0, 1)
            hidden = torch.bmm(slices, weights.deter)
            in0 = F.linear(deter, self.dynin0.cast(deter.dtype)[0])
        return _PartialHidden(hidden, in0, None)

    def _add_shared_inputs(
        self,
        state: RSSMState,
        partial_hidden: _PartialHidden,
        weights: _HiddenWeights,
    ) -> None:
        """Add the products of `dynhid0` with the outputs of `dynin0` and `dynin1`.

        `dynin0` is the layer of `deter`, `dynin1` that of `stoch`. The products are
        added to `partial_hidden.hidden` in place, on the side stream.
        """
        hidden, in0, classes = partial_hidden
        bias, norm = self.dynin0.cast(in0.dtype)[1], self.dynin0norm
        with on_stream(in0, HIDDEN_INPUTS):
            if classes is None or weights.stoch is None:
                layer0 = rms_norm_silu(in0, norm.scale, norm.eps, bias)
                layer1 = self._layer("dynin1", state.stoch.flatten(-2))
                shared = torch.cat([layer0, layer1], -1)
            else:
                shared = embed_deter_stoch(
                    *(in0, bias, norm, classes, weights.stoch),
                    *(self.dynin1.cast(in0.dtype)[1], self.dynin1norm),
                )
            hidden.baddbmm_(shared.expand(len(hidden), -1, -1), weights.shared)

    def _add_action(
        self,
        partial_hidden: _PartialHidden,
        action: dict[str, Tensor],
        weights: _HiddenWeights,
    ) -> Float[Tensor, "N D"]:
        """Add the product of the action; return silu(norm(hidden + bias))."""
        hidden, norm = partial_hidden.hidden, self.dynhid0norm
        _, bias = self.dynhid0.cast(hidden.dtype)
        if weights.table is not None:
            (index,) = action.values()
            return norm_silu_actions(hidden, bias, norm, weights.table, index)
        embed = self._embed_policy_action(action, partial_hidden.in0)
        hidden.baddbmm_(embed.expand(len(hidden), -1, -1), weights.action)
        return rms_norm_silu_blocks(hidden, norm.scale, norm.eps, bias)

    def _write_stoch(
        self,
        deter: Float[Tensor, "N D"],
        noise: Float[Tensor, "N S K"],
        out: Float[Tensor, "N S K"],
    ) -> Int[Tensor, "N S"] | None:
        """Write a sample of the prior; return class indices if the prior is fused."""
        unimix = self.config.unimix
        if not self._has_fused_prior(deter.dtype):
            logits = self.prior_logits(deter)
            wait_for(deter, NOISE)
            sample_onehot(logits, noise, unimix, out=out)
            return None
        # each kernel applies bias, norm and SiLU of a layer and the weights of the next
        weight, bias = self._prior_layer(0)[0].cast(deter.dtype)
        x, norm = F.linear(deter, weight), self._prior_layer(0)[1]
        for i in range(1, self.config.imglayers):  # hidden layers of the prior
            layer, next_norm = self._prior_layer(i)
            x = norm_silu_linear(x, bias, norm, layer)
            bias, norm = layer.cast(x.dtype)[1], next_norm
        wait_for(deter, NOISE)
        args = (x, bias, norm, self.priorlogit, noise, unimix)
        return sampling.sample_layer(*args, torch.int32, out)

    def _prior_layer(self, i: int) -> tuple[Linear, Norm]:
        """Return hidden layer `i` of the prior, and its norm."""
        return getattr(self, f"prior{i}"), getattr(self, f"prior{i}norm")

    def _has_fused_prior(self, dtype: torch.dtype) -> bool:
        """True if the prior's layers are fused with norms and sampling."""
        config = self.config
        return (
            config.imglayers > 0
            and config.classes <= sampling.MAX_CLASSES
            and is_linear_fusable(self.dynin0norm, self.act, dtype)
        )

    def _has_index_action(self) -> bool:
        """True if there is a single discrete action, given as a class index."""
        spaces = list(self.actions.spaces.values())
        is_scalar = len(spaces) == 1 and spaces[0].is_discrete and not spaces[0].shape
        return is_scalar and not spaces[0].low.any()

    def _embed_policy_action(self, action: dict[str, Tensor], like: Tensor) -> Tensor:
        """Embed imagined actions; a single discrete action selects a weight column."""
        if not self._has_index_action():
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
        has_single_layers = (config.dynlayers, config.obslayers) == (1, 1)
        supported = has_single_layers and not config.absolute
        return supported and is_fusable(self.dynin0norm, self.act, x.dtype)
