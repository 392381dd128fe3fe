"""Bring in agents of the original Δ-IRIS (`last.pt`)."""

from __future__ import annotations

ACTOR_CRITIC = [
    (r"cnn\.0\.encoder", "frame.layers"),
    (r"actor_linear", "actor"),
    (r"critic_linear", "critic"),
]
