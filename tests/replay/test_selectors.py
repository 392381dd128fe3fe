"""Sampling probabilities of the selectors."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.api import UserError
from reverie.replay.config import PriorityConfig, ReplayConfig, SelectorFractions
from reverie.replay.selectors import (
    MixtureSelector,
    PrioritizedSelector,
    RecencySelector,
    SumTree,
    UniformSelector,
    make_selector,
)
from reverie.replay.step_index import StepIndex
from reverie.rows import Window
from reverie.run.config import resolve

SPAN = 3


def make_index(capacity=50, slots=2, turns=60, seed=0):
    """An index in which environments skip steps and old steps are evicted."""
    rng = np.random.default_rng(seed)
    index = StepIndex(capacity, slots)
    for _ in range(turns):
        index.add(None if rng.random() < 0.8 else rng.integers(0, slots, 1))
    return index


def assert_distribution(selector, weights, draws=20000, seed=0):
    """Chi-square test of sampled start ids; `weights` are proportional to their
    probabilities."""
    drawn = selector.sample(draws, np.random.default_rng(seed))
    ids, counts = np.unique(drawn, return_counts=True)
    assert set(ids.tolist()) <= {start for start, w in weights.items() if w > 0}
    found = dict(zip(ids.tolist(), counts.tolist(), strict=True))
    total = sum(weights.values())
    chi_square, degrees = 0.0, -1  # degrees of freedom
    for start, weight in weights.items():
        expected = draws * weight / total
        if expected > 0:
            chi_square += (found.get(start, 0) - expected) ** 2 / expected
            degrees += 1
    # mean of the chi-square distribution plus four standard deviations
    assert chi_square < degrees + 4 * np.sqrt(2 * degrees), (chi_square, degrees)


def window_priority(index, start, priority, config):
    ids = index.window_ids(np.array([start]), SPAN)[0]
    power = np.array([priority[int(g)] for g in ids]) ** config.exponent
    return config.maxfrac * power.max() + (1 - config.maxfrac) * power.mean()


def test_uniform_gives_each_window_the_same_probability():
    index = make_index()
    weights = dict.fromkeys(index.window_starts(SPAN).tolist(), 1.0)
    assert_distribution(UniformSelector(index, SPAN), weights)


@pytest.mark.parametrize("exponent", [0.5, 1.0, 3.0])
def test_recency_decreases_with_a_power_of_age(exponent):
    index = make_index()
    starts = index.window_starts(SPAN)
    ages = starts.max() - starts + 1.0
    weights = dict(zip(starts.tolist(), (ages**-exponent).tolist(), strict=True))
    assert_distribution(RecencySelector(index, SPAN, exponent), weights)


def test_recency_finds_the_few_complete_windows():
    index = StepIndex(1000, 300)
    index.add()
    index.add(np.array([5]))
    index.add(np.array([5]))
    index.add(np.arange(299))
    drawn = RecencySelector(index, SPAN, 1.0).sample(5, np.random.default_rng(0))
    assert set(drawn.tolist()) <= {5, 300}
    index = StepIndex(100_000, 30_000)
    index.add()
    index.add(np.array([5]))
    index.add(np.array([5]))
    index.add(np.array([29_000]))
    index.add(np.array([29_000]))
    drawn = RecencySelector(index, SPAN, 0.0).sample(40, np.random.default_rng(0))
    assert set(drawn.tolist()) == {5, 29_000}


def test_window_priority_mixes_maximum_and_mean():
    index = make_index()
    config = PriorityConfig(exponent=0.7, maxfrac=0.3, zero_on_sample=False)
    selector = PrioritizedSelector(index, SPAN, config)
    rng = np.random.default_rng(1)
    live = np.arange(index.first, index.total)
    value = rng.random(len(live)) ** 3
    selector.prioritize(live, value)
    priority = dict(zip(live.tolist(), value.tolist(), strict=True))
    starts = index.window_starts(SPAN).tolist()
    weights = {g: window_priority(index, g, priority, config) for g in starts}
    assert_distribution(selector, weights)


def test_priorities_are_updated_after_additions_and_evictions():
    index = make_index(turns=10)
    config = PriorityConfig(zero_on_sample=False)
    selector = PrioritizedSelector(index, SPAN, config)
    rng = np.random.default_rng(0)
    priority = {}
    for _ in range(300):
        index.add(None if rng.random() < 0.8 else rng.integers(0, 2, 1))
        some = np.unique(rng.integers(0, index.total, 6))  # some are evicted
        value = rng.random(len(some))
        selector.prioritize(some, value)
        priority |= dict(zip(some.tolist(), value.tolist(), strict=True))
    live = np.arange(index.first, index.total)
    unrated = np.array([g for g in live if int(g) not in priority], np.int64)
    selector.prioritize(unrated, np.full(len(unrated), 0.5))
    priority |= dict.fromkeys(unrated.tolist(), 0.5)
    starts = index.window_starts(SPAN).tolist()
    weights = {g: window_priority(index, g, priority, config) for g in starts}
    assert_distribution(selector, weights)


def test_windows_with_new_steps_are_sampled_first():
    index = make_index()
    selector = PrioritizedSelector(index, SPAN, PriorityConfig())
    live = np.arange(index.first, index.total)
    selector.prioritize(live, np.ones(len(live)))
    index.add()
    index.add()
    index.add()
    new = set(range(index.total - 6, index.total))
    rng = np.random.default_rng(0)
    served = set()
    for _ in range(6):
        (start,) = selector.sample(1, rng)
        ids = set(index.window_ids(np.array([start]), SPAN)[0].tolist())
        if new <= served:
            break
        assert ids & (new - served)
        served |= ids
    assert new <= served


def test_sampled_steps_lose_their_priority():
    index = make_index()
    selector = PrioritizedSelector(index, SPAN, PriorityConfig(zero_on_sample=True))
    live = np.arange(index.first, index.total)
    selector.prioritize(live, np.zeros(len(live)))
    start = int(index.window_starts(SPAN)[10])
    selector.prioritize(np.array([start]), np.array([1.0]))
    rng = np.random.default_rng(0)
    drawn = selector.sample(1, rng)
    ids = index.window_ids(drawn, SPAN)[0]
    assert start in ids
    assert (selector.raw_priority[ids % index.capacity] == 0).all()


def test_without_any_priority_sampling_is_uniform():
    index = make_index()
    selector = PrioritizedSelector(index, SPAN, PriorityConfig())
    drawn = selector.sample(500, np.random.default_rng(0))
    assert set(drawn.tolist()) == set(index.window_starts(SPAN).tolist())


def test_a_mixture_samples_by_its_fractions():
    index = make_index()
    config = ReplayConfig(fracs=SelectorFractions(0.4, 0.0, 0.6))
    selector = make_selector(index, Window(4, SPAN, select="mixture"), config)
    assert isinstance(selector, MixtureSelector)
    starts = index.window_starts(SPAN)
    ages = (starts.max() - starts + 1.0) ** -1.0
    weights = 0.4 / len(starts) + 0.6 * ages / ages.sum()
    assert_distribution(
        selector, dict(zip(starts.tolist(), weights.tolist(), strict=True))
    )


def test_fractions_must_add_up_to_one():
    with pytest.raises(UserError, match="add up to 1"):
        SelectorFractions(0.5, 0.2, 0.0)
    with pytest.raises(UserError, match="add up to 1"):
        SelectorFractions(1.5, -0.5, 0.0)


@pytest.mark.parametrize("size", [1, 16, 17, 300, 5000])
def test_a_sum_tree_samples_in_proportion(size):
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
    drawn = tree.sample(40000, rng)
    assert (leaves[drawn] > 0).all()
    share = np.bincount(drawn, minlength=size) / 40000
    error = np.abs(share - leaves / leaves.sum()).max()
    assert error < 4 * np.sqrt(0.25 / 40000)


CURIOUS = resolve(["curious_replay"]).replay.prio


def curious_selector(index, context=0):
    return PrioritizedSelector(index, SPAN, CURIOUS, context)


def window_weights(selector):
    """Weight of every complete window, by the id of its first step."""
    starts = selector.index.window_starts(SPAN)
    selector.sample(1, np.random.default_rng(0))
    leaves = selector._priority_tree.levels[0].reshape(-1)
    return dict(
        zip(starts.tolist(), leaves[starts % selector.index.capacity], strict=True)
    )


def test_curious_replay_weighs_visits_and_losses():
    index = StepIndex(50, 1)
    for _ in range(5):
        index.add()
    selector = curious_selector(index)
    assert window_weights(selector) == {0: 1e5, 1: 1e5, 2: 1e5}
    # one batch with step 3 in two sequences: one visit, and the last loss counts
    selector.prioritize(np.array([2, 3, 3]), np.array([0.99, 5.0, 2.0]))
    selector.prioritize(np.array([2]), np.array([0.99]))
    twice, once = 1e4 * 0.49 + 1.0, 1e4 * 0.7 + 2.01**0.7
    expected = {
        0: (1e5 + 1e5 + twice) / 3,
        1: (1e5 + twice + once) / 3,
        2: (twice + once + 1e5) / 3,
    }
    assert window_weights(selector) == pytest.approx(expected)
    assert_distribution(selector, expected)


def test_context_steps_do_not_count_for_curious_replay():
    index = StepIndex(50, 1)
    for _ in range(5):
        index.add()
    selector = curious_selector(index, context=1)
    selector.prioritize(np.arange(1, 5), np.full(4, 0.99))  # step 0 is never trained on
    assert window_weights(selector) == pytest.approx(dict.fromkeys(range(3), 7001.0))


def test_visits_are_saved_and_evicted_with_their_steps():
    index = make_index()
    selector = curious_selector(index)
    rng = np.random.default_rng(0)
    for _ in range(30):
        live = rng.integers(index.first, index.total, 12)
        selector.prioritize(live, rng.random(12))
        index.add()
    copy = curious_selector(index)
    copy.load_state_dict(selector.state_dict())
    assert window_weights(copy) == window_weights(selector)
    one, other = np.random.default_rng(1), np.random.default_rng(1)
    assert (copy.sample(99, one) == selector.sample(99, other)).all()
    for _ in range(index.capacity):
        index.add()
    assert set(window_weights(selector).values()) == {1e5}
