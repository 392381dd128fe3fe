"""Scripted policy that lifts a cube with a robot gripper.

The open gripper moves above the cube, descends while it approaches the center, closes
around the cube and moves up. The action depends on the current positions only, so the
policy recovers from disturbances and can be learned without memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

STEP, TURN = 0.05, 0.5
"""Motion of the gripper for an action of 1, in meters and radians."""
GAIN = 2.0
"""Proportional gain; above 1 because the arm lags behind its target."""

FUNNEL_SLOPE, FUNNEL_RADIUS, FUNNEL_HEIGHT = 3.0, 0.012, 0.06
"""The gripper approaches the cube through a funnel: slope of its wall, radius at the
bottom and maximum height, in meters."""
START_CLOSING, KEEP_CLOSING = 0.013, 0.022
"""Distances to the cube in meters below which an open gripper starts to close, and a
closing gripper continues to close."""
CLOSING_WIDTH, CLOSED_WIDTH = 0.065, 0.05
"""Finger distances in meters below which the gripper counts as closing, and as closed
around the cube."""
LIFT_HEIGHT = 0.1
"""Target height above the gripper while lifting, in meters."""


class Scene(NamedTuple):
    """Positions in meters; axes are the columns of 3x3 rotation matrices."""

    hand: np.ndarray
    hand_axes: np.ndarray
    cube: np.ndarray
    cube_axes: np.ndarray
    opening: float
    """Distance between the fingers."""


def lift_action(scene: Scene) -> np.ndarray:
    """Return the change of position and rotation, and 1 to close or -1 to open."""
    move = scene.cube - scene.hand
    distance = float(np.linalg.norm(move[:2]))  # horizontal
    tolerance = KEEP_CLOSING if scene.opening < CLOSING_WIDTH else START_CLOSING
    is_near = max(distance, abs(float(move[2]))) < tolerance
    if is_near and scene.opening < CLOSED_WIDTH:
        move[2] = LIFT_HEIGHT
    else:
        move[2] += min(FUNNEL_HEIGHT, FUNNEL_SLOPE * max(0.0, distance - FUNNEL_RADIUS))
    change = GAIN * np.concatenate([move / STEP, _rotation(scene) / TURN])
    return np.concatenate([np.clip(change, -1, 1), [1.0 if is_near else -1.0]])


def _rotation(scene: Scene) -> np.ndarray:
    """Return the rotation to point down, with the fingers parallel to the cube."""
    tilt = np.cross(scene.hand_axes[:, 2], [0.0, 0.0, -1.0])
    angle = _heading(scene.cube_axes) - _heading(scene.hand_axes)
    quarter = np.pi / 2  # a cube is symmetric under quarter turns
    return np.array([tilt[0], tilt[1], (angle + quarter / 2) % quarter - quarter / 2])


def _heading(axes: np.ndarray) -> float:
    return float(np.arctan2(axes[1, 0], axes[0, 0]))
