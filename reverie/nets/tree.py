"""Functions on trees of tensors: nested tuples, NamedTuples and dicts."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor


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
