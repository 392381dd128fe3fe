"""Units of recorded continuous actions.

Environments scale bounded actions to [-1, 1] (`envs.wrappers.NormalizeAction`), and
recorded actions are scaled in the same way when they are read, so agents train and act
in the same units. `Space.native` has the bounds that an action was scaled from. Actions
without bounds are not scaled: they are in the environment's own units.
`make_action_converter` converts between action spaces: from recordings to an
environment, or to other recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from reverie.api import UserError
from reverie.datasets.episode_format import Episode
from reverie.datasets.readers import Reader, WrappedReader
from reverie.spaces import Space, Spaces

TOLERANCE = 1e-4
"""Relative tolerance when bounds are compared, because they may be float32."""

ActionConverter = Callable[[dict[str, Any]], dict[str, Any]]
"""Converts the actions in a dict and copies its other entries."""


def make_action_converter(
    source: Spaces, target: Spaces, source_name: str, target_name: str
) -> tuple[ActionConverter, str]:
    """Return a function that converts actions from `source` to `target`, and a warning.

    The environment's own units are assumed to be the same in both. If the bounds
    differ, or only one has bounds, the warning states this assumption; otherwise it is
    empty. Actions that were scaled from unknown bounds are not converted. Raises
    `UserError` if the bounds of `source` exceed those of `target`.
    """
    pairs = {
        key: (space, target[key])
        for key, space in source.items()
        if key in target and differ_in_units(space, target[key])
    }
    assumptions = []
    for key, (space, other) in pairs.items():
        (low, high), (min_low, max_high) = space.native_bounds, other.native_bounds
        width = max_high - min_low
        margin = TOLERANCE * np.where(np.isfinite(width), width, 0)
        exceeds = (low < min_low - margin) | (high > max_high + margin)
        if (np.isfinite(low) & np.isfinite(high) & exceeds).any():
            raise UserError(
                f"The action {key!r} has {format_bounds(space)} in {source_name}, but "
                f"{format_bounds(other)} in {target_name}.\n  Fix: use data and "
                "environments with the same robot, task and controller."
            )
        if not np.allclose([low, high], [min_low, max_high], rtol=TOLERANCE):
            assumptions.append(
                f"The action {key!r} has {format_bounds(space)} in {source_name}, and "
                f"is taken to be in the units of {target_name} "
                f"({format_bounds(other)})"
            )

    def convert(values: dict[str, Any]) -> dict[str, Any]:
        converted = {
            key: other.from_native(space.to_native(values[key]))
            for key, (space, other) in pairs.items()
            if key in values
        }
        return {**values, **converted}

    return convert, "; ".join(assumptions)


def check_same_actions(
    name: str, space: Spaces, other_name: str, other: Spaces, check_range: bool = True
) -> None:
    """Raise `UserError` unless two action spaces have the same keys, shapes and kinds.

    With `check_range`, all discrete actions of `other` must be valid in `space`, too.
    """

    def kinds(spaces: Spaces) -> dict[str, Any]:
        return {key: (s.shape, s.is_discrete) for key, s in spaces.items()}

    def exceeds(key: str, candidate: Space) -> bool:
        high, low = np.max(candidate.high), np.min(candidate.low)
        return bool(high > np.max(space[key].high) or low < np.min(space[key].low))

    same = kinds(space) == kinds(other)
    if same and check_range:
        same = not any(exceeds(k, s) for k, s in other.items() if s.is_discrete)
    if not same:
        texts = [
            ", ".join(map(_describe_action, x, x.values())) for x in (space, other)
        ]
        raise UserError(
            f"The actions of {name} are {texts[0]}, those of {other_name} are "
            f"{texts[1]}.\n  Fix: use data and environments with the same robot, task "
            "and controller."
        )


def _describe_action(key: str, space: Space) -> str:
    if space.is_discrete and not space.shape:
        return f"{key} from {int(space.low)} to {int(space.high) - 1}"
    return f"{key} {space.shape}"


def check_same_units(
    run_name: str, act_space: Spaces, data_name: str, recorded: Spaces
) -> None:
    """Raise if recorded actions are not in the units that a run was trained with."""
    for key, space in act_space.items():
        if key in recorded and differ_in_units(space, recorded[key]):
            low, high = (np.unique(bound) for bound in space.native_bounds)
            fix = f"--offline.read.action_bounds {low[0]:g} {high[0]:g}"
            if max(len(low), len(high)) > 1:
                fix = "use data whose actions have the same bounds"
            raise UserError(
                f"The action {key!r} has {format_bounds(space)} in {run_name}, but "
                f"{format_bounds(recorded[key])} in {data_name}.\n  Fix: {fix}."
            )


def differ_in_units(space: Space, other: Space) -> bool:
    """True if the same action is represented by different numbers in two spaces."""
    if space.is_discrete or other.is_discrete or space.shape != other.shape:
        return False
    if _has_unknown_bounds(space) or _has_unknown_bounds(other):
        return False
    if space.native is None or other.native is None:
        return space.native is not other.native
    return not np.allclose(space.native, other.native, rtol=TOLERANCE)


def _has_unknown_bounds(space: Space) -> bool:
    """True if actions are scaled to [-1, 1] from unknown bounds, which are infinite in
    `Space.native`."""
    bounds = (space.low, space.high)
    return bool(
        space.native is not None
        and (~np.isfinite(space.native) & np.isfinite(bounds)).any()
    )


def format_bounds(space: Space) -> str:
    """Return the bounds of an action in the environment's own units."""
    texts = [
        f"{bound.flat[0]:.4g}" if (bound == bound.flat[0]).all() else str(bound)
        for bound in space.native_bounds
    ]
    return "no bounds" if texts == ["-inf", "inf"] else f"bounds [{', '.join(texts)}]"


class ConvertedActionsReader(WrappedReader):
    """Reads the episodes of another reader with actions converted to another space."""

    def __init__(self, reader: Reader, act_space: Spaces, target_name: str):
        super().__init__(reader)
        self._convert, self.unit_warning = make_action_converter(
            reader.act_space, act_space, reader.origin, target_name
        )
        self._spaces = reader.obs_space, act_space

    def read(self, name: str) -> Episode:
        return self._convert_episode(self.inner.read(name))

    def read_keys(self, name: str, keys: Collection[str]) -> Episode:
        return self._convert_episode(self.inner.read_keys(name, keys))

    def _convert_episode(self, episode: Episode) -> Episode:
        converted = self._convert(episode)
        for key in self.act_space.keys() & converted.keys():
            if converted[key] is not episode[key]:
                converted[key][-1] = 0  # the last row has no action
        return converted


def normalize_actions(reader: Reader, bounds: tuple[float, float]) -> Reader:
    """Return the reader with bounded continuous actions scaled to [-1, 1].

    `bounds` replaces the bounds of the dataset, unless both are 0.
    """
    act_space = {
        key: Space(space.dtype, space.shape, *bounds)
        if any(bounds) and space.dtype.kind == "f"
        else space
        for key, space in reader.act_space.items()
    }
    normalized = {key: space.normalized() for key, space in act_space.items()}
    if normalized == reader.act_space:
        return reader
    return ConvertedActionsReader(reader, normalized, "--action_bounds")
