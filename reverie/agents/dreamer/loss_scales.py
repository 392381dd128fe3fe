"""Scales of losses, replay priorities from scaled losses, and norms of gradients."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from reverie.agents.dreamer.config import (
    REPRESENTATION_LOSSES,
    WORLDS,
    DreamerConfig,
    LossScales,
)
from reverie.api import Metrics, UserError
from reverie.distributed.collective import mean_contribution
from reverie.nets.encoder import split_keys
from reverie.spaces import Spaces

ACTOR_CRITIC_LOSSES = ("policy", "value", "repval")
WITHOUT_STEP_VALUES = ("barlow", "repval")
"""Losses with one value per batch, or without a value for the last step."""


def check_names(obs_space: Spaces, config: DreamerConfig) -> None:
    """Raise if the keys of observations or `priosignal` are not valid names.

    An observation must not have the name of a loss. `priosignal` must be the name of a
    loss with a value for each step. Plug-in worlds may have other losses, so
    `step_priorities` checks their names.
    """
    losses = vars(config.loss_scales).keys()
    for key in obs_space.keys() & {*losses, "prevact"}:
        raise UserError(
            f"The observation key {key!r} is reserved for a loss or batch key.\n"
            "  Fix: rename it in the environment."
        )
    if config.priosignal and config.world in WORLDS:
        signals = ["model", *sorted(_step_losses(obs_space, config))]
        if config.priosignal not in signals:
            raise _unknown_signal(config.priosignal, signals)


def _step_losses(obs_space: Spaces, config: DreamerConfig) -> set[str]:
    """Return the names of the losses with a value for each step."""
    names = {"rew", "con", "dyn", "rep"}
    if config.representation == "decoder" or config.has_detached_decoder:
        for decoded in split_keys(obs_space, config.dec.cnn_keys, config.dec.mlp_keys):
            names |= decoded.keys()
    names |= {*REPRESENTATION_LOSSES.get(config.representation, ())}
    if config.behaviour:
        names |= {*ACTOR_CRITIC_LOSSES}
    if config.world == "vta":
        names.add("boundary")
        if config.vta.boundary_rate:
            names.add("boundary_rate")
    return names - {*WITHOUT_STEP_VALUES}


def scaled_means(
    losses: dict[str, Tensor], config: LossScales
) -> dict[str, Float[Tensor, ""]]:
    """Return the mean of each loss, multiplied by its scale.

    In data-parallel training, return the contribution of this rank to the mean over the
    global batch. Losses without a scale of their own have the scale `rec`.
    """
    scales = vars(config)
    return {
        k: scales.get(k, scales["rec"]) * mean_contribution(x)
        for k, x in losses.items()
    }


def selection_scale(
    name: str, config: LossScales, detached: Collection[str] = ()
) -> float:
    """Return the scale of a world model loss in the sum that selects a checkpoint.

    It is 0 for the losses of a detached decoder, whose names are in `detached`. The
    learned scales of HarmonyDream are not used, because they differ between the
    checkpoints that are compared.
    """
    if name in detached:
        return 0.0
    return float(vars(config).get(name, config.rec))


def step_priorities(
    losses: dict[str, Tensor], config: DreamerConfig, detached: Collection[str] = ()
) -> Float[Tensor, "B T"] | None:
    """Return the replay priority of each step: the absolute value of `priosignal`.

    For `model`, it is the sum of all scaled world model losses, except those that are
    one number per batch and those of a detached decoder, whose names are in `detached`.
    Priorities are 0 where this value is not finite.
    """
    if not (signal := config.priosignal):
        return None
    scales = vars(config.loss_scales)
    by_step = {
        k: x for k, x in losses.items() if x.ndim and k not in WITHOUT_STEP_VALUES
    }
    if signal == "model":
        priority = sum(
            scales.get(k, scales["rec"]) * x
            for k, x in by_step.items()
            if k not in (*ACTOR_CRITIC_LOSSES, *detached)
        )
        assert isinstance(priority, Tensor)
    elif signal in by_step:
        priority = by_step[signal]
    else:
        raise _unknown_signal(signal, ["model", *by_step])
    # the policy loss may be negative, so use absolute values
    return torch.nan_to_num(priority.detach().abs(), posinf=0.0)


def _unknown_signal(signal: str, names: Sequence[str]) -> UserError:
    return UserError(
        f"dreamer.priosignal is {signal!r}, which is not a loss of each step.\n"
        f"  Fix: --dreamer.priosignal with one of {', '.join(names)}, or leave it out."
    )


def gradient_norms(losses: dict[str, Tensor], parameters: Sequence[Tensor]) -> Metrics:
    """Return the norm of the gradient of each loss, as metrics `gradnorm/LOSS`."""
    metrics, norm = {}, torch.linalg.vector_norm
    for name, loss in losses.items():
        grads = torch.autograd.grad(
            loss.mean(), parameters, retain_graph=True, allow_unused=True
        )
        norms = [norm(grad.float()) for grad in grads if grad is not None]
        metrics[f"gradnorm/{name}"] = norm(torch.stack(norms))
    return metrics
