"""MiniGrid: small grid worlds seen through a window of seven by seven cells.

`pixels` draws the window with tiles as large as fit into the image, centred on black;
`symbols` tells object, colour and state of every cell and the direction instead. Where
the mission differs between episodes it arrives as vectors (`language.py`). The step
limit of a task is not terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Obs, UserError
from reverie.envs import text_embedding
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.seeding import SEED_RANGE
from reverie.envs.suite import nearest
from reverie.spaces import Space, Spaces

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
"""The tasks of MiniGrid; those of BabyAI work as well (`minigrid_BabyAI-GoToObj`)."""

SYMBOLS = {"object": 11, "color": 6, "state": 3}
"""What a cell is made of, and how many kinds there are of each."""


@dataclass(frozen=True)
class MiniGridConfig:
    view: Literal["pixels", "symbols"] = "pixels"
    """Show the window as an image, or its cells as numbers."""
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""


class MiniGrid:
    """One task; `action` turns, walks, picks up, drops, toggles, or says it is done."""

    def __init__(self, name: str, config: MiniGridConfig | None = None):
        self.config = config or MiniGridConfig()
        import gymnasium

        made: Any = gymnasium.make(_full_id(name), disable_env_checker=True)
        self._grid, self._core = made, made.unwrapped
        self._window = int(self._core.agent_view_size)
        mission = made.observation_space["mission"]
        always_same = getattr(mission, "ordered_placeholders", None) is None
        self._reads = "BabyAI" in type(mission).__name__ or not always_same

    @property
    def obs_space(self) -> Spaces:
        if self.config.view == "pixels":
            shape = (*self.config.size, 3)
            spaces = {"image": Space(np.dtype(np.uint8), shape)}
        else:
            i32, cells = np.dtype(np.int32), (self._window, self._window)
            spaces = {k: Space(i32, cells, 0, count) for k, count in SYMBOLS.items()}
            spaces["direction"] = Space(i32, (), 0, 4)
        if self._reads:
            length = text_embedding.WORDS * text_embedding.WIDTH
            spaces["mission"] = Space(np.dtype(np.float32), (length,))
        return {**spaces, **flag_spaces()}

    @property
    def act_space(self) -> Spaces:
        count = int(self._grid.action_space.n)
        return {"action": Space(np.dtype(np.int32), (), 0, count)}

    def reset(self, seed: int | None = None) -> Obs:
        seen, _ = self._grid.reset(seed=None if seed is None else seed % SEED_RANGE)
        return {**self._look(seen), **flags(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        seen, reward, terminated, truncated, _ = self._grid.step(int(action["action"]))
        last = bool(terminated or truncated)
        return {
            **self._look(seen),
            **flags(reward, last=last, terminal=bool(terminated)),
        }

    def close(self) -> None:
        self._grid.close()

    def _look(self, seen: dict[str, Any]) -> Obs:
        obs: Obs = {}
        if self.config.view == "pixels":
            obs["image"] = self._draw()
        else:
            for channel, key in enumerate(SYMBOLS):
                obs[key] = seen["image"][..., channel].astype(np.int32)
            obs["direction"] = np.int32(seen["direction"])
        if self._reads:
            obs["mission"] = text_embedding.embed(seen["mission"])
        return obs

    def _draw(self) -> np.ndarray:
        height, width = self.config.size
        tile = min(height, width) // self._window
        drawn = self._core.get_frame(False, tile, agent_pov=True)
        image = np.zeros((height, width, 3), np.uint8)
        top, left = (height - drawn.shape[0]) // 2, (width - drawn.shape[1]) // 2
        image[top : top + drawn.shape[0], left : left + drawn.shape[1]] = drawn
        return image


def is_task(name: str) -> bool:
    """Whether a task beyond the list may exist; `BabyAI` ones are looked up later."""
    return name.startswith("BabyAI-") or bool(_versions(name))


def _full_id(name: str) -> str:
    """The newest id of a task, such as `MiniGrid-Empty-5x5-v0` for `Empty-5x5`."""
    if found := _versions(name):
        return found[-1]
    raise UserError(
        f"MiniGrid has no task {name!r}.{nearest(name, TASKS)}\n"
        "  Fix: pick one that `reverie envs minigrid` lists."
    )


def _versions(name: str) -> list[str]:
    import gymnasium
    import minigrid  # noqa: F401  its import registers the tasks

    ids = (f"MiniGrid-{name}", name)
    found = [key for key in gymnasium.registry if key.rpartition("-v")[0] in ids]
    exact = [key for key in gymnasium.registry if key in ids and "-v" in key]
    return exact or sorted(found)
