"""Meta-World: 50 manipulation tasks with one robot arm.

Objects and goal are placed randomly in every episode. The goal is part of the state
vector (39 numbers) and is drawn in the images. An episode has 500 simulator steps;
success does not end it, but is logged as `log/success`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs import opengl
from reverie.envs.seeding import SEED_RANGE
from reverie.envs.suite import ImageAndStateConfig, Package, Suite
from reverie.spaces import Space, Spaces, step_spaces, step_values

_NAMES = """
assembly basketball bin-picking box-close button-press button-press-topdown
button-press-topdown-wall button-press-wall coffee-button coffee-pull coffee-push
dial-turn disassemble door-close door-lock door-open door-unlock drawer-close
drawer-open faucet-close faucet-open hammer hand-insert handle-press handle-press-side
handle-pull handle-pull-side lever-pull peg-insert-side peg-unplug-side
pick-out-of-hole pick-place pick-place-wall plate-slide plate-slide-back
plate-slide-back-side plate-slide-side push push-back push-wall reach reach-wall
shelf-place soccer stick-pull stick-push sweep sweep-into window-close window-open
"""
TASKS: tuple[str, ...] = tuple(f"{name}-v3" for name in _NAMES.split())

ROTATED_CAMERAS = ("corner", "corner2", "corner3")
"""Cameras that are mounted upside down; their images are rotated by 180 degrees."""

STATE_SIZE = 39
"""Length of the state vector."""


@dataclass(frozen=True)
class MetaWorldConfig(ImageAndStateConfig):
    camera: str = "corner2"
    """Camera: corner, corner2, corner3, topview, behindGripper or gripperPOV."""


class MetaWorld:
    """One task; rewards are in [0, 10] per simulator step."""

    def __init__(self, name: str, config: MetaWorldConfig | None = None, seed: int = 0):
        self.config = config = config or MetaWorldConfig()
        opengl.select_backend(config.image, "--env.metaworld.image False")
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        options: dict[str, Any] = {}
        if config.image:
            height, width = config.size
            options = {"render_mode": "rgb_array", "camera_name": config.camera}
            options |= {"width": width, "height": height}
        self._sim: Any = ALL_V3_ENVIRONMENTS[name](**options)
        # These are the settings of the package's variants with an observable goal, but
        # every episode draws a new goal from the seeded random generator.
        self._sim._partially_observable = False
        self._sim._freeze_rand_vec = False
        self._sim._set_task_called = True
        self._sim.seeded_rand_vec = True
        # remove the cached space, which was computed for a hidden goal
        vars(self._sim).pop("sawyer_observation_space", None)
        self._sim.seed(seed)
        self.obs_space: Spaces = {"log/success": Space(np.float32), **step_spaces()}
        if config.proprio:
            self.obs_space["vector"] = Space(np.float32, STATE_SIZE)
        if config.image:
            self.obs_space["image"] = Space(np.uint8, (*config.size, 3))
        self.act_space = {"action": Space(np.float32, 4, -1, 1)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._sim.seed(seed % SEED_RANGE)
        state, _ = self._sim.reset()
        return {**self._obs(state, 0.0), **step_values(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        move = np.asarray(action["action"], np.float32)
        total = success = 0.0
        for _ in range(self.config.repeat):
            state, reward, terminated, truncated, info = self._sim.step(move)
            total += float(reward)
            success = max(success, float(info["success"]))
            last = bool(terminated or truncated)
            if last:
                break
        return {
            **self._obs(state, success),
            **step_values(total, last=last, terminal=bool(terminated)),
        }

    def close(self) -> None:
        self._sim.close()

    def _obs(self, state: np.ndarray, success: float) -> Obs:
        obs: Obs = {"log/success": np.float32(success)}
        if self.config.proprio:
            obs["vector"] = np.array(state, np.float32)
        if self.config.image:
            image = np.asarray(self._sim.render())
            if self.config.camera in ROTATED_CAMERAS:
                image = image[::-1, ::-1]
            obs["image"] = np.ascontiguousarray(image)
        return obs


SUITE = Suite(
    name="metaworld",
    description="Meta-World: 50 manipulation tasks",
    make=MetaWorld,
    config=MetaWorldConfig,
    tasks=TASKS,
    package=Package("metaworld", ("metaworld", "mujoco"), (3, 13)),
)
