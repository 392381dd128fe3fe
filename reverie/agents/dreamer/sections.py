"""The work of one update of DreamerV3, in pieces that `reverie bench` times alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reverie.api import Feed
from reverie.nets.tree import tree_map
from reverie.worlds.rssm.sections import Section

if TYPE_CHECKING:
    from reverie.agents.dreamer.agent import Dreamer


def dreamer_sections(agent: Dreamer, feed: Feed) -> dict[str, Callable[[], Any]]:
    """What an update does, in its order; each piece may be called again and again.

    Forward and backward where something is trained by it. The statistics of returns
    stay as they are, and the optimizer gets gradients of zero. If updates are replayed
    as a graph, so is each piece.
    """
    world, critic, opt = agent.world, agent.actor_critic, agent.opt
    rng, config = agent.rng["train"], agent.config
    data = tree_map(lambda x: x.clone(), dict(feed("train")))
    _, state, batch = agent._restore("train", data)
    state = tree_map(lambda x: x.detach().clone(), state)
    with torch.no_grad():
        states = world.loss(state, batch, rng).states
    start = tree_map(lambda x: x.detach().flatten(0, 1), states)
    recorded = world.features(states).detach().clone().requires_grad_()
    flags = [batch[key].float() for key in ("reward", "is_last", "is_terminal")]
    zero = torch.zeros((), device=agent.device)
    still = [torch.zeros_like(leaf) for leaf in opt.leaves]

    @torch.no_grad()
    def imagine() -> Any:
        return world.imagine(
            start, lambda state: agent._act(state, rng), config.imag_length, rng
        )

    dream = imagine()
    feat = world.features(dream.states).detach().clone()

    def act_and_judge() -> list[Tensor]:
        with torch.no_grad():
            reward, cont = world.outcome(feat)
        dreamt = critic.imag_loss(feat, dream.actions, reward, cont, False)
        boot = dreamt.ret[:, 0].reshape(flags[0].shape)
        reward, is_last, is_terminal = flags
        real = critic.repl_loss(recorded, reward, is_last, is_terminal, boot, False)
        return [x.mean() for x in (*dreamt.losses.values(), real.loss)]

    def learn_world() -> list[Tensor]:
        losses = world.loss(state, batch, rng).losses
        return [x.mean() for x in losses.values()]

    works: dict[str, Section] = {"world": Section(learn_world, [])}
    if hasattr(world, "sections"):
        works = world.sections(state, batch, rng)
    works["actor and critic"] = Section(act_and_judge, [recorded])
    pieces = {name: _trained(work, opt.leaves) for name, work in works.items()}
    pieces["imagination"] = lambda: (imagine(), ())[1]
    pieces["optimizer"] = lambda: (opt.apply(zero, still), ())[1]
    graphs = {key: agent.fast.graph(piece, key, rng) for key, piece in pieces.items()}
    return {"feed": lambda: feed("train"), **graphs}


def _trained(work: Section, weights: list[Tensor]) -> Callable[[], Any]:
    """Forward and backward of a piece, as one."""

    def both() -> Any:
        outs = [out for out in work.forward() if out.requires_grad]
        ones = [torch.ones_like(out) for out in outs]
        leaves = [*work.inputs, *weights]
        torch.autograd.grad(outs, leaves, ones, allow_unused=True)
        return ()

    return both
