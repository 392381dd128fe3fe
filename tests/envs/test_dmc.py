"""DeepMind Control with the settings of DreamerV3."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import Env, UserError
from reverie.envs import opengl
from reverie.envs.suites import dmc
from reverie.run.config import resolve
from reverie.spaces import agent_obs_space

pytest.importorskip("dm_control")

STATE = {"image": False}


@contextmanager
def make_dmc(task: str, **config: Any) -> Iterator[Env]:
    env = envs.make(task, envs.EnvConfig(dmc=dmc.DMCConfig(**config)))
    yield env
    env.close()


@pytest.fixture
def needs_opengl() -> None:
    try:
        opengl.select_backend()
    except UserError as error:
        pytest.skip(str(error).splitlines()[0])


def zero(env: Env) -> dict[str, np.ndarray]:
    return {key: space.zeros() for key, space in env.act_space.items()}


def test_the_spaces_of_walker_walk() -> None:
    with make_dmc("dmc_walker_walk", **STATE) as env:
        shapes = {
            key: space.shape for key, space in agent_obs_space(env.obs_space).items()
        }
        assert shapes == {"orientations": (14,), "height": (), "velocity": (9,)}
        assert env.act_space["action"].shape == (6,)


@pytest.mark.parametrize("repeat", [1, 2])
def test_rewards_are_bounded_by_the_action_repeat(repeat: int) -> None:
    with make_dmc("dmc_cartpole_balance", **STATE, repeat=repeat) as env:
        assert env.obs_space["reward"].low == 0
        assert env.obs_space["reward"].high == repeat
        env.reset()
        rewards = [float(env.step(zero(env))["reward"]) for _ in range(20)]
    assert 0.9 * repeat < max(rewards) <= repeat


@pytest.mark.parametrize("repeat", [1, 4])
def test_episodes_are_truncated_after_1000_simulator_steps(
    repeat: int,
) -> None:
    with make_dmc("dmc_pendulum_swingup", **STATE, repeat=repeat) as env:
        obs, steps = env.reset(), 0
        while not obs["is_last"]:
            obs, steps = env.step(zero(env)), steps + 1
        assert steps == 1000 // repeat
        assert not obs["is_terminal"]


def test_all_tasks_of_the_suite_are_listed() -> None:
    from dm_control import manipulation, suite

    expected = {f"{domain}_{task}" for domain, task in suite.ALL_TASKS} | {"cup_catch"}
    bricks = {name.removesuffix("_features") for name in manipulation.ALL}
    expected |= {f"manip_{name}" for name in bricks if not name.endswith("_vision")}
    assert set(dmc.TASKS) == expected


@pytest.mark.parametrize(
    ("task", "key"),
    [
        ("dmc_cup_catch", "position"),
        ("dmc_ball_in_cup_catch", "position"),
        ("dmc_point_mass_easy", "position"),
        ("dmc_manip_reach_site", "target_position"),
    ],
)
def test_domains_with_underscores(task: str, key: str) -> None:
    with make_dmc(task, **STATE) as env:
        assert key in env.reset()


def test_rewards_of_lqr_are_unbounded() -> None:
    with make_dmc("dmc_lqr_lqr_2_1", **STATE) as env:
        assert env.obs_space["reward"].low == -np.inf


def test_unknown_tasks_suggest_the_closest_name() -> None:
    with pytest.raises(UserError, match="dmc_walker_walk"):
        envs.make("dmc_walker_wlk")


def test_presets_select_the_observations() -> None:
    proprio = resolve(["dmc_proprio"]).env.dmc
    vision = resolve(["dmc_vision"]).env.dmc
    both = resolve(flags={"task": "dmc_walker_run"}).env.dmc
    assert (proprio.image, proprio.proprio) == (False, True)
    assert (vision.image, vision.proprio) == (True, False)
    assert (both.image, both.proprio) == (True, True)
    for config in (proprio, vision, both):
        assert (config.size, config.repeat, config.camera) == ((64, 64), 1, -1)


def test_a_config_without_observations_is_refused() -> None:
    with pytest.raises(ValueError, match="image or proprio"):
        dmc.DMCConfig(image=False, proprio=False)


@pytest.mark.usefixtures("needs_opengl")
def test_images_show_the_scene() -> None:
    with make_dmc("dmc_pendulum_swingup", proprio=False) as env:
        assert list(agent_obs_space(env.obs_space)) == ["image"]
        first = env.reset()["image"]
        for _ in range(10):
            last = env.step({"action": np.ones(1, np.float32)})["image"]
    assert first.shape == (64, 64, 3)
    assert first.std() > 10
    assert (first != last).any()


@pytest.mark.usefixtures("needs_opengl")
def test_images_can_be_logged_without_being_observed() -> None:
    with make_dmc("dmc_cup_catch", image=False, log_image=True, size=(32, 48)) as env:
        assert "image" not in agent_obs_space(env.obs_space)
        assert env.reset()["log/image"].shape == (32, 48, 3)


def test_only_images_need_opengl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MUJOCO_GL", raising=False)
    monkeypatch.setattr(opengl, "probe_backend", lambda name: "broken")
    with pytest.raises(UserError, match=r"--env\.dmc\.image False"):
        envs.make("dmc_walker_walk")
    with make_dmc("dmc_walker_walk", **STATE) as env:
        assert env.reset()["is_first"]
