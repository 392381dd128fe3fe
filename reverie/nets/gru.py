"""GRUs over sequences whose inputs are all known in advance.

The product of inputs and weights does not depend on the state, so it is computed for
all steps at once (`gates`); the loop (`scan`) only computes the rest (`step`). Several
GRUs of the same size run as one batched product.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class StateUpdate(NamedTuple):
    """Factors of the state update; None leaves a factor or term out.

    The next state is `move * gru(keep * state) + stay * state + fresh`.
    """

    keep: Float[Tensor, "G B T"] | None = None  # 0 resets the input of the GRU
    move: Float[Tensor, "G B T"] | None = None  # weight of its output
    stay: Float[Tensor, "G B T"] | None = None  # weight of the previous state
    fresh: Float[Tensor, "G B T D"] | None = None  # state to start with instead


class GRU(nn.Module):
    """`count` independent GRUs; axes: `G` GRUs, `I` inputs, `D` width, `W` gates.

    The gates are those of `torch.nn.GRUCell`, in its order: reset, update, candidate.
    Kernels may compute products with the state in `dtype`.
    """

    fast_version = "reverie.kernels.scan.gru:FastGRU"

    def __init__(
        self,
        inputs: int,
        width: int,
        count: int = 1,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        self.inputs, self.width, self.count = inputs, width, count
        self.dtype = dtype
        self.weight_ih = nn.Parameter(torch.empty(count, 3 * width, inputs))
        self.weight_hh = nn.Parameter(torch.empty(count, 3 * width, width))
        self.bias_ih = nn.Parameter(torch.empty(count, 3 * width))
        self.bias_hh = nn.Parameter(torch.empty(count, 3 * width))

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        bound = 1 / math.sqrt(self.width)
        for parameter in self.parameters():
            parameter.uniform_(-bound, bound, generator=generator)

    def gates(self, x: Float[Tensor, "*b I"]) -> Float[Tensor, "G *b W"]:
        """Product of the inputs with the weights of every GRU, plus bias."""
        y = F.linear(x, self.weight_ih.flatten(0, 1), self.bias_ih.flatten())
        return y.reshape(*x.shape[:-1], self.count, -1).movedim(-2, 0)

    def step(
        self, gates: Float[Tensor, "G B W"], state: Float[Tensor, "G B D"]
    ) -> Float[Tensor, "G B D"]:
        hidden = torch.baddbmm(self.bias_hh[:, None], state, self.weight_hh.mT)
        if state.is_cuda:  # equals `gru_cell`, in one kernel
            rows = [x.contiguous().flatten(0, 1) for x in (gates, hidden, state)]
            fused = torch.ops.aten._thnn_fused_gru_cell(*rows, None, None)
            moved: Tensor = fused[0].view_as(state)
            return moved
        return gru_cell(gates, hidden, state)

    def scan(
        self,
        gates: Float[Tensor, "G B T W"],
        start: Float[Tensor, "G B D"],
        state_update: StateUpdate,
        backwards: Collection[int] = (),
    ) -> Float[Tensor, "G B T D"]:
        """States of all steps; the GRUs in `backwards` run from the last step."""
        parts = [gates, *state_update]
        steps = zip(*(_steps(part, backwards, gates) for part in parts), strict=True)
        state, states = start, []
        for gate, keep, move, stay, fresh in steps:
            moved = self.step(gate, state if keep is None else state * keep)
            moved = moved if move is None else move * moved
            moved = moved if stay is None else moved + stay * state
            state = moved if fresh is None else moved + fresh
            states.append(state)
        return _flip_time(torch.stack(states, 2), backwards)


class SegmentHold(nn.Module):
    """The value at the start of each segment: `read * fresh + copy * previous`.

    `read` is 1 where a segment begins and `copy` where it continues.
    """

    fast_version = "reverie.kernels.scan.gru:FastSegmentHold"

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


def gru_cell(
    gates: Float[Tensor, "*b W"],
    hidden: Float[Tensor, "*b W"],
    state: Float[Tensor, "*b D"],
) -> Float[Tensor, "*b D"]:
    """The next state, from the products of the weights with inputs and state."""
    width = state.shape[-1]
    opened = torch.sigmoid(gates[..., : 2 * width] + hidden[..., : 2 * width])
    reset, update = opened.chunk(2, -1)
    candidate = gates[..., 2 * width :] + reset * hidden[..., 2 * width :]
    return torch.lerp(torch.tanh(candidate), state, update)


def _steps(
    part: Tensor | None, backwards: Collection[int], gates: Tensor
) -> list[Tensor | None]:
    """Split a sequence into steps, in the order in which each GRU runs."""
    if part is None:
        return [None] * gates.shape[2]
    part = part if part.ndim == gates.ndim else part[..., None]
    return list(_flip_time(part, backwards).movedim(2, 0).contiguous().unbind(0))


def _flip_time(x: Float[Tensor, "G B T *any"], backwards: Collection[int]) -> Tensor:
    """Reverse the time axis of the given GRUs."""
    if not backwards:
        return x
    sequences = enumerate(x.unbind(0))
    return torch.stack([s.flip(1) if i in backwards else s for i, s in sequences])
