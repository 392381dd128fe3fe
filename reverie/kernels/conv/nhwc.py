"""Stride-1 convolutions of `(b, h, w, c)` tensors, and their gradients.

`grad` is the gradient of the output. Weights are laid out as in PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def conv2d(x: Tensor, weight: Tensor) -> Tensor:
    """Convolve with "same" padding; the kernel size is odd."""
    pad = weight.shape[-1] // 2
    return F.conv2d(x.permute(0, 3, 1, 2), weight, padding=pad).permute(0, 2, 3, 1)


def conv2d_input_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the input."""
    dx: Tensor = _backward(grad, x, weight, True, False)[0]
    return dx.permute(0, 2, 3, 1)


def conv2d_weight_grad(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of the weight."""
    dweight: Tensor = _backward(grad, x, weight, False, True)[1]
    return dweight


def conv2d_grads(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of input and weight."""
    dx, dweight, _ = _backward(grad, x, weight, True, True)
    return dx.permute(0, 2, 3, 1), dweight


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, of_input: bool, of_weight: bool
) -> Any:
    pad = [weight.shape[-1] // 2] * 2
    return torch.ops.aten.convolution_backward(
        *(grad.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), weight, None),
        *([1, 1], pad, [1, 1], False, [0, 0], 1, [of_input, of_weight, False]),
    )
