"""MiniGrid: small grid worlds, partially observed as a view of 7x7 cells.

The observation is an image of the view, centered on a black background, or
(`view=symbols`) the object, color and state of every cell and the direction of the
agent. If the mission differs between episodes, it is observed as a text embedding. The
time limit truncates episodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.envs.seeding import SEED_RANGE
from reverie.envs.suite import ImageConfig, Package, Suite, suggest
from reverie.envs.text_embedding import EMBEDDING_SPACE, embed_text
from reverie.spaces import Space, Spaces, step_spaces, step_values

_NAMES = """
BlockedUnlockPickup DistShift1 DistShift2 DoorKey-16x16 DoorKey-5x5 DoorKey-6x6
DoorKey-8x8 Dynamic-Obstacles-16x16 Dynamic-Obstacles-5x5 Dynamic-Obstacles-6x6
Dynamic-Obstacles-8x8 Dynamic-Obstacles-Random-5x5 Dynamic-Obstacles-Random-6x6
Empty-16x16 Empty-5x5 Empty-6x6 Empty-8x8 Empty-Random-5x5 Empty-Random-6x6 Fetch-5x5-N2
Fetch-6x6-N2 Fetch-8x8-N3 FourRooms GoToDoor-5x5 GoToDoor-6x6 GoToDoor-8x8
GoToObject-6x6-N2 GoToObject-8x8-N2 KeyCorridorS3R1 KeyCorridorS3R2 KeyCorridorS3R3
KeyCorridorS4R3 KeyCorridorS5R3 KeyCorridorS6R3 LavaCrossingS11N5 LavaCrossingS9N1
LavaCrossingS9N2 LavaCrossingS9N3 LavaGapS5 LavaGapS6 LavaGapS7 LockedRoom MemoryS11
MemoryS13 MemoryS13Random MemoryS17Random MemoryS7 MemoryS9 MultiRoom-N2-S4
MultiRoom-N4-S5 MultiRoom-N6 ObstructedMaze-1Dl ObstructedMaze-1Dlh ObstructedMaze-1Dlhb
ObstructedMaze-1Q ObstructedMaze-2Dl ObstructedMaze-2Dlh ObstructedMaze-2Dlhb
ObstructedMaze-2Q ObstructedMaze-Full Playground PutNear-6x6-N2 PutNear-8x8-N3
RedBlueDoors-6x6 RedBlueDoors-8x8 SimpleCrossingS11N5 SimpleCrossingS9N1
SimpleCrossingS9N2 SimpleCrossingS9N3 Unlock UnlockPickup
"""
TASKS: tuple[str, ...] = tuple(_NAMES.split())
"""Tasks of MiniGrid; BabyAI tasks work as well (`minigrid_BabyAI-GoToObj`)."""

SYMBOLS = {"object": 11, "color": 6, "state": 3}
"""Attributes of a cell and their number of classes."""


@dataclass(frozen=True)
class MiniGridConfig(ImageConfig):
    view: Literal["pixels", "symbols"] = "pixels"
    """Observe the view as an image, or its cells as integers."""


class MiniGrid:
    """One task; the actions are left, right, forward, pickup, drop, toggle and done."""

    action_names = ("left", "right", "forward", "pickup", "drop", "toggle", "done")

    def __init__(self, name: str, config: MiniGridConfig | None = None):
        self.config = config = config or MiniGridConfig()
        import gymnasium

        env: Any = gymnasium.make(_full_id(name), disable_env_checker=True)
        self._env, self._unwrapped = env, env.unwrapped
        self._view_size = int(self._unwrapped.agent_view_size)
        mission = env.observation_space["mission"]
        # a mission space without placeholders has a single text
        is_constant = getattr(mission, "ordered_placeholders", None) is None
        self._has_mission = "BabyAI" in type(mission).__name__ or not is_constant
        self.obs_space: Spaces = step_spaces()
        if config.view == "pixels":
            self.obs_space["image"] = Space(np.uint8, (*config.size, 3))
        else:
            cells = (self._view_size, self._view_size)
            for key, count in SYMBOLS.items():
                self.obs_space[key] = Space(np.int32, cells, 0, count)
            self.obs_space["direction"] = Space(np.int32, (), 0, 4)
        if self._has_mission:
            self.obs_space["mission"] = EMBEDDING_SPACE
        self.act_space = {"action": Space(np.int32, (), 0, int(env.action_space.n))}

    def reset(self, seed: int | None = None) -> Obs:
        obs, _ = self._env.reset(seed=None if seed is None else seed % SEED_RANGE)
        return {**self._convert(obs), **step_values(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        obs, reward, terminated, truncated, _ = self._env.step(int(action["action"]))
        last = bool(terminated or truncated)
        return {
            **self._convert(obs),
            **step_values(reward, last=last, terminal=bool(terminated)),
        }

    def close(self) -> None:
        self._env.close()

    def _convert(self, values: dict[str, Any]) -> Obs:
        obs: Obs = {}
        if self.config.view == "pixels":
            obs["image"] = self._render()
        else:
            for channel, key in enumerate(SYMBOLS):
                obs[key] = values["image"][..., channel].astype(np.int32)
            obs["direction"] = np.int32(values["direction"])
        if self._has_mission:
            obs["mission"] = embed_text(values["mission"])
        return obs

    def _render(self) -> np.ndarray:
        """Draw the view of the agent, centered in an image of the configured size."""
        height, width = self.config.size
        tile = min(height, width) // self._view_size
        view = self._unwrapped.get_frame(False, tile, agent_pov=True)
        image = np.zeros((height, width, 3), np.uint8)
        top, left = (height - view.shape[0]) // 2, (width - view.shape[1]) // 2
        image[top : top + view.shape[0], left : left + view.shape[1]] = view
        return image


def is_task(name: str) -> bool:
    """True for registered tasks, and for every name that starts with `BabyAI-`.

    `MiniGrid` raises an error if there is no such BabyAI task.
    """
    return name.startswith("BabyAI-") or bool(_versions(name))


def _full_id(name: str) -> str:
    """Return the newest id of a task: `MiniGrid-Empty-5x5-v0` for `Empty-5x5`."""
    if versions := _versions(name):
        return versions[-1]
    raise UserError(
        f"MiniGrid has no task {name!r}.{suggest(name, TASKS)}\n"
        "  Fix: choose one of the tasks that `reverie envs minigrid` lists."
    )


def _versions(name: str) -> list[str]:
    """Return the registered ids of a task (or of one version of it), newest last."""
    import gymnasium
    import minigrid  # noqa: F401  registers the tasks

    ids = (f"MiniGrid-{name}", name)
    versions = [key for key in gymnasium.registry if key.rpartition("-v")[0] in ids]
    exact = [key for key in gymnasium.registry if key in ids and "-v" in key]
    return exact or sorted(versions)


SUITE = Suite(
    name="minigrid",
    description="MiniGrid: small grid worlds",
    make=MiniGrid,
    config=MiniGridConfig,
    tasks=TASKS,
    accepts=is_task,
    package=Package("minigrid", ("minigrid",), group="small", license="Apache-2.0"),
)
