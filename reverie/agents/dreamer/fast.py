"""The actor and critic on a GPU, with what is a loop over time as one kernel."""

from __future__ import annotations

from reverie.agents.dreamer.actor_critic import ActorCritic
from reverie.kernels.heads.returns import lambda_return


class FastActorCritic(ActorCritic):
    returns = staticmethod(lambda_return)
