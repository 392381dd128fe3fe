"""Nests of tensors: NamedTuples and dicts, and what is in them."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def map1(fn: Any, tree: Any) -> Any:
    """Apply `fn` to every tensor of a nest of tuples, NamedTuples and dicts."""
    if isinstance(tree, dict):
        return {key: map1(fn, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return _like(tree, [map1(fn, value) for value in tree])
    return fn(tree)


def map2(fn: Any, left: Any, right: Any) -> Any:
    """Apply `fn` to the pairs of tensors of two such nests."""
    if isinstance(left, dict):
        return {key: map2(fn, left[key], right[key]) for key in left}
    if isinstance(left, tuple):
        pairs = zip(left, right, strict=True)
        return _like(left, [map2(fn, a, b) for a, b in pairs])
    return fn(left, right)


def leaves(tree: Any) -> list[Tensor]:
    """The tensors of such a nest; whatever else is in it is passed over."""
    found: list[Tensor] = []
    map1(lambda x: found.append(x) if isinstance(x, Tensor) else None, tree)
    return found


def _like(old: Any, values: list[Any]) -> Any:
    return type(old)(*values) if hasattr(old, "_fields") else tuple(values)
