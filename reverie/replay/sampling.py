"""How the start of the next sequence is chosen.

A selector draws start ids of whole windows of one span: all with the same chance
(`Uniform`), by what the agent says its steps deserve (`Prioritized`), or preferring the
young (`Recency`); `Mixture` draws from several. All randomness comes from the generator
that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from reverie.api import StateDict, UserError
from reverie.replay.timeline import Timeline


@dataclass(frozen=True)
class Fractions:
    """Which part of the sequences is chosen in which way; they add up to one."""

    uniform: float = 1.0
    """Every stored sequence with the same chance."""

    priority: float = 0.0
    """By the priorities the agent gives to steps."""

    recency: float = 0.0
    """Preferring recent sequences."""

    def __post_init__(self) -> None:
        parts = (self.uniform, self.priority, self.recency)
        if min(parts) < 0 or abs(sum(parts) - 1) > 1e-6:
            raise UserError(
                f"The replay fractions {parts} must be positive and add up to 1.\n"
                "  Fix: e.g. --replay.fracs.uniform 0.5 --replay.fracs.priority 0.5"
            )


@dataclass(frozen=True)
class PriorityConfig:
    """How priorities of steps become priorities of sequences."""

    exponent: float = 0.8
    """Each step counts with its priority to this power."""

    maxfrac: float = 0.5
    """Share of the largest step in a sequence's priority; the mean has the rest."""

    initial: float = float("inf")
    """Priority of a step nobody has rated; infinite means it is drawn first."""

    zero_on_sample: bool = True
    """Forget the priorities of a drawn sequence until the agent rates it again."""


@runtime_checkable
class Selector(Protocol):
    """Chooses where sampled windows begin."""

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray: ...

    def prioritize(self, ids: np.ndarray, priority: np.ndarray) -> None: ...

    def state_dict(self) -> StateDict: ...

    def load_state_dict(self, state: StateDict) -> None: ...


class Uniform:
    """Every whole window with the same chance.

    Draws live steps and rejects those whose window is not whole yet, which is exact
    and needs no bookkeeping; where few are whole it lists them instead.
    """

    def __init__(self, timeline: Timeline, span: int) -> None:
        self.timeline = timeline
        self.span = span

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        timeline = self.timeline
        size = timeline.total - timeline.first
        whole = timeline.count(self.span)
        assert whole > 0, f"no window of {self.span} steps is stored yet"
        if whole * 64 < size:
            starts = timeline.starts(self.span)
            return starts[rng.integers(0, len(starts), count)]
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:
            tries = 8 + (count - len(drawn)) * size * 5 // (whole * 4)
            ids = rng.integers(timeline.first, timeline.total, tries)
            drawn = np.append(drawn, ids[timeline.whole(ids, self.span)])
        return drawn[:count]

    def prioritize(self, ids: np.ndarray, priority: np.ndarray) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        pass


class Arrivals:
    """Notices windows as they become whole."""

    def __init__(self, timeline: Timeline, span: int) -> None:
        self.timeline = timeline
        self.span = span
        self.seen = timeline.first
        self._waiting = np.empty(0, np.int64)

    def take(self) -> np.ndarray:
        """Starts of windows that have become whole since the last call."""
        timeline = self.timeline
        added = np.arange(max(self.seen, timeline.first), timeline.total)
        waiting = np.append(self._waiting, added)
        waiting = waiting[timeline.live(waiting)]
        whole = timeline.whole(waiting, self.span)
        self._waiting = waiting[~whole]
        self.seen = timeline.total
        return waiting[whole]


