"""Environment wrappers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import Action, Obs, UserError
from reverie.envs import wrappers
from reverie.spaces import Space, Spaces


class Recorder:
    """Returns given observations and records the actions."""

    def __init__(
        self, obs: Obs | None = None, act: Spaces | None = None, last: int = 9
    ):
        self.values = obs or {"vector": np.zeros(2)}
        self.act = act or {"action": Space(np.dtype(np.int64), (), 0, 3)}
        self.last = last
        self.count = 0
        self.actions: list[Action] = []

    @property
    def obs_space(self) -> Spaces:
        flags = {k: Space(np.dtype(bool)) for k in ("is_first", "is_last")}
        flags["is_terminal"] = Space(np.dtype(bool))
        values = {k: Space(v.dtype, v.shape) for k, v in self.values.items()}
        return {**values, **flags, "reward": Space(np.dtype(np.float64))}

    @property
    def act_space(self) -> Spaces:
        return self.act

    def reset(self, seed: int | None = None) -> Obs:
        self.count = 0
        return self._obs()

    def step(self, action: Action) -> Obs:
        self.actions.append(action)
        self.count += 1
        return self._obs()

    def close(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]

    def _obs(self) -> Obs:
        return {
            **self.values,
            "reward": np.float64(self.count),
            "is_first": self.count == 0,
            "is_last": self.count == self.last,
            "is_terminal": self.count == self.last,
        }


def box(low: Any, high: Any, dtype: Any = np.float64) -> Spaces:
    return {"action": Space(np.dtype(dtype), np.shape(low), low, high)}


def test_action_repeat_sums_rewards_until_the_last_step() -> None:
    inner = Recorder(last=5)
    env = wrappers.ActionRepeat(inner, 3)
    env.reset()
    assert env.step({"action": 1})["reward"] == 1 + 2 + 3
    row = env.step({"action": 1})
    assert row["reward"] == 4 + 5
    assert row["is_last"]
    assert len(inner.actions) == 5


def test_a_time_limit_truncates_every_episode() -> None:
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


def test_unbounded_entries_are_not_scaled() -> None:
    inner = Recorder(act=box(np.array([-np.inf, 0.0]), np.array([np.inf, 2.0])))
    env = wrappers.NormalizeAction(inner)
    env.step({"action": np.array([7.0, 1.0])})
    np.testing.assert_allclose(inner.actions[-1]["action"], [7, 2])


def test_clipping_does_not_modify_the_given_action() -> None:
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


def test_nearest_and_bilinear_resampling() -> None:
    image = np.zeros((4, 4, 1), np.uint8)
    image[:, ::2] = 200
    nearest = wrappers.resize(image, (2, 2), "nearest")
    assert set(np.unique(nearest)) <= {0, 200}
    assert (wrappers.resize(image, (2, 2), "bilinear") > 50).all()


def test_rewards_are_clipped() -> None:
    env = wrappers.ClipReward(Recorder(), 1.5)
    env.reset()
    assert [env.step({"action": 0})["reward"] for _ in range(3)] == [1, 1.5, 1.5]


def test_dtypes_are_unified_without_hiding_errors() -> None:
    values = {
        "a": np.zeros(2),
        "b": np.zeros(2, np.int64),
        "c": np.zeros(2, np.uint16),
        "d": np.zeros((4, 4, 3), np.uint8),
        "e": np.zeros(2, bool),
    }
    env = wrappers.UnifyDtypes(Recorder(values))
    row = env.reset()
    names = ("float32", "int32", "int32", "uint8", "bool")
    for key, name in zip("abcde", names, strict=True):
        assert row[key].dtype == env.obs_space[key].dtype == np.dtype(name)
    inner = Recorder(values)
    inner.values = {**values, "b": np.zeros(2) + 0.5}
    inner_space = Recorder(values).obs_space
    env = envs.make(OtherSpaces(inner, inner_space))
    with pytest.raises(UserError, match=r"(?s)'b' has dtype float64.*check-env"):
        env.reset()


class OtherSpaces(wrappers.Wrapper):
    """Declares other spaces than the environment has."""

    def __init__(self, env: Any, spaces: Spaces):
        super().__init__(env)
        self.obs_space = spaces


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        ({"vector": np.zeros(3)}, "has shape"),
        ({"vector": np.full(2, np.nan)}, "NaN"),
        ({}, "missing"),
        ({"vector": np.zeros(2), "unexpected": np.zeros(1)}, "extra"),
    ],
)
def test_observations_outside_of_their_space_are_refused(
    obs: Obs, message: str
) -> None:
    inner = Recorder()
    env = envs.make(OtherSpaces(inner, inner.obs_space))
    inner.values = obs
    with pytest.raises(UserError, match=message):
        env.reset()


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ({"action": 3}, "has values"),
        ({"action": 0.5}, "dtype"),
        ({"action": np.zeros(2, int)}, "shape"),
        ({"act": 0}, "needs the action 'action'"),
    ],
)
def test_actions_outside_of_their_space_are_refused(
    action: Action, message: str
) -> None:
    env = envs.make("catch")
    env.reset()
    with pytest.raises(UserError, match=message):
        env.step(action)


def test_the_config_applies_wrappers_in_order() -> None:
    config = envs.EnvConfig(repeat=2, length=3, clip_reward=5, resize=(4, 4))
    env = envs.make(Recorder({"image": np.zeros((8, 8, 3), np.uint8)}), config)
    env.reset()
    rows = [env.step({"action": 0}) for _ in range(3)]
    assert [float(row["reward"]) for row in rows] == [3, 5, 5]
    assert [bool(row["is_last"]) for row in rows] == [False, False, True]
    assert rows[0]["image"].shape == (4, 4, 3)


def test_invalid_spaces_are_refused() -> None:
    inner = Recorder()
    with pytest.raises(UserError, match=r"not a reverie\.spaces\.Space"):
        envs.make(OtherSpaces(inner, {"vector": 3}))  # type: ignore[dict-item]
    with pytest.raises(UserError, match="at least one entry"):
        envs.make(OtherSpaces(inner, {}))
    spaces = dict(inner.obs_space)
    del spaces["is_last"]
    with pytest.raises(UserError, match="lacks is_last"):
        envs.make(OtherSpaces(inner, spaces)).reset()


def test_action_repeat_widens_the_reward_bounds() -> None:
    inner = Recorder()
    spaces = {**inner.obs_space, "reward": Space(np.dtype(np.float64), (), 0, 9)}
    env = envs.make(OtherSpaces(inner, spaces), envs.EnvConfig(repeat=9))
    env.reset()
    assert env.step({"action": 0})["reward"] == sum(range(10))
    space = env.obs_space["reward"]
    assert (space.low, space.high) == (0, 81)


@pytest.mark.parametrize("name", ["action", "stepid", "consec"])
def test_reserved_observation_names_are_refused(name: str):
    with pytest.raises(UserError, match=name):
        envs.make(Recorder({name: np.zeros(2)}))


class Settable(Recorder):
    def simulator_state(self) -> np.ndarray:
        return np.zeros(2)

    def simulator_model(self) -> str:
        return ""

    def set_simulator_state(self, state: np.ndarray, model: str = "") -> Obs:
        return self.reset()


def test_the_state_of_a_simulator_is_found_inside_wrappers() -> None:
    for env in (Recorder(), Settable()):
        wrapped = wrappers.ActionRepeat(wrappers.TimeLimit(env, 5), 2)
        assert wrappers.without_wrappers(wrapped) is env
        assert wrappers.has_simulator_state(wrapped) == isinstance(env, Settable)
