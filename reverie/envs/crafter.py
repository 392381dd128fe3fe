"""Crafter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CrafterConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
