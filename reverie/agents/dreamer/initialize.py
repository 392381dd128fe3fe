"""Initial weights of Dreamer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from reverie.agents.weights import init_generator
from reverie.nets.blocks import initialize
from reverie.nets.rng import Rng

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer


def initialize_weights(agent: Dreamer, seed: int) -> None:
    """Initialize the weights of all networks, and move them to the agent's device."""
    world, actor_critic = agent.world, agent.actor_critic
    generator, decoder = init_generator(seed), None
    if agent.config.has_detached_decoder:
        # with its own generator, so that the setting `dreamer.draw` does not change
        # the initial weights of the other networks
        world.dec, decoder = None, world.dec
        rng = Rng(seed, "detached_decoder", torch.device("cpu"))
        initialize(decoder, rng.generator)
    for module in (world, actor_critic.pol, actor_critic.val):
        initialize(module, generator)
    if decoder is not None:
        world.dec = decoder  # replaces None, so the order of the components is the same
    actor_critic.slowval.load_state_dict(actor_critic.val.state_dict())
    if agent.config.representation != "decoder":
        world.initialize_slow()
    world.to(agent.device)
    actor_critic.to(agent.device)
    if agent.explorer:
        agent.explorer.initialize_weights(generator)
        agent.explorer.to(agent.device)
