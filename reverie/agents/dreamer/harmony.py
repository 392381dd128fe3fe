"""HarmonyDream: learned weights of the losses of the world model.

The reconstruction loss of an image is a sum over thousands of pixels, the reward loss a
single number. With fixed scales, one of the losses of observations, rewards and
dynamics can dominate the others. HarmonyDream (Ma et al., 2024) divides each by a
learned scale s and adds log(1 + s), which keeps s from growing without bound:

    L / s + log(1 + s),  s = exp(sigma)

For a constant loss L, the minimum is at s = (L + sqrt(L^2 + 4 L)) / 2. There, a large
loss is scaled to L / s = s / (1 + s), which is about 1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import Metrics
from reverie.distributed.collective import mean_contribution

GROUPS = ("observation", "reward", "dynamics")
"""Groups of losses that share one scale; `dynamics` are both KL losses."""


class Harmony(nn.Module):
    """Scales of the three groups of losses.

    Scales and networks have separate optimizers: `scale_losses` has gradients only for
    the networks, `loss` only for the scales.
    """

    def __init__(self, observation_losses: Iterable[str]):
        super().__init__()
        self.sigma = nn.Parameter(torch.zeros(len(GROUPS)))
        # group of each loss, by name
        self.group = dict.fromkeys(observation_losses, "observation")
        self.group |= {"rew": "reward", "dyn": "dynamics", "rep": "dynamics"}

    def scale_losses(self, losses: dict[str, Float[Tensor, ""]]) -> Float[Tensor, ""]:
        """Return the sum of all losses, divided by their scales, plus log(1 + s).

        Losses without a group are not scaled.
        """
        scales = dict(zip(GROUPS, self.sigma.detach().exp().unbind(), strict=True))
        terms = [
            loss / scales[self.group[name]] if name in self.group else loss
            for name, loss in losses.items()
        ]
        # this term is equal on all ranks, and the losses are summed over ranks
        terms += [
            mean_contribution(torch.log1p(scales[name]))
            for name in self._group_sums(losses)
        ]
        return torch.stack(terms).sum()

    def loss(self, losses: dict[str, Float[Tensor, ""]]) -> Float[Tensor, ""]:
        """Return the loss that trains the scales, given the losses that they divide."""
        sigma = dict(zip(GROUPS, self.sigma.unbind(), strict=True))
        terms = [
            total.detach() * torch.exp(-sigma[name])
            + mean_contribution(torch.log1p(sigma[name].exp()))
            for name, total in self._group_sums(losses).items()
        ]
        return torch.stack(terms).sum()

    def metrics(self) -> Metrics:
        scales = self.sigma.detach().exp().unbind()
        return {f"harmony/{k}": x for k, x in zip(GROUPS, scales, strict=True)}

    def _group_sums(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sum of the losses of each group, without groups that have none."""
        sums: dict[str, Tensor] = {}
        for name, loss in losses.items():
            if group := self.group.get(name):
                sums[group] = sums[group] + loss if group in sums else loss
        return sums
