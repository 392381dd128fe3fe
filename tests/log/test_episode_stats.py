"""Episodes told from rows."""

from __future__ import annotations

import numpy as np

from reverie.log import episodes
from reverie.log.episodes import EpisodeStats


def row(first, last, reward, **more):
    batch = {"is_first": first, "is_last": last, "is_terminal": last, "reward": reward}
    batch = {key: np.array(value) for key, value in batch.items()}
    return batch | {key: np.array(value) for key, value in more.items()}


def test_score_is_the_sum_of_rewards_and_length_the_steps_taken():
    stats = EpisodeStats(2)
    assert stats.add(row([True, True], [False, False], [0.0, 0.0])) == {}
    assert stats.add(row([False, False], [False, False], [1.0, 2.0])) == {}
    metrics = stats.add(row([False, False], [True, False], [1.5, 2.0]))
    np.testing.assert_array_equal(metrics["episode/score"], [2.5])
    np.testing.assert_array_equal(metrics["episode/length"], [2])
    metrics = stats.add(row([True, False], [False, True], [0.0, 2.0]))
    np.testing.assert_array_equal(metrics["episode/score"], [6.0])
    np.testing.assert_array_equal(metrics["episode/length"], [3])
    metrics = stats.add(row([False, True], [True, False], [5.0, 0.0]))
    np.testing.assert_array_equal(metrics["episode/score"], [5.0])


def test_episodes_that_end_together_are_told_apart():
    stats = EpisodeStats(3)
    stats.add(row([True] * 3, [False] * 3, [0.0] * 3))
    metrics = stats.add(row([False] * 3, [True, False, True], [1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(metrics["episode/score"], [1.0, 3.0])
    np.testing.assert_array_equal(metrics["episode/length"], [1, 1])


def test_a_summary_weighs_rewards_by_steps_and_forgets():
    stats = EpisodeStats(2)
    stats.add(row([True] * 2, [False] * 2, [0.0] * 2))
    stats.add(row([False] * 2, [True, False], [1.0, 0.0]))
    stats.add(row([True, False], [False] * 2, [0.0] * 2))
    stats.add(row([False] * 2, [False, True], [0.0, 1.0]))
    found = stats.summary()
    assert found["episodes"] == 2
    assert found["return_mean"] == 1.0
    assert found["length_mean"] == 2.0
    assert found["reward_mean"] == 2 / 4
    assert stats.summary() == {"episodes": 0}


def test_reward_rate_counts_changes():
    stats = EpisodeStats(1)
    for reward in (0.0, 0.0, 1.0, 1.0):
        stats.add(
            row([reward == 0 and stats._values["rows"][0] == 0], [False], [reward])
        )
    metrics = stats.add(row([False], [True], [0.0]))
    np.testing.assert_allclose(metrics["epstats/reward_rate"], [2 / 4])


def test_log_keys_are_averaged_summed_and_maximised_per_episode():
    stats = EpisodeStats(1)
    stats.add(row([True], [False], [0.0], **{"log/coal": [-3.0]}))
    metrics = stats.add(row([False], [True], [0.0], **{"log/coal": [-1]}))
    got = {key: value.tolist() for key, value in metrics.items() if "coal" in key}
    assert got == {
        "epstats/log/coal/avg": [-2.0],
        "epstats/log/coal/max": [-1.0],
        "epstats/log/coal/sum": [-4.0],
    }
    stats.add(row([True], [False], [0.0], **{"log/coal": [-5.0]}))
    metrics = stats.add(row([False], [True], [0.0], **{"log/coal": [-6.0]}))
    assert metrics["epstats/log/coal/max"].tolist() == [-5.0]


def test_the_first_environment_is_filmed_and_the_film_is_bounded(monkeypatch):
    monkeypatch.setattr(episodes, "FRAMES", 4)
    stats = EpisodeStats(2)
    image = np.zeros((2, 8, 6, 3), np.uint8)
    for step in range(6):
        image[0] = step  # the same memory every time, as a pool would
        metrics = stats.add(
            row([step == 0, False], [step == 5, step == 3], [0.0, 0.0], image=image)
        )
        assert ("epstats/policy_image" in metrics) == (step == 5)
    film = metrics["epstats/policy_image"]
    assert film.shape == (4, 8, 6, 3)
    assert film[:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_a_restored_count_goes_on_where_it_stood():
    def play(stats, rows):
        return [stats.add(r) for r in rows]

    rows = [
        row([t % 5 == 0], [t % 5 == 4], [0.1 * t], **{"log/x": [t]}) for t in range(20)
    ]
    whole = play(EpisodeStats(1), rows)
    first = EpisodeStats(1)
    play(first, rows[:12])
    second = EpisodeStats(1)
    second.load_state_dict(first.state_dict())
    play(first, rows[12:])  # must not reach into the state
    rest = play(second, rows[12:])
    for got, want in zip(rest, whole[12:], strict=True):
        assert got.keys() == want.keys()
        for key in got:
            np.testing.assert_array_equal(got[key], want[key])
