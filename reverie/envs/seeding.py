"""Derived seeds, and NumPy generator states in a form that checkpoints can store."""

from __future__ import annotations

import json

import numpy as np

SEED_RANGE = 2**31 - 1
"""Upper bound of seeds; some simulators take a signed 32-bit integer."""


def derive_seed(*parts: int) -> int:
    """Hash several integers into one seed, identically in every process."""
    sequence = np.random.SeedSequence([part % 2**63 for part in parts])
    return int(sequence.generate_state(1, np.uint64)[0]) % SEED_RANGE


def save_rng(rng: np.random.Generator) -> str:
    """Return the generator state as JSON, because its integers have 128 bits."""
    return json.dumps(rng.bit_generator.state)


def load_rng(text: str) -> np.random.Generator:
    """Restore a generator from the output of `save_rng`."""
    rng = np.random.default_rng(0)
    rng.bit_generator.state = json.loads(text)
    return rng
