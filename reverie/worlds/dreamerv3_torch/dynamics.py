"""Dynamics of dreamerv3-torch: a GRU with layer norm, prior and posterior.

The stochastic state has S categorical variables of K classes, as in the RSSM of the
current DreamerV3, or S Gaussian variables (then K is 1). The state at the start of an
episode is learned: `deter` is a parameter, and `stoch` the mode of the prior given it.

The *statistics* of the stochastic state are the logits `(S, K)` of the categorical
variables, or mean and standard deviation `(S, 2)` of the Gaussian ones.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from reverie.nets.distributions import OneHot
from reverie.nets.dreamerv3_torch.layers import HiddenLinear, OutputLinear
from reverie.nets.gaussian import Gaussian
from reverie.nets.inputs import Concat
from reverie.nets.rng import Rng
from reverie.spaces import Spaces
from reverie.worlds.dreamerv3_torch.config import DreamerV3TorchConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics, RSSMState, update_deter


class DreamerV3TorchDynamics(RSSMDynamics):
    """`RSSMDynamics` with other networks.

    `prior_logits` and `posterior_logits` return statistics (see above).
    """

    config: DreamerV3TorchConfig  # type: ignore[assignment]

    def __init__(
        self, token_width: int, act_space: Spaces, config: DreamerV3TorchConfig
    ):
        nn.Module.__init__(self)
        self.config, layer = config, config.layer
        deter, stoch = config.feature_widths
        hidden = config.hidden
        self.actions = Concat(act_space)
        if config.initial == "learned":
            self.initial_deter = nn.Parameter(torch.empty(1, deter))
        self.input = HiddenLinear(stoch + self.actions.width, hidden, layer)
        self.gru = HiddenLinear(hidden + deter, 3 * deter, config.gate_layer)
        statistics = stoch if config.classes else 2 * stoch
        self.prior = HiddenLinear(deter, hidden, layer)
        self.prior_out = OutputLinear(hidden, statistics)
        self.posterior = HiddenLinear(deter + token_width, hidden, layer)
        self.posterior_out = OutputLinear(hidden, statistics)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        if self.config.initial == "learned":
            self.initial_deter.zero_()

    def initial(self, batch: int, dtype: torch.dtype) -> RSSMState:
        """Return the state at the start of an episode, with gradients if learned."""
        config, like = self.config, self.prior_out.bias
        if config.initial == "zeros":
            deter = like.new_zeros(batch, config.deter, dtype=dtype)
            shape = (batch, config.stoch, max(1, config.classes))
            return RSSMState(deter, like.new_zeros(shape, dtype=dtype))
        deter = torch.tanh(self.initial_deter).to(dtype)
        stoch = self.mode(self.prior_logits(deter)).to(dtype)
        return RSSMState(deter.expand(batch, -1), stoch.expand(batch, -1, -1))

    def _initial_values(self, tokens: Float[Tensor, "B T E"]) -> RSSMState:
        return self.initial(tokens.shape[0], tokens.dtype)

    def embed_action(
        self,
        action: dict[str, Tensor],
        is_first: Bool[Tensor, "*b"] | None,
        like: Tensor,
    ) -> Float[Tensor, "*b A"]:
        """Return actions in the dtype of `like`, zero where `is_first`."""
        x: Tensor = self.actions(action, like.dtype)
        return x if is_first is None else torch.where(is_first[..., None], 0, x)

    def core(
        self, state: RSSMState, action: Float[Tensor, "B A"]
    ) -> Float[Tensor, "B D"]:
        """Return the next `deter`. The GRU's reset gate scales the candidate."""
        deter, stoch = state
        x = self.input(torch.cat([stoch.flatten(-2), action], -1))
        gates = self.gru(torch.cat([x, deter], -1))
        return update_deter(deter, *gates.chunk(3, -1))

    def posterior_logits(
        self, deter: Float[Tensor, "*b D"], token: Float[Tensor, "*b E"]
    ) -> Float[Tensor, "*b S _"]:
        """Return the statistics of the posterior."""
        hidden = self.posterior(torch.cat([deter, token], -1))
        return self._statistics(self.posterior_out(hidden))

    def prior_logits(self, deter: Float[Tensor, "*b D"]) -> Float[Tensor, "*b S _"]:
        """Return the statistics of the prior."""
        return self._statistics(self.prior_out(self.prior(deter)))

    def distribution(  # type: ignore[override]
        self, statistics: Float[Tensor, "*b S _"]
    ) -> OneHot | Gaussian:
        """Return the distribution of `stoch` with these statistics."""
        if self.config.classes:
            return OneHot(statistics, self.config.unimix)
        mean, std = statistics.float().unbind(-1)
        return Gaussian(mean, std)

    def sample(
        self, statistics: Float[Tensor, "*b S _"], rng: Rng
    ) -> Float[Tensor, "*b S K"]:
        """Sample `stoch`, in the dtype of the statistics."""
        sample = self.distribution(statistics).sample(rng).to(statistics.dtype)
        return sample if self.config.classes else sample[..., None]

    def mode(self, statistics: Float[Tensor, "*b S _"]) -> Float[Tensor, "*b S K"]:
        """Return the most likely `stoch`."""
        if not self.config.classes:
            return statistics[..., :1]
        return OneHot(statistics, self.config.unimix).mode()

    def features(self, states: RSSMState) -> Float[Tensor, "*b F"]:
        """Concatenate the flattened `stoch` and `deter`."""
        return torch.cat([states.stoch.flatten(-2), states.deter], -1)

    def _statistics(self, x: Float[Tensor, "*b O"]) -> Float[Tensor, "*b S _"]:
        """Convert the output of a network to logits, or to means and deviations."""
        config = self.config
        if config.classes:
            return x.reshape(*x.shape[:-1], config.stoch, config.classes)
        mean, std = x.chunk(2, -1)
        if config.mean_act == "tanh5":
            mean = 5 * torch.tanh(mean / 5)
        if config.std_act == "sigmoid2":
            std = 2 * torch.sigmoid(std / 2)
        elif config.std_act == "sigmoid":
            std = torch.sigmoid(std)
        else:
            std = torch.abs(std + 1)
        return torch.stack([mean, std + config.min_std], -1)
