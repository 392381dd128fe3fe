"""Minecraft on MineRL 0.4: find a diamond, collect wood, or climb.

The simulator needs Java 8 and is not quick to install (`tools/install_minecraft.sh`).
An action is one of a flat list: the camera turns by fifteen degrees and never looks
further up or down than `pitch_limit`; a jump is held for `sticky_jump` steps, walking
forward; `attack` is held for `sticky_attack` steps, unless blocks break faster than in
the original, which needs no holding.

`diamond` pays 1 for the first of each of twelve items, once an episode, `wood` 1 for
every log, `climb` 1 for every block of height; all of them a hundredth of the change in
health. Death is terminal, the step limit is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.flags import flag_spaces, flags
from reverie.envs.seeding import SEED_RANGE
from reverie.spaces import Space, Spaces

TASKS = ("diamond", "wood", "climb")
TURN = 15
"""Degrees the camera turns in one action."""
HEALTH_SCALE = 0.01
LIFE, FOOD, AIR = 20, 20, 300
"""What the simulator calls full health, no hunger and all the breath."""

Command = dict[str, Any]
"""An action of the simulator, complete or as the difference to `IDLE`."""

IDLE: Command = {
    "camera": (0.0, 0.0),  # degrees down and right
    **dict.fromkeys(("forward", "back", "left", "right", "jump", "sneak"), 0),
    "attack": 0,
    **dict.fromkeys(("place", "equip", "craft", "nearbyCraft", "nearbySmelt"), "none"),
}
HELD = ("attack", "forward", "back", "left", "right")
"""What goes on while an action is repeated; the rest happens once."""

BASIC: dict[str, Command] = {
    "noop": {},
    "attack": {"attack": 1},
    "turn_up": {"camera": (-TURN, 0)},
    "turn_down": {"camera": (TURN, 0)},
    "turn_left": {"camera": (0, -TURN)},
    "turn_right": {"camera": (0, TURN)},
    "forward": {"forward": 1},
    "back": {"back": 1},
    "left": {"left": 1},
    "right": {"right": 1},
    "jump": {"jump": 1, "forward": 1},
    "place_dirt": {"place": "dirt"},
}
TOOLS: dict[str, Command] = {
    "craft_planks": {"craft": "planks"},
    "craft_stick": {"craft": "stick"},
    "craft_crafting_table": {"craft": "crafting_table"},
    "place_crafting_table": {"place": "crafting_table"},
    "craft_wooden_pickaxe": {"nearbyCraft": "wooden_pickaxe"},
    "craft_stone_pickaxe": {"nearbyCraft": "stone_pickaxe"},
    "craft_iron_pickaxe": {"nearbyCraft": "iron_pickaxe"},
    "equip_stone_pickaxe": {"equip": "stone_pickaxe"},
    "equip_wooden_pickaxe": {"equip": "wooden_pickaxe"},
    "equip_iron_pickaxe": {"equip": "iron_pickaxe"},
    "craft_furnace": {"nearbyCraft": "furnace"},
    "place_furnace": {"place": "furnace"},
    "smelt_iron_ingot": {"nearbySmelt": "iron_ingot"},
}
MILESTONES = (
    "log",
    "planks",
    "stick",
    "crafting_table",
    "wooden_pickaxe",
    "cobblestone",
    "stone_pickaxe",
    "iron_ore",
    "furnace",
    "iron_ingot",
    "iron_pickaxe",
    "diamond",
)
LOGGED = ("log", "cobblestone", "iron_ingot", "diamond")


@dataclass(frozen=True)
class MinecraftConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    repeat: int = 1
    """Simulator steps per action; crafting, placing and turning happen in the first."""
    break_speed: float = 100.0
    """How many times faster than in the original blocks break."""
    length: int = 36_000
    """Steps after which an episode is cut (which is not terminal)."""
    sticky_attack: int = 30
    """Steps an attack goes on; none where `break_speed` is not 1."""
    sticky_jump: int = 10
    """Steps a jump goes on."""
    pitch_limit: int = 60
    """How far up and down the camera may look, in degrees."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.length < 1 or self.break_speed <= 0:
            raise ValueError(
                "minecraft needs repeat >= 1, length >= 1 and break_speed > 0, got "
                f"repeat={self.repeat}, length={self.length}, "
                f"break_speed={self.break_speed}"
            )


