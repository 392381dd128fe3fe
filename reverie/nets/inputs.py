"""Concatenation of vectors, scalars and classes into one feature vector."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from reverie.api import UserError
from reverie.spaces import Space, Spaces

MAX_CLASSES = 2**16
"""Maximum number of classes of a one-hot encoding."""


class Concat(nn.Module):
    """Concatenates the values of several keys, in the given order (default: sorted).

    Classes are one-hot encoded, floats are transformed by `squash`. If the values of a
    key with a discrete space are floats, they are already one-hot vectors, such as
    straight-through samples of actions, which have gradients.

    An entry of -inf (floats) or -1 (signed integers with a lower bound of zero) marks
    the key as missing in that row: all of its features are zero there.
    """

    def __init__(
        self,
        spaces: Spaces,
        squash: Callable[[Tensor], Tensor] | None = None,
        order: Sequence[str] = (),
    ):
        super().__init__()
        self.spaces = {key: spaces[key] for key in order or sorted(spaces)}
        self.squash = squash
        self.width = 0
        for i, (key, space) in enumerate(self.spaces.items()):
            size = math.prod(space.shape)
            if space.is_discrete:
                if space.classes > MAX_CLASSES:
                    raise UserError(
                        f"Observation {key!r} has {space.classes} classes, too many "
                        "for a one-hot encoding.\n"
                        "  Fix: set `low` and `high` of its space, or make it a float."
                    )
                size *= space.classes
                low = torch.tensor(np.asarray(space.low, np.int64))
                self.register_buffer(f"low{i}", low, persistent=False)
            self.width += size

    def forward(
        self, values: dict[str, Tensor], dtype: torch.dtype
    ) -> Float[Tensor, "*b F"]:
        keys = enumerate(self.spaces)
        return torch.cat([self._encode(i, k, values[k], dtype) for i, k in keys], -1)

    def _encode(self, i: int, key: str, x: Tensor, dtype: torch.dtype) -> Tensor:
        space = self.spaces[key]
        if space.is_discrete and x.is_floating_point():
            return x.to(dtype).flatten(-1 - len(space.shape))
        batch = x.shape[: x.ndim - len(space.shape)]
        missing = missing_value(space)
        if space.is_discrete:
            classes = torch.arange(space.classes, device=x.device)
            index = x.long() - self.get_buffer(f"low{i}")
            features = (index[..., None] == classes).to(dtype)
        else:
            values = torch.where(x != -torch.inf, x, 0).float()
            features = (self.squash(values) if self.squash else values).to(dtype)
        features = features.reshape(*batch, -1)
        if missing is None:
            return features
        present = (x != missing).reshape(*batch, -1).all(-1, keepdim=True)
        return torch.where(present, features, 0)


def missing_value(space: Space) -> float | None:
    """Return the entry that marks a key as missing in a row; None if there is none."""
    if not space.is_discrete:
        return -math.inf
    return -1 if space.dtype.kind == "i" and (space.low >= 0).all() else None
