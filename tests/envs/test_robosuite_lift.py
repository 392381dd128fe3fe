"""The expert for Lift on a hand without a robot."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.envs.suites.robosuite.lift import STEP, TURN, Scene, lift_action

WIDE, CUBE = 0.08, 0.042


class Table:
    """A hand that lags behind its orders, and a cube that follows closed fingers."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.hand = np.array([-0.1, 0.0, 1.0]) + rng.uniform(-0.02, 0.02, 3)
        self.cube = np.array([*rng.uniform(-0.03, 0.03, 2), 0.82])
        self.turned, self.yaw = rng.uniform(-0.3, 0.3), rng.uniform(-np.pi, np.pi)
        self.opening = CUBE

    def scene(self) -> Scene:
        down = np.diag([1.0, -1.0, -1.0])
        axes = _about_z(self.turned) @ down
        return Scene(self.hand, axes, self.cube, _about_z(self.yaw), self.opening)

    @property
    def holds(self) -> bool:
        return self.opening <= CUBE and np.linalg.norm(self.hand - self.cube) < 0.025

    def step(self, action: np.ndarray) -> None:
        held = self.holds
        move = 0.4 * STEP * action[:3]
        self.hand = self.hand + move
        self.turned += 0.4 * TURN * action[5]
        if held and action[6] > 0:
            self.cube = self.cube + move
        least = CUBE if np.linalg.norm(self.hand - self.cube) < 0.025 else 0.0
        opening = self.opening - 0.008 * np.sign(action[6])
        self.opening = float(np.clip(opening, least, WIDE))


def _about_z(angle: float) -> np.ndarray:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1.0]])


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_the_cube_is_lifted_from_anywhere(seed: int, noise: float) -> None:
    table = Table(seed)
    for _ in range(60):
        action = lift_action(table.scene())
        assert action.shape == (7,)
        assert np.abs(action).max() <= 1
        table.step(np.clip(action + noise * table.rng.standard_normal(7), -1, 1))
        if table.cube[2] > 0.84:
            break
    assert table.cube[2] > 0.84
    apart = (table.yaw - table.turned + np.pi / 4) % (np.pi / 2) - np.pi / 4
    assert abs(apart) < 0.2  # it holds two sides, not two edges


def test_a_hand_beside_the_cube_neither_sinks_nor_closes() -> None:
    table = Table(0)
    table.opening, table.hand = WIDE, table.cube + np.array([0.05, 0, 0.03])
    action = lift_action(table.scene())
    assert action[0] < 0 < action[2]
    assert action[6] == -1


def test_a_lost_cube_is_taken_up_again() -> None:
    table = Table(0)
    table.opening, table.hand = 0.01, table.cube + np.array([0, 0, 0.05])
    assert lift_action(table.scene())[6] == -1


def test_a_tilted_hand_is_set_upright() -> None:
    table = Table(0)
    scene = table.scene()
    cos, sin = np.cos(0.2), np.sin(0.2)
    about_x = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    tilted = lift_action(scene._replace(hand_axes=about_x @ scene.hand_axes))
    assert tilted[3] < 0  # back about the same axis
    assert abs(tilted[4]) < 0.1
