"""Gymnasium's MuJoCo tasks: locomotion from joint states, optionally with images.

A task is a Gymnasium id such as `HalfCheetah-v5`, with Gymnasium's defaults: episodes
of 1000 steps, a fall is terminal, rewards are unbounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs import opengl
from reverie.envs.adapters.gymnasium import GymnasiumEnv
from reverie.envs.suite import ImageAndStateConfig, Package, Suite
from reverie.envs.wrappers import ActionRepeat
from reverie.spaces import Space

_NAMES = """
Ant-v5 HalfCheetah-v5 Hopper-v5 Humanoid-v5 HumanoidStandup-v5 InvertedDoublePendulum-v5
InvertedPendulum-v5 Pusher-v5 Reacher-v5 Swimmer-v5 Walker2d-v5
"""
TASKS: tuple[str, ...] = tuple(_NAMES.split())


@dataclass(frozen=True)
class MuJoCoConfig(ImageAndStateConfig):
    image: bool = False
    """Observe the task's camera image as `image`."""


class MuJoCo:
    """One task of Gymnasium."""

    def __init__(self, name: str, config: MuJoCoConfig | None = None):
        self.config = config = config or MuJoCoConfig()
        opengl.select_backend(config.image, "--env.mujoco.image False")
        import gymnasium

        options: dict[str, Any] = {}
        if config.image:
            height, width = config.size
            options = {"render_mode": "rgb_array", "width": width, "height": height}
        env: Any = GymnasiumEnv(
            gymnasium.make(name, **options),
            partial(gymnasium.make, name, render_mode="rgb_array"),
        )
        self._render = env.gym.render
        self._env: Any = ActionRepeat(env, config.repeat)
        self.render_fps: float = self._env.render_fps
        self.obs_space, self.act_space = dict(self._env.obs_space), env.act_space
        if not config.proprio:
            del self.obs_space["vector"]
        if config.image:
            self.obs_space["image"] = Space(np.uint8, (*config.size, 3))

    def reset(self, seed: int | None = None) -> Obs:
        return self._convert(self._env.reset(seed))

    def step(self, action: Action) -> Obs:
        return self._convert(self._env.step(action))

    def simulator_state(self) -> np.ndarray:
        state: np.ndarray = self._env.simulator_state()
        return state

    def simulator_model(self) -> str:
        return ""

    def set_simulator_state(self, state: np.ndarray, model: str = "") -> Obs:
        return self._convert(self._env.set_simulator_state(state, model))

    def close(self) -> None:
        self._env.close()

    def start_rendering(self) -> None:
        """Prepare for `render`; call `reset` next."""
        opengl.select_backend(True, "--videos 0")
        self._env.start_rendering()

    def render(self) -> np.ndarray:
        frame: np.ndarray = self._env.render()
        return frame

    def _convert(self, obs: Obs) -> Obs:
        if not self.config.proprio:
            del obs["vector"]
        if self.config.image:
            obs["image"] = np.array(self._render())
        return obs


SUITE = Suite(
    name="mujoco",
    description="Gymnasium's MuJoCo locomotion tasks",
    make=MuJoCo,
    config=MuJoCoConfig,
    tasks=TASKS,
    package=Package("mujoco", ("gymnasium", "mujoco"), group="dmc"),
)
