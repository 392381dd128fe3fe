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
    world, actor_critic, opt = agent.world, agent.actor_critic, agent.opt
    rng, config = agent.rng["train"], agent.config
    data = tree_map(lambda x: x.clone(), dict(feed("train")))
    _, state, batch = agent.prepare_batch("train", data)
    state = tree_map(lambda x: x.detach().clone(), state)
    with torch.no_grad():
        states = world.loss(state, batch, rng).states
    start = tree_map(lambda x: x.detach().flatten(0, 1), states)
    replay_feat = world.features(states).detach().clone().requires_grad_()
    returns_inputs = [batch[k].float() for k in ("reward", "is_last", "is_terminal")]
    zero_loss = torch.zeros((), device=agent.device)
    zero_grads = [torch.zeros_like(leaf) for leaf in opt.leaves]

    @torch.no_grad()
    def imagine() -> Any:
        return world.imagine(
            start, lambda state: agent.act(state, rng), config.imag_length, rng
        )

    rollout = imagine()
    feat = world.features(rollout.states).detach().clone()

    def actor_critic_losses() -> list[Tensor]:
        with torch.no_grad():
            reward, cont = world.outcome(feat)
        imag = actor_critic.imag_loss(feat, rollout.actions, reward, cont, False)
        reward, is_last, is_terminal = returns_inputs
        bootstrap = imag.ret[:, 0].reshape(reward.shape)
        repl = actor_critic.repl_loss(
            replay_feat, reward, is_last, is_terminal, bootstrap, False
        )
        return [x.mean() for x in (*imag.losses.values(), repl.loss)]

    def world_losses() -> list[Tensor]:
        losses = world.loss(state, batch, rng).losses
        return [x.mean() for x in losses.values()]

    trained: dict[str, Section] = {"world": Section(world_losses, [])}
    if isinstance(world, ProfilableWorld):
        trained = world.sections(state, batch, rng)
    trained["actor and critic"] = Section(actor_critic_losses, [replay_feat])
    sections = {
        name: _forward_and_backward(section, opt.leaves)
        for name, section in trained.items()
    }
    sections["imagination"] = lambda: _discard(imagine())
    sections["optimizer"] = lambda: _discard(opt.apply(zero_loss, zero_grads))
    graphs = {key: agent.fast.graph(call, key, rng) for key, call in sections.items()}
    return {"feed": lambda: feed("train"), **graphs}


def _discard(output: object) -> tuple[()]:
    """Return no tensors, so that a CUDA graph does not keep the output."""
    return ()


def _forward_and_backward(
    section: Section, weights: list[Tensor]
) -> Callable[[], tuple[()]]:
    def call() -> tuple[()]:
        outputs = [x for x in section.forward() if x.requires_grad]
        grads = [torch.ones_like(x) for x in outputs]
        leaves = [*section.inputs, *weights]
        torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
        return ()

    return call
