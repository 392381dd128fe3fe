"""Sections of one DreamerV3 update, which `reverie bench` times separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reverie.api import Feed
from reverie.capabilities import ProfilableWorld
from reverie.nets.tree import tree_map
from reverie.worlds.rssm.sections import Section

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer


def dreamer_sections(agent: Dreamer, feed: Feed) -> dict[str, Callable[[], Any]]:
    """Return the sections of an update in order; each may be called repeatedly.

    Sections with trained networks run forward and backward. The normalizers are not
    updated, and the optimizer gets zero gradients. If updates run as CUDA graphs, each
    section does, too.
    """
    world, opt, rng = agent.world, agent.opt, agent.rng["train"]
    data = tree_map(lambda x: x.clone(), dict(feed("train")))
    _, state, batch = agent.prepare_batch("train", data)
    state = tree_map(lambda x: x.detach().clone(), state)
    with torch.no_grad():
        states = world.loss(state, batch, rng).states
    zero_loss = torch.zeros((), device=agent.device)
    zero_grads = [torch.zeros_like(leaf) for leaf in opt.leaves]

    def world_losses() -> list[Tensor]:
        losses = world.loss(state, batch, rng).losses
        return [x.mean() for x in losses.values()]

    trained: dict[str, Section] = {"world": Section(world_losses, [])}
    if isinstance(world, ProfilableWorld):
        trained = world.sections(state, batch, rng)
    trained |= agent.actor_critic.sections(world, states, batch, rng)
    sections = {
        name: _forward_and_backward(section, opt.leaves)
        for name, section in trained.items()
    }
    sections["optimizer"] = lambda: _discard(opt.apply(zero_loss, zero_grads))
    captured = {
        key: agent.accelerator.capture(call, key, rng) for key, call in sections.items()
    }
    return {"feed": lambda: feed("train"), **captured}


def _discard(output: object) -> tuple[()]:
    """Return no tensors, so that a CUDA graph does not keep the output."""
    return ()


def _forward_and_backward(
    section: Section, weights: list[Tensor]
) -> Callable[[], tuple[()]]:
    """Return a function that runs the forward and the backward pass of a section.

    `weights` are all weights of the agent, for sections that do not list their own.
    """

    def call() -> tuple[()]:
        outputs = [x for x in section.forward() if x.requires_grad]
        if outputs:
            grads = [torch.ones_like(x) for x in outputs]
            trained = weights if section.weights is None else section.weights
            leaves = [*section.inputs, *trained]
            torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
        return ()

    return call
