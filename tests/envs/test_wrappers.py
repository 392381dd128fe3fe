"""Each wrapper changes one thing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import Action, Obs, UserError
from reverie.envs import wrappers
from reverie.spaces import Space, Spaces


class Recorder:
    """Shows what it is told to, and remembers the actions it got."""

    def __init__(
        self, obs: Obs | None = None, act: Spaces | None = None, last: int = 9
    ):
        self.more = obs or {"vector": np.zeros(2)}
        self.act = act or {"action": Space(np.dtype(np.int64), (), 0, 3)}
        self.last = last
        self.count = 0
        self.actions: list[Action] = []

    @property
    def obs_space(self) -> Spaces:
        flags = {k: Space(np.dtype(bool)) for k in ("is_first", "is_last")}
        flags["is_terminal"] = Space(np.dtype(bool))
        shown = {k: Space(v.dtype, v.shape) for k, v in self.more.items()}
        return {**shown, **flags, "reward": Space(np.dtype(np.float64))}

    @property
    def act_space(self) -> Spaces:
        return self.act

    def reset(self, seed: int | None = None) -> Obs:
        self.count = 0
        return self._row()

    def step(self, action: Action) -> Obs:
        self.actions.append(action)
        self.count += 1
        return self._row()

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def _row(self) -> Obs:
        return {
            **self.more,
            "reward": np.float64(self.count),
            "is_first": self.count == 0,
            "is_last": self.count == self.last,
            "is_terminal": self.count == self.last,
        }


def box(low: Any, high: Any, dtype: Any = np.float64) -> Spaces:
    return {"action": Space(np.dtype(dtype), np.shape(low), low, high)}


def test_repeat_sums_rewards_and_stops_at_the_last_step() -> None:
    inner = Recorder(last=5)
    env = wrappers.ActionRepeat(inner, 3)
    env.reset()
    assert env.step({"action": 1})["reward"] == 1 + 2 + 3
    row = env.step({"action": 1})
    assert row["reward"] == 4 + 5
    assert row["is_last"]
    assert len(inner.actions) == 5


def test_a_time_limit_is_not_terminal_and_restarts() -> None:
    env = wrappers.TimeLimit(Recorder(), 3)
    for _ in range(2):
        env.reset()
        rows = [env.step({"action": 0}) for _ in range(3)]
        assert [bool(row["is_last"]) for row in rows] == [False, False, True]
        assert not rows[-1]["is_terminal"]


def test_a_time_limit_resumes_its_count() -> None:
    env = wrappers.TimeLimit(Recorder(), 3)
    env.reset()
    env.step({"action": 0})
    state = env.state_dict()
    other = wrappers.TimeLimit(Recorder(), 3)
    other.load_state_dict(state)
    assert not other.step({"action": 0})["is_last"]
    assert other.step({"action": 0})["is_last"]


def test_bounded_actions_are_scaled_from_plus_minus_one() -> None:
    inner = Recorder(act=box(np.array([0.0, -4.0]), np.array([10.0, 4.0])))
    env = wrappers.NormalizeAction(inner)
    assert (env.act_space["action"].low == -1).all()
    env.step({"action": np.array([-1.0, 0.5])})
    np.testing.assert_allclose(inner.actions[-1]["action"], [0, 2])


def test_unbounded_entries_pass_as_they_are() -> None:
    inner = Recorder(act=box(np.array([-np.inf, 0.0]), np.array([np.inf, 2.0])))
    env = wrappers.NormalizeAction(inner)
    env.step({"action": np.array([7.0, 1.0])})
    np.testing.assert_allclose(inner.actions[-1]["action"], [7, 2])


def test_actions_are_clipped_on_the_way_in_only() -> None:
    inner = Recorder(act=box(np.array([-2.0]), np.array([2.0])))
    env = envs.make(inner)
    raw = {"action": np.array([3.0], np.float32)}
    env.reset()
    env.step(raw)
    assert inner.actions[-1]["action"] == 2
    assert raw["action"] == 3


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("resample", ["nearest", "bilinear"])
def test_images_are_resized(channels: int, resample: Any) -> None:
    image = np.full((10, 14, channels), 77, np.uint8)
    env = wrappers.ResizeImage(Recorder({"image": image}), (6, 9), resample)
    assert env.obs_space["image"].shape == (6, 9, channels)
    for row in (env.reset(), env.step({"action": 0})):
        assert row["image"].shape == (6, 9, channels)
        assert (row["image"] == 77).all()


def test_nearest_takes_pixels_and_bilinear_mixes_them() -> None:
    image = np.zeros((4, 4, 1), np.uint8)
    image[:, ::2] = 200
    nearest = wrappers.resize(image, (2, 2), "nearest")
    assert set(np.unique(nearest)) <= {0, 200}
    assert (wrappers.resize(image, (2, 2), "bilinear") > 50).all()


def test_rewards_are_clipped() -> None:
    env = wrappers.ClipReward(Recorder(), 1.5)
    env.reset()
    assert [env.step({"action": 0})["reward"] for _ in range(3)] == [1, 1.5, 1.5]


def test_dtypes_are_unified_but_mistakes_are_not_hidden() -> None:
    shown = {
        "a": np.zeros(2),
        "b": np.zeros(2, np.int64),
        "c": np.zeros(2, np.uint16),
        "d": np.zeros((4, 4, 3), np.uint8),
        "e": np.zeros(2, bool),
    }
    env = wrappers.UnifyDtypes(Recorder(shown))
    row = env.reset()
    names = ("float32", "int32", "int32", "uint8", "bool")
    for key, name in zip("abcde", names, strict=True):
        assert row[key].dtype == env.obs_space[key].dtype == np.dtype(name)
    inner = Recorder(shown)
    inner.more = {**shown, "b": np.zeros(2) + 0.5}
    inner_space = Recorder(shown).obs_space
    env = envs.make(Fixed(inner, inner_space))
    with pytest.raises(UserError, match=r"(?s)'b' has dtype float64.*check-env"):
        env.reset()


class Fixed(wrappers.Wrapper):
    """Promises spaces whatever the environment does."""

    def __init__(self, env: Any, spaces: Spaces):
        super().__init__(env)
        self.spaces = spaces

    @property
    def obs_space(self) -> Spaces:
        return self.spaces


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"vector": np.zeros(3)}, "has shape"),
        ({"vector": np.full(2, np.nan)}, "NaN"),
        ({}, "missing"),
        ({"vector": np.zeros(2), "surprise": np.zeros(1)}, "extra"),
    ],
)
def test_rows_that_break_their_promise_are_refused(wrong: Obs, words: str) -> None:
    inner = Recorder()
    env = envs.make(Fixed(inner, inner.obs_space))
    inner.more = wrong
    with pytest.raises(UserError, match=words):
        env.reset()


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ({"action": 3}, "has values"),
        ({"action": 0.5}, "dtype"),
        ({"action": np.zeros(2, int)}, "shape"),
        ({"act": 0}, "needs the action 'action'"),
    ],
)
def test_wrong_actions_are_refused(action: Action, words: str) -> None:
    env = envs.make("catch")
    env.reset()
    with pytest.raises(UserError, match=words):
        env.step(action)


def test_the_config_stacks_them_in_order() -> None:
    config = envs.EnvConfig(repeat=2, length=3, clip_reward=5, resize=(4, 4))
    env = envs.make(Recorder({"image": np.zeros((8, 8, 3), np.uint8)}), config)
    env.reset()
    rows = [env.step({"action": 0}) for _ in range(3)]
    assert [float(row["reward"]) for row in rows] == [3, 5, 5]
    assert [bool(row["is_last"]) for row in rows] == [False, False, True]
    assert rows[0]["image"].shape == (4, 4, 3)


def test_spaces_that_are_not_spaces_are_refused() -> None:
    inner = Recorder()
    with pytest.raises(UserError, match=r"not a reverie\.api\.Space"):
        envs.make(Fixed(inner, {"vector": 3}))  # type: ignore[dict-item]
    with pytest.raises(UserError, match="at least one entry"):
        envs.make(Fixed(inner, {}))
    spaces = dict(inner.obs_space)
    del spaces["is_last"]
    with pytest.raises(UserError, match="lacks is_last"):
        envs.make(Fixed(inner, spaces)).reset()


def test_repeated_rewards_may_exceed_the_bounds_of_a_single_one() -> None:
    inner = Recorder()
    spaces = {**inner.obs_space, "reward": Space(np.dtype(np.float64), (), 0, 9)}
    env = envs.make(Fixed(inner, spaces), envs.EnvConfig(repeat=9))
    env.reset()
    assert env.step({"action": 0})["reward"] == sum(range(10))
    space = env.obs_space["reward"]
    assert (space.low, space.high) == (0, 81)


@pytest.mark.parametrize("name", ["action", "stepid", "consec"])
def test_observations_that_are_called_like_something_else_are_refused(name: str):
    with pytest.raises(UserError, match=name):
        envs.make(Recorder({name: np.zeros(2)}))
