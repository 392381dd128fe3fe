"""Episode statistics from rows."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.log import episode_stats
from reverie.log.episode_stats import EpisodeStats


def row(first, last, reward, **extra):
    """Return a row of each environment, as a batch."""
    batch = {"is_first": first, "is_last": last, "is_terminal": last, "reward": reward}
    batch = {key: np.array(value) for key, value in batch.items()}
    return batch | {key: np.array(value) for key, value in extra.items()}


def test_score_is_the_sum_of_rewards_and_length_the_number_of_actions():
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


def test_episodes_that_end_at_the_same_step():
    stats = EpisodeStats(3)
    stats.add(row([True] * 3, [False] * 3, [0.0] * 3))
    metrics = stats.add(row([False] * 3, [True, False, True], [1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(metrics["episode/score"], [1.0, 3.0])
    np.testing.assert_array_equal(metrics["episode/length"], [1, 1])


def test_a_summary_weights_rewards_by_steps_and_resets():
    stats = EpisodeStats(2)
    stats.add(row([True] * 2, [False] * 2, [0.0] * 2))
    stats.add(row([False] * 2, [True, False], [1.0, 0.0]))
    stats.add(row([True, False], [False] * 2, [0.0] * 2))
    stats.add(row([False] * 2, [False, True], [0.0, 1.0]))
    summary = stats.summary()
    assert summary["episodes"] == 2
    assert summary["return_mean"] == 1.0
    assert summary["length_mean"] == 2.0
    assert summary["reward_mean"] == 2 / 4
    assert stats.summary() == {"episodes": 0}


def test_reward_rate_counts_changes():
    stats = EpisodeStats(1)
    for reward in (0.0, 0.0, 1.0, 1.0):
        stats.add(
            row([reward == 0 and stats._values["rows"][0] == 0], [False], [reward])
        )
    metrics = stats.add(row([False], [True], [0.0]))
    np.testing.assert_allclose(metrics["epstats/reward_rate"], [2 / 4])


def test_log_keys_have_mean_sum_and_maximum_per_episode():
    stats = EpisodeStats(1)
    stats.add(row([True], [False], [0.0], **{"log/coal": [-3.0]}))
    metrics = stats.add(row([False], [True], [0.0], **{"log/coal": [-1]}))
    actual = {key: value.tolist() for key, value in metrics.items() if "coal" in key}
    assert actual == {
        "epstats/log/coal/avg": [-2.0],
        "epstats/log/coal/max": [-1.0],
        "epstats/log/coal/sum": [-4.0],
    }
    stats.add(row([True], [False], [0.0], **{"log/coal": [-5.0]}))
    metrics = stats.add(row([False], [True], [0.0], **{"log/coal": [-6.0]}))
    assert metrics["epstats/log/coal/max"].tolist() == [-5.0]


def test_the_video_of_the_first_environment_has_a_maximum_length(monkeypatch):
    monkeypatch.setattr(episode_stats, "MAX_FRAMES", 4)
    stats = EpisodeStats(2)
    image = np.zeros((2, 8, 6, 3), np.uint8)
    for step in range(6):
        image[0] = step  # the same memory at every step, as a VecEnv does
        metrics = stats.add(
            row([step == 0, False], [step == 5, step == 3], [0.0, 0.0], image=image)
        )
        assert ("epstats/policy_image" in metrics) == (step == 5)
    video = metrics["epstats/policy_image"]
    assert video.shape == (4, 8, 6, 3)
    assert video[:, 0, 0, 0].tolist() == [0, 1, 2, 3]


def test_a_restored_state_continues_exactly():
    def play(stats, rows):
        return [stats.add(r) for r in rows]

    rows = [
        row([t % 5 == 0], [t % 5 == 4], [0.1 * t], **{"log/x": [t]}) for t in range(20)
    ]
    expected = play(EpisodeStats(1), rows)
    first = EpisodeStats(1)
    play(first, rows[:12])
    second = EpisodeStats(1)
    second.load_state_dict(first.state_dict())
    play(first, rows[12:])  # must not change the state
    resumed = play(second, rows[12:])
    for actual, reference in zip(resumed, expected[12:], strict=True):
        assert actual.keys() == reference.keys()
        for key in actual:
            np.testing.assert_array_equal(actual[key], reference[key])


@pytest.mark.parametrize("array", [np.zeros(0), np.zeros((2, 2)), np.zeros(3)])
@pytest.mark.parametrize("part", ["values", "sum", "max"])
def test_a_state_of_another_number_of_environments_is_refused(part, array):
    stats = EpisodeStats(2)
    stats.add(row([True] * 2, [False] * 2, [0.0] * 2, **{"log/x": [0, 1]}))
    state = stats.state_dict()
    state[part] = dict.fromkeys(state[part], array)
    with pytest.raises(ValueError, match="reshape"):
        stats.load_state_dict(state)


def test_achievements_are_unlocked_if_they_were_ever_positive():
    stats, key = EpisodeStats(2), "log/achievement_wood"
    stats.add(row([True] * 2, [False] * 2, [0.0] * 2, **{key: [0, 0]}))
    stats.add(row([False] * 2, [False] * 2, [0.0] * 2, **{key: [3, 0]}))
    metrics = stats.add(row([False] * 2, [True] * 2, [0.0] * 2, **{key: [0, 0]}))
    assert metrics["episode/achievement_wood"].tolist() == [1, 0]
    assert metrics["epstats/log/achievement_wood/max"].tolist() == [3, 0]


def test_success_counts_episodes_that_report_it():
    stats = EpisodeStats(3)
    stats.add(row([True] * 3, [False] * 3, [0.0] * 3, **{"log/success": [-1, -1, -1]}))
    stats.add(row([False] * 3, [False] * 3, [0.0] * 3, **{"log/success": [1, 0, -1]}))
    metrics = stats.add(
        row([False] * 3, [True] * 3, [0.0] * 3, **{"log/success": [0, 0, -1]})
    )
    np.testing.assert_array_equal(metrics["episode/success"], [1, 0, np.nan])
    stats.add(row([True] * 3, [False] * 3, [0.0] * 3, **{"log/success": [-1, -1, -1]}))
    metrics = stats.add(
        row([False] * 3, [True] * 3, [0.0] * 3, **{"log/success": [-1, -1, -1]})
    )
    assert not [name for name in metrics if "success" in name]
