"""Parts of Dreamer that the config selects by name: world, actor-critic and update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reverie.agents.dreamer.actor_critic import ActorCritic
from reverie.agents.dreamer.config import DreamerConfig
from reverie.agents.dreamer.dreamerv3_torch import DreamerV3TorchActorCritic
from reverie.agents.dreamer.updates import JointUpdate, SeparateUpdates
from reverie.api import UserError
from reverie.plugins import import_object, is_plugin, settings_name
from reverie.spaces import Spaces
from reverie.worlds.dreamerv3_torch.world import DreamerV3TorchWorld
from reverie.worlds.latent import WorldNetworksConfig
from reverie.worlds.rssm.world import RSSM
from reverie.worlds.vta.recurrent import RecurrentVTA

WORLDS: dict[str, Callable[..., Any]] = {
    "rssm": RSSM,
    "vta": RecurrentVTA,
    "dreamerv3_torch": DreamerV3TorchWorld,
}
"""Built-in worlds. The settings of each are `dreamer.<name>`."""

ACTOR_CRITICS: dict[str, type[ActorCritic]] = {
    "dreamerv3": ActorCritic,
    "dreamerv3_torch": DreamerV3TorchActorCritic,
}
"""Actor-critics by the name in `dreamer.actor_critic`."""

UPDATES: dict[str, type[JointUpdate | SeparateUpdates]] = {
    "joint": JointUpdate,
    "separate": SeparateUpdates,
}
"""Updates by the name in `dreamer.optimizers`."""


def make_world(
    config: DreamerConfig, obs_space: Spaces, act_space: Spaces, dtype: torch.dtype
) -> Any:
    """Build the world model named by `dreamer.world`: an nn.Module and a `LatentWorld`.

    A world named as `package.module:Class` is called like `RSSM`: with the spaces, its
    own settings (`dreamer.<class_name>`, an instance of its `Config`), the configs of
    the other networks and the dtype.
    """
    name = config.world
    if name not in WORLDS and not is_plugin(name):
        raise UserError(
            f"There is no world {name!r}.\n  Fix: --dreamer.world "
            f"{' or '.join(WORLDS)}, or package.module:Class for your own."
        )
    world_class = WORLDS.get(name) or import_object(name, "--dreamer.world")
    settings = getattr(config, settings_name(name))
    supported = getattr(world_class, "representations", ("decoder",))
    if config.representation not in supported:
        raise UserError(
            f"The world {name!r} cannot be trained with the representation "
            f"{config.representation!r}.\n  Fix: --dreamer.representation "
            f"{' or '.join(supported)}, or --dreamer.world rssm"
        )
    networks = WorldNetworksConfig(
        enc=config.enc,
        dec=config.dec,
        rewhead=config.rewhead,
        conhead=config.conhead,
        discount=config.discount if config.contdisc else 1.0,
        reward_grad=config.reward_grad,
        representation=config.representation,
        draw=config.draw,
    )
    world = world_class(obs_space, act_space, settings, networks, dtype)
    if direct := [key for key in world.state_dict() if "." not in key]:
        raise UserError(
            f"The world {name!r} has the tensor {direct[0]!r} as a direct attribute, "
            "but only the tensors of its submodules are trained and saved.\n"
            f"  Fix: define {direct[0]!r} in an nn.Module that the world contains."
        )
    return world
