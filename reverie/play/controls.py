"""Keyboard keys, sliders and buttons for the entries of an action space.

An environment with one discrete action may have an attribute `action_names`, from which
keys are chosen. A name that consists of `left`, `right`, `up`, `down` and `fire` is
selected by several keys at once: `upright` or `up_right` by the arrow up and the arrow
right. An action without effect (`noop`, `stay`) has no key. Other names get the free
keys of `KEY_ROWS` in order. If actions have no names, the values of each discrete entry
get the keys of one row of `KEY_ROWS`.

Keys are codes of the browser (`KeyboardEvent.code`), which do not depend on the
keyboard layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reverie.api import Action
from reverie.spaces import Spaces

WORD_KEYS = {
    "left": "ArrowLeft",
    "right": "ArrowRight",
    "up": "ArrowUp",
    "forward": "ArrowUp",
    "down": "ArrowDown",
    "back": "ArrowDown",
    "fire": "Space",
    "do": "Space",
    "toggle": "Space",
    "attack": "Space",
    "sleep": "KeyZ",
    "pickup": "KeyG",
    "drop": "KeyX",
    "done": "KeyC",
    "jump": "KeyJ",
}
"""Keyboard key of each word that names of actions may contain."""

NOOP_NAMES = ("noop", "stay", "none", "idle")
"""Names of actions without effect; they have no keys."""

DIGITS = tuple(f"Digit{n}" for n in (1, 2, 3, 4, 5, 6, 7, 8, 9, 0))
KEY_ROWS = (
    DIGITS,
    tuple(f"Key{letter}" for letter in "QWEYUIO"),
    tuple(f"Key{letter}" for letter in "ASDGJKL"),
    tuple(f"Key{letter}" for letter in "ZXCVBNM"),
)
"""Keys of actions for which `WORD_KEYS` has no key; see the top of this file."""

PAGE_KEYS = ("KeyP", "Period", "KeyR", "KeyF", "KeyT", "KeyH", "Comma", "Slash")
"""Shortcuts of the page, which are not used for actions."""

MAX_CONTROLS = 64
"""Maximum number of controls; further entries of the action space are always zero."""

_JOINED_WORDS = re.compile("left|right|up|down|fire")
"""Finds the words in names without underscores, such as `upright` or `downleftfire`."""


@dataclass(frozen=True)
class Control:
    """The control of one entry of the action space."""

    action_key: str
    """Key of the action space."""
    index: int
    """Index of the entry in the flattened action."""
    label: str
    value_names: tuple[str, ...] = ()
    """Names of the values of a discrete entry; empty for a continuous one."""
    key_combinations: tuple[tuple[str, ...], ...] = ()
    """For each value, the keyboard keys that select it when all are held."""
    noop: int = 0
    """Index of the value that is selected while no key is held."""
    low: float = -1.0
    high: float = 1.0


def make_controls(act_space: Spaces, names: Sequence[str] = ()) -> list[Control]:
    """Return the controls of all entries of an action space."""
    controls: list[Control] = []
    num_discrete = sum(
        int(np.prod(s.shape)) for s in act_space.values() if s.is_discrete
    )
    for key, space in act_space.items():
        size = int(np.prod(space.shape))
        for index in range(size):
            if len(controls) == MAX_CONTROLS:
                return controls
            label = f"{key} {index + 1}" if size > 1 else key
            low, high = (float(x.flat[index]) for x in (space.low, space.high))
            if not space.is_discrete:
                # a slider needs finite bounds; without any, its range is [-1, 1]
                low, high = max(low, -1e6), min(high, 1e6)
                if (low, high) == (-1e6, 1e6):
                    low, high = -1.0, 1.0
                controls.append(Control(key, index, label, low=low, high=high))
                continue
            num_values = int(high - low)
            is_named = num_discrete == 1 and len(names) == num_values
            value_names = tuple(names) if is_named else ()
            discrete_index = sum(1 for control in controls if control.value_names)
            controls.append(
                Control(
                    key,
                    index,
                    label,
                    value_names or tuple(str(int(low) + n) for n in range(num_values)),
                    named_keys(value_names)
                    if value_names
                    else _row_keys(discrete_index, num_values),
                    _noop_index(value_names),
                    low,
                    high,
                )
            )
    return controls


def named_keys(names: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the key combination of each action name.

    A name without known words, or with the keys of an earlier name, gets a free key.
    """
    combinations = {name: _word_keys(name) for name in names}
    used = {key for keys in combinations.values() for key in keys}
    all_keys = [key for row in KEY_ROWS for key in row]
    free = iter([key for key in all_keys if key not in {*used, *PAGE_KEYS}])
    assigned: set[tuple[str, ...]] = set()
    result = []
    for name in names:
        keys = combinations[name]
        if name not in NOOP_NAMES and (not keys or keys in assigned):
            free_key = next(free, None)
            keys = () if free_key is None else (free_key,)
        assigned.add(keys)
        result.append(keys)
    return tuple(result)


