"""Fast version of the actor and critic: lambda-returns in one GPU kernel."""

from __future__ import annotations

from reverie.agents.dreamer.actor_critic import ActorCritic
from reverie.kernels.heads.returns import lambda_return


class FastActorCritic(ActorCritic):
    """`ActorCritic` whose lambda-returns are computed by one kernel."""

    lambda_return = staticmethod(lambda_return)
