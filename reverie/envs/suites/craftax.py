"""Craftax: Crafter rewritten in JAX, and a much larger game in its spirit.

`symbolic` and `pixels` are Craftax, `classic_symbolic` and `classic_pixels` the rules
of Crafter. The first reset and step of a process compile for one to three minutes on a
CPU. The step limit is not terminal. Achievements are told to people while an episode
lasts (`log/achievement_*`: 1 once it was unlocked).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.wrappers import resize
from reverie.spaces import Space, Spaces

NAMES = {
    "symbolic": "Craftax-Symbolic-v1",
    "pixels": "Craftax-Pixels-v1",
    "classic_symbolic": "Craftax-Classic-Symbolic-v1",
    "classic_pixels": "Craftax-Classic-Pixels-v1",
}


@dataclass(frozen=True)
class CraftaxConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""


class Craftax:
    """One game; `action` indexes its action list."""

    def __init__(self, name: str, config: CraftaxConfig | None = None, seed: int = 0):
        self.config = config or CraftaxConfig()
        import jax

        self._jax = jax
        self._game, self._reset, self._step = _compiled(NAMES[name])
        self._params = self._game.default_params
        self._seen = self._game.observation_space(self._params).shape
        self._names = _achievements(classic=name.startswith("classic"))
        self._key = jax.random.PRNGKey(seed)
        self._state: Any = None

    @property
    def obs_space(self) -> Spaces:
        f32 = np.dtype(np.float32)
        if len(self._seen) == 3:
            shape = (*self.config.size, 3)
            spaces = {"image": Space(np.dtype(np.uint8), shape)}
        else:
            spaces = {"vector": Space(f32, self._seen)}
        logged = {f"log/achievement_{name}": Space(f32) for name in self._names}
        return {**spaces, **flag_spaces(), **logged}

    @property
    def act_space(self) -> Spaces:
        count = int(self._game.action_space(self._params).n)
        return {"action": Space(np.dtype(np.int32), (), 0, count)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._key = self._jax.random.PRNGKey(seed)
        seen, self._state = self._reset(self._next_key(), self._params)
        return {**self._look(seen), **flags(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        chosen = int(action["action"])
        seen, self._state, reward, done, _ = self._step(
            self._next_key(), self._state, chosen, self._params
        )
        over = bool(done)
        # The game calls its step limit an end like any other.
        limit = int(self._state.timestep) >= int(self._params.max_timesteps)
        alive = float(self._state.player_health) > 0
        terminal = over and not (limit and alive)
        return {**self._look(seen), **flags(reward, last=over, terminal=terminal)}

    def close(self) -> None:
        self._state = None

    def _next_key(self) -> Any:
        self._key, key = self._jax.random.split(self._key)
        return key

    def _look(self, seen: Any) -> Obs:
        array = np.array(seen, np.float32)
        if array.ndim == 3:
            pixels = np.round(array * 255).astype(np.uint8)
            obs: Obs = {"image": resize(pixels, self.config.size, "bilinear")}
        else:
            obs = {"vector": array}
        unlocked = np.asarray(self._state.achievements, np.float32)
        for name, place in self._names.items():
            obs[f"log/achievement_{name}"] = unlocked[place]
        return obs


@functools.cache
def _compiled(name: str) -> tuple[Any, Any, Any]:
    """A game with its `reset` and `step`, which all environments of a process share,
    so that they are compiled once."""
    import jax
    from craftax.craftax_env import make_craftax_env_from_name

    game = make_craftax_env_from_name(name, auto_reset=False)
    return game, jax.jit(game.reset), jax.jit(game.step)


def _achievements(classic: bool) -> dict[str, int]:
    """The achievements of a game, and where its state counts them."""
    if classic:
        from craftax.craftax_classic.constants import Achievement
    else:
        from craftax.craftax.constants import Achievement
    return {each.name.lower(): int(each.value) for each in Achievement}
