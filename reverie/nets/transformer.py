"""A causal transformer with a KV cache.

Layers are pre-norm: attention, then an MLP with GELU. A `Cache` holds the keys and
values of all previous positions in tensors of fixed size. The number of positions is a
Python integer, so that a loop over positions can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from reverie.nets.blocks import Linear, Norm


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of a transformer; the defaults are those of Δ-IRIS for Crafter."""

    layers: int = 3
    """Number of layers."""
    heads: int = 8
    """Attention heads per layer."""
    width: int = 512
    """Embedding size; a multiple of `heads`."""
    blocks: int = 21
    """Maximum context length in time steps."""
    attention: Literal["causal", "block_causal"] = "causal"
    """Attention mask: a token attends to itself and the tokens before it; with
    `block_causal` also to all tokens of its time step, so that in training (but not in
    imagination) the prediction of a token can depend on that token."""

    def __post_init__(self) -> None:
        if min(self.layers, self.heads, self.width, self.blocks) < 1:
            raise ValueError("layers, heads, width and blocks must be at least 1")
        if self.width % self.heads:
            raise ValueError("width must be a multiple of heads")


STD = 0.02
"""Standard deviation of initial weights of dense layers and embeddings."""


class Cache(NamedTuple):
    """Keys and values of the first `size` positions.

    New positions are written to the same tensors. To continue a cache with two
    different sequences, `clone` it first.
    """

    keys: Float[Tensor, "layers B heads L D"]
    values: Float[Tensor, "layers B heads L D"]
    size: int

    @property
    def free(self) -> int:
        """Number of positions that can be added."""
        return self.keys.shape[-2] - self.size

    def clear(self) -> Cache:
        """Return an empty cache, which uses the same tensors."""
        return self._replace(size=0)

    def clone(self) -> Cache:
        return Cache(self.keys.clone(), self.values.clone(), self.size)


class Dense(Linear):
    """A dense layer with a small normal initialization."""

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        self.weight.normal_(0, STD, generator=generator)
        self.bias.zero_()


class Embedding(nn.Module):
    """A learned vector per class."""

    def __init__(self, classes: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width))

    def forward(
        self, index: Int[Tensor, "*b"], dtype: torch.dtype
    ) -> Float[Tensor, "*b E"]:
        return F.embedding(index.long(), self.weight).to(dtype)

    @torch.no_grad()
    def initialize(self, generator: torch.Generator) -> None:
        self.weight.normal_(0, STD, generator=generator)


class TransformerLayer(nn.Module):
    """Self-attention and MLP, both pre-norm with residual connections."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm0, self.norm1 = Norm("layer1em5", width), Norm("layer1em5", width)
        self.qkv, self.out = Dense(width, 3 * width), Dense(width, width)
        self.wide, self.narrow = Dense(width, 4 * width), Dense(4 * width, width)

    def forward(
        self,
        x: Float[Tensor, "B L E"],
        mask: Bool[Tensor, "L S"] | None,
        past: tuple[Tensor, Tensor] | None,
        size: int,
    ) -> Float[Tensor, "B L E"]:
        """Apply the layer; `past` is the KV cache of this layer with `size` positions.

        Without a `mask`, a single token attends to the whole cache and itself; several
        tokens, for which the cache must be empty, attend to each other causally.
        """
        y = self.qkv(self.norm0(x))
        q, k, v = rearrange(y, "b l (n h d) -> n b h l d", n=3, h=self.heads)
        if past is not None:
            for store, new in zip(past, (k, v), strict=True):
                store[:, :, size : size + x.shape[1]] = new.to(store.dtype)
            k, v = (store[:, :, : size + x.shape[1]].to(q.dtype) for store in past)
        is_causal = mask is None and x.shape[1] > 1
        z = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
        x = x + self.out(rearrange(z, "b h l d -> b l (h d)"))
        residual: Tensor = self.narrow(F.gelu(self.wide(self.norm1(x))))
        return x + residual


class Transformer(nn.Module):
    """Position embeddings, layers, final norm; a time step has `tokens` tokens."""

    fast_version = "reverie.kernels.transformer:FastTransformer"
    mask: Tensor

    def __init__(self, tokens: int, config: TransformerConfig):
        super().__init__()
        self.config, self.length = config, tokens * config.blocks
        self.positions = Embedding(self.length, config.width)
        layers = [
            TransformerLayer(config.width, config.heads) for _ in range(config.layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = Norm("layer1em5", config.width)
        mask = torch.ones(self.length, self.length, dtype=torch.bool).tril()
        if config.attention == "block_causal":
            block = torch.arange(self.length) // tokens
            mask |= block[:, None] == block
        self.register_buffer("mask", mask, persistent=False)

    def cache(self, batch: int, dtype: torch.dtype) -> Cache:
        """Return an empty cache for `batch` sequences."""
        c = self.config
        shape = (c.layers, batch, c.heads, self.length, c.width // c.heads)
        keys = torch.zeros(shape, dtype=dtype, device=self.mask.device)
        return Cache(keys, torch.zeros_like(keys), 0)

    def forward(
        self, x: Float[Tensor, "B L E"], cache: Cache | None = None
    ) -> tuple[Float[Tensor, "B L E"], Cache | None]:
        """Return outputs for tokens that follow the cached ones, and the new cache."""
        size, new = (cache.size if cache else 0), x.shape[1]
        assert size + new <= self.length, f"{size} + {new} tokens > {self.length}"
        x = x + self.positions.weight[size : size + new].to(x.dtype)
        mask = None  # `TransformerLayer` is causal without one, if the cache is empty
        if self.config.attention != "causal" or (new > 1 and size > 0):
            mask = self.mask[size : size + new, : size + new]
        for i, layer in enumerate(self.layers):
            past = (cache.keys[i], cache.values[i]) if cache else None
            x = layer(x, mask, past, size)
        cache = cache._replace(size=size + new) if cache else None
        return self.norm(x), cache
