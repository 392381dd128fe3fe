"""ProcGen: sixteen games with procedurally generated levels.

The simulator starts the next episode in the step that ends one and never returns the
final frame. Here the last observation repeats the previous image, and `reset` returns
the first frame of the new episode. Image sizes other than 64x64 are downscaled from the
simulator's 512x512 human rendering.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Obs, StateDict
from reverie.envs.suite import Package, Suite
from reverie.envs.wrappers import resize
from reverie.spaces import Space, step_spaces, step_values

_NAMES = """
bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper
leaper maze miner ninja plunder starpilot
"""
GAMES: tuple[str, ...] = tuple(_NAMES.split())
ACTIONS = 15
"""Number of actions."""
NATIVE_SIZE = (64, 64)
"""Image size of the simulator's observations."""
RESTART = -1
"""Action that ends the episode immediately."""


@dataclass(frozen=True)
class ProcgenConfig:
    size: tuple[int, int] = (96, 96)
    """Height and width of the image in pixels."""
    levels: int = 0
    """Number of different levels; 0 for unlimited."""
    first_level: int = 0
    """Seed of the first level."""
    mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "hard"
    """Difficulty of the levels."""


class Procgen:
    """One game; `action` is one of 15 key combinations."""

    def __init__(self, name: str, config: ProcgenConfig | None = None, seed: int = 0):
        self.name = name
        self.config = config = config or ProcgenConfig()
        self._game: Any = None
        self._start(seed)
        self._image = np.zeros((*config.size, 3), np.uint8)
        self.obs_space = {"image": Space(np.uint8, (*config.size, 3)), **step_spaces()}
        self.act_space = {"action": Space(np.int32, (), 0, ACTIONS)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._start(seed)
        elif not self._game.observe()[2][0]:
            # the game has not started a new episode: a wrapper truncated this one
            self._game.act(np.array([RESTART], np.int32))
        self._update_image()
        return {"image": self._image, **step_values(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        self._game.act(np.array([int(action["action"])], np.int32))
        reward, _, is_first = self._game.observe()
        ended = bool(is_first[0])
        if ended:  # repeat the previous image, see the module docstring
            self._image = self._image.copy()
        else:
            self._update_image()
        return {
            "image": self._image,
            **step_values(reward[0], last=ended, terminal=ended),
        }

    def close(self) -> None:
        if self._game is not None:
            self._game.close()
            self._game = None

    def state_dict(self) -> StateDict:
        state = np.frombuffer(self._game.get_state()[0], np.uint8)
        return {"game": state.copy(), "image": self._image.copy()}

    def load_state_dict(self, state: StateDict) -> None:
        self._game.set_state([np.asarray(state["game"], np.uint8).tobytes()])
        self._image = np.array(state["image"], np.uint8)

    def _start(self, seed: int) -> None:
        """Build the simulator, which takes its seed only when it is built."""
        from procgen import ProcgenGym3Env

        self.close()
        config = self.config
        options: dict[str, Any] = {}
        if config.size != NATIVE_SIZE:
            options["render_mode"] = "rgb_array"
        if config.mode != "exploration":  # this mode has a single level
            options["num_levels"] = config.levels
            options["start_level"] = config.first_level
        self._game = ProcgenGym3Env(
            num=1,
            env_name=self.name,
            distribution_mode=config.mode,
            rand_seed=seed,
            num_threads=0,
            **options,
        )

    def _update_image(self) -> None:
        """Read the current frame from the simulator."""
        if self.config.size == NATIVE_SIZE:
            self._image = self._game.observe()[1]["rgb"][0].copy()
        else:
            frame = self._game.get_info()[0]["rgb"]
            self._image = resize(frame, self.config.size, "bilinear").copy()


SUITE = Suite(
    name="procgen",
    description="ProcGen: 16 procedurally generated games",
    make=Procgen,
    config=ProcgenConfig,
    tasks=GAMES,
    package=Package("procgen", ("procgen-mirror", "numpy"), (3, 12)),
)
