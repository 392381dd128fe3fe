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
    """Base class: samples start ids of windows. By default, priorities are ignored."""

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
        if windows * 64 < steps:  # rejection sampling would need too many tries
            starts = index.window_starts(self.span)
            return starts[rng.integers(0, len(starts), count)]
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:
            # 25 % more than the expected number of tries, so that one pass is enough
            tries = 8 + (count - len(drawn)) * steps * 5 // (windows * 4)
            ids = rng.integers(index.first, index.total, tries)
            drawn = np.append(drawn, ids[index.has_window(ids, self.span)])
        return drawn[:count]


class NewWindowTracker:
    """Finds the windows that new steps complete."""

    def __init__(self, index: StepIndex, span: int) -> None:
        self.index = index
        self.span = span
        self.next_id = index.first  # steps before this id were processed
        self._incomplete = np.empty(0, np.int64)

    def pop(self) -> np.ndarray:
        """Return the start ids of the windows completed since the last call."""
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
        self._newest = -1  # start id of the newest complete window
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
        for _ in range(32):  # rejection sampling; usually the first pass is enough
            points = rng.random(2 * count) * cumulative[-1]
            ages = np.searchsorted(cumulative, points, "right")
            ids = self._newest - np.minimum(ages, max_age - 1)
            drawn = np.append(drawn, ids[index.has_window(ids, self.span)])
            if len(drawn) >= count:
                return drawn[:count]
        # Few recent windows are complete: list all complete windows instead.
        starts = index.window_starts(self.span)
        weights = np.cumsum((self._newest - starts + 1.0) ** -self.exponent)
        chosen = np.searchsorted(weights, rng.random(count) * weights[-1], "right")
        return starts[np.minimum(chosen, len(starts) - 1)]

    def load_state_dict(self, state: StateDict) -> None:
        self._new_windows = NewWindowTracker(self.index, self.span)
        self._newest = -1


