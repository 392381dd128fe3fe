"""A small Dreamer with the parts of dreamerv3-torch."""

from __future__ import annotations

from dataclasses import replace

from dreamer_helpers import TINY, make

from reverie.agents.dreamer.agent import Dreamer, DreamerConfig
from reverie.agents.dreamer.config import DreamerV3TorchACConfig, LossScales
from reverie.nets.decoder import DecoderConfig
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import HeadConfig, PolicyConfig
from reverie.nets.optim.adam import AdamConfig
from reverie.worlds.dreamerv3_torch.config import DreamerV3TorchConfig

NORM = "layer1em3"


def settings(
    imag_gradient: str = "auto", mix: float = 0.0, classes: int = 3, **changes
) -> DreamerConfig:
    conv = {"depth": 4, "mults": (1, 2), "kernel": 4, "layers": 2, "units": 8}
    config = replace(
        TINY,
        world="dreamerv3_torch",
        actor_critic="dreamerv3_torch",
        optimizers="separate",
        dreamerv3_torch=DreamerV3TorchConfig(16, 8, 4, classes),
        dreamerv3_torch_ac=DreamerV3TorchACConfig(imag_gradient, mix),
        enc=EncoderConfig(**conv, norm=NORM),
        dec=DecoderConfig(**conv, norm=NORM),
        rewhead=HeadConfig(2, 8, norm=NORM, output="symlog_twohot"),
        conhead=HeadConfig(2, 8, norm=NORM, output="binary", outscale=1.0),
        policy=PolicyConfig(2, 8, norm=NORM, outscale=1.0, unimix=0.01),
        value=HeadConfig(2, 8, norm=NORM, output="symlog_twohot"),
        world_opt=AdamConfig(1e-3, 1e-8, clip=1000.0, wd=0.0),
        actor_opt=AdamConfig(1e-3, 1e-5, clip=100.0, wd=0.0),
        critic_opt=AdamConfig(1e-3, 1e-5, clip=100.0, wd=0.0),
        loss_scales=LossScales(dyn=0.5, rep=0.1),
        replay_context=0,
        greedy_eval=True,
        contdisc=False,
        repval_loss=False,
    )
    return replace(config, **changes)


def make_torch(act=None, **changes) -> Dreamer:
    return make(settings(**changes), **({} if act is None else {"act": act}))
