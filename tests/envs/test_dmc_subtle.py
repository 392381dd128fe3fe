"""DMC-Subtle: tasks of DeepMind Control with small objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import UserError
from reverie.envs import opengl
from reverie.envs.suites import dmc, dmc_subtle
from reverie.run.config import resolve

ORIGINAL = {
    "ball_in_cup_catch": "ball_in_cup_catch",
    "cartpole_swingup": "cartpole_swingup",
    "finger_turn": "finger_turn_hard",
    "point_mass": "point_mass_easy",
    "reacher": "reacher_hard",
}
"""Task of the control suite with the original sizes, by task."""
STATE = dmc.DMCConfig(image=False)

every_task = pytest.mark.parametrize("name", ORIGINAL)


def test_the_suite_has_the_tasks_of_the_benchmark() -> None:
    assert set(dmc_subtle.SUITE.tasks) == set(ORIGINAL)
    assert envs.split_task("dmc_subtle_reacher") == ("dmc_subtle", "reacher")
    assert envs.benchmark_tasks("dmc_subtle")[0] == "dmc_subtle_ball_in_cup_catch"


@pytest.mark.parametrize("task", ["dmc_subtle", "dmc_subtle_walker_walk"])
def test_unknown_tasks_are_refused(task: str) -> None:
    with pytest.raises(UserError, match="dmc_subtle_ball_in_cup_catch"):
        envs.make(task)


def test_the_preset_has_the_settings_of_r2_dreamer() -> None:
    config = resolve(flags={"task": "dmc_subtle_point_mass"})
    run, env = config.run, config.env.dmc
    assert (run.steps, run.train_ratio, run.envs) == (505_000, 512, 16)
    assert (env.image, env.proprio, env.size, env.repeat) == (True, False, (64, 64), 2)
    assert envs.action_repeat(config.task, config.env) == 2
    assert resolve(flags={"task": "dmc_walker_walk"}).env.dmc == dmc.DMCConfig()


class TestSimulator:
    """Tests that need dm_control."""

    @pytest.fixture(autouse=True)
    def _needs_dm_control(self) -> None:
        pytest.importorskip("dm_control")

    @pytest.fixture
    def make(self) -> Iterator[Callable[..., Any]]:
        """Function that builds a task, which is closed at the end of the test."""
        built = []

        def build(name: str, original: bool, config: dmc.DMCConfig = STATE) -> Any:
            env = (
                dmc.DMC(ORIGINAL[name], config)
                if original
                else dmc_subtle.make_subtle(name, config)
            )
            env.reset(seed=0)
            built.append(env)
            return env

        yield build
        for env in built:
            env.close()

    @every_task
    def test_spaces_and_episodes_are_those_of_the_original(
        self, make: Callable[..., Any], name: str
    ) -> None:
        config = dmc.DMCConfig(image=False, repeat=100)
        subtle, original = make(name, False, config), make(name, True, config)
        assert subtle.obs_space == original.obs_space
        assert subtle.act_space == original.act_space
        for env in (subtle, original):
            action = {"action": env.act_space["action"].zeros()}
            rows = [env.step(action) for _ in range(10)]
            assert [bool(row["is_last"]) for row in rows] == [False] * 9 + [True]
            assert not rows[-1]["is_terminal"]
            seconds = 10 if name == "cartpole_swingup" else 20
            assert env._sim.physics.data.time == pytest.approx(seconds)

    @pytest.mark.parametrize(
        ("name", "array", "element", "size"),
        [
            ("ball_in_cup_catch", "geom_size", "ball", 0.025 / 12),
            ("ball_in_cup_catch", "tendon_width", "string", 0.003 / 12),
            ("ball_in_cup_catch", "site_size", "ball", 0.005),
            ("cartpole_swingup", "geom_size", "pole_1", 0.00225),
            ("finger_turn", "site_size", "target", 0.015),
            ("finger_turn", "site_size", "tip", 0.02),
            ("point_mass", "geom_size", "target", 0.0025),
            ("point_mass", "geom_size", "pointmass", 0.01 / 6),
            ("reacher", "geom_size", "target", 0.005),
            ("reacher", "geom_size", "finger", 0.01),
        ],
    )
    def test_sizes(
        self,
        make: Callable[..., Any],
        name: str,
        array: str,
        element: str,
        size: float,
    ) -> None:
        model = make(name, False)._sim.physics.named.model
        assert np.ravel(getattr(model, array)[element])[0] == pytest.approx(size)

    def test_only_the_ball_has_another_mass(self, make: Callable[..., Any]) -> None:
        for name in ORIGINAL:
            subtle, original = (make(name, x)._sim.physics.model for x in (False, True))
            ratio = subtle.body_mass[1:] / original.body_mass[1:]
            expected = np.ones_like(ratio)
            if name == "ball_in_cup_catch":
                expected[-1] = 1 / 12**3  # the same density
                assert subtle.body_mass[-1] == pytest.approx(3.79e-5, rel=1e-2)
            np.testing.assert_allclose(ratio, expected)

    def test_the_rewarded_regions_have_the_new_sizes(
        self, make: Callable[..., Any]
    ) -> None:
        def reward(name: str, original: bool, change: Callable[[Any], None]) -> float:
            sim = make(name, original)._sim
            with sim.physics.reset_context():
                change(sim.physics)
            return float(sim.task.get_reward(sim.physics))

        def set_reacher(physics: Any) -> None:
            x, y, _ = physics.named.data.geom_xpos["finger"]
            physics.named.model.geom_pos["target", :2] = x + 0.02, y

        # The sum of the radii of target and finger is 0.015 m instead of 0.025 m.
        assert reward("reacher", True, set_reacher) == 1
        assert reward("reacher", False, set_reacher) == 0

        def set_ball(physics: Any) -> None:
            physics.named.data.qpos[["ball_x", "ball_z"]] = 0.04, 0.35

        # The ball may be 0.05 m minus its radius away from the center of the cup.
        assert reward("ball_in_cup_catch", True, set_ball) == 0
        assert reward("ball_in_cup_catch", False, set_ball) == 1

    @every_task
    def test_seeds_reproduce_episodes(self, name: str) -> None:
        def run(seed: int) -> list[dict[str, np.ndarray]]:
            config = envs.EnvConfig(dmc=STATE)
            env = envs.make(f"dmc_subtle_{name}", config, seed)
            rng = np.random.default_rng(0)
            rows = [env.reset()]
            for _ in range(20):
                action = {"action": env.act_space["action"].sample(rng)}
                rows.append(env.step(action))
            env.close()
            return rows

        first, second, other = run(0), run(0), run(1)
        for row, same in zip(first, second, strict=True):
            for key in row:
                np.testing.assert_array_equal(row[key], same[key])
        assert (first[0]["position"] != other[0]["position"]).any()

    @every_task
    def test_objects_change_fewer_pixels(
        self, make: Callable[..., Any], name: str
    ) -> None:
        try:
            opengl.select_backend()
        except UserError as error:
            pytest.skip(str(error).splitlines()[0])
        images = {
            original: render_poses(make(name, original, dmc.DMCConfig()), name)
            for original in (False, True)
        }
        assert (images[False] != images[True]).any((1, 2, 3)).all()
        changed = {key: count_changed_pixels(value) for key, value in images.items()}
        assert 0 < changed[False] < 0.7 * changed[True], changed


POSES = 8


def render_poses(env: Any, name: str) -> np.ndarray:
    """Render a task with its object at different positions: (POSES, 64, 64, 3)."""
    physics, images = env._sim.physics, []
    qpos, model = physics.named.data.qpos, physics.named.model
    for angle in np.linspace(0, 5, POSES):
        x, y = np.sin(angle), np.cos(angle)
        with physics.reset_context():
            if name == "ball_in_cup_catch":
                qpos[["ball_x", "ball_z"]] = 0.15 * x, 0.2 + 0.1 * y
            elif name == "cartpole_swingup":
                qpos["hinge_1"] = angle
            elif name == "finger_turn":
                model.site_pos["target", ["x", "z"]] = 0.2 + 0.13 * x, 0.4 + 0.13 * y
            elif name == "point_mass":
                qpos[["root_x", "root_y"]] = 0.1 * x, 0.1 * y
            else:
                model.geom_pos["target", :2] = 0.15 * x, 0.15 * y
        images.append(env._render())
    return np.stack(images)


def count_changed_pixels(images: np.ndarray) -> int:
    """Return how many pixels differ between successive images."""
    return int((images[1:] != images[:-1]).any(-1).sum())
