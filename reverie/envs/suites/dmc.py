"""DeepMind Control: continuous control from joint states, images or both.

Tasks are `DOMAIN_TASK` of the suite (`walker_walk`; `cup` is short for `ball_in_cup`)
and `manip_NAME` for its manipulation tasks. The defaults are those of DreamerV3: images
of 64x64 pixels and one simulator step per action. Rewards of the suite are in [0, 1],
so the maximum return of 1000 steps is 1000.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.envs import opengl
from reverie.envs.adapters.dm_env import DmEnv
from reverie.envs.mujoco_state import read_state, split_state
from reverie.envs.suite import ImageAndStateConfig, Package, Suite
from reverie.spaces import Space, Spaces, agent_obs_space, step_spaces

_NAMES = """
acrobot_swingup acrobot_swingup_sparse ball_in_cup_catch cartpole_balance
cartpole_balance_sparse cartpole_swingup cartpole_swingup_sparse cartpole_three_poles
cartpole_two_poles cheetah_run cup_catch dog_fetch dog_run dog_stand dog_trot dog_walk
finger_spin finger_turn_easy finger_turn_hard fish_swim fish_upright hopper_hop
hopper_stand humanoid_CMU_run humanoid_CMU_stand humanoid_CMU_walk humanoid_run
humanoid_run_pure_state humanoid_stand humanoid_walk lqr_lqr_2_1 lqr_lqr_6_2
manip_lift_brick manip_lift_large_box manip_place_brick manip_place_cradle
manip_reach_duplo manip_reach_site manip_reassemble_3_bricks_fixed_order
manip_reassemble_5_bricks_random_order manip_stack_2_bricks
manip_stack_2_bricks_moveable_base manip_stack_2_of_3_bricks_random_order
manip_stack_3_bricks manip_stack_3_bricks_random_order manipulator_bring_ball
manipulator_bring_peg
manipulator_insert_ball manipulator_insert_peg pendulum_swingup point_mass_easy
point_mass_hard quadruped_escape quadruped_fetch quadruped_run quadruped_walk
reacher_easy reacher_hard stacker_stack_2 stacker_stack_4 swimmer_swimmer15
swimmer_swimmer6 walker_run walker_stand walker_walk
"""
TASKS: tuple[str, ...] = tuple(_NAMES.split())

UNDERSCORE_DOMAINS = ("ball_in_cup", "humanoid_CMU", "point_mass")
"""Domains whose names contain an underscore."""

CAMERAS = {"quadruped": 2}
"""Ids of the default cameras; 0 for all other domains."""

UNBOUNDED_REWARD = ("lqr",)
"""Domains whose rewards are not in [0, 1]."""

PACKAGE = Package(
    "dm_control",
    ("dm_control", "mujoco"),
    (3, 12),
    group="dmc",
    license="Apache-2.0",
)


@dataclass(frozen=True)
class DMCConfig(ImageAndStateConfig):
    camera: int = -1
    """Camera id; -1 selects the default of the domain."""
    log_image: bool = False
    """If `image` is off, render `log/image` for videos, as DreamerV3 does. Rendering
    takes longer than a simulator step."""


class DMC:
    """One task of DeepMind Control."""

    def __init__(
        self,
        name: str,
        config: DMCConfig | None = None,
        seed: int = 0,
        load: Callable[[str, bool, int], tuple[str, Any]] | None = None,
    ):
        """`load` replaces `load_task` in suites that modify tasks."""
        self.config = config = config or DMCConfig()
        log_key = "log/image" if config.log_image else ""  # empty: render nothing
        self._image_key = "image" if config.image else log_key
        render = bool(self._image_key)
        opengl.select_backend(render, no_images_flag="--env.dmc.image False")
        domain, simulator = (load or load_task)(name, config.image, seed)
        self._sim = simulator
        set_seed = _random_state(simulator).seed
        self._env = DmEnv(simulator, set_seed, config.repeat, squeeze=domain == "manip")
        self._camera = CAMERAS.get(domain, 0) if config.camera < 0 else config.camera
        self._has_bounded_reward = domain not in UNBOUNDED_REWARD
        self.obs_space, self.act_space = self._make_obs_space(), self._env.act_space

    def reset(self, seed: int | None = None) -> Obs:
        return self._obs(self._env.reset(seed))

    def step(self, action: Action) -> Obs:
        return self._obs(self._env.step(action))

    def simulator_state(self) -> np.ndarray:
        physics = self._sim.physics
        return read_state(physics.model, physics.data)

    def simulator_model(self) -> str:
        """Return an empty string: the scene of a task is the same in all episodes."""
        return ""

    def set_simulator_state(self, state: np.ndarray, model: str = "") -> Obs:
        """Set the state of a task of the suite; `model` is not used."""
        import dm_env

        sim, physics = self._sim, self._sim.physics
        if not hasattr(sim.task, "get_observation"):
            raise UserError(
                "The states of manipulation tasks cannot be set.\n"
                "  Fix: use a task of the control suite, such as dmc_walker_walk."
            )
        time, *parts = split_state(physics.model, state)
        with physics.reset_context():
            physics.set_state(np.concatenate(parts))
        physics.data.time = time
        timestep = dm_env.restart(sim.task.get_observation(physics))
        return self._obs(self._env.observe(timestep, 0.0))

    def close(self) -> None:
        physics = self._sim.physics
        self._sim.close()
        # environments of `dm_control.composer` have freed it already
        with contextlib.suppress(ReferenceError):
            physics.free()

    def _make_obs_space(self) -> Spaces:
        # Images of the task are left out; one of the configured size replaces them.
        proprio = {
            key: space
            for key, space in agent_obs_space(self._env.obs_space).items()
            if not space.is_image and self.config.proprio
        }
        rewards = (0, self.config.repeat) if self._has_bounded_reward else ()
        spaces = {**proprio, **step_spaces(*rewards)}
        if self._image_key:
            spaces[self._image_key] = Space(np.uint8, (*self.config.size, 3))
        return spaces

    def _obs(self, obs: Obs) -> Obs:
        observed = {key: obs[key] for key in self.obs_space if key != self._image_key}
        if self._image_key:
            observed[self._image_key] = self._render()
        return observed

    def _render(self) -> np.ndarray:
        height, width = self.config.size
        image = self._sim.physics.render(height, width, camera_id=self._camera)
        return np.ascontiguousarray(image)


def load_task(name: str, image: bool, seed: int) -> tuple[str, Any]:
    """Return the domain and the simulator of a task.

    Manipulation tasks have another variant if images are observed (`image`).
    """
    name = f"ball_in_{name}" if name.startswith("cup_") else name
    matches = [d for d in UNDERSCORE_DOMAINS if name.startswith(f"{d}_")]
    domain = matches[0] if matches else name.partition("_")[0]
    task = name.removeprefix(f"{domain}_")
    if domain == "manip":
        from dm_control import manipulation

        # `features` observe the positions of the bricks, which are not observed with
        # images (`vision`).
        variant = f"{task}_vision" if image else f"{task}_features"
        if variant not in manipulation.ALL:
            variant = f"{task}_features"
        return domain, manipulation.load(variant, seed=seed)
    from dm_control import suite

    return domain, suite.load(domain, task, task_kwargs={"random": seed})


def _random_state(simulator: Any) -> Any:
    """Return the `RandomState` of a simulator, which is seeded in place.

    Environments of `dm_control.composer` have one; the suite stores it in the task.
    """
    rng = getattr(simulator, "random_state", None)
    return simulator.task.random if rng is None else rng


SUITE = Suite(
    name="dmc",
    description="DeepMind Control: continuous control from states or images",
    make=DMC,
    config=DMCConfig,
    tasks=TASKS,
    name_format="dmc_DOMAIN_TASK, such as dmc_walker_walk",
    package=PACKAGE,
)