class Minecraft:
    """One task; `action` indexes its action list."""

    def __init__(
        self,
        task: str = "diamond",
        config: MinecraftConfig | None = None,
        seed: int = 0,
    ):
        self.task = task
        self.config = config = config or MinecraftConfig()
        self.actions = {**BASIC, **(TOOLS if task == "diamond" else {})}
        self._commands = [{**IDLE, **change} for change in self.actions.values()]
        self._game: Any = make_simulator(config)
        seen = self._game.observation_space
        # Two items are both called wood; they are counted as one.
        self._items = sorted({*seen["inventory"].spaces} - {"log2"})
        self._equippable = [*seen["equipped_items"]["mainhand"]["type"].values]
        self._hands = Hands(config)
        self._rng = np.random.default_rng(seed)
        self._count = 0
        self._most = np.zeros(len(self._items), np.float32)
        self._had: set[str] = set()
        self._before: dict[str, float] = {}

    @property
    def obs_space(self) -> Spaces:
        f32 = np.dtype(np.float32)
        amount, number = Space(f32, (len(self._items),), 0), Space(f32)
        return {
            "image": Space(np.dtype(np.uint8), (*self.config.size, 3)),
            "inventory": amount,
            "inventory_max": amount,
            "equipped": Space(f32, (len(self._equippable),), 0, 1),
            "health": number,
            "hunger": number,
            "breath": number,
            **flag_spaces(),
            **{f"log/inventory_{name}": number for name in LOGGED},
            "log/height": number,
        }

    @property
    def act_space(self) -> Spaces:
        return {"action": Space(np.dtype(np.int32), (), 0, len(self._commands))}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        # The simulator forgets its seed after every reset.
        self._game.seed(int(self._rng.integers(SEED_RANGE)))
        seen = self._game.reset()
        self._count = 0
        self._most[:] = 0
        self._had = set()
        self._before = {}
        self._hands = Hands(self.config)
        return {**self._look(seen), **flags(self._earn(seen), first=True)}

    def step(self, action: Action) -> Obs:
        command = self._hands.act(self._commands[int(action["action"])])
        over = False
        for turn in range(self.config.repeat):
            if turn == 1:
                command = {**IDLE, **{key: command[key] for key in HELD}}
            seen, _, over, info = self._game.step(command)
            if "error" in info:  # it shows noise from here on
                raise RuntimeError(f"Minecraft lost its connection: {info['error']}")
            if over:
                break
        self._count += 1
        last = over or self._count >= self.config.length
        reward = self._earn(seen)
        return {**self._look(seen), **flags(reward, last=last, terminal=bool(over))}

    def close(self) -> None:
        self._game.close()

    def _look(self, seen: Any) -> Obs:
        held = _inventory(seen)
        inventory = np.array([held.get(name, 0) for name in self._items], np.float32)
        self._most = np.maximum(self._most, inventory)
        in_hand = str(seen["equipped_items"]["mainhand"]["type"])
        equipped = np.zeros(len(self._equippable), np.float32)
        equipped[self._equippable.index(in_hand)] = 1
        body = seen["life_stats"]
        return {
            "image": np.array(seen["pov"], np.uint8),
            "inventory": inventory,
            "inventory_max": self._most.copy(),
            "equipped": equipped,
            "health": np.float32(float(body["life"]) / LIFE),
            "hunger": np.float32(float(body["food"]) / FOOD),
            "breath": np.float32(float(body["air"]) / AIR),
            **{f"log/inventory_{n}": np.float32(held.get(n, 0)) for n in LOGGED},
            "log/height": np.float32(seen["location_stats"]["ypos"]),
        }

    def _earn(self, seen: Any) -> float:
        """The reward for arriving here; the first row of an episode earns nothing."""
        held = _inventory(seen)
        now = {
            "health": float(seen["life_stats"]["life"]) / LIFE,
            "height": float(seen["location_stats"]["ypos"]),
            "log": float(held.get("log", 0)),
        }
        before, self._before = self._before or now, now
        new = {name for name in MILESTONES if held.get(name, 0)} - self._had
        self._had |= new
        reward = HEALTH_SCALE * (now["health"] - before["health"])
        if before is now:
            return 0.0
        if self.task == "diamond":
            reward += len(new)
        elif self.task == "wood":
            reward += max(0.0, now["log"] - before["log"])
        else:
            reward += now["height"] - before["height"]
        return reward


