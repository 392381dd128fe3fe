"""Functions on trees of tensors (nested tuples, NamedTuples and dicts) and on rows."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

LARGE_ROW = 1024
"""Minimum size of a row, in bytes, for which `rows_from` copies the rows."""


def tree_map(fn: Any, tree: Any, *others: Any) -> Any:
    """Apply `fn` to every leaf, and to the same leaves of other trees if given."""
    if isinstance(tree, dict):
        return {
            key: tree_map(fn, value, *(other[key] for other in others))
            for key, value in tree.items()
        }
    if isinstance(tree, tuple):
        values = [tree_map(fn, *xs) for xs in zip(tree, *others, strict=True)]
        return type(tree)(*values) if hasattr(tree, "_fields") else tuple(values)
    return fn(tree, *others)


def tree_where(mask: Bool[Tensor, " B"], tree: Any, other: Any) -> Any:
    """Select by a mask of the first axis: `tree` where it is True, else `other`.

    The leaves of `tree` may be numbers.
    """

    def select(x: Any, y: Tensor) -> Tensor:
        return torch.where(mask.to(y.device).reshape(-1, *[1] * (y.ndim - 1)), x, y)

    return tree_map(select, tree, other)


def tree_leaves(tree: Any) -> list[Tensor]:
    """All tensors of a tree; other leaves are left out."""
    tensors: list[Tensor] = []
    tree_map(lambda x: tensors.append(x) if isinstance(x, Tensor) else None, tree)
    return tensors


def rows_from(x: Tensor, start: int) -> Tensor:
    """Return `x[:, start:]`; large rows, such as images, are copied contiguously.

    Several networks read images, and each would copy them. Bytes are copied as 8-byte
    integers, which is several times faster on a GPU.
    """
    rows = x[:, start:]
    if x.ndim < 3 or rows.is_contiguous() or rows[0, 0].nbytes < LARGE_ROW:
        return rows
    is_aligned = x.storage_offset() % 8 == 0 and rows[0, 0].numel() % 8 == 0
    if x.dtype != torch.uint8 or not (is_aligned and x.is_contiguous()):
        return rows.contiguous()
    words = x.flatten(2).view(torch.int64)[:, start:].contiguous()
    return words.view(torch.uint8).view(rows.shape)
