"""The transformer when it goes on by a few tokens, which is what dreams consist of.

The work is tiny and the kernels are many, so what lies between two matrix products is
one kernel: adding to the stream and normalizing it, or storing keys and values and
attending to everything up to now. Gradients, and longer pieces, take the plain way.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import can_launch
from reverie.nets.blocks import Norm
from reverie.nets.transformer import Cache, Transformer, TransformerLayer

MOST_TOKENS = 4
"""Tokens at a time up to which attention is worth its own kernel."""
LEAST_BLOCK = 64
"""Earlier tokens that a program has room for; fewer would only be more kinds of it."""
WIDEST = 4096
"""The widest stream that one program holds a row of."""


class FastTransformer(Transformer):
    def forward(
        self, x: Float[Tensor, "B L E"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "B L E"], Cache | None]:
        if cache is None or not self._is_simple(x):
            return super().forward(x, cache)
        size, new = cache.size, x.shape[1]
        assert size + new <= self.length, f"no room for {new} after {size} tokens"
        change = self.positions.weight[size : size + new].to(x.dtype)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, TransformerLayer)
            x, y = add_norm(x, change, layer.norm0)
            z = attend(layer.qkv(y), cache.keys[i], cache.values[i], size)
            x, y = add_norm(x, layer.out(z), layer.norm1)
            change = layer.narrow(F.gelu(layer.wide(y)))
        _, y = add_norm(x, change, self.norm)
        return y, cache._replace(size=size + new)

    def _is_simple(self, x: Tensor) -> bool:
        config = self.config
        head = config.width // config.heads
        return (
            not torch.is_grad_enabled()
            and x.shape[1] <= MOST_TOKENS
            and config.attention == "causal"
            and config.width <= WIDEST
            and triton.next_power_of_2(head) == head
            and can_launch(x.device, x.dtype)
        )


def add_norm(
    x: Float[Tensor, "B L E"], change: Float[Tensor, "*b L E"], norm: Norm
) -> tuple[Float[Tensor, "B L E"], Float[Tensor, "B L E"]]:
    """`x + change`, and its layer norm; the change may be the same for all rows."""
    x, change = x.contiguous(), change.contiguous()
    total, out, width = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    rows, cycle = x.numel() // width, change.numel() // width
    wide = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        *(x, change, norm.scale, norm.shift, total, out, cycle, width, norm.eps, wide),
        num_warps=4,
    )
    return total, out


def attend(
    qkv: Float[Tensor, "B L F"],
    keys: Float[Tensor, "B heads S D"],
    values: Float[Tensor, "B heads S D"],
    size: int,
) -> Float[Tensor, "B L E"]:
    """Causal attention of new tokens to `size` earlier ones and each other.

    Writes the new keys and values behind the earlier ones.
    """
    rows, heads, longest, width = keys.shape
    new = qkv.shape[1]
    out = qkv.new_empty(rows, new, heads * width)
    block = triton.next_power_of_2(max(size, min(longest, LEAST_BLOCK), 16))
    _attend[(rows, heads)](
        *(qkv.contiguous(), keys, values, out, size, width**-0.5, longest),
        *(heads, width, new, block),
        num_warps=2 if new == 1 else 4,
    )
    return out


@triton.jit
@no_type_check
def _add_norm(
    x, change, scale, shift, total, out, cycle, width, eps, WIDE: tl.constexpr
):
    row = tl.program_id(0)
    col = tl.arange(0, WIDE)
    mask = col < width
    v = tl.load(x + row * width + col, mask, 0.0).to(tl.float32)
    v += tl.load(change + row % cycle * width + col, mask, 0.0).to(tl.float32)
    v = v.to(total.dtype.element_ty)  # as the stream is kept
    tl.store(total + row * width + col, v, mask)
    v = v.to(tl.float32)
    away = tl.where(mask, v - tl.sum(v, 0) / width, 0.0)
    y = away * tl.rsqrt(tl.sum(away * away, 0) / width + eps)
    y = y * tl.load(scale + col, mask, 0.0).to(tl.float32)
    y += tl.load(shift + col, mask, 0.0).to(tl.float32)
    tl.store(out + row * width + col, y, mask)


@triton.jit
@no_type_check
def _attend(
    qkv,
    keys,
    values,
    out,
    size,
    scale,
    longest,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    NEW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, WIDTH)
    at = tl.arange(0, BLOCK)
    stride = 3 * HEADS * WIDTH
    first = qkv + row * NEW * stride + head * WIDTH + col
    cache = (row * HEADS + head) * longest * WIDTH
    place = cache + at[:, None] * WIDTH + col[None, :]
    seen = at < size
    k = tl.load(keys + place, seen[:, None], 0.0).to(tl.float32)
    v = tl.load(values + place, seen[:, None], 0.0).to(tl.float32)
    for i in tl.static_range(NEW):
        q = tl.load(first + i * stride).to(tl.float32) * scale
        score = tl.where(seen, tl.sum(k * q[None, :], 1), -1e30)
        top = tl.max(score, 0)
        weight = tl.where(seen, tl.exp(score - top), 0.0)
        total = tl.sum(weight, 0)
        mean = tl.sum(weight[:, None] * v, 0)
        for j in tl.static_range(i + 1):  # and the new ones, one after the other
            newer = first + j * stride + HEADS * WIDTH
            own = tl.sum(q * tl.load(newer).to(tl.float32), 0)
            higher = tl.maximum(top, own)
            fade, share = tl.exp(top - higher), tl.exp(own - higher)
            mean *= fade
            mean += share * tl.load(newer + HEADS * WIDTH).to(tl.float32)
            total = total * fade + share
            top = higher
        goal = out + (row * NEW + i) * HEADS * WIDTH + head * WIDTH + col
        tl.store(goal, mean / total)
        newer = first + i * stride + HEADS * WIDTH
        behind = cache + (size + i) * WIDTH + col
        tl.store(keys + behind, tl.load(newer))
        tl.store(values + behind, tl.load(newer + HEADS * WIDTH))
