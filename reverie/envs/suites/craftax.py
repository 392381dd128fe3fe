"""Craftax: a reimplementation of Crafter in JAX, and a larger game based on it.

`symbolic` and `pixels` are Craftax; `classic_symbolic` and `classic_pixels` have the
rules of Crafter. The first reset and step of a process compile for one to three minutes
on a CPU. The time limit truncates episodes. Achievements are logged as
`log/achievement_*`: 1 after they are unlocked in the episode, 0 before.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.suite import ImageConfig, Package, Suite
from reverie.envs.wrappers import resize
from reverie.spaces import Space, step_spaces, step_values

ENV_IDS = {
    "symbolic": "Craftax-Symbolic-v1",
    "pixels": "Craftax-Pixels-v1",
    "classic_symbolic": "Craftax-Classic-Symbolic-v1",
    "classic_pixels": "Craftax-Classic-Pixels-v1",
}


class Craftax:
    """One game; `action` is an index into its list of actions."""

    def __init__(self, name: str, config: ImageConfig | None = None, seed: int = 0):
        self.config = config or ImageConfig()
        import jax

        self._jax = jax
        self._game, self._reset, self._step = _compile_game(ENV_IDS[name])
        self._params = self._game.default_params
        self._achievements = _achievement_indices(classic=name.startswith("classic"))
        self._rng_key = jax.random.PRNGKey(seed)
        self._state: Any = None
        shape = self._game.observation_space(self._params).shape
        image = Space(np.uint8, (*self.config.size, 3))
        vector = Space(np.float32, shape)
        self.obs_space = {
            **({"image": image} if len(shape) == 3 else {"vector": vector}),
            **step_spaces(),
            **{
                f"log/achievement_{key}": Space(np.float32)
                for key in self._achievements
            },
        }
        count = int(self._game.action_space(self._params).n)
        self.act_space = {"action": Space(np.int32, (), 0, count)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng_key = self._jax.random.PRNGKey(seed)
        obs, self._state = self._reset(self._next_key(), self._params)
        return {**self._convert(obs), **step_values(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        obs, self._state, reward, done, _ = self._step(
            self._next_key(), self._state, int(action["action"]), self._params
        )
        last = bool(done)
        # `done` does not distinguish the time limit from death
        at_limit = int(self._state.timestep) >= int(self._params.max_timesteps)
        is_alive = float(self._state.player_health) > 0
        terminal = last and not (at_limit and is_alive)
        return {
            **self._convert(obs),
            **step_values(reward, last=last, terminal=terminal),
        }

    def close(self) -> None:
        self._state = None

    def _next_key(self) -> Any:
        """Return a new random key of JAX."""
        self._rng_key, key = self._jax.random.split(self._rng_key)
        return key

    def _convert(self, values: Any) -> Obs:
        array = np.array(values, np.float32)
        if array.ndim == 3:
            pixels = np.round(array * 255).astype(np.uint8)
            obs: Obs = {"image": resize(pixels, self.config.size, "bilinear")}
        else:
            obs = {"vector": array}
        unlocked = np.asarray(self._state.achievements, np.float32)
        for name, index in self._achievements.items():
            obs[f"log/achievement_{name}"] = unlocked[index]
        return obs


@functools.cache
def _compile_game(name: str) -> tuple[Any, Any, Any]:
    """Return a game and its compiled `reset` and `step`.

    All environments of a process share them, so that they are compiled once.
    """
    import jax
    from craftax.craftax_env import make_craftax_env_from_name

    game = make_craftax_env_from_name(name, auto_reset=False)
    return game, jax.jit(game.reset), jax.jit(game.step)


def _achievement_indices(classic: bool) -> dict[str, int]:
    """Return the names of the achievements and their indices in the game state."""
    if classic:
        from craftax.craftax_classic.constants import Achievement
    else:
        from craftax.craftax.constants import Achievement
    return {each.name.lower(): int(each.value) for each in Achievement}


SUITE = Suite(
    name="craftax",
    description="Craftax: combines Crafter and NetHack, implemented in JAX",
    make=Craftax,
    config=ImageConfig,
    tasks=tuple(ENV_IDS),
    package=Package("craftax", ("craftax", "jax")),
)
