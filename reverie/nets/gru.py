"""GRUs over sequences whose inputs are all known in advance.

The contribution of the inputs to the pre-activations of the gates is computed for all
steps at once (`gates`). The loop over time (`scan`) only computes what depends on the
state (`step`). Several GRUs of the same size are computed by batched matrix products.
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
    """Terms of the state update of every step; None leaves a factor or term out.

    The next state is
    `output_scale * gru(input_scale * state) + state_scale * state + offset`.
    """

    input_scale: Float[Tensor, "G B T"] | None = None  # 0 resets the state
    output_scale: Float[Tensor, "G B T"] | None = None
    state_scale: Float[Tensor, "G B T"] | None = None
    offset: Float[Tensor, "G B T D"] | None = None


class GRU(nn.Module):
    """`count` independent GRUs; axes: `G` GRUs, `I` inputs, `D` width, `W` = 3 D gates.

    The gates are those of `torch.nn.GRUCell`, in its order: reset, update, candidate.
    The fast version computes products with the state in `dtype`.
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
        """Return what inputs contribute to the gates: `weight_ih @ x + bias_ih`."""
        y = F.linear(x, self.weight_ih.flatten(0, 1), self.bias_ih.flatten())
        return y.reshape(*x.shape[:-1], self.count, -1).movedim(-2, 0)

    def step(
        self, gates: Float[Tensor, "G B W"], state: Float[Tensor, "G B D"]
    ) -> Float[Tensor, "G B D"]:
        """Return the next states."""
        hidden = torch.baddbmm(self.bias_hh[:, None], state, self.weight_hh.mT)
        if state.is_cuda:  # the same as `gru_cell`, in one kernel
            rows = [x.contiguous().flatten(0, 1) for x in (gates, hidden, state)]
            fused = torch.ops.aten._thnn_fused_gru_cell(*rows, None, None)
            output: Tensor = fused[0].view_as(state)
            return output
        return gru_cell(gates, hidden, state)

    def scan(
        self,
        gates: Float[Tensor, "G B T W"],
        start: Float[Tensor, "G B D"],
        state_update: StateUpdate,
        backwards: Collection[int] = (),
    ) -> Float[Tensor, "G B T D"]:
        """Return all states; GRUs with an index in `backwards` run back in time."""
        parts = [gates, *state_update]
        steps = zip(*(_steps(part, backwards, gates) for part in parts), strict=True)
        state, states = start, []
        for gate, input_scale, output_scale, state_scale, offset in steps:
            inputs = state if input_scale is None else state * input_scale
            output = self.step(gate, inputs)
            output = output if output_scale is None else output_scale * output
            output = output if state_scale is None else output + state_scale * state
            state = output if offset is None else output + offset
            states.append(state)
        return _flip_time(torch.stack(states, 2), backwards)


class SegmentHold(nn.Module):
    """Repeats the first value of each segment: `update * x + copy * previous`.

    `update` is 1 where a segment begins, `copy` is 1 where it continues.
    """

    fast_version = "reverie.kernels.scan.gru:FastSegmentHold"

    def forward(
        self,
        x: Float[Tensor, "B T Z"],
        update: Float[Tensor, "B T"],
        copy: Float[Tensor, "B T"],
    ) -> Float[Tensor, "B T Z"]:
        value, values = torch.zeros_like(x[:, 0]), []
        starts = (update[..., None] * x).unbind(1)
        for start, weight in zip(starts, copy[..., None].unbind(1), strict=True):
            value = start + weight * value
            values.append(value)
        return torch.stack(values, 1)


def gru_cell(
    gates: Float[Tensor, "*b W"],
    hidden: Float[Tensor, "*b W"],
    state: Float[Tensor, "*b D"],
) -> Float[Tensor, "*b D"]:
    """Return the next state of a GRU.

    `gates` and `hidden` are the pre-activations from the input and from the state.
    """
    width = state.shape[-1]
    both = torch.sigmoid(gates[..., : 2 * width] + hidden[..., : 2 * width])
    reset, update = both.chunk(2, -1)
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
