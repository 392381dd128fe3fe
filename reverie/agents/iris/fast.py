"""Fast version of the actor-critic network: LSTM matrix products batched over time.

The products of the inputs with `weight_ih` are one matrix product for all steps; the
loop over time computes only the product of the hidden state with `weight_hh`, and the
gates in one kernel. In the backward pass, the gradient of `weight_hh` is one product
over all steps. For a single frame, the product with `weight_hh` runs on a side stream,
in parallel with the encoder.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.agents.iris.actor_critic import LSTMState, PixelNet
from reverie.nets.streams import SideStream, on_stream, wait_for

RECURRENT = SideStream("recurrent", priority=2)
"""CUDA stream of the product with `weight_hh`, which does not depend on the frame."""


class FastPixelNet(PixelNet):
    """PixelNet with the same parameters and results."""

    def policy_step(
        self, state: LSTMState, image: UInt8[Tensor, "N h w c"]
    ) -> tuple[LSTMState, Float[Tensor, "N A"]]:
        if torch.is_grad_enabled():
            return super().policy_step(state, image)
        lstm = self.lstm
        with on_stream(image, RECURRENT):
            recurrent = F.linear(state.hidden, lstm.weight_hh)
        inputs = F.linear(self.features(image), lstm.weight_ih)
        wait_for(image, RECURRENT)
        biases = (lstm.bias_ih, lstm.bias_hh)
        state = LSTMState(*_lstm_step(inputs, recurrent, state.cell, *biases))
        return state, self.actor(state.hidden)

    def run_lstm(
        self, state: LSTMState, features: Float[Tensor, "N T F"]
    ) -> tuple[LSTMState, Float[Tensor, "N T W"]]:
        if not features.shape[1]:
            return super().run_lstm(state, features)
        lstm, hidden, previous = self.lstm, list[Tensor](), list[Tensor]()
        bias = lstm.bias_ih + lstm.bias_hh
        gates = F.linear(features.transpose(0, 1), lstm.weight_ih, bias)
        gates = _RecurrentWeightGrad.apply(gates, lstm.weight_hh, previous)  # type: ignore[no-untyped-call]
        for inputs in gates:
            previous.append(state.hidden.detach())
            recurrent = F.linear(state.hidden, lstm.weight_hh.detach())
            state = LSTMState(*_lstm_step(inputs, recurrent, state.cell))
            hidden.append(state.hidden)
        return state, torch.stack(hidden, 1)


class _RecurrentWeightGrad(torch.autograd.Function):
    """Identity of `gates` whose backward pass computes the gradient of `weight`.

    In each step, the product of `weight` and the hidden state in `previous` is added to
    the gates, so the gradient of this product is that of the gates. The loop over time
    fills `previous` after this forward pass; it is complete in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, previous: list[Tensor]
    ) -> Tensor:
        ctx.previous = previous
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden = torch.stack(ctx.previous).flatten(0, 1)
        return grad, grad.flatten(0, 1).T @ hidden, None


def _lstm_step(
    inputs: Tensor, recurrent: Tensor, cell: Tensor, *biases: Tensor
) -> tuple[Tensor, Tensor]:
    """Return hidden and cell state, given the products with `weight_ih` (`inputs`) and
    `weight_hh` (`recurrent`); `biases` are added if given."""
    if inputs.device.type == "cuda":
        # the kernel of `nn.LSTMCell`, without the products
        hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(
            inputs, recurrent, cell, *biases
        )
        return hidden, cell
    i, f, g, o = sum(biases, inputs + recurrent).chunk(4, -1)  # as in `nn.LSTMCell`
    cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(cell), cell
