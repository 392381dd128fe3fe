"""Selectors draw with the chances they promise."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.api import UserError
from reverie.replay.sampling import (
    Fractions,
    Mixture,
    Prioritized,
    PriorityConfig,
    Recency,
    SumTree,
    Uniform,
    make_selector,
)
from reverie.replay.timeline import Timeline

SPAN = 3


def lived(capacity=50, slots=2, turns=60, seed=0):
    """A timeline with late environments and an evicted past."""
    rng = np.random.default_rng(seed)
    timeline = Timeline(capacity, slots)
    for _ in range(turns):
        timeline.add(None if rng.random() < 0.8 else rng.integers(0, slots, 1))
    return timeline


def assert_drawn_like(selector, chance, draws=20000, seed=0):
    """Chi square: counts agree with `chance`, a dict from start id to probability."""
    drawn = selector.draw(draws, np.random.default_rng(seed))
    ids, counts = np.unique(drawn, return_counts=True)
    assert set(ids.tolist()) <= {g for g, p in chance.items() if p > 0}
    found = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    total = sum(chance.values())
    chi, free = 0.0, -1
    for g, p in chance.items():
        expected = draws * p / total
        if expected > 0:
            chi += (found.get(g, 0) - expected) ** 2 / expected
            free += 1
    assert chi < free + 4 * np.sqrt(2 * free), (chi, free)


def window_mass(timeline, start, priority, config):
    ids = timeline.walk(np.array([start]), SPAN)[0]
    power = np.array([priority[int(g)] for g in ids]) ** config.exponent
    return config.maxfrac * power.max() + (1 - config.maxfrac) * power.mean()


def test_uniform_gives_each_whole_window_the_same_chance():
    timeline = lived()
    chance = dict.fromkeys(timeline.starts(SPAN).tolist(), 1.0)
    assert_drawn_like(Uniform(timeline, SPAN), chance)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 3.0])
def test_recency_falls_with_a_power_of_age(exponent):
    timeline = lived()
    starts = timeline.starts(SPAN)
    ages = starts.max() - starts + 1.0
    chance = dict(zip(starts.tolist(), (ages**-exponent).tolist(), strict=True))
    assert_drawn_like(Recency(timeline, SPAN, exponent), chance)


def test_recency_finds_the_few_windows_that_are_whole():
    timeline = Timeline(1000, 300)
    timeline.add()
    timeline.add(np.array([5]))
    timeline.add(np.array([5]))
    timeline.add(np.arange(299))
    drawn = Recency(timeline, SPAN, 1.0).draw(5, np.random.default_rng(0))
    assert set(drawn.tolist()) <= {5, 300}
    timeline = Timeline(100_000, 30_000)
    timeline.add()
    timeline.add(np.array([5]))
    timeline.add(np.array([5]))
    timeline.add(np.array([29_000]))
    timeline.add(np.array([29_000]))
    drawn = Recency(timeline, SPAN, 0.0).draw(40, np.random.default_rng(0))
    assert set(drawn.tolist()) == {5, 29_000}


def test_priority_is_a_mix_of_largest_and_mean():
    timeline = lived()
    config = PriorityConfig(exponent=0.7, maxfrac=0.3, zero_on_sample=False)
    selector = Prioritized(timeline, SPAN, config)
    rng = np.random.default_rng(1)
    live = np.arange(timeline.first, timeline.total)
    value = rng.random(len(live)) ** 3
    selector.prioritize(live, value)
    priority = dict(zip(live.tolist(), value.tolist(), strict=True))
    starts = timeline.starts(SPAN).tolist()
    chance = {g: window_mass(timeline, g, priority, config) for g in starts}
    assert_drawn_like(selector, chance)


def test_priorities_follow_additions_evictions_and_changes():
    timeline = lived(turns=10)
    config = PriorityConfig(zero_on_sample=False)
    selector = Prioritized(timeline, SPAN, config)
    rng = np.random.default_rng(0)
    priority = {}
    for _ in range(300):
        timeline.add(None if rng.random() < 0.8 else rng.integers(0, 2, 1))
        some = np.unique(rng.integers(0, timeline.total, 6))  # some are long gone
        value = rng.random(len(some))
        selector.prioritize(some, value)
        priority |= dict(zip(some.tolist(), value.tolist(), strict=True))
    live = np.arange(timeline.first, timeline.total)
    rest = np.array([g for g in live if int(g) not in priority], np.int64)
    selector.prioritize(rest, np.full(len(rest), 0.5))
    priority |= dict.fromkeys(rest.tolist(), 0.5)
    starts = timeline.starts(SPAN).tolist()
    chance = {g: window_mass(timeline, g, priority, config) for g in starts}
    assert_drawn_like(selector, chance)


def test_new_windows_come_first_and_each_new_step_is_served():
    timeline = lived()
    selector = Prioritized(timeline, SPAN, PriorityConfig())
    live = np.arange(timeline.first, timeline.total)
    selector.prioritize(live, np.ones(len(live)))
    timeline.add()
    timeline.add()
    timeline.add()
    new = set(range(timeline.total - 6, timeline.total))
    rng = np.random.default_rng(0)
    served = set()
    for _ in range(6):
        (start,) = selector.draw(1, rng)
        ids = set(timeline.walk(np.array([start]), SPAN)[0].tolist())
        if new <= served:
            break
        assert ids & (new - served)
        served |= ids
    assert new <= served


def test_what_was_drawn_is_forgotten_until_it_is_rated_again():
    timeline = lived()
    selector = Prioritized(timeline, SPAN, PriorityConfig(zero_on_sample=True))
    live = np.arange(timeline.first, timeline.total)
    selector.prioritize(live, np.zeros(len(live)))
    start = int(timeline.starts(SPAN)[10])
    selector.prioritize(np.array([start]), np.array([1.0]))
    rng = np.random.default_rng(0)
    drawn = selector.draw(1, rng)
    ids = timeline.walk(drawn, SPAN)[0]
    assert start in ids
    assert (selector.step[ids % timeline.capacity] == 0).all()


def test_with_nothing_rated_and_all_drawn_it_goes_on_uniformly():
    timeline = lived()
    selector = Prioritized(timeline, SPAN, PriorityConfig())
    drawn = selector.draw(500, np.random.default_rng(0))
    assert set(drawn.tolist()) == set(timeline.starts(SPAN).tolist())


def test_a_mixture_draws_by_its_fractions():
    timeline = lived()
    selector = make_selector(
        timeline, SPAN, Fractions(0.4, 0.0, 0.6), PriorityConfig(), 1.0
    )
    assert isinstance(selector, Mixture)
    starts = timeline.starts(SPAN)
    ages = (starts.max() - starts + 1.0) ** -1.0
    chance = 0.4 / len(starts) + 0.6 * ages / ages.sum()
    assert_drawn_like(
        selector, dict(zip(starts.tolist(), chance.tolist(), strict=True))
    )


def test_fractions_must_add_up_to_one():
    with pytest.raises(UserError, match="add up to 1"):
        Fractions(0.5, 0.2, 0.0)
    with pytest.raises(UserError, match="add up to 1"):
        Fractions(1.5, -0.5, 0.0)


@pytest.mark.parametrize("size", [1, 16, 17, 300, 5000])
def test_a_sum_tree_draws_in_proportion(size):
    rng = np.random.default_rng(size)
    tree = SumTree(size)
    leaves = np.zeros(size)
    for _ in range(50):
        rows = np.unique(rng.integers(0, size, 20))
        leaves[rows] = rng.random(len(rows)) * (rng.random(len(rows)) < 0.7)
        tree.set(rows, leaves[rows])
    leaves[0] = 2.0
    tree.set(np.array([0]), leaves[:1])
    assert tree.total == pytest.approx(leaves.sum())
    drawn = tree.draw(40000, rng)
    assert (leaves[drawn] > 0).all()
    share = np.bincount(drawn, minlength=size) / 40000
    error = np.abs(share - leaves / leaves.sum()).max()
    assert error < 4 * np.sqrt(0.25 / 40000)
