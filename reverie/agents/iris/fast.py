"""The actor-critic of Δ-IRIS on a GPU: what does not wait for the LSTM is done at once.

The inputs of all steps are multiplied with their weights together; in the loop only the
product with the hidden state is left, and one kernel for the gates. On the way back the
gradient of its weights is one product over all steps as well. Where one frame is looked
at, the product with the hidden state is made beside.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from reverie.agents.iris.actor_critic import PixelNet, Recall
from reverie.nets.streams import SideStream, on_stream, wait_for

REMEMBER = SideStream("remember", priority=2)
"""The lane of what does not wait for the frame."""


class FastPixelNet(PixelNet):
    def decide(
        self, recall: Recall, image: UInt8[Tensor, "N h w c"]
    ) -> tuple[Recall, Float[Tensor, "N A"]]:
        if torch.is_grad_enabled():
            return super().decide(recall, image)
        lstm = self.lstm
        with on_stream(image, REMEMBER):
            remembered = F.linear(recall.hidden, lstm.weight_hh)
        seen = F.linear(self.features(image), lstm.weight_ih)
        wait_for(image, REMEMBER)
        biases = (lstm.bias_ih, lstm.bias_hh)
        recall = Recall(*_gates(seen, remembered, recall.cell, *biases))
        return recall, self.actor(recall.hidden)

    def watch(
        self, recall: Recall, features: Float[Tensor, "N T F"]
    ) -> tuple[Recall, Float[Tensor, "N T W"]]:
        if not features.shape[1]:
            return super().watch(recall, features)
        lstm, states, before = self.lstm, list[Tensor](), list[Tensor]()
        bias = lstm.bias_ih + lstm.bias_hh
        gates = F.linear(features.transpose(0, 1), lstm.weight_ih, bias)
        gates = _Tied.apply(gates, lstm.weight_hh, before)  # type: ignore[no-untyped-call]
        for seen in gates:
            before.append(recall.hidden.detach())
            remembered = F.linear(recall.hidden, lstm.weight_hh.detach())
            recall = Recall(*_gates(seen, remembered, recall.cell))
            states.append(recall.hidden)
        return recall, torch.stack(states, 1)


class _Tied(torch.autograd.Function):
    """Nothing, but for the gradient of the weights that `before` is multiplied with.

    To each step's gates their product is added, so its gradient is that of the gates.
    `before` is filled later, and complete when a gradient comes.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, weight: Tensor, before: list[Tensor]
    ) -> Tensor:
        ctx.before = before
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        hidden = torch.stack(ctx.before).flatten(0, 1)
        return slope, slope.flatten(0, 1).T @ hidden, None


def _gates(
    seen: Tensor, remembered: Tensor, cell: Tensor, *biases: Tensor
) -> tuple[Tensor, Tensor]:
    """Hidden state and cell after one step; two biases, or none if they were added."""
    if seen.device.type == "cuda":
        # what `nn.LSTMCell` calls, but for the products
        hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(
            seen, remembered, cell, *biases
        )
        return hidden, cell
    enter, keep, new, leave = sum(biases, seen + remembered).chunk(4, -1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell
