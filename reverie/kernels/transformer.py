"""Incremental transformer steps of a few tokens, as used in imagination.

Launching kernels dominates the time of such steps, so everything between two matrix
products is fused: residual addition with layer norm, and KV cache update with
attention. Training and longer inputs use the plain transformer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from reverie.kernels.launch import can_launch, jit
from reverie.nets.blocks import Norm
from reverie.nets.transformer import Cache, Transformer, TransformerLayer

MAX_TOKENS = 4
"""Maximum number of new tokens for which the attention kernel is faster."""
MIN_BLOCK = 64
"""Minimum number of cached tokens that the attention kernel loads as one block.

The kernel is compiled for every block size, so a minimum saves compilations.
"""
MAX_WIDTH = 4096
"""Maximum width of the norm kernel."""


class FastTransformer(Transformer):
    """`Transformer` with fused kernels for steps that use a KV cache."""

    def forward(
        self, x: Float[Tensor, "B L E"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "B L E"], Cache | None]:
        if cache is None or not self._is_supported(x):
            return super().forward(x, cache)
        size, new = cache.size, x.shape[1]  # numbers of cached and new tokens
        assert size + new <= self.length, f"{size} + {new} tokens > {self.length}"
        # the next kernel adds `delta` to `x`: first the position embeddings, then the
        # output of each residual branch
        delta = self.positions.weight[size : size + new].to(x.dtype)
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, TransformerLayer)
            x, y = add_norm(x, delta, layer.norm0)
            z = attend(layer.qkv(y), cache.keys[i], cache.values[i], size)
            x, y = add_norm(x, layer.out(z), layer.norm1)
            delta = layer.narrow(F.gelu(layer.wide(y)))
        _, y = add_norm(x, delta, self.norm)
        return y, cache._replace(size=size + new)

    def _is_supported(self, x: Tensor) -> bool:
        config = self.config
        head = config.width // config.heads
        return (
            not torch.is_grad_enabled()
            and x.shape[1] <= MAX_TOKENS
            and config.attention == "causal"
            and config.width <= MAX_WIDTH
            and triton.next_power_of_2(head) == head
            and can_launch(x.device, x.dtype)
        )


def add_norm(
    x: Float[Tensor, "B L E"], delta: Float[Tensor, "*b L E"], norm: Norm
) -> tuple[Float[Tensor, "B L E"], Float[Tensor, "B L E"]]:
    """Return `x + delta` and its layer norm; `delta` may lack the batch axis."""
    x, delta = x.contiguous(), delta.contiguous()
    total, out, width = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    rows, delta_rows = x.numel() // width, delta.numel() // width
    _add_norm[(rows,)](
        *(x, delta, norm.scale, norm.shift, total, out, delta_rows, width, norm.eps),
        triton.next_power_of_2(width),
        num_warps=4,
    )
    return total, out


def attend(
    qkv: Float[Tensor, "B L F"],
    keys: Float[Tensor, "B heads S D"],
    values: Float[Tensor, "B heads S D"],
    size: int,
) -> Float[Tensor, "B L E"]:
    """Return causal attention of new tokens to `size` cached tokens and each other.

    Appends the new keys and values to the cache. A row of `qkv` has the queries of all
    heads, then the keys and the values.
    """
    rows, heads, capacity, width = keys.shape
    new = qkv.shape[1]
    out = qkv.new_empty(rows, new, heads * width)
    block = triton.next_power_of_2(max(size, min(capacity, MIN_BLOCK), 16))
    _attend[(rows, heads)](
        *(qkv.contiguous(), keys, values, out, size, width**-0.5, capacity),
        *(heads, width, new, block),
        num_warps=2 if new == 1 else 4,
    )
    return out


@jit
def _add_norm(
    x, delta, scale, shift, total, out, delta_rows, width, eps, BLOCK: tl.constexpr
):
    """Compute `x + delta` and its layer norm for one row."""
    row = tl.program_id(0)
    col = tl.arange(0, BLOCK)
    mask = col < width
    v = tl.load(x + row * width + col, mask, 0.0).to(tl.float32)
    v += tl.load(delta + row % delta_rows * width + col, mask, 0.0).to(tl.float32)
    v = v.to(total.dtype.element_ty)  # the norm gets the rounded sum, as it is stored
    tl.store(total + row * width + col, v, mask)
    v = v.to(tl.float32)
    centered = tl.where(mask, v - tl.sum(v, 0) / width, 0.0)
    y = centered * tl.rsqrt(tl.sum(centered * centered, 0) / width + eps)
    y = y * tl.load(scale + col, mask, 0.0).to(tl.float32)
    y += tl.load(shift + col, mask, 0.0).to(tl.float32)
    tl.store(out + row * width + col, y, mask)


@jit
def _attend(
    qkv, keys, values, out, size, scale, capacity,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, NEW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one head of one sequence: attention of NEW tokens, and cache update.

    A block has all cached tokens, and WIDTH is the width of a head. In `qkv`, the key
    and the value of a token follow its query at distances of HEADS * WIDTH.
    """
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = tl.arange(0, WIDTH)
    position = tl.arange(0, BLOCK)
    stride = 3 * HEADS * WIDTH
    first_q = qkv + row * NEW * stride + head * WIDTH + col
    cache = (row * HEADS + head) * capacity * WIDTH
    offset = cache + position[:, None] * WIDTH + col[None, :]
    is_cached = position < size
    k = tl.load(keys + offset, is_cached[:, None], 0.0).to(tl.float32)
    v = tl.load(values + offset, is_cached[:, None], 0.0).to(tl.float32)
    for i in tl.static_range(NEW):  # online softmax, as in flash attention
        q = tl.load(first_q + i * stride).to(tl.float32) * scale
        # -1e30 instead of -inf, so that differences of masked scores are not NaN
        score = tl.where(is_cached, tl.sum(k * q[None, :], 1), -1e30)
        max_score = tl.max(score, 0)
        weight = tl.where(is_cached, tl.exp(score - max_score), 0.0)
        total = tl.sum(weight, 0)
        weighted = tl.sum(weight[:, None] * v, 0)
        for j in tl.static_range(i + 1):  # then new tokens up to this one
            new_k = first_q + j * stride + HEADS * WIDTH
            new_score = tl.sum(q * tl.load(new_k).to(tl.float32), 0)
            new_max = tl.maximum(max_score, new_score)
            rescale = tl.exp(max_score - new_max)
            new_weight = tl.exp(new_score - new_max)
            weighted *= rescale
            weighted += new_weight * tl.load(new_k + HEADS * WIDTH).to(tl.float32)
            total = total * rescale + new_weight
            max_score = new_max
        target = out + (row * NEW + i) * HEADS * WIDTH + head * WIDTH + col
        tl.store(target, weighted / total)
        new_k = first_q + i * stride + HEADS * WIDTH
        append_at = cache + (size + i) * WIDTH + col
        tl.store(keys + append_at, tl.load(new_k))
        tl.store(values + append_at, tl.load(new_k + HEADS * WIDTH))
