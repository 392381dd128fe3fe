"""Moving averages of weights: the slow critic and the slow encoder."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from reverie.agents.explore import EXPLORE_PREFIX
from reverie.nets.streams import SideStream

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer

SLOW_WEIGHTS = SideStream("slow weights")
"""Stream on which moving averages of weights are updated, while other work that does
not use them continues."""


def copy_slow_weights(agent: Dreamer, loaded: Collection[str]) -> None:
    """Set the moving averages of loaded weights to these weights.

    Averages that were loaded, too, are kept. `loaded` has the names of the components
    that were loaded.
    """
    critics = {"": agent.actor_critic}
    if agent.explorer:
        critics[EXPLORE_PREFIX] = agent.explorer.actor_critic
    for prefix, critic in critics.items():
        if f"{prefix}val" in loaded and f"{prefix}slowval" not in loaded:
            critic.slowval.load_state_dict(critic.val.state_dict())
    if agent.config.representation == "decoder":
        return  # without a slow encoder
    if "enc" in loaded and "representation" not in loaded:
        agent.world.initialize_slow()
