"""Minecraft on MineRL 0.4: find a diamond, collect wood, or climb.

The simulator needs Java 8; `tools/install_minecraft.sh` installs both. An action is an
index into `BASIC_ACTIONS`, followed by `TOOL_ACTIONS` in the task `diamond`. The camera
turns by 15 degrees per action, and its pitch is limited to `pitch_limit`. A jump is
repeated for `sticky_jump` steps, and the player moves forward in all of them. An attack
is repeated for `sticky_attack` steps, but only if blocks break at the original speed.

Rewards: `diamond` gives 1 for the first of each of twelve items per episode, `wood` 1
per log, `climb` 1 per block of height; all tasks add 0.01 times the change in health.
Death is terminal, the time limit is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reverie.api import Action, Obs
from reverie.envs.seeding import SEED_RANGE
from reverie.envs.suite import Package, Suite
from reverie.spaces import Space, step_spaces, step_values

TASKS = ("diamond", "wood", "climb")
TURN = 15
"""Camera rotation of one action in degrees."""
HEALTH_SCALE = 0.01
"""Reward for a change in health from 0 to its maximum."""
MAX_LIFE, MAX_FOOD, MAX_AIR = 20, 20, 300
"""Maximum values of the simulator, by which observations are divided."""

Command = dict[str, Any]
"""Action of the simulator: all entries, or only those that differ from `NOOP`."""

KEYS = ("forward", "back", "left", "right", "jump", "sneak", "attack")
NOOP: Command = {
    "camera": (0.0, 0.0),  # degrees down and right
    **dict.fromkeys(KEYS, 0),
    **dict.fromkeys(("place", "equip", "craft", "nearbyCraft", "nearbySmelt"), "none"),
}
REPEATED = ("attack", "forward", "back", "left", "right")
"""Keys that are repeated for `repeat` steps; all others are sent in the first step."""

BASIC_ACTIONS: dict[str, Command] = {
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
TOOL_ACTIONS: dict[str, Command] = {
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
_ITEMS = """
log planks stick crafting_table wooden_pickaxe cobblestone stone_pickaxe iron_ore
furnace iron_ingot iron_pickaxe diamond
"""
MILESTONES = tuple(_ITEMS.split())
"""Items that are rewarded once per episode in the task `diamond`."""
LOGGED_ITEMS = ("log", "cobblestone", "iron_ingot", "diamond")
"""Items whose number is logged as `log/inventory_ITEM`."""


@dataclass(frozen=True)
class MinecraftConfig:
    size: tuple[int, int] = (64, 64)
    """Height and width of the image in pixels."""
    repeat: int = 1
    """Simulator steps per action; crafting, placing and turning happen in the first."""
    break_speed: float = 100.0
    """Factor by which blocks break faster than in the original game."""
    length: int = 36_000
    """Time limit of an episode in steps (truncation)."""
    sticky_attack: int = 30
    """Steps for which an attack is repeated; used only if `break_speed` is 1."""
    sticky_jump: int = 10
    """Steps for which a jump is repeated."""
    pitch_limit: int = 60
    """Maximum pitch of the camera in degrees, up and down."""

    def __post_init__(self) -> None:
        if self.repeat < 1 or self.length < 1 or self.break_speed <= 0:
            raise ValueError(
                f"needs repeat >= 1, length >= 1 and break_speed > 0, got {self}"
            )


class Minecraft:
    """One task; `action` is an index into its list of actions."""

    def __init__(
        self,
        task: str = "diamond",
        config: MinecraftConfig | None = None,
        seed: int = 0,
    ):
        self.task = task
        self.config = config = config or MinecraftConfig()
        self.actions = {**BASIC_ACTIONS, **(TOOL_ACTIONS if task == "diamond" else {})}
        self._commands = [{**NOOP, **change} for change in self.actions.values()]
        self._game: Any = make_simulator(config)
        spaces = self._game.observation_space
        # `log` and `log2` are both wood and are counted as one item
        self._items = sorted({*spaces["inventory"].spaces} - {"log2"})
        self._equippable = [*spaces["equipped_items"]["mainhand"]["type"].values]
        self._controls = Controls(config)
        self._rng = np.random.default_rng(seed)
        self._count = 0
        self._max_inventory = np.zeros(len(self._items), np.float32)
        self._collected: set[str] = set()
        self._previous: dict[str, float] = {}
        items, number = Space(np.float32, (len(self._items),), 0), Space(np.float32)
        self.obs_space = {
            "image": Space(np.uint8, (*config.size, 3)),
            "inventory": items,
            "inventory_max": items,
            "equipped": Space(np.float32, (len(self._equippable),), 0, 1),
            **dict.fromkeys(("health", "hunger", "breath"), number),
            **step_spaces(),
            **{f"log/inventory_{name}": number for name in LOGGED_ITEMS},
            "log/height": number,
        }
        self.act_space = {"action": Space(np.int32, (), 0, len(self._commands))}

    def reset(self, seed: int | None = None) -> Obs:
        if seed is not None:
            self._rng = np.random.default_rng(seed)
        # the simulator has to be seeded before every reset
        self._game.seed(int(self._rng.integers(SEED_RANGE)))
        values = self._game.reset()
        self._count = 0
        self._max_inventory[:] = 0
        self._collected = set()
        self._previous = {}
        self._controls = Controls(self.config)
        return {**self._obs(values), **step_values(self._reward(values), first=True)}

    def step(self, action: Action) -> Obs:
        command = self._controls.apply(self._commands[int(action["action"])])
        done = False
        for repetition in range(self.config.repeat):
            if repetition == 1:
                command = {**NOOP, **{key: command[key] for key in REPEATED}}
            values, _, done, info = self._game.step(command)
            if "error" in info:  # the simulator returns noise after an error
                raise RuntimeError(f"Minecraft lost its connection: {info['error']}")
            if done:
                break
        self._count += 1
        last = done or self._count >= self.config.length
        reward = self._reward(values)
        return {
            **self._obs(values),
            **step_values(reward, last=last, terminal=bool(done)),
        }

    def close(self) -> None:
        self._game.close()

    def _obs(self, values: Any) -> Obs:
        """Convert an observation of the simulator."""
        items = _inventory(values)
        inventory = np.array([items.get(name, 0) for name in self._items], np.float32)
        self._max_inventory = np.maximum(self._max_inventory, inventory)
        in_hand = str(values["equipped_items"]["mainhand"]["type"])
        equipped = np.zeros(len(self._equippable), np.float32)
        equipped[self._equippable.index(in_hand)] = 1
        stats = values["life_stats"]
        return {
            "image": np.array(values["pov"], np.uint8),
            "inventory": inventory,
            "inventory_max": self._max_inventory.copy(),
            "equipped": equipped,
            "health": np.float32(float(stats["life"]) / MAX_LIFE),
            "hunger": np.float32(float(stats["food"]) / MAX_FOOD),
            "breath": np.float32(float(stats["air"]) / MAX_AIR),
            **{f"log/inventory_{n}": np.float32(items.get(n, 0)) for n in LOGGED_ITEMS},
            "log/height": np.float32(values["location_stats"]["ypos"]),
        }

    def _reward(self, values: Any) -> float:
        """Return the reward of a step; 0 at the start of an episode."""
        items = _inventory(values)
        current = {
            "health": float(values["life_stats"]["life"]) / MAX_LIFE,
            "height": float(values["location_stats"]["ypos"]),
            "log": float(items.get("log", 0)),
        }
        previous, self._previous = self._previous or current, current
        new_items = {name for name in MILESTONES if items.get(name, 0)}
        new_items -= self._collected
        self._collected |= new_items
        if previous is current:  # first observation of an episode
            return 0.0
        reward = HEALTH_SCALE * (current["health"] - previous["health"])
        if self.task == "diamond":
            reward += len(new_items)
        elif self.task == "wood":
            reward += max(0.0, current["log"] - previous["log"])
        else:
            reward += current["height"] - previous["height"]
        return reward


class Controls:
    """Repeats attacks and jumps, and limits the pitch of the camera."""

    def __init__(self, config: MinecraftConfig):
        self.config = config
        self._attack_steps = 0
        self._jump_steps = 0
        self._pitch = 0.0

    def apply(self, command: Command) -> Command:
        """Return the command to send to the simulator in this step."""
        config, command = self.config, dict(command)
        if config.break_speed == 1.0:
            if command["attack"]:
                self._attack_steps = config.sticky_attack
            if self._attack_steps:
                self._attack_steps -= 1
                command |= {"attack": 1, "jump": 0}
        if command["jump"]:
            self._jump_steps = config.sticky_jump
        if self._jump_steps:
            self._jump_steps -= 1
            command |= {"jump": 1, "forward": 1}
        down, right = command["camera"]
        if abs(self._pitch + down) > config.pitch_limit:
            down = 0.0
        self._pitch += down
        return {**command, "camera": (float(down), float(right))}


def _inventory(values: Any) -> dict[str, int]:
    """Return how many of each item the player has."""
    items = {name: int(count) for name, count in values["inventory"].items()}
    items["log"] = items.get("log", 0) + items.pop("log2", 0)
    return items


def make_simulator(config: MinecraftConfig) -> Any:
    """Build a MineRL environment without reward; actions have the keys of `NOOP`."""
    for name, kind in (("float", float), ("int", int), ("bool", bool)):
        if name not in vars(np):  # MineRL uses names that NumPy has removed
            setattr(np, name, kind)
    from minerl.herobraine.env_spec import EnvSpec
    from minerl.herobraine.hero import handlers, mc

    height, width = config.size
    nothing = {"_other": "none", "_default": "none"}
    choices = ["none", *mc.ALL_ITEMS]

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
                    for key in KEYS
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


SUITE = Suite(
    name="minecraft",
    description="Minecraft: obtain a diamond, collect wood, or climb",
    make=Minecraft,
    config=MinecraftConfig,
    tasks=TASKS,
    package=Package(
        "minerl",
        max_python=(3, 11),
        script="tools/install_minecraft.sh",
        note="It needs Java 8 and old build tools, which this script installs.",
    ),
)
