"""Keys, combinations of keys and sliders become actions."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.play.controls import (
    DIGITS,
    PAGE_KEYS,
    describe_action,
    human_action,
    make_controls,
    named_keys,
)
from reverie.spaces import Space

ALE = ("noop", "fire", "up", "right", "left", "down", "upright", "upleft", "upfire")
CRAFTER = [
    "noop",
    "move_left",
    "move_right",
    "move_up",
    "move_down",
    "do",
    "sleep",
    "place_stone",
    "place_table",
    "place_furnace",
    "place_plant",
    "make_wood_pickaxe",
    "make_stone_pickaxe",
    "make_iron_pickaxe",
    "make_wood_sword",
    "make_stone_sword",
    "make_iron_sword",
]


def discrete(values: int, low: int = 0):
    return {"action": Space(np.int32, (), low, low + values)}


def act(space, held=(), sliders=None, names=()):
    """Return the action that held keys and sliders select."""
    controls = make_controls(space, names)
    return human_action(controls, space, list(held), sliders or {})


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        ([], "noop"),
        (["ArrowUp"], "up"),
        (["ArrowUp", "ArrowRight"], "upright"),
        (["ArrowRight", "ArrowUp"], "upright"),
        (["ArrowUp", "Space"], "upfire"),
        (
            ["ArrowLeft", "Space"],
            "fire",
        ),  # there is no `leftfire`: the newest key counts
        (["ArrowLeft", "ArrowRight"], "right"),
        (["ArrowRight", "ArrowLeft"], "left"),
        (["KeyQ"], "noop"),
    ],
)
def test_the_largest_combination_of_held_keys_is_taken(held, expected):
    action = act(discrete(len(ALE)), held, names=ALE)
    assert ALE[int(action["action"])] == expected


def test_every_action_of_crafter_has_its_own_keys():
    keys = named_keys(CRAFTER)
    assert keys[0] == ()
    assert keys[1:5] == (
        ("ArrowLeft",),
        ("ArrowRight",),
        ("ArrowUp",),
        ("ArrowDown",),
    )
    assert len(set(keys)) == len(CRAFTER)
    assert not {key for combination in keys for key in combination} & set(PAGE_KEYS)


def test_actions_without_names_have_digits():
    (control,) = make_controls(discrete(4, low=2))
    assert control.value_names == ("2", "3", "4", "5")
    assert control.key_combinations == tuple((digit,) for digit in DIGITS[:4])
    assert int(act(discrete(4, low=2), ["Digit3"])["action"]) == 4
    assert int(act(discrete(4, low=2))["action"]) == 2


def test_entries_of_a_multi_discrete_action_have_a_row_of_keys_each():
    space = {"action": Space(np.int32, (2,), 0, [3, 5])}
    controls = make_controls(space)
    assert [len(control.value_names) for control in controls] == [3, 5]
    action = act(space, ["Digit2", "KeyE"])
    assert action["action"].tolist() == [1, 2]


def test_sliders_set_continuous_actions_within_their_bounds():
    space = {"move": Space(np.float32, (2,), -1, 1), "jump": Space(np.int32, (), 0, 2)}
    action = act(space, ["Digit2"], {0: 0.25, 1: 7.0})
    np.testing.assert_allclose(action["move"], [0.25, 1.0])
    assert int(action["jump"]) == 1
    for key, value in action.items():
        assert space[key].problem(value) is None


def test_actions_are_described_by_name_and_number():
    space = {"move": Space(np.float32, (1,), -1, 1)}
    assert describe_action(make_controls(space), {"move": np.array([0.5])}) == "0.50"
    controls = make_controls(discrete(3), ("left", "stay", "right"))
    assert describe_action(controls, {"action": np.int32(2)}) == "right"
