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
    """The length of the shortest way from P to G; -1 if there is none."""
    grid = [list(line) for line in text.splitlines()]
    places = {grid[i][j]: (i, j) for i in range(len(grid)) for j in range(len(grid))}
    seen, queue = {places["P"]}, deque([(places["P"], 0)])
    while queue:
        (i, j), count = queue.popleft()
        if (i, j) == places["G"]:
            return count
        for after in ((i + 1, j), (i - 1, j), (i, j + 1), (i, j - 1)):
            if grid[after[0]][after[1]] != "*" and after not in seen:
                seen.add(after)
                queue.append((after, count + 1))
    return -1


def test_every_maze_can_be_walked_and_larger_ones_take_longer() -> None:
    lengths = []
    for rooms in loconav.SIZES.values():
        text = loconav.layout(rooms)
        assert text == loconav.layout(rooms)
        lines = text.splitlines()
        assert {len(line) for line in lines} == {2 * rooms + 1} == {len(lines)}
        assert set(lines[0]) == set(lines[-1]) == {"*"}
        assert text.count("P") == text.count("G") == 1
        lengths.append(steps_to_goal(text))
    assert lengths[0] > 0
    assert lengths == sorted(lengths)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("ant_maze_m", True),
        ("quadruped_maze_xxl_20hz", True),
        ("ant_maze_m_0hz", False),
        ("ant_maze_xxxl", False),
        ("cat_maze_m", False),
    ],
)
def test_names_are_a_body_a_maze_and_perhaps_a_rate(name: str, known: bool) -> None:
    assert loconav.is_task(name) is known
    if not known:
        with pytest.raises(UserError, match="loconav_ant_maze"):
            envs.make(f"loconav_{name}")


def test_a_wrong_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="repeat >= 1"):
        loconav.LocoNavConfig(repeat=0)


class TestSimulated:
    """With dm_control."""

    @pytest.fixture(autouse=True)
    def _needs_dm_control(self) -> None:
        pytest.importorskip("dm_control")

    def test_an_ant_feels_its_body_and_sees_nothing(self) -> None:
        env = envs.make("loconav_ant_maze_s")
        spaces = agent_obs_space(env.obs_space)
        assert spaces["walker/joints_pos"].shape == (8,)
        assert not any(space.is_image for space in spaces.values())
        assert env.act_space["action"].shape == (8,)
        assert env.reset()["log/coverage"] == 1
        env.close()

    def test_the_quadruped_of_the_suite_stands_in_the_maze(self) -> None:
        env = envs.make("loconav_quadruped_maze_s")
        obs = env.reset()
        assert env.act_space["action"].shape == (12,)
        assert obs["walker/joints_pos"].shape == (16,)
        for _ in range(5):
            obs = env.step({"action": np.zeros(12, np.float32)})
        assert obs["walker/body_height"] > 0.3
        env.close()

    def test_sixty_seconds_end_an_episode_without_being_terminal(
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

    def test_the_ball_pays_from_the_first_touch_on(self) -> None:
        env: Any = loconav.LocoNav("ant_maze_s_10hz")
        env.reset(seed=0)
        still = {"action": np.zeros(8, np.float32)}
        assert env.step(still)["reward"] == 0
        task, physics = env._sim.task, env._sim.physics
        task.walker.set_pose(physics, position=[*task._target_position[:2], 0.9])
        rows = [env.step(still) for _ in range(8)]
        task.walker.set_pose(physics, position=[-3.0, 3.0, 0.9])  # and away again
        rows += [env.step(still) for _ in range(3)]
        paid = [float(row["reward"]) for row in rows]
        assert paid == sorted(paid)
        assert paid[-4:] == [1, 1, 1, 1]
        assert rows[-1]["log/coverage"] >= 2
        env.close()
