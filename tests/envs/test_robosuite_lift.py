"""The scripted policy for Lift, in a simple simulation of the gripper."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.envs.suites.robosuite.lift import STEP, TURN, Scene, lift_action

OPEN, CUBE = 0.08, 0.042


class SimpleGripper:
    """A gripper that lags behind its commands, and a cube that moves with it."""

    def __init__(self, seed: int):
        self.rng = rng = np.random.default_rng(seed)
        self.hand = np.array([-0.1, 0.0, 1.0]) + rng.uniform(-0.02, 0.02, 3)
        self.cube = np.array([*rng.uniform(-0.03, 0.03, 2), 0.82])
        self.angle, self.yaw = rng.uniform(-0.3, 0.3), rng.uniform(-np.pi, np.pi)
        self.opening = CUBE

    def scene(self) -> Scene:
        down = np.diag([1.0, -1.0, -1.0])
        axes = _about_z(self.angle) @ down
        return Scene(self.hand, axes, self.cube, _about_z(self.yaw), self.opening)

    @property
    def holds(self) -> bool:
        return self.opening <= CUBE and np.linalg.norm(self.hand - self.cube) < 0.025

    def step(self, action: np.ndarray) -> None:
        is_holding = self.holds
        move = 0.4 * STEP * action[:3]
        self.hand = self.hand + move
        self.angle += 0.4 * TURN * action[5]
        if is_holding and action[6] > 0:
            self.cube = self.cube + move
        min_opening = CUBE if np.linalg.norm(self.hand - self.cube) < 0.025 else 0.0
        opening = self.opening - 0.008 * np.sign(action[6])
        self.opening = float(np.clip(opening, min_opening, OPEN))


def _about_z(angle: float) -> np.ndarray:
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([[cos, -sin, 0], [sin, cos, 0], [0, 0, 1.0]])


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("seed", range(5))
def test_the_cube_is_lifted_from_random_positions(seed: int, noise: float) -> None:
    gripper = SimpleGripper(seed)
    for _ in range(60):
        action = lift_action(gripper.scene())
        assert action.shape == (7,)
        assert np.abs(action).max() <= 1
        gripper.step(np.clip(action + noise * gripper.rng.standard_normal(7), -1, 1))
        if gripper.cube[2] > 0.84:
            break
    assert gripper.cube[2] > 0.84
    angle = (gripper.yaw - gripper.angle + np.pi / 4) % (np.pi / 2) - np.pi / 4
    assert abs(angle) < 0.2  # the fingers are parallel to the cube


def test_a_gripper_next_to_the_cube_moves_up_and_stays_open() -> None:
    gripper = SimpleGripper(0)
    gripper.opening, gripper.hand = OPEN, gripper.cube + np.array([0.05, 0, 0.03])
    action = lift_action(gripper.scene())
    assert action[0] < 0 < action[2]
    assert action[6] == -1


def test_the_gripper_opens_again_if_the_cube_is_lost() -> None:
    gripper = SimpleGripper(0)
    gripper.opening, gripper.hand = 0.01, gripper.cube + np.array([0, 0, 0.05])
    assert lift_action(gripper.scene())[6] == -1


def test_a_tilted_gripper_is_turned_back() -> None:
    gripper = SimpleGripper(0)
    scene = gripper.scene()
    cos, sin = np.cos(0.2), np.sin(0.2)
    about_x = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    tilted = lift_action(scene._replace(hand_axes=about_x @ scene.hand_axes))
    assert tilted[3] < 0  # back around the same axis
    assert abs(tilted[4]) < 0.1
