"""Atari 2600 games, straight on the Arcade Learning Environment (`ale-py`)."""

from __future__ import annotations

from dataclasses import dataclass

GAMES: tuple[str, ...] = ("pong",)


@dataclass(frozen=True)
class AtariConfig:
    repeat: int = 4
    """Frames each action is held."""
