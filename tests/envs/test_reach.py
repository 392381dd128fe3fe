"""Reach: the expert policy, and the target is visible only in the image."""

from __future__ import annotations

import numpy as np
import pytest

from reverie import envs
from reverie.envs.suites.reach import Reach, ReachConfig


def play(env: Reach, seed: int, policy) -> list[dict]:
    rows = [env.reset(seed)]
    while not rows[-1]["is_last"]:
        rows.append(env.step(policy(env)))
    return rows


def test_the_expert_always_reaches_the_target():
    env = Reach()
    for seed in range(50):
        rows = play(env, seed, Reach.expert)
        assert rows[-1]["is_terminal"]
        assert rows[-1]["log/success"] == 1
        assert sum(row["reward"] for row in rows) == 1
        assert 4 <= len(rows) <= 20


def test_the_time_limit_truncates_episodes():
    env = Reach(ReachConfig(length=5))
    rows = play(env, 0, lambda env: {"action": np.zeros(2, np.float32)})
    assert len(rows) == 6
    assert rows[-1]["is_last"]
    assert not rows[-1]["is_terminal"]


def test_only_the_image_depends_on_the_target():
    env = Reach()
    first = env.reset(0)
    state = env.state_dict()
    env.load_state_dict({**state, "target": -state["target"]})
    other = env.step({"action": np.zeros(2, np.float32)})
    equal = {key for key in first if np.array_equal(first[key], other[key])}
    assert "image" not in equal
    assert {"proprio", "reward", "log/success"} <= equal


def test_the_image_shows_hand_and_target():
    env = Reach(ReachConfig(size=(48, 24)))
    env.reset(0)
    env.load_state_dict(
        {
            **env.state_dict(),
            "hand": np.array([0.5, -0.5]),
            "target": np.array([-0.5, 0]),
        }
    )
    image = env.step({"action": np.zeros(2, np.float32)})["image"].astype(int)
    red = np.argwhere(image[..., 0] > 200).mean(0) / (48, 24)
    blue = np.argwhere((image[..., 2] > 200) & (image[..., 0] < 150)).mean(0)
    np.testing.assert_allclose(red * 2.4 - 1.2, [0, -0.5], atol=0.1)
    np.testing.assert_allclose(blue / (48, 24) * 2.4 - 1.2, [-0.5, 0.5], atol=0.1)


def test_the_expert_is_available_through_wrappers():
    env = envs.make("reach", envs.EnvConfig(), 3)
    env.reset()
    assert env.expert()["action"].shape == (2,)


def test_invalid_settings_are_refused():
    with pytest.raises(ValueError, match="reach needs"):
        ReachConfig(size=(4, 4))
