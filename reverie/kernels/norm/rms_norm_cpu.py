"""RMS norm and SiLU on a CPU, with a closed-form gradient.

PyTorch computes the RMS norm on a CPU as a sequence of operations, each of which
autograd records and differentiates separately. So it reads and writes large maps of an
encoder or decoder many times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from reverie.nets.blocks import Norm


class CpuNorm(Norm):
    """`Norm` that computes RMS norm and SiLU together if gradients are needed."""

    def activate(
        self, x: Float[Tensor, "*b F"], act: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*b F"]:
        if (
            self.kind != "rms"
            or act is not F.silu
            or x.dtype != self.scale.dtype
            or not torch.is_grad_enabled()
        ):
            return super().activate(x, act)
        y: Tensor = _RMSNormSiLU.apply(x, self.scale, self.eps)  # type: ignore[no-untyped-call]
        return y


class _RMSNormSiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        rstd = norm.square_().div_(rows.shape[1]).add_(eps).rsqrt_()
        normed = rows * rstd
        scaled = normed * scale
        ctx.save_for_backward(normed, scaled, rstd, scale)
        return F.silu(scaled).view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scaled, rstd, scale = ctx.saved_tensors
        grad_rows = grad.reshape(scaled.shape)
        d_scaled = torch.ops.aten.silu_backward(grad_rows, scaled)
        product = d_scaled * normed
        dot = torch.mv(product, scale)[:, None]
        dx = d_scaled.mul_(scale)
        dx.addcmul_(normed, dot, value=-1 / len(scale)).mul_(rstd)
        return dx.view(grad.shape), product.sum(0), None
