"""ProcGen: sixteen games whose levels are drawn anew in every episode.

The simulator begins the next episode in the same step that ends one, and never shows
the frame in between; here the last row repeats the image before it, and `reset` returns
the first frame of the new episode. Images larger than 64 pixels are reduced from the
512 pixels the simulator draws for people.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from reverie.api import Action, Obs, StateDict
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.wrappers import resize
from reverie.spaces import Space, Spaces

_NAMES = """
bigfish bossfight caveflyer chaser climber coinrun dodgeball fruitbot heist jumper
leaper maze miner ninja plunder starpilot
"""
GAMES: tuple[str, ...] = tuple(_NAMES.split())
ACTIONS = 15
SMALL = (64, 64)
"""What the simulator draws for agents; other sizes come from its large picture."""
BEGIN_ANEW = -1
"""The action that ends an episode at once."""


@dataclass(frozen=True)
class ProcgenConfig:
    size: tuple[int, int] = (96, 96)
    """Height and width of the image in pixels."""
    levels: int = 0
    """How many different levels there are; 0 for no end of them."""
    first_level: int = 0
    """The number of the first level."""
    mode: Literal["easy", "hard", "extreme", "memory", "exploration"] = "hard"
    """How difficult levels are."""


class Procgen:
    """One game; `action` is one of its fifteen combinations of keys."""

    def __init__(self, name: str, config: ProcgenConfig | None = None, seed: int = 0):
        self.name = name
        self.config = config or ProcgenConfig()
        self._game: Any = None
        self._start(seed)
        self._image = np.zeros((*self.config.size, 3), np.uint8)

    @property
    def obs_space(self) -> Spaces:
        return {
            "image": Space(np.dtype(np.uint8), (*self.config.size, 3)),
            **flag_spaces(),
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, ACTIONS)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._start(seed)
        elif not self._game.observe()[2][0]:  # somebody else cut the episode
            self._game.act(np.array([BEGIN_ANEW], np.int32))
        self._look()
        return {"image": self._image, **flags(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        self._game.act(np.array([int(action["action"])], np.int32))
        reward, _, begins = self._game.observe()
        ended = bool(begins[0])
        if ended:
            self._image = self._image.copy()
        else:
            self._look()
        return {"image": self._image, **flags(reward[0], last=ended, terminal=ended)}

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
        from procgen import ProcgenGym3Env

        self.close()
        config = self.config
        drawn = {} if config.size == SMALL else {"render_mode": "rgb_array"}
        chosen = {}
        if config.mode != "exploration":  # that one has its single level
            chosen = {"num_levels": config.levels, "start_level": config.first_level}
        self._game = ProcgenGym3Env(
            num=1,
            env_name=self.name,
            distribution_mode=config.mode,
            rand_seed=seed,
            num_threads=0,
            **chosen,
            **drawn,
        )

    def _look(self) -> None:
        if self.config.size == SMALL:
            self._image = self._game.observe()[1]["rgb"][0].copy()
        else:
            drawn = self._game.get_info()[0]["rgb"]
            self._image = resize(drawn, self.config.size, "bilinear").copy()