class PrioritizedSelector(Selector):
    """Samples windows in proportion to the priorities of their steps.

    The priority of a window is `maxfrac * max + (1 - maxfrac) * mean` of the priorities
    of its steps. If `initial` is infinite, windows with a step that was never sampled
    and has no priority yet are sampled before all others.

    With `visit_scale`, the priority of a step also depends on the number of batches
    that trained on it. The agent does not train on the first `context` steps of a
    window, so their priorities are not used for the priority of this window.

    `rows` are rows of the ring buffer in `StepIndex`: the step `id` is in the row
    `id % capacity`.
    """

    _changed: list[np.ndarray]
    """Ids of steps with a new priority; their windows are updated in `sample`."""

    def __init__(
        self, index: StepIndex, span: int, config: PriorityConfig, context: int = 0
    ) -> None:
        self.index = index
        self.span = span
        self.config = config
        self.counts_visits = config.visit_scale > 0
        self._skipped = context if self.counts_visits else 0  # first steps of a window
        self._reset()

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        self._sync()
        self._update_changed()
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:
            is_new = self._new_tree.total > 0
            tree = self._new_tree if is_new else self._priority_tree
            if tree.total <= 0:  # all steps were sampled and have no new priority
                uniform = UniformSelector(self.index, self.span)
                return np.append(drawn, uniform.sample(count - len(drawn), rng))
            rows = tree.sample(count - len(drawn), rng)
            capacity, first = self.index.capacity, self.index.first
            starts = first + (rows - first) % capacity  # live ids in these rows
            if is_new or self.config.zero_on_sample:
                # Keep the first sample of each window: its weight changes to 0.
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
        rows = ids % self.index.capacity
        self.raw_priority[rows] = priority[live]
        if self.counts_visits:
            self.visits[np.unique(rows)] += 1
        self._set_priorities(rows)
        # All selectors get all priorities, but some, such as that of report batches,
        # rarely sample. So windows are updated in `sample` and not in every call.
        self._changed.append(ids)
        if sum(map(len, self._changed)) > self.index.capacity:
            changed = np.unique(np.concatenate(self._changed))
            self._changed = [changed[self.index.is_live(changed)]]

    def state_dict(self) -> StateDict:
        self._sync()
        rows = np.arange(self.index.first, self.index.total) % self.index.capacity
        state: StateDict = {"step_priority": self.raw_priority[rows]}
        if self.counts_visits:
            state["visits"] = self.visits[rows]
        return state

    def load_state_dict(self, state: StateDict) -> None:
        self._reset()
        saved = np.asarray(state["step_priority"])
        visits = state["visits"] if self.counts_visits else None
        stop = self.index.total
        ids = np.arange(max(stop - len(saved), self.index.first), stop)
        self._sync(update=False)
        rows = ids % self.index.capacity
        self.raw_priority[rows] = saved[len(saved) - len(ids) :]
        if visits is not None:
            self.visits[rows] = np.asarray(visits)[len(saved) - len(ids) :]
        self._set_priorities(rows)
        self._update_windows(self.index.window_starts(self.span))

    def _reset(self) -> None:
        capacity = self.index.capacity
        # the argument of `prioritize` (usually a loss), or `initial` before that
        self.raw_priority = np.full(capacity, self.config.initial)
        self.visits = np.zeros(capacity if self.counts_visits else 0, np.int32)
        self._priorities = np.zeros(capacity)  # of steps; infinite if new
        self._changed = []
        self._new_windows = NewWindowTracker(self.index, self.span)
        self._first = self.index.first
        # Leaves are windows, by the row of their first step. `_new_tree` has weight 1
        # for windows with a new step, `_priority_tree` the priorities of the others.
        self._new_tree = SumTree(capacity)
        self._priority_tree = SumTree(capacity)

    def _sync(self, update: bool = True) -> None:
        """Process the steps that were evicted and added since the last call.

        With `update`, compute the priorities of the windows completed by them.
        """
        index, capacity = self.index, self.index.capacity
        next_id = self._new_windows.next_id
        evicted = np.arange(self._first, index.first)[-capacity:] % capacity
        self._new_tree.set(evicted, np.zeros(len(evicted)))
        self._priority_tree.set(evicted, np.zeros(len(evicted)))
        self._first = index.first
        added = np.arange(max(next_id, index.first), index.total)
        self.raw_priority[added % capacity] = self.config.initial
        if self.counts_visits:
            self.visits[added % capacity] = 0
        self._set_priorities(added % capacity)
        completed = self._new_windows.pop()
        if update:
            self._update_windows(completed)

    def _mark_sampled(self, starts: np.ndarray) -> None:
        """Set the raw priorities of the steps of sampled windows to 0.

        Without `zero_on_sample`, only infinite ones are set to 0, so that these steps
        are not new anymore.
        """
        ids = self.index.window_ids(starts, self.span).reshape(-1)
        rows = ids % self.index.capacity
        old = self.raw_priority[rows]
        new = 0.0 if self.config.zero_on_sample else np.where(np.isinf(old), 0.0, old)
        self.raw_priority[rows] = new
        self._set_priorities(rows)
        self._update_windows_with(ids)

    def _update_changed(self) -> None:
        """Update the windows with steps that got a priority since the last call."""
        if self._changed:
            ids = np.concatenate(self._changed)
            self._changed = []
            self._update_windows_with(ids[self.index.is_live(ids)])

    def _update_windows_with(self, ids: np.ndarray) -> None:
        """Recompute the priority of every window that contains one of these steps."""
        index = self.index
        ids = np.unique(ids)
        prev_offset = index.prev_offset[ids % index.capacity]
        # the first id of each run of consecutive steps
        first_of_run = ids[(prev_offset == 0) | ~np.isin(ids - prev_offset, ids)]
        before = index.predecessors(first_of_run, self.span - 1)
        starts = np.unique(np.append(ids, before))
        self._update_windows(starts[index.has_window(starts, self.span)])

    def _update_windows(self, starts: np.ndarray) -> None:
        """Recompute the priorities of the windows with these starts."""
        if not len(starts):
            return
        capacity, config = self.index.capacity, self.config
        for part in np.array_split(starts, 1 + len(starts) // 65536):
            ids = self.index.window_ids(part, self.span)[:, self._skipped :]
            steps = self._priorities[ids % capacity]
            is_new = np.isinf(steps).any(1)
            steps[is_new] = 0.0
            mean, largest = steps.mean(1), steps.max(1)
            priority = config.maxfrac * largest + (1 - config.maxfrac) * mean
            self._new_tree.set(part % capacity, is_new.astype(float))
            self._priority_tree.set(part % capacity, priority)

    def _set_priorities(self, rows: np.ndarray) -> None:
        """Compute the priorities of steps from their raw priorities and visits."""
        config, raw = self.config, self.raw_priority[rows]
        priority = (raw + config.offset) ** config.exponent
        if self.counts_visits:
            visits = self.visits[rows]
            priority += config.visit_scale * config.visit_decay**visits
            priority = np.where(visits > 0, priority, raw)  # `initial` if new
        self._priorities[rows] = np.where(np.isinf(raw), np.inf, priority)


class MixtureSelector(Selector):
    """Samples each start id with one of several selectors, chosen at random."""

    def __init__(self, selectors: dict[str, tuple[float, Selector]]) -> None:
        self.selectors = {name: item for name, (_, item) in selectors.items()}
        self.cumulative = np.cumsum([fraction for fraction, _ in selectors.values()])

    def sample(self, count: int, rng: np.random.Generator) -> np.ndarray:
        chosen = np.searchsorted(self.cumulative, rng.random(count), "right")
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
    """Build the selector of a kind of batch: strategies with a fraction above 0."""
    span, fracs = window.span, config.fracs
    if window.select != "mixture":
        return UniformSelector(index, span)
    selectors: dict[str, tuple[float, Selector]] = {}
    if fracs.uniform:
        selectors["uniform"] = fracs.uniform, UniformSelector(index, span)
    if fracs.priority:
        prioritized = PrioritizedSelector(index, span, config.prio, window.context)
        selectors["priority"] = fracs.priority, prioritized
    if fracs.recency:
        recent = RecencySelector(index, span, config.recexp)
        selectors["recency"] = fracs.recency, recent
    if len(selectors) == 1:
        return next(iter(selectors.values()))[1]
    return MixtureSelector(selectors)


class SumTree:
    """Vectorized 16-ary sum tree for prioritized sampling.

    After a change, every node is computed again as the sum of its children, so rounding
    errors do not accumulate and the tree depends only on its leaves.
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
