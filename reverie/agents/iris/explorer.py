"""Plan2Explore for Δ-IRIS: token heads and exploration actor-critic.

Several heads predict the Δ-tokens of the next frame from the outputs of the
transformer, their shared trunk. They are trained with cross-entropy on the batches of
the transformer. The outputs are detached, so that the heads do not change the world
model.

The divergence of their predictions is the reward of a second actor-critic with its own
weights, target network and normalization of returns. It imagines its own rollouts, from
the same real frames as the task policy. World model and task policy are trained as
without exploration.

Shapes: `M` heads, `N` imagined sequences, `K` tokens of a transition, `C` codes; `S`
tokens of a whole sequence, `E` features of a transformer output.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from reverie.agents.explore import (
    ENSEMBLE,
    EXPLORE_PREFIX,
    ExploreConfig,
    token_disagreement,
)
from reverie.agents.iris.actor_critic import PixelActorCritic, PixelActorCriticConfig
from reverie.api import Metrics
from reverie.nets.blocks import initialize
from reverie.nets.distributions import Categorical
from reverie.nets.ensemble import Ensemble
from reverie.worlds.iris.segment import EpisodeSegment, scale_by_mask
from reverie.worlds.iris.world import IrisStep, IrisWorld, StepReward

ACTIVATION = "silu"
"""Activation function of the heads."""
EXPLORE_COMPONENTS = {
    "world_model": ENSEMBLE,
    "actor_critic": f"{EXPLORE_PREFIX}actor_critic",
}
"""Maps a component of the agent to the exploration component that is trained after it,
on the same batches."""


class TokenExplorer(nn.Module):
    """The token heads and the exploration actor-critic."""

    def __init__(
        self, world: IrisWorld, config: PixelActorCriticConfig, settings: ExploreConfig
    ):
        super().__init__()
        self.settings, heads = settings, settings.heads
        dynamics = world.dynamics
        self.tokens, self.tokens_per_step = dynamics.tokens, dynamics.tokens_per_step
        self.heads = Ensemble(
            dynamics.config.transformer.width,
            world.tokenizer.quantizer.config.codes,
            heads.models,
            heads.layers,
            heads.units,
            ACTIVATION,
        )
        self.actor_critic = PixelActorCritic(
            world.shape, world.actions, config, world.dtype, settings.retnorm
        )

    def initialize(self, generator: torch.Generator) -> None:
        """Initialize all networks from a generator."""
        initialize(self.heads, generator)
        self.actor_critic.initialize(generator)

    def components(self) -> dict[str, nn.Module]:
        """Return all modules with weights or running statistics, by name."""
        modules = (self.heads, self.actor_critic)
        return dict(zip(EXPLORE_COMPONENTS.values(), modules, strict=True))

    def running_stats(self, name: str) -> list[Tensor]:
        """Return the statistics that a skipped update of `name` must not change."""
        return self.actor_critic.running_stats() if name == "actor_critic" else []

    def head_loss(
        self,
        outputs: Float[Tensor, "B S E"],
        tokens: Int[Tensor, "B T K"],
        segment: EpisodeSegment,
    ) -> tuple[dict[str, Float[Tensor, "B T"]], Metrics]:
        """Return the cross-entropy of the tokens, as a mean over heads and tokens.

        `outputs` are those of the transformer for L = T + 1 frames. As in the loss of
        the transformer, transitions whose first frame is padding are masked.
        """
        blocks = rearrange(
            outputs.detach(), "b (l k) e -> b l k e", k=self.tokens_per_step
        )
        # tokens of a step: frame, action, then K Δ-tokens; the outputs at the positions
        # 1 to K predict the K Δ-tokens
        logits = self.heads(blocks[:, :-1, 1 : 1 + self.tokens])  # (M, B, T, K, C)
        loss = Categorical(logits).loss(tokens.expand(logits.shape[:-1]))
        real = segment.real[:, :-1]
        spread = token_disagreement(logits.detach())
        metrics: Metrics = {"disagreement": scale_by_mask(spread, real).mean()}
        return {"tokens": scale_by_mask(loss.mean((0, -1)), real)}, metrics

    def intrinsic_reward(self, step: IrisStep) -> Float[Tensor, " N"]:
        """Return the disagreement of the heads about the tokens of an imagined step."""
        return token_disagreement(self.heads(torch.stack(step.outputs, 1)))

    def reward_fn(self, intrinsic: list[Tensor]) -> StepReward:
        """Return the function that computes the rewards of imagined steps.

        When called, the function also appends the intrinsic rewards to `intrinsic`.
        """

        def reward(step: IrisStep) -> Tensor:
            intrinsic.append(self.intrinsic_reward(step))
            return self.settings.combine_rewards(intrinsic[-1], step.state.reward)

        return reward
