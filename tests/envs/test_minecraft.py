"""Minecraft, rule by rule, against a stand-in for MineRL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import minerl_stand_in
import numpy as np
import pytest
from minerl_stand_in import ITEMS, Game

from reverie import envs
from reverie.envs.suites.minecraft import Minecraft, MinecraftConfig

Make = Callable[..., tuple[Minecraft, Game]]

NOTHING = {
    "camera": (0.0, 0.0),
    "forward": 0,
    "back": 0,
    "left": 0,
    "right": 0,
    "jump": 0,
    "sneak": 0,
    "attack": 0,
    "place": "none",
    "equip": "none",
    "craft": "none",
    "nearbyCraft": "none",
    "nearbySmelt": "none",
}
BASIC = {
    "noop": {},
    "attack": {"attack": 1},
    "turn_up": {"camera": (-15.0, 0.0)},
    "turn_down": {"camera": (15.0, 0.0)},
    "turn_left": {"camera": (0.0, -15.0)},
    "turn_right": {"camera": (0.0, 15.0)},
    "forward": {"forward": 1},
    "back": {"back": 1},
    "left": {"left": 1},
    "right": {"right": 1},
    "jump": {"jump": 1, "forward": 1},
    "place_dirt": {"place": "dirt"},
}
TOOLS = {
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


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    games = minerl_stand_in.install(monkeypatch)

    def build(task: str = "diamond", **settings: Any) -> tuple[Minecraft, Game]:
        env = Minecraft(task, MinecraftConfig(**settings))
        env.reset(seed=0)
        return env, games.newest

    return build


def act(env: Minecraft, name: str) -> Any:
    return env.step({"action": np.int32(list(env.actions).index(name))})


def test_the_defaults_are_the_published_ones() -> None:
    config = MinecraftConfig()
    assert (config.size, config.repeat, config.break_speed) == ((64, 64), 1, 100.0)
    assert (config.length, config.pitch_limit) == (36_000, 60)
    assert (config.sticky_jump, config.sticky_attack) == (10, 30)
    with pytest.raises(ValueError, match="break_speed > 0"):
        MinecraftConfig(break_speed=0)


def test_the_world_is_asked_for_as_published(make: Make) -> None:
    _, game = make(size=(48, 64), break_speed=7.0)
    spec = game.spec
    parts = {type(h).__name__: h for h in [*spec.observables, *spec.actionables]}
    assert parts["POVObservation"].args == ((64, 48),)  # theirs is width, height
    assert parts["FlatInventoryObservation"].args == (ITEMS,)
    assert parts["EquippedItemObservation"].options["_default"] == "air"
    assert game.break_speed == 7.0
    (world,) = spec.server_world_generators
    assert world.options == {"force_reset": True}
    start = {type(h).__name__: h.options for h in spec.server_initial_conditions}
    assert start == {
        "TimeInitialCondition": {"allow_passage_of_time": True, "start_time": 0},
        "SpawningInitialCondition": {"allow_spawning": True},
    }
    assert len(spec.server_quit_producers) == 1


@pytest.mark.parametrize(
    ("task", "actions"),
    [("diamond", {**BASIC, **TOOLS}), ("wood", BASIC), ("climb", BASIC)],
)
def test_every_action_is_one_complete_command(
    make: Make, task: str, actions: dict[str, Any]
) -> None:
    env, game = make(task, sticky_jump=0)
    assert list(env.actions) == list(actions)
    assert env.act_space["action"].classes == (25 if task == "diamond" else 12)
    for name, change in actions.items():
        act(env, name)
        assert game.commands[-1] == {**NOTHING, **change}, name


@pytest.mark.parametrize(("turn", "sign"), [("turn_up", -1), ("turn_down", 1)])
def test_the_camera_stops_at_sixty_degrees(make: Make, turn: str, sign: int) -> None:
    env, game = make()
    for _ in range(6):
        act(env, turn)
    pitches = [command["camera"][0] for command in game.commands]
    assert pitches == [sign * 15.0] * 4 + [0.0] * 2
    act(env, "turn_left")  # to the sides there is no limit
    act(env, "turn_up" if sign > 0 else "turn_down")
    assert game.pitch == sign * 45.0
    env.reset()
    act(env, turn)
    assert game.pitch == sign * 15.0  # and a new episode looks straight ahead


def test_the_pitch_limit_is_a_setting(make: Make) -> None:
    env, game = make(pitch_limit=30)
    for _ in range(6):
        act(env, "turn_down")
    assert game.pitch == 30.0


def test_a_jump_goes_on_forward_for_ten_steps(make: Make) -> None:
    env, game = make()
    for name in ["jump", *["noop"] * 11]:
        act(env, name)
    assert [c["jump"] for c in game.commands] == [1] * 10 + [0] * 2
    assert [c["forward"] for c in game.commands] == [1] * 10 + [0] * 2


def test_jumping_again_begins_the_ten_steps_anew(make: Make) -> None:
    env, game = make()
    for name in ["jump", *["back"] * 4, "jump", *["noop"] * 11]:
        act(env, name)
    assert [c["jump"] for c in game.commands] == [1] * 15 + [0] * 2
    assert [c["back"] for c in game.commands[1:5]] == [1] * 4


def test_a_new_episode_has_forgotten_the_jump(make: Make) -> None:
    env, game = make()
    act(env, "jump")
    env.reset()
    act(env, "noop")
    assert game.commands[-1] == NOTHING


def test_attacks_are_held_only_where_blocks_break_at_their_own_speed(
    make: Make,
) -> None:
    env, game = make(break_speed=1.0)
    for name in ["attack", *["noop"] * 31]:
        act(env, name)
    assert [c["attack"] for c in game.commands] == [1] * 30 + [0] * 2
    assert game.items["log"] == 1
    env, game = make(break_speed=100.0)
    for name in ["attack", "noop"]:
        act(env, name)
    assert [c["attack"] for c in game.commands] == [1, 0]
    assert game.items["log"] == 1
    env, game = make(break_speed=2.0)
    for name in ["attack", "noop"]:
        act(env, name)
    assert [c["attack"] for c in game.commands] == [1, 0]


def test_a_held_attack_does_not_jump(make: Make) -> None:
    env, game = make(break_speed=1.0, sticky_attack=3)
    for name in ["attack", "jump", "noop", "noop"]:
        act(env, name)
    assert [c["jump"] for c in game.commands] == [0, 0, 0, 0]
    assert [c["attack"] for c in game.commands] == [1, 1, 1, 0]
    env.reset()
    act(env, "attack")
    env.reset()
    act(env, "noop")
    assert game.commands[-1]["attack"] == 0


@pytest.mark.parametrize("name", ["attack", "forward", "back", "left", "right"])
def test_repeats_hold_what_can_be_held(make: Make, name: str) -> None:
    env, game = make(repeat=3)
    act(env, name)
    assert game.commands == [{**NOTHING, **BASIC[name]}] * 3


@pytest.mark.parametrize("name", ["turn_left", "craft_planks", "place_dirt", "jump"])
def test_repeats_do_the_rest_once(make: Make, name: str) -> None:
    env, game = make(repeat=3)
    act(env, name)
    first, *rest = game.commands
    assert first == {**NOTHING, **BASIC, **TOOLS}[name] | first
    held = {"forward": 1} if name == "jump" else {}
    assert rest == [{**NOTHING, **held}] * 2


def test_repeats_stop_at_death_and_count_as_one_step(make: Make) -> None:
    env, game = make(repeat=4, length=2)
    assert not act(env, "noop")["is_last"]
    game.life = 0
    row = act(env, "noop")
    assert (row["is_last"], row["is_terminal"]) == (True, True)
    assert len(game.commands) == 5


def test_the_inventory_lists_every_item_and_both_kinds_of_wood_as_one(
    make: Make,
) -> None:
    env, game = make()
    game.items |= {"log": 2, "log2": 3, "diamond": 1}
    row = act(env, "noop")
    names = sorted(set(ITEMS) - {"log2"})
    assert row["inventory"].shape == (len(ITEMS) - 1,)
    found = dict(zip(names, row["inventory"].tolist(), strict=True))
    assert {k: v for k, v in found.items() if v} == {"log": 5, "diamond": 1}


def test_the_largest_inventory_is_remembered_until_the_episode_ends(make: Make) -> None:
    env, game = make()
    log, dirt = (sorted(set(ITEMS) - {"log2"}).index(n) for n in ("log", "dirt"))
    for logs, dirts in ((4, 0), (1, 2)):
        game.items |= {"log": logs, "dirt": dirts}
        row = act(env, "noop")
    assert (row["inventory"][log], row["inventory"][dirt]) == (1, 2)
    assert (row["inventory_max"][log], row["inventory_max"][dirt]) == (4, 2)
    later = act(env, "noop")
    assert not np.shares_memory(row["inventory_max"], later["inventory_max"])
    assert not env.reset()["inventory_max"].any()
    assert later["inventory_max"][log] == 4  # rows that were given away stay


def test_what_is_in_hand_is_one_hot(make: Make) -> None:
    env, game = make()
    kinds = sorted({*ITEMS, "air", "other"})
    row = env.reset()
    assert row["equipped"].tolist() == [float(kind == "air") for kind in kinds]
    game.items["iron_pickaxe"] = 1
    row = act(env, "equip_iron_pickaxe")
    assert row["equipped"].sum() == 1
    assert row["equipped"][kinds.index("iron_pickaxe")] == 1


def test_health_hunger_and_breath_are_shares(make: Make) -> None:
    env, game = make()
    game.life, game.food, game.air = 5.0, 8, 60
    row = act(env, "noop")
    assert (row["health"], row["hunger"], row["breath"]) == pytest.approx(
        (0.25, 0.4, 0.2)
    )


def test_a_diamond_needs_eleven_things_and_each_pays_once(make: Make) -> None:
    env, game = make()
    assert env.reset()["reward"] == 0

    def find(item: str, count: int = 1) -> float:
        game.items[item] += count
        return float(act(env, "noop")["reward"])

    def get(name: str, times: int = 1) -> float:
        return float(sum(float(act(env, name)["reward"]) for _ in range(times)))

    assert get("attack") == 1  # log
    assert get("attack", 4) == 0
    assert get("craft_planks") == 1
    assert get("craft_planks", 3) == 0
    assert get("craft_crafting_table") == 1
    assert get("place_crafting_table") == 0
    assert get("craft_stick") == 1
    assert get("craft_stick") == 0
    assert get("craft_wooden_pickaxe") == 1
    assert get("equip_wooden_pickaxe") == 0
    assert find("cobblestone", 20) == 1
    assert get("craft_stone_pickaxe") == 1
    assert get("craft_furnace") == 1
    assert get("place_furnace") == 0
    assert find("iron_ore", 3) == 1
    assert get("smelt_iron_ingot") == 1
    assert get("smelt_iron_ingot", 2) == 0
    assert get("craft_iron_pickaxe") == 1
    assert find("diamond") == 1
    assert find("diamond") == 0
    game.items["diamond"] = 0
    assert get("noop") == 0
    assert find("diamond") == 0  # once an episode
    env.reset()
    assert get("attack") == 1  # and again in the next


def test_two_firsts_in_one_step_pay_two(make: Make) -> None:
    env, game = make()
    game.items |= {"diamond": 1, "iron_ore": 1, "dirt": 1}
    assert act(env, "noop")["reward"] == 2


def test_losing_health_costs_a_hundredth_and_gaining_pays_it(make: Make) -> None:
    for task in ("diamond", "wood", "climb"):
        env, game = make(task)
        game.life = 10.0
        assert act(env, "noop")["reward"] == pytest.approx(-0.005)
        game.life = 14.0
        assert act(env, "noop")["reward"] == pytest.approx(0.002)
        assert act(env, "noop")["reward"] == 0
        assert env.reset()["reward"] == 0
        assert act(env, "noop")["reward"] == 0


def test_wood_pays_for_every_log_and_never_charges(make: Make) -> None:
    env, game = make("wood")
    rewards = []
    for logs in (1, 3, 2, 3):
        game.items["log"] = logs
        rewards.append(float(act(env, "noop")["reward"]))
    assert rewards == [1, 2, 0, 1]
    game.items["log2"] = 2
    assert act(env, "noop")["reward"] == 2
    game.items["diamond"] = 1
    assert act(env, "noop")["reward"] == 0


def test_climb_pays_for_height_both_ways(make: Make) -> None:
    env, game = make("climb")
    game.items["diamond"] = 1
    rewards = []
    for height in (70.0, 68.5, 68.5):
        game.height = height
        row = act(env, "noop")
        rewards.append(float(row["reward"]))
        assert row["log/height"] == height
    assert rewards == [6.0, -1.5, 0.0]
    assert env.reset()["reward"] == 0


def test_things_held_at_the_start_are_not_found(make: Make) -> None:
    env, game = make()
    begin = game._observe

    def rich() -> dict[str, Any]:
        game.items["log"] = 1
        return begin()

    game._observe = rich  # type: ignore[method-assign]
    assert env.reset()["reward"] == 0
    assert act(env, "noop")["reward"] == 0


def test_death_is_terminal_and_the_step_limit_is_not(make: Make) -> None:
    env, game = make(length=3)
    rows = [act(env, "noop") for _ in range(3)]
    assert [bool(row["is_last"]) for row in rows] == [False, False, True]
    assert not rows[-1]["is_terminal"]
    env.reset()
    assert not act(env, "noop")["is_last"]  # the count begins anew
    game.life = 0
    row = act(env, "noop")
    assert row["is_last"]
    assert row["is_terminal"]


def test_every_episode_has_a_world_of_its_own_that_the_seed_decides(make: Make) -> None:
    env, game = make()
    env.reset(seed=3)
    env.reset()
    env.reset()
    env.reset(seed=3)
    env.reset()
    first, second, third, again, then = game.seeds[1:]
    assert len({first, second, third}) == 3
    assert (again, then) == (first, second)


def test_people_see_the_items_that_count(make: Make) -> None:
    env, game = make()
    game.items |= {"log": 1, "log2": 1, "cobblestone": 3}
    row = act(env, "noop")
    logged = {key: float(row[key]) for key in row if key.startswith("log/inventory")}
    assert logged == {
        "log/inventory_log": 2,
        "log/inventory_cobblestone": 3,
        "log/inventory_iron_ingot": 0,
        "log/inventory_diamond": 0,
    }


def test_a_lost_connection_closes_the_episode_and_starts_another_game(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    _, _ = make()
    factory = envs.TaskFactory("minecraft_wood", envs.EnvConfig(), 0)
    pool = envs.make_vec_env(factory, 1)
    pool.reset()
    lost = Game.newest
    lost.lost = True
    row = pool.step({"action": np.zeros(1, np.int32)})
    assert row["is_last"].all()
    assert not row["is_terminal"].any()
    assert "lost its connection" in caplog.text
    assert lost.closed
    assert pool.step({"action": np.zeros(1, np.int32)})["is_first"].all()
    assert Game.newest is not lost
    pool.close()
    assert Game.newest.closed


def test_names_that_numpy_has_dropped_are_there_for_the_simulator(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(np, "float", raising=False)
    monkeypatch.delattr(np, "int", raising=False)
    make()
    assert vars(np)["float"] is float
    assert vars(np)["int"] is int
