"""Meta-World with a fake simulator; `make test-envs` runs the real one."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import UserError
from reverie.envs.suites import metaworld
from reverie.run.config import resolve
from reverie.spaces import agent_obs_space

CAMERAS = {*metaworld.ROTATED_CAMERAS, "topview", "behindGripper", "gripperPOV"}


class FakeSawyer:
    """The parts of Meta-World's environments that the suite uses, with their checks."""

    def __init__(self, **options: Any):
        assert options.keys() <= {"render_mode", "camera_name", "width", "height"}
        assert options.get("camera_name", "topview") in CAMERAS
        self.options = options
        self._partially_observable = self._freeze_rand_vec = True
        self._set_task_called = self.seeded_rand_vec = False
        self.seeds: list[int] = []
        self.count = 0
        self.is_closed = False

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict]:
        assert self._set_task_called
        assert not self._freeze_rand_vec
        assert self.seeded_rand_vec
        self.count = 0
        return self._state(), {}

    def step(self, action: np.ndarray) -> Any:
        assert action.shape == (4,)
        assert (np.abs(action) <= 1).all()
        assert self.count < 500, "You must reset the env manually once truncate==True"
        self.count += 1
        success = float(self.count == 3)
        return self._state(), 2.0, False, self.count == 500, {"success": success}

    def render(self) -> np.ndarray:
        assert self.options["render_mode"] == "rgb_array"
        image = np.zeros((self.options["height"], self.options["width"], 3), np.uint8)
        image[0, 0] = 255
        return image

    def close(self) -> None:
        self.is_closed = True

    def _state(self) -> np.ndarray:
        return np.full(39, 0.0 if self._partially_observable else 1.0)


@pytest.fixture(autouse=True)
def simulators(monkeypatch: pytest.MonkeyPatch, working_egl: None) -> list[FakeSawyer]:
    """Install a fake `metaworld` package; return the simulators it builds."""
    made: list[FakeSawyer] = []

    def make(**options: Any) -> FakeSawyer:
        made.append(FakeSawyer(**options))
        return made[-1]

    tables = ModuleType("metaworld.env_dict")
    tables.ALL_V3_ENVIRONMENTS = dict.fromkeys(metaworld.TASKS, make)
    package = ModuleType("metaworld")
    package.__spec__ = SimpleNamespace(name="metaworld")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "metaworld", package)
    monkeypatch.setitem(sys.modules, "metaworld.env_dict", tables)
    return made


def zero() -> dict[str, np.ndarray]:
    return {"action": np.zeros(4, np.float32)}


def test_there_are_50_tasks_and_unknown_ones_suggest_them() -> None:
    assert len(metaworld.TASKS) == 50
    with pytest.raises(UserError, match="metaworld_reach-v3"):
        envs.make("metaworld_reach")


def test_observations_are_image_and_state_with_the_goal() -> None:
    env = envs.make("metaworld_reach-v3")
    shapes = {key: space.shape for key, space in agent_obs_space(env.obs_space).items()}
    assert shapes == {"image": (64, 64, 3), "vector": (39,)}
    assert env.reset()["vector"].all()


def test_images_of_upside_down_cameras_are_rotated() -> None:
    def bright_corner(camera: str) -> list[int]:
        config = metaworld.MetaWorldConfig(camera=camera, size=(32, 48))
        image = envs.make("metaworld_push-v3", envs.EnvConfig(metaworld=config)).reset()
        assert image["image"].shape == (32, 48, 3)
        return np.argwhere(image["image"][..., 0])[0].tolist()

    assert bright_corner("corner2") == [31, 47]
    assert bright_corner("topview") == [0, 0]


def test_the_preset_repeats_actions_and_success_is_logged() -> None:
    config = resolve(["metaworld"])
    env = envs.make("metaworld_door-open-v3", config.env)
    assert list(agent_obs_space(env.obs_space)) == ["image"]
    rows = [env.reset()] + [env.step(zero()) for _ in range(250)]
    assert [float(row["log/success"]) for row in rows[:4]] == [0, 0, 1, 0]
    assert {float(row["reward"]) for row in rows[1:]} == {4.0}
    assert rows[-1]["is_last"]
    assert not any(row["is_last"] for row in rows[:-1])
    assert not rows[-1]["is_terminal"]


def test_seeding_and_closing(simulators: list[FakeSawyer]) -> None:
    env = envs.make("metaworld_reach-v3")
    env.reset(5)
    env.reset()
    assert simulators[0].seeds[1:] == [5]
    env.close()
    assert simulators[0].is_closed


def test_without_images_nothing_is_rendered(simulators: list[FakeSawyer]) -> None:
    config = envs.EnvConfig(metaworld=metaworld.MetaWorldConfig(image=False))
    env = envs.make("metaworld_reach-v3", config)
    assert list(agent_obs_space(env.obs_space)) == ["vector"]
    env.reset()
    assert simulators[0].options == {}
    with pytest.raises(ValueError, match="image or proprio"):
        metaworld.MetaWorldConfig(image=False, proprio=False)
