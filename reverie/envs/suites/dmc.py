"""DeepMind Control: continuous control from joint states, pixels or both.

Tasks are `DOMAIN_TASK` of the suite (`walker_walk`; `cup` is short for `ball_in_cup`)
and `manip_NAME` of its manipulation tasks. The settings are DreamerV3's: 64x64 pixels,
one simulator step per action, and both kinds of observation unless one is turned off.
The rewards of the suite lie in [0, 1], so that 1000 steps earn at most 1000.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.adapters.dm_env import DmEnv
from reverie.envs.opengl import prepare
from reverie.spaces import Space, Spaces

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

DOMAINS = ("ball_in_cup", "humanoid_CMU", "point_mass")
"""The domains whose names have an underscore of their own."""

CAMERAS = {"quadruped": 2}
"""Where another camera than the first one shows what matters."""

UNBOUNDED = ("lqr",)
"""Domains whose rewards do not lie in [0, 1]."""


@dataclass(frozen=True)
class DMCConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    repeat: int = 1
    """Simulator steps each action is held; their rewards are summed."""
    image: bool = True
    """Show the agent what a camera sees."""
    proprio: bool = True
    """Show the agent the state: positions, velocities and what else the task gives."""
    camera: int = -1
    """The camera; -1 is the usual one of the domain."""
    log_image: bool = False
    """Draw what the agent does not see for people (`log/image`), as DreamerV3 does.
    It takes longer than the simulation."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or not (self.image or self.proprio):
            raise ValueError(
                "dmc needs repeat >= 1 and image or proprio, got "
                f"repeat={self.repeat}, image={self.image}, proprio={self.proprio}"
            )


class DMC:
    """One task of DeepMind Control."""

    def __init__(self, name: str, config: DMCConfig | None = None, seed: int = 0):
        self.config = config = config or DMCConfig()
        self._picture = "image" if config.image else "log/image" * config.log_image
        prepare(bool(self._picture), instead="--env.dmc.image False")
        domain, simulator = _load(name, config.image, seed)
        self._sim = simulator
        squeeze = domain == "manip"
        self._env = DmEnv(simulator, _reseed(simulator), config.repeat, squeeze)
        self._camera = CAMERAS.get(domain, 0) if config.camera < 0 else config.camera
        self._bounded = domain not in UNBOUNDED
        self._obs_space = self._spaces()

    @property
    def obs_space(self) -> Spaces:
        return self._obs_space

    @property
    def act_space(self) -> Spaces:
        return self._env.act_space

    def reset(self, seed: int | None = None) -> Obs:
        return self._obs(self._env.reset(seed))

    def step(self, action: Action) -> Obs:
        return self._obs(self._env.step(action))

    def close(self) -> None:
        physics = self._sim.physics
        self._sim.close()
        with contextlib.suppress(ReferenceError):  # composer tasks have done so
            physics.free()

    def _spaces(self) -> Spaces:
        spaces = self._env.obs_space
        flags = {k: spaces.pop(k) for k in ("is_first", "is_last", "is_terminal")}
        reward = spaces.pop("reward")
        # Cameras that tasks bring along give way to ours, which has the size asked for.
        seen = {
            k: s for k, s in spaces.items() if not s.is_image and self.config.proprio
        }
        if self._bounded:
            reward = replace(reward, low=0.0, high=float(self.config.repeat))
        if self._picture:
            image = Space(np.dtype(np.uint8), (*self.config.size, 3))
            seen[self._picture] = image
        return {**seen, "reward": reward, **flags}

    def _obs(self, obs: Obs) -> Obs:
        shown = {key: obs[key] for key in self._obs_space if key != self._picture}
        if self._picture:
            shown[self._picture] = self._draw()
        return shown

    def _draw(self) -> np.ndarray:
        height, width = self.config.size
        image = self._sim.physics.render(height, width, camera_id=self._camera)
        return np.ascontiguousarray(image)


def _load(name: str, image: bool, seed: int) -> tuple[str, Any]:
    """The domain of a task, and its simulator."""
    name = f"ball_in_{name}" if name.startswith("cup_") else name
    wide = [domain for domain in DOMAINS if name.startswith(f"{domain}_")]
    domain = wide[0] if wide else name.partition("_")[0]
    task = name.removeprefix(f"{domain}_")
    if domain == "manip":
        from dm_control import manipulation

        # Without a camera the task is only whole with the positions of the bricks.
        wanted = f"{task}_vision" if image else f"{task}_features"
        known = wanted if wanted in manipulation.ALL else f"{task}_features"
        return domain, manipulation.load(known, seed=seed)
    from dm_control import suite

    return domain, suite.load(domain, task, task_kwargs={"random": seed})


def _reseed(simulator: Any) -> Any:
    """Composer tasks keep their rng in the environment, those of the suite in the
    task; seeding them in place reaches everyone who holds them."""
    rng = getattr(simulator, "random_state", None)
    return (simulator.task.random if rng is None else rng).seed
