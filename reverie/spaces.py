"""`Space`: dtype, shape and bounds of one observation, action or extra.

Shapes, unless a module lists its own: `B` batch, `T` time, `N` start states, `H`
horizon, `A` action, `E` embedding, `F` feature, `D` deterministic, `S` stochastic
groups, `K` classes per group, `L` tokens, `h w c` image axes, `*b` any leading axes.
Images are uint8, channels last, except inside networks.

Agents and the replay use flat keys. For an environment with nested Dict and Tuple
spaces, `Space.source` records the place of each value in the nested space; `to_flat`
and `to_nested` convert values.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

STEP_KEYS = ("reward", "is_first", "is_last", "is_terminal")
"""Keys that every row has: the reward and the three flags of the episode."""

RESERVED = (*STEP_KEYS, "stepid", "consec", "reset")
"""Keys that an environment cannot use; `reset` is an action key of DreamerV3."""

SUCCESS = "log/success"
"""1 in steps in which the task is solved and 0 in others; -1 if it is not reported."""

EVENT = "log/event"
"""Ground-truth events (segment boundaries). Used by evaluation only, never by losses.
"""


class Source(NamedTuple):
    """Place and form of a value in the environment's own, possibly nested, space."""

    path: tuple[str | int, ...]
    """Keys of Dict spaces and indices of Tuple spaces."""
    space: Space
    """The value in the environment's own dtype, shape and units."""
    is_int: bool = False
    """True if the environment uses a Python int instead of an array (Discrete)."""