class Recency:
    """Chance falls with age: one over age to the power `exponent`.

    The newest whole window has age 1.
    """

    def __init__(self, timeline: Timeline, span: int, exponent: float) -> None:
        self.timeline = timeline
        self.span = span
        self.exponent = exponent
        self._arrivals = Arrivals(timeline, span)
        self._newest = -1
        self._mass = np.empty(0)  # chance of age up to i + 1, not normalised

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        timeline = self.timeline
        arrived = self._arrivals.take()
        if len(arrived):
            self._newest = max(self._newest, int(arrived.max()))
        oldest = self._newest - timeline.first + 1
        if oldest > len(self._mass):
            ages = np.arange(1, min(2 * oldest, timeline.capacity) + 1)
            self._mass = np.cumsum(ages**-self.exponent)
        mass = self._mass[:oldest]
        drawn = np.empty(0, np.int64)
        for _ in range(32):
            ages = np.searchsorted(mass, rng.random(2 * count) * mass[-1], "right")
            ids = self._newest - np.minimum(ages, oldest - 1)
            drawn = np.append(drawn, ids[timeline.whole(ids, self.span)])
            if len(drawn) >= count:
                return drawn[:count]
        # hardly any of the young ones are whole: list those that are
        starts = timeline.starts(self.span)
        chance = np.cumsum((self._newest - starts + 1.0) ** -self.exponent)
        found = np.searchsorted(chance, rng.random(count) * chance[-1], "right")
        return starts[np.minimum(found, len(starts) - 1)]

    def prioritize(self, ids: np.ndarray, priority: np.ndarray) -> None:
        pass

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        self._arrivals = Arrivals(self.timeline, self.span)
        self._newest = -1


class Prioritized:
    """Chance in proportion to how much the steps of a window deserve it.

    A window's priority is `maxfrac` times the largest plus `1 - maxfrac` times the mean
    over its steps of priority to the power `exponent`. A window with a new step, never
    drawn nor rated, comes before all others.
    """

    def __init__(self, timeline: Timeline, span: int, config: PriorityConfig) -> None:
        self.timeline = timeline
        self.span = span
        self.config = config
        self._reset()

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        self._follow()
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:
            is_new = self._new.total > 0
            tree = self._new if is_new else self._mass
            if tree.total <= 0:  # everything was drawn and nothing rated since
                uniform = Uniform(self.timeline, self.span)
                return np.append(drawn, uniform.draw(count - len(drawn), rng))
            rows = tree.draw(count - len(drawn), rng)
            capacity, first = self.timeline.capacity, self.timeline.first
            starts = first + (rows - first) % capacity
            forgets = self.config.zero_on_sample
            if is_new or forgets:
                starts = starts[np.sort(np.unique(starts, return_index=True)[1])]
                self._mark(starts, forgets)
            drawn = np.append(drawn, starts)
        return drawn

    def prioritize(self, ids: np.ndarray, priority: np.ndarray) -> None:
        assert np.isfinite(priority).all(), "priorities must be finite"
        assert (priority >= 0).all(), "priorities must not be negative"
        self._follow()
        live = self.timeline.live(ids)
        ids = ids[live]
        self.step[ids % self.timeline.capacity] = priority[live]
        self._refresh(ids)

    def state_dict(self) -> StateDict:
        self._follow()
        ids = np.arange(self.timeline.first, self.timeline.total)
        return {"step": self.step[ids % self.timeline.capacity]}

    def load_state_dict(self, state: StateDict) -> None:
        self._reset()
        step = np.asarray(state["step"])
        stop = self.timeline.total
        ids = np.arange(max(stop - len(step), self.timeline.first), stop)
        self._follow(fresh=False)
        self.step[ids % self.timeline.capacity] = step[len(step) - len(ids) :]
        self._set(self.timeline.starts(self.span))

    def _reset(self) -> None:
        capacity = self.timeline.capacity
        self.step = np.full(capacity, self.config.initial)
        self._arrivals = Arrivals(self.timeline, self.span)
        self._first = self.timeline.first
        self._new = SumTree(capacity)
        self._mass = SumTree(capacity)

    def _follow(self, fresh: bool = True) -> None:
        """Catch up with what the timeline evicted and added."""
        timeline, capacity = self.timeline, self.timeline.capacity
        seen = self._arrivals.seen
        gone = np.arange(self._first, timeline.first)[-capacity:] % capacity
        self._new.set(gone, np.zeros(len(gone)))
        self._mass.set(gone, np.zeros(len(gone)))
        self._first = timeline.first
        added = np.arange(max(seen, timeline.first), timeline.total)
        self.step[added % capacity] = self.config.initial
        arrived = self._arrivals.take()
        if fresh:
            self._set(arrived)

    def _mark(self, starts: np.ndarray, forgets: bool) -> None:
        """These windows are served: their steps are new no more."""
        ids = self.timeline.walk(starts, self.span).reshape(-1)
        rows = ids % self.timeline.capacity
        old = self.step[rows]
        self.step[rows] = 0.0 if forgets else np.where(np.isinf(old), 0.0, old)
        self._refresh(ids)

    def _refresh(self, ids: np.ndarray) -> None:
        """Recompute every window that has one of these steps."""
        timeline = self.timeline
        ids = np.unique(ids)
        behind = timeline.behind[ids % timeline.capacity]
        heads = ids[(behind == 0) | ~np.isin(ids - behind, ids)]
        before = timeline.predecessors(heads, self.span - 1)
        starts = np.unique(np.append(ids, before))
        self._set(starts[timeline.whole(starts, self.span)])

    def _set(self, starts: np.ndarray) -> None:
        if not len(starts):
            return
        capacity, config = self.timeline.capacity, self.config
        for part in np.array_split(starts, 1 + len(starts) // 65536):
            step = self.step[self.timeline.walk(part, self.span) % capacity]
            is_new = np.isinf(step).any(1)
            power = np.where(is_new[:, None], 0.0, step) ** config.exponent
            power[is_new] = 0.0
            mean, most = power.mean(1), power.max(1)
            mass = config.maxfrac * most + (1 - config.maxfrac) * mean
            self._new.set(part % capacity, is_new.astype(float))
            self._mass.set(part % capacity, mass)


class Mixture:
    """Each sequence comes from one of several selectors, by chance."""

    def __init__(self, parts: dict[str, tuple[float, Selector]]) -> None:
        self.parts = {name: part for name, (_, part) in parts.items()}
        self.limits = np.cumsum([fraction for fraction, _ in parts.values()])

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        chosen = np.searchsorted(self.limits, rng.random(count), "right")
        chosen = np.minimum(chosen, len(self.parts) - 1)
        starts = np.empty(count, np.int64)
        for index, part in enumerate(self.parts.values()):
            mine = chosen == index
            if mine.any():
                starts[mine] = part.draw(int(mine.sum()), rng)
        return starts

    def prioritize(self, ids: np.ndarray, priority: np.ndarray) -> None:
        for part in self.parts.values():
            part.prioritize(ids, priority)

    def state_dict(self) -> StateDict:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: StateDict) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