class Hands:
    """Holds what wants holding, and keeps the head from turning over."""

    def __init__(self, config: MinecraftConfig):
        self.config = config
        self._attack = 0
        self._jump = 0
        self._pitch = 0.0

    def act(self, command: Command) -> Command:
        config, command = self.config, dict(command)
        if config.break_speed == 1.0:
            if command["attack"]:
                self._attack = config.sticky_attack
            if self._attack:
                self._attack -= 1
                command |= {"attack": 1, "jump": 0}
        if command["jump"]:
            self._jump = config.sticky_jump
        if self._jump:
            self._jump -= 1
            command |= {"jump": 1, "forward": 1}
        down, right = command["camera"]
        if abs(self._pitch + down) > config.pitch_limit:
            down = 0.0
        self._pitch += down
        return {**command, "camera": (float(down), float(right))}


def _inventory(seen: Any) -> dict[str, int]:
    """How many of each item the player has."""
    held = {name: int(count) for name, count in seen["inventory"].items()}
    held["log"] = held.get("log", 0) + held.pop("log2", 0)
    return held


def make_simulator(config: MinecraftConfig) -> Any:
    """A MineRL environment with our observations and actions and no reward."""
    for name, kind in (("float", float), ("int", int), ("bool", bool)):
        if name not in vars(np):  # MineRL uses names that numpy has dropped
            setattr(np, name, kind)
    from minerl.herobraine.env_spec import EnvSpec
    from minerl.herobraine.hero import handlers, mc

    height, width = config.size
    nothing = {"_other": "none", "_default": "none"}
    choices = ["none", *mc.ALL_ITEMS]
    keys = ("forward", "back", "left", "right", "jump", "sneak", "attack")

    class World(EnvSpec):  # type: ignore
        def __init__(self) -> None:
            super().__init__(name="ReverieMinecraft-v0")

        def create_observables(self) -> list[Any]:
            return [
                handlers.POVObservation((width, height)),
                handlers.FlatInventoryObservation(mc.ALL_ITEMS),
                handlers.EquippedItemObservation(
                    mc.ALL_ITEMS, _default="air", _other="other"
                ),
                handlers.ObservationFromCurrentLocation(),
                handlers.ObservationFromLifeStats(),
            ]

        def create_actionables(self) -> list[Any]:
            return [
                *(
                    handlers.KeybasedCommandAction(key, mc.INVERSE_KEYMAP[key])
                    for key in keys
                ),
                handlers.CameraAction(),
                handlers.PlaceBlock(choices, **nothing),
                handlers.EquipAction(choices, **nothing),
                handlers.CraftAction(choices, **nothing),
                handlers.CraftNearbyAction(choices, **nothing),
                handlers.SmeltItemNearby(choices, **nothing),
            ]

        def create_agent_start(self) -> list[Any]:
            return [handlers.AgentStartBreakSpeedMultiplier(config.break_speed)]

        def create_server_world_generators(self) -> list[Any]:
            return [handlers.DefaultWorldGenerator(force_reset=True)]

        def create_server_quit_producers(self) -> list[Any]:
            return [handlers.ServerQuitWhenAnyAgentFinishes()]

        def create_server_initial_conditions(self) -> list[Any]:
            return [
                handlers.TimeInitialCondition(allow_passage_of_time=True, start_time=0),
                handlers.SpawningInitialCondition(allow_spawning=True),
            ]

        def create_rewardables(self) -> list[Any]:
            return []

        create_agent_handlers = create_monitors = create_rewardables
        create_server_decorators = create_rewardables

        def is_from_folder(self, folder: str) -> bool:
            return False

        def get_docstring(self) -> str:
            return ""

        def determine_success_from_rewards(self, rewards: list[float]) -> bool:
            return True

    return World().make()
