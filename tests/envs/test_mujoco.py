"""Gymnasium's MuJoCo tasks."""

from __future__ import annotations

import numpy as np
import pytest

from reverie import envs
from reverie.api import UserError
from reverie.envs import opengl
from reverie.envs.suites import mujoco
from reverie.spaces import agent_obs_space

pytest.importorskip("mujoco")
pytest.importorskip("imageio")


@pytest.mark.parametrize(
    ("task", "obs_size", "act_size"),
    [
        ("HalfCheetah-v5", 17, 6),
        ("Ant-v5", 105, 8),
        ("Humanoid-v5", 348, 17),
    ],
)
def test_spaces_equal_those_of_gymnasium(
    task: str, obs_size: int, act_size: int
) -> None:
    env = envs.make(f"mujoco_{task}")
    spaces = agent_obs_space(env.obs_space)
    assert {key: space.shape for key, space in spaces.items()} == {
        "vector": (obs_size,)
    }
    assert env.act_space["action"].shape == (act_size,)
    assert (env.act_space["action"].high == 1).all()
    env.close()


def test_every_task_is_a_gymnasium_id() -> None:
    import gymnasium

    assert set(mujoco.TASKS) <= set(gymnasium.registry)


@pytest.mark.parametrize("repeat", [1, 4])
def test_the_time_limit_truncates_episodes(repeat: int) -> None:
    config = envs.EnvConfig(mujoco=mujoco.MuJoCoConfig(repeat=repeat))
    env = envs.make("mujoco_Swimmer-v5", config)
    obs, steps = env.reset(), 0
    while not obs["is_last"]:
        obs, steps = env.step({"action": np.zeros(2, np.float32)}), steps + 1
    assert steps == 1000 // repeat
    assert not obs["is_terminal"]
    env.close()


def test_a_fall_is_terminal() -> None:
    env = envs.make("mujoco_Hopper-v5")
    obs = env.reset()
    while not obs["is_last"]:
        obs = env.step({"action": np.ones(3, np.float32)})
    assert obs["is_terminal"]
    env.close()


def test_images_are_observed_if_configured() -> None:
    try:
        opengl.select_backend()
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])
    config = mujoco.MuJoCoConfig(image=True, proprio=False, size=(32, 48))
    env = envs.make("mujoco_InvertedPendulum-v5", envs.EnvConfig(mujoco=config))
    assert list(agent_obs_space(env.obs_space)) == ["image"]
    image = env.reset()["image"]
    assert image.shape == (32, 48, 3)
    assert image.std() > 5
    env.close()


def test_invalid_names_and_settings_are_refused() -> None:
    with pytest.raises(UserError, match="mujoco_HalfCheetah-v5"):
        envs.make("mujoco_HalfCheeta-v5")
    with pytest.raises(ValueError, match="image or proprio"):
        mujoco.MuJoCoConfig(proprio=False)
