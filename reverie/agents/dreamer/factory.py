"""Build the world model, actor and critic of a Dreamer from its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from reverie.agents.dreamer.actor_critic import ActorCritic
from reverie.agents.dreamer.config import DreamerConfig
from reverie.api import UserError
from reverie.plugins import import_object, is_plugin, settings_name
from reverie.spaces import Spaces
from reverie.worlds.latent import WorldNetworks
from reverie.worlds.rssm.world import RSSM
from reverie.worlds.vta.recurrent import RecurrentVTA

WORLDS: dict[str, Callable[..., Any]] = {"rssm": RSSM, "vta": RecurrentVTA}
"""Built-in worlds. The settings of each are `dreamer.<name>`."""


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
    make = WORLDS.get(name) or import_object(name, "--dreamer.world")
    settings = getattr(config, settings_name(name))
    networks = WorldNetworks(
        enc=config.enc,
        dec=config.dec,
        rewhead=config.rewhead,
        conhead=config.conhead,
        discount=config.discount if config.contdisc else 1.0,
        reward_grad=config.reward_grad,
    )
    return make(obs_space, act_space, settings, networks, dtype)


def make_actor_critic(
    config: DreamerConfig, inputs: int, act_space: Spaces
) -> ActorCritic:
    """Build actor and critic for features of size `inputs`."""
    return ActorCritic(
        inputs,
        act_space,
        policy=config.policy,
        value=config.value,
        slowvalue=config.slowvalue,
        imag_loss=config.imag_loss,
        repl_loss=config.repl_loss,
        retnorm=config.retnorm,
        valnorm=config.valnorm,
        advnorm=config.advnorm,
        discount=config.discount,
        contdisc=config.contdisc,
    )
