"""How to lift a cube with a robot hand, from where both are.

The hand swings over the cube with open fingers, sinks as it comes to stand above it,
closes around it, and goes up. What to do depends on what is the case now and on nothing
else, so it recovers from whatever happens, and a policy without memory can learn it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STEP, TURN = 0.05, 0.5
"""How far an action of 1 moves the hand (metres) and turns it (radians)."""
GAIN = 2.0
"""Actions per distance left; the arm lags behind, so it is told to go further."""

SLOPE, FREE, ABOVE = 3.0, 0.012, 0.06
"""Beside the cube the hand stays above a funnel: so steep, so wide at the bottom, and
never asking for more than this height."""
NEAR, STILL_NEAR = 0.013, 0.022
"""How near the hand must come to close, and how near it must stay while closing."""
CLOSING, CLOSED = 0.065, 0.05
"""Distances between the fingers: less than open, and around a cube."""
UP = 0.1
"""How far ahead the hand aims when it lifts."""


class Scene(NamedTuple):
    """Where things are, in metres; axes are the columns of a 3 by 3 matrix."""

    hand: np.ndarray
    hand_axes: np.ndarray
    cube: np.ndarray
    cube_axes: np.ndarray
    opening: float
    """Between the fingers."""


def lift(scene: Scene) -> np.ndarray:
    """A change of the hand's place and direction, and whether to close (1) or open."""
    way = scene.cube - scene.hand
    beside = float(np.linalg.norm(way[:2]))
    room = STILL_NEAR if scene.opening < CLOSING else NEAR
    there = max(beside, abs(float(way[2]))) < room
    if there and scene.opening < CLOSED:
        way[2] = UP
    else:
        way[2] += min(ABOVE, SLOPE * max(0.0, beside - FREE))
    move = GAIN * np.concatenate([way / STEP, _turn(scene) / TURN])
    return np.concatenate([np.clip(move, -1, 1), [1.0 if there else -1.0]])


def _turn(scene: Scene) -> np.ndarray:
    """What makes the hand point down, with its fingers along sides of the cube."""
    tilt = np.cross(scene.hand_axes[:, 2], [0.0, 0.0, -1.0])
    apart = _heading(scene.cube_axes) - _heading(scene.hand_axes)
    quarter = np.pi / 2  # a cube looks the same after a quarter of a turn
    return np.array([tilt[0], tilt[1], (apart + quarter / 2) % quarter - quarter / 2])


def _heading(axes: np.ndarray) -> float:
    return float(np.arctan2(axes[1, 0], axes[0, 0]))
