"""Fast version of the actor and critic.

The lambda-returns are one GPU kernel. The losses can be computed on a side stream.
"""

from __future__ import annotations

from reverie.agents.dreamer.actor_critic import ActorCritic, BehaviourLoss, RewardFn
from reverie.api import Batch, LatentWorld, State
from reverie.distributed.collective import is_synchronized
from reverie.kernels.heads.returns import lambda_return
from reverie.nets.rng import Rng
from reverie.nets.streams import SideStream, on_stream, record_use, wait_for
from reverie.nets.tree import tree_leaves

PARALLEL_BACKWARD = False
"""Whether updates use the side stream. Its effect on the time of an update on a GPU was
not measured."""
BEHAVIOUR = SideStream("behaviour")
"""Stream of the losses of actor and critic.

Autograd runs the backward pass of an operation on the stream of its forward pass. So
the backward pass of actor and critic, which are large matrix products, runs in parallel
with that of the world model, of which the scan over time uses only a part of the GPU.
"""


class FastActorCritic(ActorCritic):
    """`ActorCritic` with faster lambda-returns and, optionally, a parallel backward."""

    lambda_return = staticmethod(lambda_return)

    def losses(
        self,
        world: LatentWorld,
        states: State,
        batch: Batch,
        rng: Rng,
        training: bool,
        reward_fn: RewardFn | None = None,
    ) -> BehaviourLoss:
        args = (world, states, batch, rng, training, reward_fn)
        if not PARALLEL_BACKWARD or is_synchronized():
            # Collectives must run in the same order on all ranks, so none of them may
            # run in parallel with those of the world model.
            return super().losses(*args)
        leaves = tree_leaves(states)
        with on_stream(leaves[0], BEHAVIOUR):
            loss = super().losses(*args)
        record_use(leaves, BEHAVIOUR)
        wait_for(leaves[0], BEHAVIOUR)
        return loss