@dataclass(frozen=True, eq=False)
class Space:
    """Dtype, shape and bounds of one observation, action or extra.

    Integer spaces exclude `high`, like `range`. An integer or bool space that is not an
    image is discrete. Bounds are scalars or arrays of the given shape.

    For an action that is rescaled to [-1, 1], `native` holds the `(low, high)` bounds
    in the environment's own units. They are infinite for entries that are not rescaled,
    and in datasets of rescaled actions that do not contain these bounds. Without
    `native`, values are in the environment's own units.

    `source` is set if the environment has this value in another form, such as in a
    nested space (`to_nested`). It does not affect whether two spaces are equal.
    """

    dtype: Any
    shape: Any = ()
    low: Any = None
    high: Any = None
    native: Any = None
    source: Source | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # the dataclass is frozen
        set_(self, "dtype", np.dtype(self.dtype))
        shape = (self.shape,) if isinstance(self.shape, int) else self.shape
        set_(self, "shape", tuple(int(n) for n in shape))
        set_(self, "low", self._bound(self.low, lowest=True))
        set_(self, "high", self._bound(self.high, lowest=False))
        if self.native is not None:
            low, high = self.native
            pair = (self._bound(low, lowest=True), self._bound(high, lowest=False))
            set_(self, "native", pair)

    def _bound(self, value: Any, lowest: bool) -> np.ndarray:
        """Return a bound in the shape of the space; None is the bound of the dtype."""
        dtype = np.int64 if self.dtype.kind in "iub" else self.dtype
        if value is None:
            if self.dtype.kind == "f":
                value = -np.inf if lowest else np.inf
            elif self.dtype.kind == "b":
                value = 0 if lowest else 2
            else:
                info = np.iinfo(self.dtype)
                value = info.min if lowest else min(info.max + 1, 2**63 - 1)
        bound = np.broadcast_to(np.asarray(value, dtype), self.shape)
        return np.ascontiguousarray(bound).reshape(self.shape)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Space) and self._to_json() == other._to_json()

    @property
    def is_image(self) -> bool:
        return self.dtype == np.uint8 and len(self.shape) == 3

    @property
    def is_discrete(self) -> bool:
        return self.dtype.kind in "iub" and not self.is_image

    @property
    def classes(self) -> int:
        """Number of values that one entry of a discrete space can take."""
        if not self.is_discrete:
            raise TypeError(f"{self} is not discrete")
        return int((self.high - self.low).max()) if self.low.size else 0

    @property
    def is_bounded(self) -> bool:
        """True if every entry has a finite lowest and a finite highest value."""
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def zeros(self, *batch: int) -> np.ndarray:
        return np.zeros((*batch, *self.shape), self.dtype)

    def sample(self, rng: np.random.Generator, *batch: int) -> np.ndarray:
        """Sample uniformly within the bounds; from N(0, 1) where they are infinite."""
        shape = (*batch, *self.shape)
        if self.dtype.kind in "iub":
            return rng.integers(self.low, self.high, shape).astype(self.dtype)
        finite = np.isfinite(self.low) & np.isfinite(self.high)
        low, high = np.where(finite, self.low, 0), np.where(finite, self.high, 1)
        uniform = low + (high - low) * rng.random(shape)
        return np.where(finite, uniform, rng.standard_normal(shape)).astype(self.dtype)

    @property
    def native_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest action in the environment's own units."""
        return (self.low, self.high) if self.native is None else self.native

    def normalized(self) -> Space:
        """Return the space with bounded continuous entries rescaled to [-1, 1]."""
        if self.dtype.kind != "f" or self.native is not None:
            return self
        finite = np.isfinite(self.low) & np.isfinite(self.high)
        low, high = np.where(finite, -1, self.low), np.where(finite, 1, self.high)
        if np.array_equal(low, self.low) and np.array_equal(high, self.high):
            return self
        return replace(self, low=low, high=high, native=(self.low, self.high))

    def in_native_units(self) -> Space:
        """Return this space in the environment's own units: undo `normalized`."""
        if self.native is None:
            return self
        low, high = self.native
        return replace(self, low=low, high=high, native=None)

    def to_native(self, value: Any) -> np.ndarray:
        """Convert an action of this space to the environment's own units."""
        value = np.asarray(value)
        if self.native is None:
            return value
        low, high, finite = self._finite_native()
        rescaled = np.clip((value + 1) / 2 * (high - low) + low, low, high)
        return np.where(finite, rescaled, value).astype(value.dtype)

    def from_native(self, value: Any) -> np.ndarray:
        """Convert an action in the environment's own units to this space."""
        value = np.asarray(value)
        if self.native is None:
            return value
        low, high, finite = self._finite_native()
        width = np.where(high > low, high - low, 1)
        rescaled = 2 * (value - low) / width - 1
        return np.where(finite, rescaled, value).astype(value.dtype)

    def _finite_native(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return low, high (-1 and 1 where infinite), and the mask of finite bounds."""
        low, high = self.native
        finite = np.asarray(np.isfinite(low) & np.isfinite(high))
        return np.where(finite, low, -1), np.where(finite, high, 1), finite

    def problem(self, value: Any) -> str | None:
        """Describe why `value` is not an element of this space; None if it is."""
        array = np.asarray(value)
        if array.shape != self.shape:
            return f"has shape {array.shape}, expected {self.shape}"
        if array.dtype != self.dtype:
            return f"has dtype {array.dtype}, expected {self.dtype}"
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            if np.isnan(array).any():
                return "has NaN entries"
            return f"has infinite entries, or entries too large for {self.dtype}"
        above = array > self.high if array.dtype.kind == "f" else array >= self.high
        outside = (array < self.low) | above
        if outside.any():
            end = "]" if array.dtype.kind == "f" else ")"
            index = tuple(np.argwhere(outside)[0].tolist())
            low, high = self.low[index], self.high[index]
            if (self.low == low).all() and (self.high == high).all():
                found = f"values in [{array.min()}, {array.max()}]"
            else:  # each entry has its own bounds
                found = f"{array[index]} at index {index}"
            return f"has {found}, expected [{low}, {high}{end}"
        return None

    def to_json(self) -> dict[str, Any]:
        data = self._to_json()
        if self.source is not None:
            path, space, is_int = self.source
            source = {"path": [*path], "space": space.to_json(), "is_int": is_int}
            data["source"] = source
        return data

    def _to_json(self) -> dict[str, Any]:
        """Return the JSON data without `source`."""

        def bound(value: np.ndarray) -> Any:
            # one number if all bounds are equal; as a string, because JSON has no inf
            same = value.size and (value == value.flat[0]).all()
            numbers = value.flat[0].item() if same else value.tolist()
            return str(numbers) if isinstance(numbers, float) else numbers

        data = {
            "dtype": self.dtype.name,
            "shape": list(self.shape),
            "low": bound(self.low),
            "high": bound(self.high),
        }
        if self.native is not None:
            data["native"] = [bound(value) for value in self.native]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Space:
        def bound(value: Any) -> Any:
            return float(value) if isinstance(value, str) else value

        low, high = bound(data["low"]), bound(data["high"])
        native = data.get("native")
        pair = native and (bound(native[0]), bound(native[1]))
        dtype, shape = np.dtype(data["dtype"]), tuple(data["shape"])
        source = None
        if saved := data.get("source"):
            path = tuple(key if type(key) is int else str(key) for key in saved["path"])
            space = cls.from_json(saved["space"])
            source = Source(path, space, bool(saved["is_int"]))
        return cls(dtype, shape, low, high, pair, source)


Spaces = dict[str, Space]
Arrays = dict[str, np.ndarray]
MAX_ENTRIES = 1 << 25
"""Maximum number of entries of all spaces in a file together. The bounds of a space are
arrays of its shape, so a small file could otherwise use all memory."""


def spaces_to_json(spaces: Spaces) -> list[list[Any]]:
    """Return `[key, space]` pairs, which keep the order of the keys."""
    return [[key, space.to_json()] for key, space in spaces.items()]


def spaces_from_json(pairs: list[list[Any]]) -> Spaces:
    """Return the spaces that `spaces_to_json` has written.

    Raises ValueError if the data is invalid, or if a space is not numeric or has too
    many entries.
    """
    entries = 0
    try:
        for key, data in pairs:
            space = data
            while space:  # the space, its source, the source of its source
                if np.dtype(space["dtype"]).kind not in "biuf":
                    raise ValueError(f"{key!r} has the type {space['dtype']!r}")
                sizes = [int(n) for n in space["shape"]]
                entries += math.prod(sizes) * (2 if space.get("native") else 1)
                if min(sizes, default=0) < 0 or entries > MAX_ENTRIES:
                    raise ValueError(f"{key!r} has the shape {space['shape']}")
                source = space.get("source")
                space = source and source["space"]
        return {str(key): Space.from_json(space) for key, space in pairs}
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"not a valid description of spaces: {error}") from None


def agent_obs_space(obs_space: Spaces) -> Spaces:
    """Return the observations an agent may use: no flags and no `log/` keys."""
    return {
        key: space
        for key, space in obs_space.items()
        if key not in RESERVED and not key.startswith("log/")
    }


def to_flat(spaces: Spaces, value: Any) -> dict[str, Any]:
    """Return the values by flat key.

    `value` is nested as in the environment, a dict by flat key, or the bare value of
    the only key. Keys that are missing are left out.
    """
    if isinstance(value, Mapping) and spaces.keys() <= value.keys():
        return {key: value[key] for key in spaces}
    flat = {}
    for key, space in spaces.items():
        path: tuple[str | int, ...] = (key,)
        if space.source is not None:
            path = space.source.path
        elif len(spaces) == 1 and not isinstance(value, Mapping):
            path = ()
        with contextlib.suppress(KeyError, IndexError, TypeError):
            leaf = get_leaf(value, path)
            if not isinstance(leaf, Mapping):
                flat[key] = leaf
    return flat


def to_nested(spaces: Spaces, flat: Mapping[str, Any]) -> Any:
    """Return values by flat key, nested as in the environment.

    Spaces without a source are returned as a dict, or as a bare value if the only key
    is `action`.
    """
    tree: dict[str | int, Any] = {}
    for key, space in spaces.items():
        path: tuple[str | int, ...] = (key,)
        if space.source is not None:
            path = space.source.path
        elif len(spaces) == 1 and key == "action":
            path = ()
        if not path:
            return flat[key]
        branch = tree
        for part in path[:-1]:
            branch = branch.setdefault(part, {})
        branch[path[-1]] = flat[key]
    return _tuples(tree)


def get_leaf(value: Any, path: tuple[str | int, ...]) -> Any:
    """Return the entry of a nested value at this path."""
    for part in path:
        value = value[part]
    return value


def _tuples(tree: Any) -> Any:
    """Replace branches whose keys are indices by tuples."""
    if not isinstance(tree, dict):
        return tree
    if tree and all(isinstance(key, int) for key in tree):
        return tuple(_tuples(tree[index]) for index in sorted(tree))
    return {key: _tuples(value) for key, value in tree.items()}


def step_spaces(low: float | None = None, high: float | None = None) -> Spaces:
    """Return the spaces of `reward` (optionally with bounds) and the three flags."""
    flag = Space(bool)
    return {
        "reward": Space(np.float32, (), low, high),
        "is_first": flag,
        "is_last": flag,
        "is_terminal": flag,
    }


def step_values(
    reward: Any, first: bool = False, last: bool = False, terminal: bool = False
) -> dict[str, Any]:
    """Return `reward` and the three flags in the dtypes of `step_spaces`."""
    return {
        "reward": np.float32(reward),
        "is_first": np.bool_(first),
        "is_last": np.bool_(last),
        "is_terminal": np.bool_(terminal),
    }
