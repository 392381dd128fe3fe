"""Crafter: open-world survival with 22 achievements.

The simulator is the stock one with three repairs. It keeps the creatures of each chunk
in a `set`, whose order depends on memory addresses, so that the same seed gives another
game in another process; here they keep the order in which they came, which makes every
episode a function of its seed. It generates worlds cell by cell; `terrain.py` makes the
same worlds all at once. And so it draws them; see `crafter_view.py`.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.suites.crafter.view import quicken
from reverie.spaces import Space, Spaces

_NAMES = """
collect_coal collect_diamond collect_drink collect_iron collect_sapling collect_stone
collect_wood defeat_skeleton defeat_zombie eat_cow eat_plant make_iron_pickaxe
make_iron_sword make_stone_pickaxe make_stone_sword make_wood_pickaxe make_wood_sword
place_furnace place_plant place_stone place_table wake_up
"""
ACHIEVEMENTS = tuple(_NAMES.split())
LOGGED = tuple(f"log/achievement_{name}" for name in ACHIEVEMENTS)


@dataclass(frozen=True)
class CrafterConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    area: tuple[int, int] = (64, 64)
    """Size of the world in cells."""
    length: int = 10_000
    """Steps after which an episode is cut (which is not terminal)."""
    achievements: bool = True
    """Tell people how often each achievement was unlocked (`log/achievement_*`), and at
    the end of an episode the Crafter score so far (`log/crafter_score`)."""


class Crafter:
    """The game; `reward` gives its reward, `noreward` none (see `log/reward`)."""

    def __init__(
        self, name: str = "reward", config: CrafterConfig | None = None, seed: int = 0
    ):
        self.config = config = config or CrafterConfig()
        self._game = make_game(config, name == "reward", seed)
        quicken(self._game)
        self._episodes = 0
        self._successes = np.zeros(len(ACHIEVEMENTS))

    @property
    def obs_space(self) -> Spaces:
        f32, flag = np.dtype(np.float32), Space(np.dtype(bool))
        logged = ["log/reward"]
        if self.config.achievements:
            logged += [*LOGGED, "log/crafter_score"]
        return {
            "image": Space(np.dtype(np.uint8), (*self.config.size, 3)),
            "reward": Space(f32),
            "is_first": flag,
            "is_last": flag,
            "is_terminal": flag,
            **{key: Space(f32) for key in logged},
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, self._game.action_space.n)}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._game._seed, self._game._episode = seed, 0
        return self._obs(self._game.reset(), 0.0, {}, first=True)

    def step(self, action: Action) -> Obs:
        image, reward, done, info = self._game.step(int(action["action"]))
        terminal = info["discount"] == 0
        return self._obs(image, reward, info, last=bool(done), terminal=terminal)

    def close(self) -> None:
        pass

    def _obs(
        self,
        image: np.ndarray,
        reward: float,
        info: dict[str, Any],
        first: bool = False,
        last: bool = False,
        terminal: bool = False,
    ) -> Obs:
        obs = {
            "image": np.ascontiguousarray(image),
            "reward": np.float32(reward),
            "is_first": np.bool_(first),
            "is_last": np.bool_(last),
            "is_terminal": np.bool_(terminal),
            "log/reward": np.float32(info.get("reward", 0.0)),
        }
        if self.config.achievements:
            unlocked = info.get("achievements", {})
            counts = np.array([unlocked.get(name, 0) for name in ACHIEVEMENTS])
            obs.update(zip(LOGGED, counts.astype(np.float32), strict=True))
            so_far = self._score_with(counts) if last else 0.0
            obs["log/crafter_score"] = np.float32(so_far)
        return obs

    def _score_with(self, counts: np.ndarray) -> float:
        """The score over all episodes that this environment has finished."""
        self._episodes += 1
        self._successes += counts > 0
        return crafter_score(self._successes / self._episodes)


def crafter_score(rates: np.ndarray) -> float:
    """The score of success rates, each in [0, 1]: their geometric mean in percent, with
    one percent added inside and taken off outside, so that none of them rules alone."""
    return float(np.exp(np.log1p(100 * np.asarray(rates)).mean()) - 1)


class OrderedSet:
    """The part of `set` the simulator uses, in the order of insertion."""

    def __init__(self) -> None:
        self._items: dict[Any, None] = {}

    def add(self, item: Any) -> None:
        self._items[item] = None

    def remove(self, item: Any) -> None:
        del self._items[item]

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._items))

    def __len__(self) -> int:
        return len(self._items)


def make_game(config: CrafterConfig, reward: bool, seed: int) -> Any:
    """The simulator, repaired."""
    import crafter
    from crafter import engine, objects

    from reverie.envs.suites.crafter.terrain import generate_world

    class World(engine.World):  # type: ignore
        def reset(self, seed: int | None = None) -> None:
            super().reset(seed)
            self._chunks: Any = collections.defaultdict(OrderedSet)

    class Game(crafter.Env):  # type: ignore
        player: Any = objects.Player

        def reset(self) -> np.ndarray:
            self._episode += 1
            self._step = 0
            # The seed of an episode is the stock one; integers hash to the same number
            # in every process.
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
    game._world.__class__ = World  # the views already hold this very object
    return game