def _word_keys(name: str) -> tuple[str, ...]:
    """Return the keys of the words in a name; empty if a word has no key."""
    words = [word for word in name.lower().split("_") if word != "move"]
    if len(words) == 1 and "".join(_JOINED_WORDS.findall(words[0])) == words[0]:
        words = _JOINED_WORDS.findall(words[0])
    keys = [WORD_KEYS.get(word, "") for word in words]
    return tuple(keys) if all(keys) else ()


def _row_keys(row_index: int, num_values: int) -> tuple[tuple[str, ...], ...]:
    """Return one key of a row for each value; no key if the row is too short."""
    row = KEY_ROWS[row_index] if row_index < len(KEY_ROWS) else ()
    row = tuple(key for key in row if key not in PAGE_KEYS)
    return tuple((row[n],) if n < len(row) else () for n in range(num_values))


def _noop_index(names: Sequence[str]) -> int:
    """Return the index of the action without effect; 0 if no name says so."""
    for name in (*NOOP_NAMES, "done"):  # `done` has no effect in most MiniGrid tasks
        if name in names:
            return list(names).index(name)
    return 0


def human_action(
    controls: Sequence[Control],
    act_space: Spaces,
    held: Sequence[str],
    sliders: Mapping[int, float],
) -> Action:
    """Return the action that held keys and sliders select.

    `held` are keys in the order in which they were pressed. `sliders` maps the index of
    a control to its value; for a discrete control, to the index of the value that is
    selected while no key is held.
    """
    action = {key: np.array(space.zeros()) for key, space in act_space.items()}
    for number, control in enumerate(controls):
        entries = action[control.action_key].reshape(-1)
        if control.value_names:
            default = int(sliders.get(number, control.noop))
            default = min(max(default, 0), len(control.value_names) - 1)
            selected = _selected_value(control, held, default)
            entries[control.index] = int(control.low) + selected
        else:
            value = float(sliders.get(number, 0.0))
            entries[control.index] = min(max(value, control.low), control.high)
    for key, space in act_space.items():
        if space.is_discrete:  # entries without controls may be out of range
            highest = np.maximum(space.high - 1, space.low)
            action[key] = np.clip(action[key], space.low, highest).astype(space.dtype)
    return action


def _selected_value(control: Control, held: Sequence[str], default: int) -> int:
    """Return the index of the value whose keys are all held, or `default`.

    If there are several, the one with the most keys is returned; among those with
    equally many keys, the one whose key was pressed last.
    """
    best, best_rank = default, (0, -1)  # rank: number of keys, position in `held`
    for value, keys in enumerate(control.key_combinations):
        if keys and all(key in held for key in keys):
            newest = max(held.index(key) for key in keys)
            if (len(keys), newest) > best_rank:
                best, best_rank = value, (len(keys), newest)
    return best


def chosen_values(controls: Sequence[Control], action: Action) -> list[int]:
    """Return the index of the value of each discrete entry of an action."""
    return [
        int(
            np.asarray(action[control.action_key]).reshape(-1)[control.index]
            - control.low
        )
        for control in controls
        if control.value_names
    ]


def probabilities(
    controls: Sequence[Control], probs: Mapping[str, np.ndarray]
) -> list[list[float]]:
    """Return the probabilities of all values of each discrete entry.

    `probs` maps keys of the action space to probabilities `(..., K)` of their entries.
    The list of an entry is empty if its key is not in `probs`.
    """
    result: list[list[float]] = []
    for control in controls:
        if not control.value_names:
            continue
        table = probs.get(control.action_key)
        if table is None:
            result.append([])
            continue
        row = table.reshape(-1, table.shape[-1])[control.index]
        result.append(np.round(row[: len(control.value_names)], 4).tolist())
    return result


def describe_action(controls: Sequence[Control], action: Action) -> str:
    """Return the names or numbers of an action, for display."""
    words = []
    for control in controls:
        value = np.asarray(action[control.action_key]).reshape(-1)[control.index]
        if control.value_names:
            words.append(control.value_names[int(value) - int(control.low)])
        else:
            words.append(f"{float(value):.2f}")
    return " ".join(words[:8]) + (" ..." if len(words) > 8 else "")
