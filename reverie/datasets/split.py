"""Split the episodes of a dataset into training and held-out episodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from reverie.api import UserError
from reverie.datasets.readers import Reader, WrappedReader

HELD_OUT_FRACTION = 0.1
"""Default fraction of held-out episodes."""


class Subset(WrappedReader):
    """Reads some episodes of another reader, in the order of that reader."""

    def __init__(self, reader: Reader, names: Iterable[str]):
        selected = set(names)
        if unknown := sorted(selected - set(reader.names())):
            raise UserError(
                f"{reader.origin} has no episode {unknown[0]!r}"
                f"{' and ' + str(len(unknown) - 1) + ' more' if unknown[1:] else ''}.\n"
                "  Fix: choose from those that `reverie data inspect` lists."
            )
        super().__init__(reader)
        self._names = [name for name in reader.names() if name in selected]
        self.masks = {
            mask: [name for name in members if name in selected]
            for mask, members in reader.masks.items()
        }


def split_by_seed(
    names: Sequence[str], fraction: float = HELD_OUT_FRACTION, seed: int = 0
) -> tuple[list[str], list[str]]:
    """Split at random into training and held-out names; at least one of each."""
    if not 0 < fraction < 1 or len(names) < 2:
        raise UserError(
            f"Cannot hold out a fraction of {fraction} of {len(names)} episodes.\n"
            "  Fix: use two or more episodes and a fraction between 0 and 1."
        )
    count = min(max(1, round(fraction * len(names))), len(names) - 1)
    chosen = np.random.default_rng(seed).permutation(len(names))[:count]
    held_out = {names[i] for i in chosen.tolist()}
    train = [name for name in names if name not in held_out]
    return train, [name for name in names if name in held_out]


def split_by_mask(
    reader: Reader, train: str, held_out: str
) -> tuple[list[str], list[str]]:
    """Return the names in two masks of the dataset (robomimic's filter keys)."""
    parts = names_in_mask(reader, train), names_in_mask(reader, held_out)
    for mask, names in zip((train, held_out), parts, strict=True):
        if not names:
            raise UserError(
                f"The mask {mask!r} of {reader.origin} selects no episodes.\n"
                "  Fix: split with --fraction, or use --offline.eval_data PATH."
            )
    if both := set(parts[0]) & set(parts[1]):
        raise UserError(
            f"The masks {train!r} and {held_out!r} have {len(both)} episodes in common "
            f"({min(both)}, ...).\n  Fix: choose two disjoint masks."
        )
    return parts


def names_in_mask(reader: Reader, mask: str) -> list[str]:
    """Return the episodes of a mask, in the order of the reader."""
    if mask not in reader.masks:
        known = ", ".join(sorted(reader.masks)) or "none"
        raise UserError(
            f"{reader.origin} has no mask {mask!r}. Its masks: {known}.\n"
            "  Fix: choose one of these with --mask, or leave it out."
        )
    members = set(reader.masks[mask])
    return [name for name in reader.names() if name in members]
