"""Seeds that do not collide, and random generators a checkpoint can hold."""

from __future__ import annotations

import json

import numpy as np

SEED_RANGE = 2**31 - 1
"""Seeds stay below this: some simulators take a signed 32-bit integer."""


def derive_seed(*parts: int) -> int:
    """One seed out of several numbers, the same in every process."""
    words = np.random.SeedSequence([part % 2**63 for part in parts])
    return int(words.generate_state(1, np.uint64)[0]) % SEED_RANGE


def save_rng(rng: np.random.Generator) -> str:
    """The state of a generator as text (its integers have 128 bits)."""
    return json.dumps(rng.bit_generator.state)


def load_rng(text: str) -> np.random.Generator:
    rng = np.random.default_rng(0)
    rng.bit_generator.state = json.loads(text)
    return rng
