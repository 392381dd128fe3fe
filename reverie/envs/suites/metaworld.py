"""Meta-World: 50 manipulation tasks for one robot arm.

Every episode places the objects and the goal anew. The state the agent may see, 39
numbers, holds the goal; for a camera it is drawn into the scene. An episode has 500
steps of the simulator, and success does not end it: `log/success` tells people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.opengl import prepare
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import Space, Spaces

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

UPSIDE_DOWN = ("corner", "corner2", "corner3")
"""Cameras that hang head down; their images are turned."""

STATE = 39


@dataclass(frozen=True)
class MetaWorldConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    repeat: int = 1
    """Simulator steps each action is held; their rewards are summed."""
    image: bool = True
    """Show the agent what a camera sees."""
    proprio: bool = True
    """Show the agent the hand, the objects and the goal."""
    camera: str = "corner2"
    """corner, corner2, corner3, topview, behindGripper or gripperPOV."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or not (self.image or self.proprio):
            raise ValueError(
                "metaworld needs repeat >= 1 and image or proprio, got "
                f"repeat={self.repeat}, image={self.image}, proprio={self.proprio}"
            )


class MetaWorld:
    """One task; its rewards lie in [0, 10] for each step of the simulator."""

    def __init__(self, name: str, config: MetaWorldConfig | None = None, seed: int = 0):
        self.config = config = config or MetaWorldConfig()
        prepare(config.image, instead="--env.metaworld.image False")
        from metaworld.env_dict import ALL_V3_ENVIRONMENTS

        options: dict[str, Any] = {}
        if config.image:
            height, width = config.size
            options = {"render_mode": "rgb_array", "camera_name": config.camera}
            options |= {"width": width, "height": height}
        self._sim: Any = ALL_V3_ENVIRONMENTS[name](**options)
        # What the package does for its own variants with a visible goal, except that
        # the goal does not stay the same, and is drawn from the seed.
        self._sim._partially_observable = False
        self._sim._freeze_rand_vec = False
        self._sim._set_task_called = True
        self._sim.seeded_rand_vec = True
        vars(self._sim).pop("sawyer_observation_space", None)
        self._sim.seed(seed)

    @property
    def obs_space(self) -> Spaces:
        seen = {}
        if self.config.proprio:
            seen["vector"] = Space(np.dtype(np.float32), STATE)
        if self.config.image:
            seen["image"] = Space(np.dtype(np.uint8), (*self.config.size, 3))
        return {**seen, "log/success": Space(np.dtype(np.float32)), **flag_spaces()}

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.float32), 4, -1, 1)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._sim.seed(seed % SEED_RANGE)
        state, _ = self._sim.reset()
        return {**self._seen(state, 0.0), **flags(0.0, first=True)}

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
        ending = flags(total, last=last, terminal=bool(terminated))
        return {**self._seen(state, success), **ending}

    def close(self) -> None:
        self._sim.close()

    def _seen(self, state: np.ndarray, success: float) -> Obs:
        seen: Obs = {"log/success": np.float32(success)}
        if self.config.proprio:
            seen["vector"] = np.array(state, np.float32)
        if self.config.image:
            image = np.asarray(self._sim.render())
            if self.config.camera in UPSIDE_DOWN:
                image = image[::-1, ::-1]
            seen["image"] = np.ascontiguousarray(image)
        return seen
