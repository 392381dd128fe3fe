"""Derived seeds, and random generators that checkpoints can store."""

from __future__ import annotations

import copy
import json
from typing import ClassVar

import numpy as np

from reverie.api import StateDict

SEED_RANGE = 2**31 - 1
"""Seeds are below this number; some simulators take a signed 32-bit integer."""


def derive_seed(*parts: int) -> int:
    """Hash several integers into one seed, identically in every process."""
    sequence = np.random.SeedSequence([part % 2**63 for part in parts])  # must be >= 0
    return int(sequence.generate_state(1, np.uint64)[0]) % SEED_RANGE


def save_rng(rng: np.random.Generator) -> str:
    """Return the generator state as JSON, because its integers have 128 bits."""
    return json.dumps(rng.bit_generator.state)


def load_rng(text: str) -> np.random.Generator:
    """Restore a generator from the output of `save_rng`."""
    rng = np.random.default_rng(0)
    rng.bit_generator.state = json.loads(text)
    return rng


class SeededEnv:
    """Base class of built-in environments: has `_rng`, saves and restores the state.

    `STATE` names the attributes that change during an episode, without the leading
    underscore. They are saved in checkpoints, together with the random generator.
    """

    STATE: ClassVar[tuple[str, ...]]

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)

    def close(self) -> None:
        """Nothing to release."""

    def state_dict(self) -> StateDict:
        state = {name: copy.copy(getattr(self, f"_{name}")) for name in self.STATE}
        return {"rng": save_rng(self._rng), **state}

    def load_state_dict(self, state: StateDict) -> None:
        self._rng = load_rng(state["rng"])
        for name in self.STATE:
            setattr(self, f"_{name}", copy.copy(state[name]))
