"""Parts of recordings: some episodes to learn from, others to be measured on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import Episode
from reverie.datasets.readers import Reader

FRACTION = 0.1


class Subset(Reader):
    """Some episodes of another reader, in its order and with its spaces."""

    def __init__(self, reader: Reader, names: Iterable[str]):
        chosen = set(names)
        if unknown := sorted(chosen - set(reader.names())):
            raise UserError(
                f"{reader.origin} has no episode {unknown[0]!r}"
                f"{' and ' + str(len(unknown) - 1) + ' more' if unknown[1:] else ''}.\n"
                "  Fix: choose from those that `reverie data inspect` lists."
            )
        self.inner, self.origin = reader, reader.origin
        self._names = [name for name in reader.names() if name in chosen]
        self.masks = {
            mask: [name for name in members if name in chosen]
            for mask, members in reader.masks.items()
        }
        self._spaces = reader.obs_space, reader.act_space

    @property
    def settings(self) -> dict[str, Any]:
        return self.inner.settings

    def names(self) -> list[str]:
        return list(self._names)

    def rows(self, name: str) -> int:
        return self.inner.rows(name)

    def read(self, name: str) -> Episode:
        return self.inner.read(name)

    def read_some(self, name: str, keys: Collection[str]) -> Episode:
        return self.inner.read_some(name, keys)

    def close(self) -> None:
        self.inner.close()


def split_by_seed(
    names: Sequence[str], fraction: float = FRACTION, seed: int = 0
) -> tuple[list[str], list[str]]:
    """Names to train on and names to hold out; at least one of each."""
    if not 0 < fraction < 1 or len(names) < 2:
        raise UserError(
            f"Of {len(names)} episodes a share of {fraction} cannot be held out.\n"
            "  Fix: give two episodes or more, and a share between 0 and 1."
        )
    count = min(max(1, round(fraction * len(names))), len(names) - 1)
    chosen = np.random.default_rng(seed).permutation(len(names))[:count]
    held = {names[i] for i in chosen.tolist()}
    return [n for n in names if n not in held], [n for n in names if n in held]


def split_by_mask(reader: Reader, train: str, held: str) -> tuple[list[str], list[str]]:
    """Names as two selections that came with the recordings say (robomimic's masks)."""
    parts = masked(reader, train), masked(reader, held)
    for mask, names in zip((train, held), parts, strict=True):
        if not names:
            raise UserError(
                f"The mask {mask!r} of {reader.origin} names no episode that is there."
                "\n  Fix: split by --fraction, or --offline.eval_data PATH."
            )
    if both := set(parts[0]) & set(parts[1]):
        raise UserError(
            f"The masks {train!r} and {held!r} share {len(both)} episodes "
            f"({min(both)}, ...).\n  Fix: choose two that share none."
        )
    return parts


def masked(reader: Reader, mask: str) -> list[str]:
    """The names in a selection that came with the recordings."""
    if mask not in reader.masks:
        known = ", ".join(sorted(reader.masks)) or "none at all"
        raise UserError(
            f"{reader.origin} has no mask {mask!r}, but {known}.\n"
            "  Fix: choose from these with --mask, or leave it out."
        )
    members = set(reader.masks[mask])
    return [name for name in reader.names() if name in members]


def split_reader(
    reader: Reader, fraction: float = FRACTION, seed: int = 0
) -> tuple[Reader, Reader]:
    """Readers of what to train on and what to hold out."""
    train, held = split_by_seed(reader.names(), fraction, seed)
    return Subset(reader, train), Subset(reader, held)
