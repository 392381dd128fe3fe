"""The parts of a Dreamer, built as its config says; a new world is one row here."""

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


def make_rssm(
    config: DreamerConfig, obs_space: Spaces, act_space: Spaces, dtype: torch.dtype
) -> RSSM:
    return RSSM(obs_space, act_space, config.rssm, _networks(config), dtype)


def make_vta(
    config: DreamerConfig, obs_space: Spaces, act_space: Spaces, dtype: torch.dtype
) -> RecurrentVTA:
    return RecurrentVTA(obs_space, act_space, config.vta, _networks(config), dtype)


MakeWorld = Callable[[DreamerConfig, Spaces, Spaces, torch.dtype], Any]
WORLDS: dict[str, MakeWorld] = {"rssm": make_rssm, "vta": make_vta}


def make_world(
    config: DreamerConfig, obs_space: Spaces, act_space: Spaces, dtype: torch.dtype
) -> Any:
    """Build the world model named by `dreamer.world`: an nn.Module and a `LatentWorld`.

    A world named as `package.module:Class` is called like `RSSM`: with the spaces, its
    own settings (`dreamer.<class_name>`, an instance of its `Config`), the configs of
    the other networks and the dtype.
    """
    if config.world in WORLDS:
        return WORLDS[config.world](config, obs_space, act_space, dtype)
    if not is_plugin(config.world):
        raise UserError(
            f"There is no world {config.world!r}.\n  Fix: --dreamer.world "
            f"{' or '.join(WORLDS)}, or package.module:Class for your own."
        )
    settings = getattr(config, settings_name(config.world))
    make = import_object(config.world, "--dreamer.world")
    return make(obs_space, act_space, settings, _networks(config), dtype)


def make_actor_critic(
    config: DreamerConfig, inputs: int, act_space: Spaces
) -> ActorCritic:
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


def _networks(config: DreamerConfig) -> WorldNetworks:
    """Return the configs of the networks around the latent dynamics."""
    return WorldNetworks(
        enc=config.enc,
        dec=config.dec,
        rewhead=config.rewhead,
        conhead=config.conhead,
        discount=config.discount if config.contdisc else 1.0,
        reward_grad=config.reward_grad,
    )
