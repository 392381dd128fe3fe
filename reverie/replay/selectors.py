"""Selectors: strategies for sampling the start of a window.

A selector returns start ids of complete windows of a fixed span: uniformly
(`UniformSelector`), in proportion to priorities (`PrioritizedSelector`), or with a
preference for recent windows (`RecencySelector`); `MixtureSelector` combines several.
All random numbers come from the generator passed to `sample`.
"""

from __future__ import annotations

import numpy as np

from reverie.api import StateDict
from reverie.replay.config import PriorityConfig, ReplayConfig
from reverie.replay.step_index import StepIndex
from reverie.rows import Window


class Selector:
    """Samples start ids of windows; by default without priorities and state."""

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Sample `count` start ids."""
        raise NotImplementedError

    def prioritize(self, ids: np.ndarray, priority: np.ndarray) -> None:
        """Set the priorities of these steps."""

    def state_dict(self) -> StateDict:
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        pass


class UniformSelector(Selector):
    """Samples all complete windows with equal probability.

    Uses rejection sampling over the live steps, which needs no extra memory. If few
    windows are complete, it lists them instead.
    """

    def __init__(self, index: StepIndex, span: int) -> None:
        self.index = index
        self.span = span

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        index = self.index
        steps = index.total - index.first
        windows = index.num_windows(self.span)
        assert windows > 0, f"no window of {self.span} steps is stored yet"
        if windows * 64 < steps:
            starts = index.window_starts(self.span)
            return starts[rng.integers(0, len(starts), count)]
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:
            tries = 8 + (count - len(drawn)) * steps * 5 // (windows * 4)
            ids = rng.integers(index.first, index.total, tries)
            drawn = np.append(drawn, ids[index.has_window(ids, self.span)])
        return drawn[:count]


class NewWindowTracker:
    """Finds the windows that new steps complete."""

    def __init__(self, index: StepIndex, span: int) -> None:
        self.index = index
        self.span = span
        self.next_id = index.first  # steps before this id have been seen
        self._incomplete = np.empty(0, np.int64)

    def pop(self) -> np.ndarray:
        """Start ids of the windows completed since the last call."""
        index = self.index
        added = np.arange(max(self.next_id, index.first), index.total)
        starts = np.append(self._incomplete, added)
        starts = starts[index.is_live(starts)]
        complete = index.has_window(starts, self.span)
        self._incomplete = starts[~complete]
        self.next_id = index.total
        return starts[complete]


class RecencySelector(Selector):
    """Samples windows with probability proportional to `age ** -exponent`.

    The newest complete window has age 1.
    """

    def __init__(self, index: StepIndex, span: int, exponent: float) -> None:
        self.index = index
        self.span = span
        self.exponent = exponent
        self._new_windows = NewWindowTracker(index, span)
        self._newest = -1
        self._cumulative = np.empty(0)  # unnormalized, over ages 1, 2, ...

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        index = self.index
        completed = self._new_windows.pop()
        if len(completed):
            self._newest = max(self._newest, int(completed.max()))
        max_age = self._newest - index.first + 1
        if max_age > len(self._cumulative):
            ages = np.arange(1, min(2 * max_age, index.capacity) + 1)
            self._cumulative = np.cumsum(ages**-self.exponent)
        cumulative = self._cumulative[:max_age]
        drawn = np.empty(0, np.int64)
        for _ in range(32):
            points = rng.random(2 * count) * cumulative[-1]
            ages = np.searchsorted(cumulative, points, "right")
            ids = self._newest - np.minimum(ages, max_age - 1)
            drawn = np.append(drawn, ids[index.has_window(ids, self.span)])
            if len(drawn) >= count:
                return drawn[:count]
        # Rejection sampling failed because few recent windows are complete: list them.
        starts = index.window_starts(self.span)
        weights = np.cumsum((self._newest - starts + 1.0) ** -self.exponent)
        chosen = np.searchsorted(weights, rng.random(count) * weights[-1], "right")
        return starts[np.minimum(chosen, len(starts) - 1)]

    def load_state_dict(self, state: StateDict) -> None:
        self._new_windows = NewWindowTracker(self.index, self.span)
        self._newest = -1


class PrioritizedSelector(Selector):
    """Samples windows in proportion to the priorities of their steps.

    The priority of a window is `maxfrac * max + (1 - maxfrac) * mean` of
    `priority ** exponent` over its steps. Windows with a new step (never sampled and
    without a priority) are sampled before all others.
    """

    def __init__(self, index: StepIndex, span: int, config: PriorityConfig) -> None:
        self.index = index
        self.span = span
        self.config = config
        self._reset()

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        self._sync()
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:
            is_new = self._new_tree.total > 0
            tree = self._new_tree if is_new else self._priority_tree
            if tree.total <= 0:  # all steps were sampled and have no new priority
                uniform = UniformSelector(self.index, self.span)
                return np.append(drawn, uniform.sample(count - len(drawn), rng))
            rows = tree.sample(count - len(drawn), rng)
            capacity, first = self.index.capacity, self.index.first
            starts = first + (rows - first) % capacity
            if is_new or self.config.zero_on_sample:
                starts = starts[np.sort(np.unique(starts, return_index=True)[1])]
                self._mark_sampled(starts)
            drawn = np.append(drawn, starts)
        return drawn

    def prioritize(self, ids: np.ndarray, priority: np.ndarray) -> None:
        assert np.isfinite(priority).all(), "priorities must be finite"
        assert (priority >= 0).all(), "priorities must not be negative"
        self._sync()
        live = self.index.is_live(ids)
        ids = ids[live]
        self.step_priority[ids % self.index.capacity] = priority[live]
        self._update_windows_with(ids)

    def state_dict(self) -> StateDict:
        self._sync()
        ids = np.arange(self.index.first, self.index.total)
        return {"step_priority": self.step_priority[ids % self.index.capacity]}

    def load_state_dict(self, state: StateDict) -> None:
        self._reset()
        saved = np.asarray(state["step_priority"])
        stop = self.index.total
        ids = np.arange(max(stop - len(saved), self.index.first), stop)
        self._sync(update=False)
        rows = ids % self.index.capacity
        self.step_priority[rows] = saved[len(saved) - len(ids) :]
        self._update_windows(self.index.window_starts(self.span))

    def _reset(self) -> None:
        capacity = self.index.capacity
        self.step_priority = np.full(capacity, self.config.initial)
        self._new_windows = NewWindowTracker(self.index, self.span)
        self._first = self.index.first
        # By row of the first step: 1 for windows with a new step, and the priorities
        # of the other windows.
        self._new_tree = SumTree(capacity)
        self._priority_tree = SumTree(capacity)

    def _sync(self, update: bool = True) -> None:
        """Process the steps that were evicted and added since the last call."""
        index, capacity = self.index, self.index.capacity
        next_id = self._new_windows.next_id
        evicted = np.arange(self._first, index.first)[-capacity:] % capacity
        self._new_tree.set(evicted, np.zeros(len(evicted)))
        self._priority_tree.set(evicted, np.zeros(len(evicted)))
        self._first = index.first
        added = np.arange(max(next_id, index.first), index.total)
        self.step_priority[added % capacity] = self.config.initial
        completed = self._new_windows.pop()
        if update:
            self._update_windows(completed)

    def _mark_sampled(self, starts: np.ndarray) -> None:
        """Reset the priorities of sampled windows; their steps are no longer new."""
        ids = self.index.window_ids(starts, self.span).reshape(-1)
        rows = ids % self.index.capacity
        old = self.step_priority[rows]
        new = 0.0 if self.config.zero_on_sample else np.where(np.isinf(old), 0.0, old)
        self.step_priority[rows] = new
        self._update_windows_with(ids)

    def _update_windows_with(self, ids: np.ndarray) -> None:
        """Recompute the priority of every window that contains one of these steps."""
        index = self.index
        ids = np.unique(ids)
        prev_offset = index.prev_offset[ids % index.capacity]
        heads = ids[(prev_offset == 0) | ~np.isin(ids - prev_offset, ids)]
        before = index.predecessors(heads, self.span - 1)
        starts = np.unique(np.append(ids, before))
        self._update_windows(starts[index.has_window(starts, self.span)])

    def _update_windows(self, starts: np.ndarray) -> None:
        """Recompute the priorities of the windows with these starts."""
        if not len(starts):
            return
        capacity, config = self.index.capacity, self.config
        for part in np.array_split(starts, 1 + len(starts) // 65536):
            ids = self.index.window_ids(part, self.span)
            steps = self.step_priority[ids % capacity]
            is_new = np.isinf(steps).any(1)
            power = np.where(is_new[:, None], 0.0, steps) ** config.exponent
            power[is_new] = 0.0
            mean, largest = power.mean(1), power.max(1)
            priority = config.maxfrac * largest + (1 - config.maxfrac) * mean
            self._new_tree.set(part % capacity, is_new.astype(float))
            self._priority_tree.set(part % capacity, priority)


class MixtureSelector(Selector):
    """Samples each window with one of several selectors, chosen at random."""

    def __init__(self, selectors: dict[str, tuple[float, Selector]]) -> None:
        self.selectors = {name: item for name, (_, item) in selectors.items()}
        self.limits = np.cumsum([fraction for fraction, _ in selectors.values()])

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        chosen = np.searchsorted(self.limits, rng.random(count), "right")
        chosen = np.minimum(chosen, len(self.selectors) - 1)
        starts = np.empty(count, np.int64)
        for number, selector in enumerate(self.selectors.values()):
            mask = chosen == number
            if mask.any():
                starts[mask] = selector.sample(int(mask.sum()), rng)
        return starts

    def prioritize(self, ids: np.ndarray, priority: np.ndarray) -> None:
        for selector in self.selectors.values():
            selector.prioritize(ids, priority)

    def state_dict(self) -> StateDict:
        return {name: item.state_dict() for name, item in self.selectors.items()}

    def load_state_dict(self, state: StateDict) -> None:
        for name, selector in self.selectors.items():
            selector.load_state_dict(state[name])


def make_selector(index: StepIndex, window: Window, config: ReplayConfig) -> Selector:
    """Build the selector of a window; unused strategies are not built."""
    span, fracs = window.span, config.fracs
    if window.select != "mixture":
        return UniformSelector(index, span)
    selectors: dict[str, tuple[float, Selector]] = {}
    if fracs.uniform:
        selectors["uniform"] = fracs.uniform, UniformSelector(index, span)
    if fracs.priority:
        prioritized = PrioritizedSelector(index, span, config.prio)
        selectors["priority"] = fracs.priority, prioritized
    if fracs.recency:
        recent = RecencySelector(index, span, config.recexp)
        selectors["recency"] = fracs.recency, recent
    if len(selectors) == 1:
        return next(iter(selectors.values()))[1]
    return MixtureSelector(selectors)


class SumTree:
    """Updates and samples many weights at once.

    Every node is the sum of its sixteen children, recomputed from them, so the tree
    depends only on the leaves and rounding errors do not accumulate.
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

    def set(self, leaves: np.ndarray, weights: np.ndarray) -> None:
        if not len(leaves):
            return
        self.levels[0].reshape(-1)[leaves] = weights
        nodes = leaves
        for lower, upper in zip(self.levels[:-1], self.levels[1:], strict=True):
            nodes = np.unique(nodes // self.WIDTH)
            upper.reshape(-1)[nodes] = lower[nodes].sum(1)

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Sample leaves with probability proportional to their weight."""
        remaining = rng.random(count) * self.total
        node = np.zeros(count, np.int64)
        samples = np.arange(count)
        for level in reversed(self.levels):
            children = level[node]
            cumulative = np.cumsum(children, 1)
            child = (remaining[:, None] >= cumulative).sum(1)
            # Rounding may select a child after the last one with a positive weight.
            last = self.WIDTH - 1 - np.argmax(children[:, ::-1] > 0, axis=1)
            child = np.minimum(child, last)
            skipped = cumulative[samples, child] - children[samples, child]
            remaining = remaining - skipped
            node = node * self.WIDTH + child
        return node
