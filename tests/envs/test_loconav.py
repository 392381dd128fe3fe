"""Locomotion mazes."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import UserError
from reverie.envs.suites import loconav
from reverie.spaces import agent_obs_space


def steps_to_goal(text: str) -> int:
    """Return the length of the shortest path from P to G; -1 if there is none."""
    grid = [list(line) for line in text.splitlines()]
    positions = {grid[i][j]: (i, j) for i in range(len(grid)) for j in range(len(grid))}
    visited, queue = {positions["P"]}, deque([(positions["P"], 0)])
    while queue:
        (i, j), count = queue.popleft()
        if (i, j) == positions["G"]:
            return count
        for cell in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            if grid[cell[0]][cell[1]] != "*" and cell not in visited:
                visited.add(cell)
                queue.append((cell, count + 1))
    return -1


def test_every_maze_is_solvable_and_larger_ones_are_longer() -> None:
    lengths = []
    for cells in loconav.SIZES.values():
        text = loconav.layout(cells)
        assert text == loconav.layout(cells)
        lines = text.splitlines()
        assert {len(line) for line in lines} == {2 * cells + 1} == {len(lines)}
        assert set(lines[0]) == set(lines[-1]) == {"*"}
        assert text.count("P") == text.count("G") == 1
        lengths.append(steps_to_goal(text))
    assert lengths[0] > 0
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ant_maze_m", True),
        ("quadruped_maze_xxl_20hz", True),
        ("ant_maze_m_0hz", False),
        ("ant_maze_xxxl", False),
        ("cat_maze_m", False),
    ],
)
def test_task_names(name: str, expected: bool) -> None:
    assert loconav.is_task(name) is expected
    if not expected:
        with pytest.raises(UserError, match="loconav_ant_maze"):
            envs.make(f"loconav_{name}")


def test_an_invalid_action_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="repeat >= 1"):
        loconav.LocoNavConfig(repeat=0)


class TestSimulated:
    """Tests that need dm_control."""

    @pytest.fixture(autouse=True)
    def _needs_dm_control(self) -> None:
        pytest.importorskip("dm_control")

    def test_the_ant_observes_its_body_only(self) -> None:
        env = envs.make("loconav_ant_maze_s")
        spaces = agent_obs_space(env.obs_space)
        assert spaces["walker/joints_pos"].shape == (8,)
        assert not any(space.is_image for space in spaces.values())
        assert env.act_space["action"].shape == (8,)
        assert env.reset()["log/coverage"] == 1
        env.close()

    def test_the_quadruped_stands_in_the_maze(self) -> None:
        env = envs.make("loconav_quadruped_maze_s")
        obs = env.reset()
        assert env.act_space["action"].shape == (12,)
        assert obs["walker/joints_pos"].shape == (16,)
        for _ in range(5):
            obs = env.step({"action": np.zeros(12, np.float32)})
        assert obs["walker/body_height"] > 0.3
        env.close()

    def test_episodes_are_truncated_after_60_seconds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert loconav.SECONDS == 60
        monkeypatch.setattr(loconav, "SECONDS", 2)
        config = envs.EnvConfig(loconav=loconav.LocoNavConfig(repeat=4))
        env = envs.make("loconav_ant_maze_s_20hz", config)
        obs, steps = env.reset(), 0
        while not obs["is_last"]:
            obs, steps = env.step({"action": np.zeros(8, np.float32)}), steps + 1
        assert steps == 10
        assert not obs["is_terminal"]
        env.close()

    def test_every_step_after_touching_the_ball_is_rewarded(self) -> None:
        env: Any = loconav.LocoNav("ant_maze_s_10hz")
        env.reset(seed=0)
        no_action = {"action": np.zeros(8, np.float32)}
        assert env.step(no_action)["reward"] == 0
        task, physics = env._sim.task, env._sim.physics
        task.walker.set_pose(physics, position=[*task._target_position[:2], 0.9])
        rows = [env.step(no_action) for _ in range(8)]
        task.walker.set_pose(physics, position=[-3.0, 3.0, 0.9])  # away from the ball
        rows += [env.step(no_action) for _ in range(3)]
        rewards = [float(row["reward"]) for row in rows]
        assert rewards == sorted(rewards)
        assert rewards[-4:] == [1, 1, 1, 1]
        assert rows[-1]["log/coverage"] >= 2
        env.close()
