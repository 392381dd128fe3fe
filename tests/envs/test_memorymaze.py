"""Memory Maze with a fake simulator; `make test-envs` runs the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.run.config import resolve

LENGTHS = {"9x9": 10, "11x11": 20, "13x13": 30, "15x15": 40}
"""Episode lengths of the fake, 1/100 of the real ones."""


class FakeMaze:
    """Integer actions, an image that depends on the seed, and a time limit."""

    def __init__(self, length: int, seed: int):
        self.length, self.seed, self.count = length, seed, 0
        self.is_closed = False

    def observation_spec(self) -> Any:
        return SimpleNamespace(shape=(64, 64, 3), dtype=np.dtype(np.uint8))

    def action_spec(self) -> Any:
        return SimpleNamespace(shape=(), dtype=np.dtype(np.int32), num_values=6)

    def reset(self) -> Any:
        self.count = 0
        return self._timestep()

    def step(self, action: Any) -> Any:
        assert type(action) is int
        assert 0 <= action < 6
        self.count += 1
        return self._timestep()

    def close(self) -> None:
        self.is_closed = True

    def _timestep(self) -> Any:
        return SimpleNamespace(
            observation=np.full((64, 64, 3), self.seed % 256, np.uint8),
            reward=1.0 if self.count == 3 else 0.0,
            discount=1.0,
            first=lambda: self.count == 0,
            last=lambda: self.count == self.length,
        )


@pytest.fixture
def mazes(monkeypatch: pytest.MonkeyPatch, working_egl: None) -> list[FakeMaze]:
    """Install a fake `memory_maze` package; return the mazes it builds."""
    made: list[FakeMaze] = []

    def task(length: int) -> Any:
        def make(*, image_only_obs: bool, seed: int) -> FakeMaze:
            assert image_only_obs
            made.append(FakeMaze(length, seed))
            return made[-1]

        return make

    tasks = ModuleType("memory_maze.tasks")
    for size, length in LENGTHS.items():
        setattr(tasks, f"memory_maze_{size}", task(length))
    package = ModuleType("memory_maze")
    package.tasks = tasks  # type: ignore[attr-defined]
    package.__spec__ = SimpleNamespace(name="memory_maze")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "memory_maze", package)
    monkeypatch.setitem(sys.modules, "memory_maze.tasks", tasks)
    return made


@pytest.mark.parametrize("size", LENGTHS)
def test_every_size_is_truncated_at_its_length(
    mazes: list[FakeMaze], size: str
) -> None:
    env = envs.make(f"memorymaze_{size}")
    assert env.obs_space["image"].shape == (64, 64, 3)
    assert env.act_space["action"].classes == 6
    obs, steps, total = env.reset(), 0, 0.0
    while not obs["is_last"]:
        obs, steps = env.step({"action": np.int32(steps % 6)}), steps + 1
        total += float(obs["reward"])
    assert steps == LENGTHS[size]
    assert not obs["is_terminal"]
    assert total == 1


def test_a_seeded_reset_builds_a_new_maze(mazes: list[FakeMaze]) -> None:
    env = envs.make("memorymaze_9x9", seed=1)
    env.reset()
    env.reset()
    assert len(mazes) == 1  # the same simulator
    env.reset(7)
    assert len(mazes) == 2
    assert mazes[0].is_closed
    env.close()
    env.close()
    assert mazes[1].is_closed
    assert mazes[0].seed != mazes[1].seed


def test_the_default_task_is_the_smallest_maze() -> None:
    config = resolve(["memorymaze"])
    assert config.task == "memorymaze_9x9"
    assert config.run.steps == 1e8