def make_selector(
    timeline: Timeline, span: int, fracs: Fractions, prio: PriorityConfig, recexp: float
) -> Selector:
    """The selector for these fractions; only the parts that are used are built."""
    parts: dict[str, tuple[float, Selector]] = {}
    if fracs.uniform:
        parts["uniform"] = fracs.uniform, Uniform(timeline, span)
    if fracs.priority:
        parts["priority"] = fracs.priority, Prioritized(timeline, span, prio)
    if fracs.recency:
        parts["recency"] = fracs.recency, Recency(timeline, span, recexp)
    if len(parts) == 1:
        return next(iter(parts.values()))[1]
    return Mixture(parts)


class SumTree:
    """Numbers that can be changed, and drawn in proportion to their size, many at once.

    Every node is the sum of its sixteen children, always computed anew, so the tree
    depends on the leaves alone and rounding errors do not pile up.
    """

    WIDTH = 16

    def __init__(self, size: int) -> None:
        self.levels = []
        while True:
            size = -(-size // self.WIDTH)
            self.levels.append(np.zeros((size, self.WIDTH)))
            if size == 1:
                break

    @property
    def total(self) -> float:
        return float(self.levels[-1].sum())

    def set(self, rows: np.ndarray, values: np.ndarray) -> None:
        if not len(rows):
            return
        self.levels[0].reshape(-1)[rows] = values
        for lower, upper in zip(self.levels[:-1], self.levels[1:], strict=True):
            rows = np.unique(rows // self.WIDTH)
            upper.reshape(-1)[rows] = lower[rows].sum(1)

    def draw(self, count: int, rng: np.random.Generator) -> np.ndarray:
        left = rng.random(count) * self.total
        node = np.zeros(count, np.int64)
        for level in reversed(self.levels):
            children = level[node]
            upto = np.cumsum(children, 1)
            pick = (left[:, None] >= upto).sum(1)
            # rounding may step past the last child that has any weight
            weighty = self.WIDTH - 1 - np.argmax(children[:, ::-1] > 0, axis=1)
            pick = np.minimum(pick, weighty)
            many = np.arange(count)
            left = left - (upto[many, pick] - children[many, pick])
            node = node * self.WIDTH + pick
        return node
