"""Crafter: open-world survival with 22 achievements.

This is the original simulator with three changes. The creatures of a map chunk keep
their insertion order, so that an episode depends on its seed only; the original stores
them in a `set`, whose order depends on memory addresses. `terrain.py` generates the
same worlds with vectorized code, and `view.py` renders the same images faster.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.suite import ImageConfig, Package, Suite
from reverie.envs.suites.crafter.view import use_fast_rendering
from reverie.spaces import Space, step_spaces, step_values

_NAMES = """
collect_coal collect_diamond collect_drink collect_iron collect_sapling collect_stone
collect_wood defeat_skeleton defeat_zombie eat_cow eat_plant make_iron_pickaxe
make_iron_sword make_stone_pickaxe make_stone_sword make_wood_pickaxe make_wood_sword
place_furnace place_plant place_stone place_table wake_up
"""
ACHIEVEMENTS = tuple(_NAMES.split())
LOG_KEYS = tuple(f"log/achievement_{name}" for name in ACHIEVEMENTS)


@dataclass(frozen=True)
class CrafterConfig(ImageConfig):
    area: tuple[int, int] = (64, 64)
    """Width and height of the world in cells."""
    length: int = 10_000
    """Time limit of an episode in steps (truncation)."""
    achievements: bool = True
    """Log how often each achievement was unlocked (`log/achievement_*`) and, at the end
    of an episode, the Crafter score of all episodes so far (`log/crafter_score`)."""


class Crafter:
    """The game. The task `noreward` has zero reward; `log/reward` has the original."""

    def __init__(
        self, name: str = "reward", config: CrafterConfig | None = None, seed: int = 0
    ):
        self.config = config = config or CrafterConfig()
        self._game = make_game(config, name == "reward", seed)
        use_fast_rendering(self._game)
        self._episodes = 0
        self._successes = np.zeros(len(ACHIEVEMENTS))
        log_keys = ["log/reward"]
        if config.achievements:
            log_keys += [*LOG_KEYS, "log/crafter_score"]
        self.obs_space = {
            "image": Space(np.uint8, (*config.size, 3)),
            **step_spaces(),
            **dict.fromkeys(log_keys, Space(np.float32)),
        }
        self.act_space = {"action": Space(np.int32, (), 0, self._game.action_space.n)}
        self.action_names = tuple(self._game.action_names)

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._game._seed, self._game._episode = seed, 0
        return {**self._obs(self._game.reset(), {}), **step_values(0.0, first=True)}

    def step(self, action: Action) -> Obs:
        image, reward, done, info = self._game.step(int(action["action"]))
        terminal = info["discount"] == 0
        return {
            **self._obs(image, info, last=bool(done)),
            **step_values(reward, last=done, terminal=terminal),
        }

    def close(self) -> None:
        pass

    def _obs(self, image: np.ndarray, info: dict[str, Any], last: bool = False) -> Obs:
        obs = {
            "image": np.ascontiguousarray(image),
            "log/reward": np.float32(info.get("reward", 0.0)),
        }
        if self.config.achievements:
            unlocked = info.get("achievements", {})
            counts = np.array([unlocked.get(name, 0) for name in ACHIEVEMENTS])
            obs.update(zip(LOG_KEYS, counts.astype(np.float32), strict=True))
            score = self._update_score(counts) if last else 0.0
            obs["log/crafter_score"] = np.float32(score)
        return obs

    def _update_score(self, counts: np.ndarray) -> float:
        """Add a finished episode and return the score of all episodes so far."""
        self._episodes += 1
        self._successes += counts > 0
        return crafter_score(self._successes / self._episodes)


def crafter_score(rates: np.ndarray) -> float:
    """Return the Crafter score of success rates in [0, 1]: the geometric mean of the
    rates in percent, each offset by one percent, minus that offset."""
    return float(np.exp(np.log1p(100 * np.asarray(rates)).mean()) - 1)


class OrderedSet(dict[Any, None]):
    """The methods of `set` that the simulator uses, in insertion order."""

    def add(self, item: Any) -> None:
        self[item] = None

    def remove(self, item: Any) -> None:
        del self[item]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self.keys()))


def make_game(config: CrafterConfig, reward: bool, seed: int) -> Any:
    """Build the simulator with ordered creatures and fast world generation."""
    import crafter
    from crafter import engine, objects

    from reverie.envs.suites.crafter.terrain import generate_world

    class World(engine.World):  # type: ignore
        def reset(self, seed: int | None = None) -> None:
            super().reset(seed)
            self._chunks: Any = collections.defaultdict(OrderedSet)

    class Game(crafter.Env):  # type: ignore
        player: Any = objects.Player  # class, replaced by `use_fast_rendering`

        def reset(self) -> np.ndarray:
            """Reset as the original does, except for `player` and `generate_world`."""
            self._episode += 1
            self._step = 0
            # The original formula; hashes of integers are the same in every process.
            seed = hash((self._seed, self._episode)) % (2**31 - 1)
            self._world.reset(seed)
            self._update_time()
            width, height = self._world.area
            self._player = self.player(self._world, (width // 2, height // 2))
            self._last_health = self._player.health
            self._world.add(self._player)
            self._unlocked: set[str] = set()
            generate_world(self._world, self._player)
            image: np.ndarray = self._obs()
            return image

    height, width = config.size
    game = Game(
        area=config.area,
        size=(width, height),
        reward=reward,
        length=config.length,
        seed=seed,
    )
    # Change the class of the existing world, because the renderers of the simulator
    # (`LocalView`, `SemanticView`) reference this object.
    game._world.__class__ = World
    return game


SUITE = Suite(
    name="crafter",
    description="open-world survival with 22 achievements",
    make=Crafter,
    config=CrafterConfig,
    tasks=("reward", "noreward"),
    package=Package("crafter", ("crafter",), group="small"),
)
