"""Tests that need the real simulators; `make test-envs` runs them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.envs.suites import memorymaze, metaworld, robosuite
from reverie.envs.suites.loconav import LocoNavConfig
from reverie.envs.suites.metaworld import MetaWorldConfig
from reverie.envs.suites.robosuite import RobosuiteConfig

pytestmark = pytest.mark.slow

RENDER = os.environ.get("REVERIE_TEST_IMAGES") == "1"
renders = pytest.mark.skipif(not RENDER, reason="renders images")


def needs(package: str) -> Any:
    """Like importorskip, but without an import, which needs an OpenGL backend."""
    missing = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(missing, reason=f"needs {package}")


def zero(env: Any) -> dict[str, np.ndarray]:
    return {key: space.zeros() for key, space in env.act_space.items()}


@renders
@needs("dm_control")
def test_images_of_dmc_are_rendered() -> None:
    for name in ("dmc_walker_walk", "dmc_quadruped_run", "dmc_manip_reach_site"):
        env = envs.make(name)
        image = env.reset()["image"]
        env.close()
        assert image.shape == (64, 64, 3)
        assert image.std() > 10, name


@renders
@needs("dm_control")
def test_images_of_loconav_are_rendered() -> None:
    config = envs.EnvConfig(loconav=LocoNavConfig(log_image=True))
    env = envs.make("loconav_ant_maze_m", config)
    image = env.reset()["log/image"]
    env.close()
    assert image.shape == (64, 64, 3)
    assert image.std() > 10


@renders
@needs("memory_maze")
class TestMemoryMaze:
    @pytest.mark.parametrize("size", memorymaze.SUITE.tasks)
    def test_images_of_every_size_are_rendered(self, size: str) -> None:
        env = envs.make(f"memorymaze_{size}")
        first = env.reset()["image"]
        later = [env.step({"action": np.int32(2)})["image"] for _ in range(3)]
        env.close()
        assert first.std() > 10
        assert (first != later[-1]).any()


@needs("metaworld")
class TestMetaWorld:
    def test_the_tasks_are_those_of_the_package(self) -> None:
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        assert set(metaworld.TASKS) == set(ALL_V3_ENVIRONMENTS)

    def test_goals_are_random_and_observed(self) -> None:
        config = envs.EnvConfig(metaworld=MetaWorldConfig(image=False))
        env = envs.make("metaworld_reach-v3", config)
        goals = [env.reset()["vector"][-3:] for _ in range(3)]
        env.close()
        assert all(goal.any() for goal in goals)
        assert len({tuple(goal) for goal in goals}) == 3

    @renders
    def test_images_are_upright(self) -> None:
        env = envs.make("metaworld_reach-v3")
        image = env.reset()["image"].astype(np.float32)
        env.close()
        # The brown table is in the lower half, the gray wall above it.
        brown = image[..., 0] - image[..., 2]
        assert brown[40:].mean() > brown[:20].mean() + 10


@needs("robosuite")
class TestRobosuite:
    @pytest.fixture
    def lift(self) -> Iterator[Any]:
        config = RobosuiteConfig(cameras=(), object=True, hard_reset=False)
        env = envs.make("robosuite_Lift", envs.EnvConfig(robosuite=config))
        yield env
        env.close()

    def test_the_tasks_are_those_of_the_package(self) -> None:
        import robosuite as package

        expected = {*package.ALL_ENVIRONMENTS, *robosuite.ALIASES}
        assert set(robosuite.TASKS) == expected

    @pytest.mark.parametrize(("task", "size"), [("Lift", 10), ("Can", 14)])
    def test_objects_have_the_size_of_the_datasets(self, task: str, size: int) -> None:
        config = RobosuiteConfig(cameras=(), object=True, hard_reset=False)
        env = envs.make(f"robosuite_{task}", envs.EnvConfig(robosuite=config))
        assert env.obs_space["object"].shape == (size,)
        assert env.act_space["action"].shape == (7,)
        env.close()

    @pytest.mark.parametrize(
        ("task", "actions", "fingers"),
        [
            ("TwoArmLift", 14, 2),
            ("TwoArmHandover", 14, 2),
            ("TwoArmTransport", 14, 2),
            ("TwoArmPegInHole", 12, 0),
            ("Wipe", 6, 0),
        ],
    )
    def test_two_arm_tasks_and_wipe_run_an_episode(
        self, task: str, actions: int, fingers: int
    ) -> None:
        config = RobosuiteConfig(cameras=(), hard_reset=False, horizon=3)
        env = envs.make(f"robosuite_{task}", envs.EnvConfig(robosuite=config))
        assert env.act_space["action"].shape == (actions,)
        assert ("robot0_gripper_qpos" in env.obs_space) == (fingers > 0)
        assert ("robot1_joint_pos" in env.obs_space) == task.startswith("TwoArm")
        rows = [env.reset(), *(env.step(zero(env)) for _ in range(3))]
        env.close()
        assert [bool(row["is_last"]) for row in rows] == [False, False, False, True]
        assert all(np.isfinite(row["reward"]) for row in rows)

    def test_an_episode_starts_in_a_recorded_state(self, lift: Any) -> None:
        lift.reset()
        for _ in range(3):
            expected = lift.step({"action": np.full(7, 0.5, np.float32)})
        state = lift.simulator_state()
        lift.reset()
        restored = lift.set_simulator_state(state)
        reached = lift.simulator_state()
        np.testing.assert_array_equal(reached, state)
        # Observations of a step are sampled shortly before its end.
        for key in ("object", "robot0_joint_pos"):
            np.testing.assert_allclose(restored[key], expected[key], atol=5e-3)

    def test_a_lifted_cube_is_success(self, lift: Any) -> None:
        assert lift.reset()["log/success"] == 0
        cube = lift._sim.cube.joints[0]
        lift._sim.sim.data.set_joint_qpos(cube, np.array([0, 0, 1.2, 1, 0, 0, 0.0]))
        assert lift.step(zero(lift))["log/success"] == 1

    def test_the_expert_lifts_the_cube(self) -> None:
        config = RobosuiteConfig(cameras=(), hard_reset=False, end_on_success=True)
        env = envs.make("robosuite_Lift", envs.EnvConfig(robosuite=config))
        successes = []
        for seed in range(5):
            obs = env.reset(seed)
            while not obs["is_last"]:
                obs = env.step(env.expert())
            successes.append(bool(obs["log/success"]))
        env.close()
        assert successes == [True] * 5

    @renders
    def test_images_of_both_cameras_are_upright(self) -> None:
        config = RobosuiteConfig(cameras=("agentview", "robot0_eye_in_hand"))
        env = envs.make("robosuite_Lift", envs.EnvConfig(robosuite=config))
        image = env.reset()["image"].astype(np.float32)
        env.close()
        assert image.shape == (84, 84, 6)
        # The dark arm is at the top of the front view and at the bottom of the view of
        # the hand camera. The table is bright.
        assert image[:15, :, :3].mean() < image[30:, :, :3].mean()
        assert image[75:, :, 3:].mean() < image[:40, :, 3:].mean()
