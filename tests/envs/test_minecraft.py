"""Minecraft with a fake MineRL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_minerl
import numpy as np
import pytest
from fake_minerl import ITEMS, Game

from reverie import envs
from reverie.envs.suites.minecraft import Minecraft, MinecraftConfig

Make = Callable[..., tuple[Minecraft, Game]]

NOOP: dict[str, Any] = {
    **dict.fromkeys(["place", "equip", "craft", "nearbyCraft", "nearbySmelt"], "none"),
    **dict.fromkeys(["attack", "forward", "back", "left", "right", "jump", "sneak"], 0),
    "camera": (0, 0),
}
TURNS = {"up": (-15, 0), "down": (15, 0), "left": (0, -15), "right": (0, 15)}
_BASIC = """
noop attack turn_up turn_down turn_left turn_right forward back left right jump
place_dirt
"""
_TOOLS = """
craft_planks craft_stick craft_crafting_table place_crafting_table craft_wooden_pickaxe
craft_stone_pickaxe craft_iron_pickaxe equip_stone_pickaxe equip_wooden_pickaxe
equip_iron_pickaxe craft_furnace place_furnace smelt_iron_ingot
"""
BASIC, TOOLS = _BASIC.split(), _TOOLS.split()
WITHOUT_TABLE = ("planks", "stick", "crafting_table")
"""Items that are crafted without a crafting table."""


def expected_change(name: str) -> dict[str, Any]:
    """What an action changes in `NOOP`, derived from its name."""
    verb, _, what = name.partition("_")
    if verb == "turn":
        return {"camera": TURNS[what]}
    if what:
        at_table = verb == "craft" and what not in WITHOUT_TABLE
        verb = {"smelt": "nearbySmelt"}.get(verb, "nearbyCraft" if at_table else verb)
        return {verb: what}
    return dict.fromkeys(
        {"jump": ("jump", "forward"), "noop": ()}.get(name, (name,)), 1
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    games = fake_minerl.install(monkeypatch)

    def build(task: str = "diamond", **settings: Any) -> tuple[Minecraft, Game]:
        env = Minecraft(task, MinecraftConfig(**settings))
        env.reset(seed=0)
        return env, games.newest

    return build


def act(env: Minecraft, name: str) -> Any:
    return env.step({"action": np.int32(list(env.actions).index(name))})


def test_defaults_are_those_of_dreamerv3() -> None:
    config = MinecraftConfig()
    assert (config.size, config.repeat, config.break_speed) == ((64, 64), 1, 100.0)
    assert (config.length, config.pitch_limit) == (36_000, 60)
    assert (config.sticky_jump, config.sticky_attack) == (10, 30)
    with pytest.raises(ValueError, match="break_speed > 0"):
        MinecraftConfig(break_speed=0)


def test_the_configuration_of_the_world(make: Make) -> None:
    _, game = make(size=(48, 64), break_speed=7.0)
    spec = game.spec
    parts = {type(h).__name__: h for h in [*spec.observables, *spec.actionables]}
    assert parts["POVObservation"].args == ((64, 48),)  # width, height
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
    [("diamond", BASIC + TOOLS), ("wood", BASIC), ("climb", BASIC)],
)
def test_every_action_is_a_complete_command(
    make: Make, task: str, actions: list[str]
) -> None:
    env, game = make(task, sticky_jump=0)
    assert list(env.actions) == actions
    assert env.act_space["action"].classes == (25 if task == "diamond" else 12)
    for name in actions:
        act(env, name)
        assert game.commands[-1] == {**NOOP, **expected_change(name)}, name


@pytest.mark.parametrize(("turn", "sign"), [("turn_up", -1), ("turn_down", 1)])
def test_the_pitch_is_limited_to_60_degrees(make: Make, turn: str, sign: int) -> None:
    env, game = make()
    for _ in range(6):
        act(env, turn)
    pitches = [command["camera"][0] for command in game.commands]
    assert pitches == [sign * 15.0] * 4 + [0.0] * 2
    act(env, "turn_left")  # horizontal rotation is not limited
    act(env, "turn_up" if sign > 0 else "turn_down")
    assert game.pitch == sign * 45.0
    env.reset()
    act(env, turn)
    assert game.pitch == sign * 15.0  # the pitch is reset


def test_the_pitch_limit_can_be_configured(make: Make) -> None:
    env, game = make(pitch_limit=30)
    for _ in range(6):
        act(env, "turn_down")
    assert game.pitch == 30.0


def test_a_jump_is_repeated_for_ten_steps(make: Make) -> None:
    env, game = make()
    for name in ["jump", *["noop"] * 11]:
        act(env, name)
    assert [c["jump"] for c in game.commands] == [1] * 10 + [0] * 2
    assert [c["forward"] for c in game.commands] == [1] * 10 + [0] * 2


def test_another_jump_restarts_the_ten_steps(make: Make) -> None:
    env, game = make()
    for name in ["jump", *["back"] * 4, "jump", *["noop"] * 11]:
        act(env, name)
    assert [c["jump"] for c in game.commands] == [1] * 15 + [0] * 2
    assert [c["back"] for c in game.commands[1:5]] == [1] * 4


def test_a_reset_stops_the_jump(make: Make) -> None:
    env, game = make()
    act(env, "jump")
    env.reset()
    act(env, "noop")
    assert game.commands[-1] == NOOP


def test_attacks_are_repeated_only_at_original_break_speed(
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


def test_a_repeated_attack_does_not_jump(make: Make) -> None:
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
def test_action_repeat_repeats_motion_and_attack(make: Make, name: str) -> None:
    env, game = make(repeat=3)
    act(env, name)
    assert game.commands == [{**NOOP, **expected_change(name)}] * 3


@pytest.mark.parametrize("name", ["turn_left", "craft_planks", "place_dirt", "jump"])
def test_action_repeat_sends_other_actions_once(make: Make, name: str) -> None:
    env, game = make(repeat=3)
    act(env, name)
    first, *others = game.commands
    assert first == first | expected_change(name)
    repeated = {"forward": 1} if name == "jump" else {}
    assert others == [{**NOOP, **repeated}] * 2


def test_action_repeat_stops_at_death(make: Make) -> None:
    env, game = make(repeat=4, length=2)
    assert not act(env, "noop")["is_last"]
    game.life = 0
    row = act(env, "noop")
    assert (row["is_last"], row["is_terminal"]) == (True, True)
    assert len(game.commands) == 5


def test_the_inventory_merges_both_kinds_of_logs(
    make: Make,
) -> None:
    env, game = make()
    game.items |= {"log": 2, "log2": 3, "diamond": 1}
    row = act(env, "noop")
    names = sorted(set(ITEMS) - {"log2"})
    assert row["inventory"].shape == (len(ITEMS) - 1,)
    counts = dict(zip(names, row["inventory"].tolist(), strict=True))
    assert {k: v for k, v in counts.items() if v} == {"log": 5, "diamond": 1}


def test_the_maximum_inventory_of_an_episode(make: Make) -> None:
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
    assert later["inventory_max"][log] == 4  # returned arrays are not modified


def test_the_equipped_item_is_one_hot(make: Make) -> None:
    env, game = make()
    kinds = sorted({*ITEMS, "air", "other"})
    row = env.reset()
    assert row["equipped"].tolist() == [float(kind == "air") for kind in kinds]
    game.items["iron_pickaxe"] = 1
    row = act(env, "equip_iron_pickaxe")
    assert row["equipped"].sum() == 1
    assert row["equipped"][kinds.index("iron_pickaxe")] == 1


def test_health_hunger_and_breath_are_fractions(make: Make) -> None:
    env, game = make()
    game.life, game.food, game.air = 5.0, 8, 60
    row = act(env, "noop")
    assert (row["health"], row["hunger"], row["breath"]) == pytest.approx(
        (0.25, 0.4, 0.2)
    )


def test_each_item_on_the_way_to_the_diamond_is_rewarded_once(make: Make) -> None:
    env, game = make()
    assert env.reset()["reward"] == 0

    def reward_for_item(item: str, count: int = 1) -> float:
        game.items[item] += count
        return float(act(env, "noop")["reward"])

    def reward_for_action(name: str, times: int = 1) -> float:
        return float(sum(float(act(env, name)["reward"]) for _ in range(times)))

    assert reward_for_action("attack") == 1  # log
    assert reward_for_action("attack", 4) == 0
    assert reward_for_action("craft_planks") == 1
    assert reward_for_action("craft_planks", 3) == 0
    assert reward_for_action("craft_crafting_table") == 1
    assert reward_for_action("place_crafting_table") == 0
    assert reward_for_action("craft_stick") == 1
    assert reward_for_action("craft_stick") == 0
    assert reward_for_action("craft_wooden_pickaxe") == 1
    assert reward_for_action("equip_wooden_pickaxe") == 0
    assert reward_for_item("cobblestone", 20) == 1
    assert reward_for_action("craft_stone_pickaxe") == 1
    assert reward_for_action("craft_furnace") == 1
    assert reward_for_action("place_furnace") == 0
    assert reward_for_item("iron_ore", 3) == 1
    assert reward_for_action("smelt_iron_ingot") == 1
    assert reward_for_action("smelt_iron_ingot", 2) == 0
    assert reward_for_action("craft_iron_pickaxe") == 1
    assert reward_for_item("diamond") == 1
    assert reward_for_item("diamond") == 0
    game.items["diamond"] = 0
    assert reward_for_action("noop") == 0
    assert reward_for_item("diamond") == 0  # once per episode
    env.reset()
    assert reward_for_action("attack") == 1  # rewarded again


def test_two_new_items_in_one_step_give_reward_2(make: Make) -> None:
    env, game = make()
    game.items |= {"diamond": 1, "iron_ore": 1, "dirt": 1}
    assert act(env, "noop")["reward"] == 2


def test_changes_in_health_are_rewarded(make: Make) -> None:
    for task in ("diamond", "wood", "climb"):
        env, game = make(task)
        game.life = 10.0
        assert act(env, "noop")["reward"] == pytest.approx(-0.005)
        game.life = 14.0
        assert act(env, "noop")["reward"] == pytest.approx(0.002)
        assert act(env, "noop")["reward"] == 0
        assert env.reset()["reward"] == 0
        assert act(env, "noop")["reward"] == 0


def test_wood_rewards_new_logs_only(make: Make) -> None:
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


def test_climb_rewards_changes_in_height(make: Make) -> None:
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


def test_initial_items_are_not_rewarded(make: Make) -> None:
    env, game = make()
    observe = game._observe

    def observe_with_log() -> dict[str, Any]:
        game.items["log"] = 1
        return observe()

    game._observe = observe_with_log  # type: ignore[method-assign]
    assert env.reset()["reward"] == 0
    assert act(env, "noop")["reward"] == 0


def test_only_death_is_terminal(make: Make) -> None:
    env, game = make(length=3)
    rows = [act(env, "noop") for _ in range(3)]
    assert [bool(row["is_last"]) for row in rows] == [False, False, True]
    assert not rows[-1]["is_terminal"]
    env.reset()
    assert not act(env, "noop")["is_last"]  # the time limit is reset
    game.life = 0
    row = act(env, "noop")
    assert row["is_last"]
    assert row["is_terminal"]


def test_seeds_reproduce_the_sequence_of_worlds(make: Make) -> None:
    env, game = make()
    env.reset(seed=3)
    env.reset()
    env.reset()
    env.reset(seed=3)
    env.reset()
    first, second, third, repeated_first, repeated_second = game.seeds[1:]
    assert len({first, second, third}) == 3
    assert (repeated_first, repeated_second) == (first, second)


def test_selected_items_are_logged(make: Make) -> None:
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


def test_a_lost_connection_truncates_the_episode(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    _, _ = make()
    factory = envs.TaskFactory("minecraft_wood", envs.EnvConfig(), 0)
    vec_env = envs.make_vec_env(factory, 1)
    vec_env.reset()
    broken = Game.newest
    broken.lost = True
    row = vec_env.step({"action": np.zeros(1, np.int32)})
    assert row["is_last"].all()
    assert not row["is_terminal"].any()
    assert "lost its connection" in caplog.text
    assert broken.closed
    assert vec_env.step({"action": np.zeros(1, np.int32)})["is_first"].all()
    assert Game.newest is not broken
    vec_env.close()
    assert Game.newest.closed


def test_removed_numpy_aliases_are_restored(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(np, "float", raising=False)
    monkeypatch.delattr(np, "int", raising=False)
    make()
    assert vars(np)["float"] is float
    assert vars(np)["int"] is int
