"""Gated recurrent units whose inputs are known beforehand.

What a unit makes of its inputs does not depend on its past, so it is computed for all
steps at once (`gates`); only the rest is left to the loop (`scan`, by `step`). Several
units of one size run side by side as one batched product.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class Route(NamedTuple):
    """How states are passed on besides by the unit, each left out if it does nothing.

    A state is `move * unit(keep * last) + stay * last + fresh`.
    """

    keep: Float[Tensor, "G B T"] | None = None
    move: Float[Tensor, "G B T"] | None = None
    stay: Float[Tensor, "G B T"] | None = None
    fresh: Float[Tensor, "G B T D"] | None = None


class GRU(nn.Module):
    """`count` units side by side; letters: `G` units, `I` inputs, `D` width.

    The gates are those of `torch.nn.GRUCell`, in its order: reset, update, candidate.
    """

    def __init__(
        self,
        inputs: int,
        width: int,
        count: int = 1,
        dtype: torch.dtype = torch.float32,
    ):
        """Products with the past may be in `dtype`, where that is faster."""
        super().__init__()
        self.inputs, self.width, self.count = inputs, width, count
        self.dtype = dtype
        self.weight_ih = nn.Parameter(torch.empty(count, 3 * width, inputs))
        self.weight_hh = nn.Parameter(torch.empty(count, 3 * width, width))
        self.bias_ih = nn.Parameter(torch.empty(count, 3 * width))
        self.bias_hh = nn.Parameter(torch.empty(count, 3 * width))

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.scan.gru import FastGRU

        return FastGRU

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(self.width)
        for parameter in self.parameters():
            parameter.uniform_(-bound, bound, generator=generator)

    def gates(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "G *b W"]:
        """What every unit makes of the same inputs."""
        y = F.linear(x, self.weight_ih.flatten(0, 1), self.bias_ih.flatten())
        return y.reshape(*x.shape[:-1], self.count, -1).movedim(-2, 0)

    def step(
        self, gates: Float[Tensor, "G B W"], state: Float[Tensor, "G B D"]
    ) -> Float[Tensor, "G B D"]:
        hidden = torch.baddbmm(self.bias_hh[:, None], state, self.weight_hh.mT)
        if state.is_cuda:  # the same in one kernel
            rows = [x.contiguous().flatten(0, 1) for x in (gates, hidden, state)]
            fused = torch.ops.aten._thnn_fused_gru_cell(*rows, None, None)
            moved: Tensor = fused[0].view_as(state)
            return moved
        return combine(gates, hidden, state)

    def scan(
        self,
        gates: Float[Tensor, "G B T W"],
        start: Float[Tensor, "G B D"],
        route: Route,
        backwards: Collection[int] = (),
    ) -> Float[Tensor, "G B T D"]:
        """The states of all steps; the units named in `backwards` begin at the end."""
        parts = [gates, *route]
        steps = zip(*(_in_order(part, backwards, gates) for part in parts), strict=True)
        state, states = start, []
        for gate, keep, move, stay, fresh in steps:
            moved = self.step(gate, state if keep is None else state * keep)
            moved = moved if move is None else move * moved
            moved = moved if stay is None else moved + stay * state
            state = moved if fresh is None else moved + fresh
            states.append(state)
        return _turn(torch.stack(states, 2), backwards)


class Hold(nn.Module):
    """Keeps the value with which each segment began: `read * new + copy * last`."""

    @staticmethod
    def fast_version() -> type[nn.Module]:
        from reverie.kernels.scan.gru import FastHold

        return FastHold

    def forward(
        self,
        fresh: Float[Tensor, "B T Z"],
        read: Float[Tensor, "B T"],
        copy: Float[Tensor, "B T"],
    ) -> Float[Tensor, "B T Z"]:
        held = torch.zeros_like(fresh[:, 0])
        begun, values = read[..., None] * fresh, []
        for new, stay in zip(begun.unbind(1), copy[..., None].unbind(1), strict=True):
            held = new + stay * held
            values.append(held)
        return torch.stack(values, 1)


def combine(
    gates: Float[Tensor, "*b W"],
    hidden: Float[Tensor, "*b W"],
    state: Float[Tensor, "*b D"],
) -> Float[Tensor, "*b D"]:
    """The next state, from what inputs and past have to say about each gate."""
    width = state.shape[-1]
    openings = torch.sigmoid(gates[..., : 2 * width] + hidden[..., : 2 * width])
    reset, update = openings.chunk(2, -1)
    candidate = gates[..., 2 * width :] + reset * hidden[..., 2 * width :]
    return torch.lerp(torch.tanh(candidate), state, update)


def _in_order(
    part: Tensor | None, backwards: Collection[int], gates: Tensor
) -> list[Tensor | None]:
    """A part of a sequence step by step, in the order in which units see it."""
    if part is None:
        return [None] * gates.shape[2]
    part = part if part.ndim == gates.ndim else part[..., None]
    return list(_turn(part, backwards).movedim(2, 0).contiguous().unbind(0))


def _turn(x: Float[Tensor, "G B T *any"], backwards: Collection[int]) -> Tensor:
    """Flip time for some units."""
    if not backwards:
        return x
    units = enumerate(x.unbind(0))
    return torch.stack([u.flip(1) if i in backwards else u for i, u in units])
