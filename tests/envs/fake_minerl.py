"""A fake MineRL 0.4.4 with a strict check of all inputs.

It has the parts of the documented API that the suite uses: specifications consist of
handlers, and `make` returns an old gym environment whose spaces come from the handlers.
In the game, attacking for 30 ticks, divided by the break speed, gives a log; crafting,
placing and smelting need the same items as in Minecraft. Unknown or missing keys,
values outside of the space, steps before a reset or after the end, and seeds that are
not integers raise an exception.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

ITEMS = [
    "air",
    "cobblestone",
    "crafting_table",
    "diamond",
    "dirt",
    "furnace",
    "iron_ingot",
    "iron_ore",
    "iron_pickaxe",
    "log",
    "log2",
    "planks",
    "stick",
    "stone_pickaxe",
    "wooden_pickaxe",
]
KEYMAP = dict.fromkeys(
    ("forward", "back", "left", "right", "jump", "sneak", "attack"), "key"
)
BREAK_TICKS = 30
INGREDIENTS: dict[tuple[str, str], dict[str, int]] = {
    ("craft", "planks"): {"log": 1},
    ("craft", "stick"): {"planks": 2},
    ("craft", "crafting_table"): {"planks": 4},
    ("nearbyCraft", "wooden_pickaxe"): {"planks": 3, "stick": 2},
    ("nearbyCraft", "stone_pickaxe"): {"cobblestone": 3, "stick": 2},
    ("nearbyCraft", "iron_pickaxe"): {"iron_ingot": 3, "stick": 2},
    ("nearbyCraft", "furnace"): {"cobblestone": 8},
    ("nearbySmelt", "iron_ingot"): {"iron_ore": 1},
}
YIELDS = {"planks": 4, "stick": 4}


class Handler:
    """Stores its arguments."""

    key = ""

    def __init__(self, *args: Any, **options: Any):
        self.args, self.options = args, options


class Enum:
    def __init__(self, values: list[str]):
        self.values = np.array(values)

    def check(self, value: Any) -> str | None:
        known = isinstance(value, str) and value in self.values
        return None if known else "is not in the list"


class Button:
    def check(self, value: Any) -> str | None:
        pressed = isinstance(value, int) and value in (0, 1)
        return None if pressed else "is neither 0 nor 1"


class Camera:
    def check(self, value: Any) -> str | None:
        if len(value) != 2 or not all(isinstance(v, float) for v in value):
            return "is not two floats"
        return None if max(map(abs, value)) <= 180 else "is beyond 180 degrees"


class Dict:
    def __init__(self, spaces: dict[str, Any]):
        self.spaces = spaces

    def __getitem__(self, key: str) -> Any:
        return self.spaces[key]


class POVObservation(Handler):
    key = "pov"
    space = None


class FlatInventoryObservation(Handler):
    key = "inventory"

    @property
    def space(self) -> Dict:
        return Dict(dict.fromkeys(self.args[0]))


class EquippedItemObservation(Handler):
    key = "equipped_items"

    @property
    def space(self) -> Dict:
        extra = {self.options["_default"], self.options["_other"]}
        kinds = Enum(sorted({*self.args[0], *extra}))
        return Dict({"mainhand": Dict({"type": kinds})})


class ObservationFromCurrentLocation(Handler):
    key = "location_stats"
    space = None


class ObservationFromLifeStats(Handler):
    key = "life_stats"
    space = None


class KeybasedCommandAction(Handler):
    space = Button()

    @property
    def key(self) -> str:  # type: ignore[override]
        assert self.args[1] == KEYMAP[self.args[0]]
        return str(self.args[0])


class CameraAction(Handler):
    key = "camera"
    space = Camera()


class ItemAction(Handler):
    @property
    def space(self) -> Enum:
        assert self.options == {"_other": "none", "_default": "none"}
        assert self.args[0][0] == "none"
        return Enum(self.args[0])


PlaceBlock = type("PlaceBlock", (ItemAction,), {"key": "place"})
EquipAction = type("EquipAction", (ItemAction,), {"key": "equip"})
CraftAction = type("CraftAction", (ItemAction,), {"key": "craft"})
CraftNearbyAction = type("CraftNearbyAction", (ItemAction,), {"key": "nearbyCraft"})
SmeltItemNearby = type("SmeltItemNearby", (ItemAction,), {"key": "nearbySmelt"})
OTHERS = [
    type(name, (Handler,), {})
    for name in (
        "AgentStartBreakSpeedMultiplier",
        "DefaultWorldGenerator",
        "ServerQuitWhenAnyAgentFinishes",
        "TimeInitialCondition",
        "SpawningInitialCondition",
    )
]


class EnvSpec:
    """Calls all `create_` methods, as the original does."""

    def __init__(self, name: str):
        self.name = name
        self.observables = self.create_observables()
        self.actionables = self.create_actionables()
        self.agent_start = self.create_agent_start()
        self.server_world_generators = self.create_server_world_generators()
        self.server_quit_producers = self.create_server_quit_producers()
        self.server_initial_conditions = self.create_server_initial_conditions()
        assert self.create_rewardables() == self.create_monitors() == []
        assert self.create_agent_handlers() == self.create_server_decorators() == []
        assert not self.is_from_folder("anything")
        assert self.determine_success_from_rewards([])
        assert self.get_docstring() == ""

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"subclasses must override {name}")

    def make(self) -> Game:
        return Game(self)


class Game:
    """The environment; `newest` is the last one that was built."""

    newest: Game

    def __init__(self, spec: EnvSpec):
        self.spec = spec
        self.action_space = Dict({h.key: h.space for h in spec.actionables})
        self.observation_space = Dict({h.key: h.space for h in spec.observables})
        (multiplier,) = spec.agent_start
        (self.break_speed,) = multiplier.args
        self.commands: list[dict[str, Any]] = []
        self.seeds: list[int] = []
        self.closed = False
        self.playing = False
        self.lost = False
        self._seed: int | None = None
        Game.newest = self

    def seed(self, seed: int) -> None:
        assert type(seed) is int, "Seed must be an int!"
        self._seed = seed
        self.seeds.append(seed)

    def reset(self) -> dict[str, Any]:
        self._rng = np.random.default_rng(self._seed)
        self._seed = None  # as in the original
        self.items = dict.fromkeys(ITEMS, 0)
        self.life, self.food, self.air, self.height = 20.0, 20, 300, 64.0
        self.pitch = 0.0
        self.placed: set[str] = set()
        self.in_hand = "air"
        self.attack_ticks = 0
        self.playing = True
        return self._observe()

    def step(self, command: dict[str, Any]) -> tuple[Any, float, bool, dict[str, Any]]:
        if not self.playing:
            raise RuntimeError("Attempted to step an environment server with done=True")
        if command.keys() != self.action_space.spaces.keys():
            wrong = command.keys() ^ self.action_space.spaces.keys()
            raise ValueError(f"unknown or missing actions: {sorted(wrong)}")
        for key, space in self.action_space.spaces.items():
            if problem := space.check(command[key]):
                raise ValueError(f"{key}={command[key]!r} {problem}")
        self.commands.append(command)
        if self.lost:
            self.playing = False
            return self._observe(), 0.0, True, {"error": "Connection timed out!"}
        self._update(command)
        self.playing = self.life > 0
        return self._observe(), 0.0, not self.playing, {}

    def close(self) -> None:
        self.closed = True

    def _update(self, command: dict[str, Any]) -> None:
        self.pitch += command["camera"][0]
        assert abs(self.pitch) <= 90, "the pitch exceeds 90 degrees"
        self.attack_ticks = self.attack_ticks + 1 if command["attack"] else 0
        if self.attack_ticks >= max(1, BREAK_TICKS / self.break_speed):
            self.items["log"] += 1
            self.attack_ticks = 0
        for verb in ("craft", "nearbyCraft", "nearbySmelt"):
            if command[verb] != "none":
                self._make(verb, command[verb])
        if self.items.get(command["place"], 0):
            self.items[command["place"]] -= 1
            self.placed.add(command["place"])
        if self.items.get(command["equip"], 0):
            self.in_hand = command["equip"]
        if command["jump"]:
            self.height += 1

    def _make(self, verb: str, item: str) -> None:
        needs = INGREDIENTS[verb, item]
        station = {"nearbyCraft": "crafting_table", "nearbySmelt": "furnace"}.get(verb)
        enough = all(self.items[name] >= count for name, count in needs.items())
        if enough and (station is None or station in self.placed):
            for name, count in needs.items():
                self.items[name] -= count
            self.items[item] += YIELDS.get(item, 1)

    def _observe(self) -> dict[str, Any]:
        (pov,) = (h for h in self.spec.observables if h.key == "pov")
        width, height = pov.args[0]
        obs = {
            "pov": self._rng.integers(0, 256, (height, width, 3), np.uint8),
            "inventory": {name: np.array(count) for name, count in self.items.items()},
            "equipped_items": {"mainhand": {"type": self.in_hand, "damage": 0}},
            "life_stats": {
                "life": np.array(self.life),
                "food": np.array(self.food),
                "air": np.array(self.air),
            },
            "location_stats": {"xpos": 0.0, "ypos": self.height, "zpos": 0.0},
        }
        assert obs.keys() == self.observation_space.spaces.keys()
        return obs


def install(monkeypatch: pytest.MonkeyPatch) -> type[Game]:
    """Make `import minerl` import this module."""
    names = (
        "minerl",
        "minerl.herobraine",
        "minerl.herobraine.env_spec",
        "minerl.herobraine.hero",
        "minerl.herobraine.hero.handlers",
        "minerl.herobraine.hero.mc",
    )
    for name in names:
        module: Any = types.ModuleType(name)
        module.__spec__ = types.SimpleNamespace(name=name)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    modules: Any = sys.modules
    modules["minerl.herobraine.env_spec"].EnvSpec = EnvSpec
    known = [POVObservation, FlatInventoryObservation, EquippedItemObservation]
    known += [ObservationFromCurrentLocation, ObservationFromLifeStats]
    known += [KeybasedCommandAction, CameraAction, PlaceBlock, EquipAction]
    known += [CraftAction, CraftNearbyAction, SmeltItemNearby, *OTHERS]
    for handler in known:
        setattr(modules["minerl.herobraine.hero.handlers"], handler.__name__, handler)
    modules["minerl.herobraine.hero.mc"].ALL_ITEMS = list(ITEMS)
    modules["minerl.herobraine.hero.mc"].INVERSE_KEYMAP = dict(KEYMAP)
    return Game
