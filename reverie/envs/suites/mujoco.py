"""Gymnasium's MuJoCo tasks: locomotion from joint states, with a camera if wanted.

A task is the id Gymnasium has for it, such as `HalfCheetah-v5`. Everything is left as
Gymnasium sets it up: episodes of 1000 steps, a fall is terminal, rewards are not
bounded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.adapters.gymnasium import GymnasiumEnv
from reverie.envs.opengl import prepare
from reverie.spaces import Space, Spaces

_NAMES = """
Ant-v5 HalfCheetah-v5 Hopper-v5 Humanoid-v5 HumanoidStandup-v5 InvertedDoublePendulum-v5
InvertedPendulum-v5 Pusher-v5 Reacher-v5 Swimmer-v5 Walker2d-v5
"""
TASKS: tuple[str, ...] = tuple(_NAMES.split())


@dataclass(frozen=True)
class MuJoCoConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    repeat: int = 1
    """Steps of the task each action is held; their rewards are summed."""
    image: bool = False
    """Show the agent what the camera of the task sees."""
    proprio: bool = True
    """Show the agent the state of the joints."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or not (self.image or self.proprio):
            raise ValueError(
                "mujoco needs repeat >= 1 and image or proprio, got "
                f"repeat={self.repeat}, image={self.image}, proprio={self.proprio}"
            )


class MuJoCo:
    """One task, as Gymnasium makes it."""

    def __init__(self, name: str, config: MuJoCoConfig | None = None):
        self.config = config = config or MuJoCoConfig()
        prepare(config.image, instead="--env.mujoco.image False")
        import gymnasium

        options: dict[str, Any] = {}
        if config.image:
            height, width = config.size
            options = {"render_mode": "rgb_array", "width": width, "height": height}
        self._gym = gymnasium.make(name, **options)
        self._env = GymnasiumEnv(self._gym)

    @property
    def obs_space(self) -> Spaces:
        spaces = dict(self._env.obs_space)
        if not self.config.proprio:
            del spaces["vector"]
        if self.config.image:
            spaces["image"] = Space(np.dtype(np.uint8), (*self.config.size, 3))
        return spaces

    @property
    def act_space(self) -> Spaces:
        return self._env.act_space

    def reset(self, seed: int | None = None) -> Obs:
        return self._show(self._env.reset(seed))

    def step(self, action: Action) -> Obs:
        reward = 0.0
        for _ in range(self.config.repeat):
            obs = self._env.step(action)
            reward += float(obs["reward"])
            if obs["is_last"]:
                break
        return self._show({**obs, "reward": np.float32(reward)})

    def close(self) -> None:
        self._env.close()

    def _show(self, obs: Obs) -> Obs:
        if not self.config.proprio:
            del obs["vector"]
        if self.config.image:
            obs["image"] = np.array(self._gym.render())
        return obs
