"""The environment checker reports each common error together with a fix."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest

from reverie import envs
from reverie.api import Obs
from reverie.envs.adapters.gymnasium import GymnasiumEnv
from reverie.envs.checker import check_env, describe
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.spaces import Space, Spaces

F32 = np.dtype(np.float32)


class Base(Catch):
    """A valid environment; each subclass adds one error."""

    changed_obs: ClassVar[Any] = {}
    """Changes of the observation space; None removes a key."""
    changed_act: ClassVar[Spaces] = {}

    def __init__(self) -> None:
        super().__init__(CatchConfig(rows=8, cols=8, size=(16, 16)))
        spaces = {**self.obs_space, **self.changed_obs}
        self.obs_space = {k: space for k, space in spaces.items() if space is not None}
        self.act_space = self.changed_act or self.act_space


class Missing(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(*args, **kwargs)
        del obs["image"]
        return obs


class Extra(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        return {**super()._obs(*args, **kwargs), "lives": np.int32(3)}


class NoFlag(Base):
    changed_obs: ClassVar[Any] = {"is_last": None}


class WrongDtype(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(*args, **kwargs)
        return {**obs, "image": obs["image"].astype(np.float32)}


class WrongShape(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(*args, **kwargs)
        return {**obs, "image": obs["image"][:4]}


class WrongRange(Base):
    def _obs(self, reward: float, *args: Any, **kwargs: Any) -> Obs:
        return super()._obs(5 * reward, *args, **kwargs)


class NanReward(Base):
    def _obs(self, reward: float, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(reward, *args, **kwargs)
        return {**obs, "reward": np.float32(np.nan)} if reward else obs


class AlwaysFirst(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        return {**super()._obs(*args, **kwargs), "is_first": np.bool_(True)}


class NeverFirst(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        return {**super()._obs(*args, **kwargs), "is_first": np.bool_(False)}


class EarlyTerminal(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        return {**super()._obs(*args, **kwargs), "is_terminal": np.bool_(True)}


class EarlyReward(Base):
    def reset(self, seed: int | None = None) -> Obs:
        return {**super().reset(seed), "reward": np.float32(1)}


class Aliasing(Base):
    buffer = np.zeros((16, 16, 3), np.uint8)

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(*args, **kwargs)
        self.buffer[:] = obs["image"]
        return {**obs, "image": self.buffer}


class NeverEnds(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        self._row = 0
        flags = {"is_last": np.bool_(False), "is_terminal": np.bool_(False)}
        return {**super()._obs(*args, **kwargs), **flags}


class LastAtReset(Base):
    def reset(self, seed: int | None = None) -> Obs:
        return {**super().reset(seed), "is_last": np.bool_(True)}


class Unseeded(Base):
    def reset(self, seed: int | None = None) -> Obs:
        self.episodes = getattr(self, "episodes", 0) + 1
        obs = super().reset(self.episodes)
        self._ball = (
            self.episodes % self.config.cols
        )  # differs between consecutive episodes
        return {**obs, **self._obs(0.0, first=True)}


class FloatImage(Base):
    changed_obs: ClassVar[Any] = {"image": Space(F32, (16, 16, 3), 0, 1)}

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(*args, **kwargs)
        return {**obs, "image": obs["image"].astype(np.float32) / 255}


class ChannelsFirst(Base):
    changed_obs: ClassVar[Any] = {"image": Space(np.dtype(np.uint8), (3, 16, 16))}

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(*args, **kwargs)
        return {**obs, "image": obs["image"].transpose(2, 0, 1).copy()}


class Unbounded(Base):
    changed_act: ClassVar[Spaces] = {"action": Space(F32, (2,))}

    def step(self, action: Any) -> Obs:
        return super().step({"action": 1})


class NoObservation(Base):
    changed_obs: ClassVar[Any] = {"image": None}

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(*args, **kwargs)
        del obs["image"]
        return obs


class ReservedName(Base):
    changed_act: ClassVar[Spaces] = {"reward": Space(np.dtype(np.int32), (), 0, 3)}

    def step(self, action: Any) -> Obs:
        return super().step({"action": action["reward"]})


class Raises(Base):
    def step(self, action: Any) -> Obs:
        raise KeyError("gripper")


class NotSpaces(Base):
    changed_obs: ClassVar[Any] = {"image": (16, 16, 3)}


@pytest.mark.parametrize(
    ("env_class", "severity", "message", "fix"),
    [
        (Missing, "error", "did not return 'image'", "return 'image'"),
        (Extra, "error", "returned 'lives'", "add 'lives' to `obs_space`"),
        (NoFlag, "error", "lacks 'is_last'", "add 'is_last'"),
        (WrongDtype, "error", "dtype float32", "np.uint8"),
        (WrongShape, "error", "has shape", "correct `obs_space`"),
        (WrongRange, "error", "has values", "widen"),
        (NanReward, "error", "NaN", "division by zero"),
        (AlwaysFirst, "error", "`step` returned is_first=True", "and only there"),
        (NeverFirst, "error", "`reset` returned is_first=False", "set is_first"),
        (EarlyTerminal, "error", "`is_terminal` was set without", "set both"),
        (EarlyReward, "error", "`reset` returned the reward", "return 0"),
        (Aliasing, "warning", "the same array", ".copy()"),
        (NeverEnds, "warning", "no episode ended", "--env.length"),
        (LastAtReset, "error", "returned an observation with `is_last`", "start a new"),
        (Unseeded, "warning", "same seed and actions", "created in `reset"),
        (FloatImage, "error", "looks like an image but is float32", "uint8"),
        (ChannelsFirst, "warning", "channels first", "transpose"),
        (Unbounded, "warning", "no finite bounds", "set finite bounds"),
        (NoObservation, "error", "no key that an agent can use", "add an image"),
        (ReservedName, "error", "has a reserved name", "rename"),
        (Raises, "error", "`step` raised KeyError", "correct this error"),
        (NotSpaces, "error", "not a dict with reverie.spaces.Space", "Space(dtype"),
    ],
)
def test_each_error_is_reported_once(
    env_class: Any, severity: str, message: str, fix: str
) -> None:
    findings = check_env(env_class(), steps=60)
    matches = [finding for finding in findings if message in finding.message]
    assert len(matches) == 1, findings
    assert matches[0].severity == severity
    assert fix in matches[0].fix
    assert findings == sorted(findings, key=lambda finding: finding.severity)


class NanVector(Base):
    changed_obs: ClassVar[Any] = {"vector": Space(F32, (2,))}

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        return {**super()._obs(*args, **kwargs), "vector": np.full(2, np.nan, F32)}


class UnseededNanVector(NanVector):
    resets = 0

    def reset(self, seed: int | None = None) -> Obs:
        self.resets += 1
        return super().reset(seed)

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        obs = super()._obs(*args, **kwargs)
        obs["vector"][0] = self.resets
        return obs


@pytest.mark.parametrize("env_class", [NanReward, NanVector])
def test_nan_in_both_episodes_is_not_a_difference(env_class: Any) -> None:
    findings = check_env(env_class(), steps=60)
    assert ["NaN" in finding.message for finding in findings] == [True], findings


def test_other_differences_of_arrays_with_nan_are_reported() -> None:
    findings = check_env(UnseededNanVector(), steps=60)
    assert any("gave a different 'vector'" in x.message for x in findings), findings


def test_errors_are_reported_through_wrappers() -> None:
    wrapped = envs.make(WrongRange())
    assert any("has values" in f.message for f in check_env(wrapped, steps=60))


def test_a_slow_environment_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reverie.envs.checker.SLOW_STEP", 0.0)
    assert any("a step takes" in f.message for f in check_env(Catch(), steps=20))


def test_the_description_lists_spaces_and_findings() -> None:
    env = envs.make("dummy_cont")
    text = describe("dummy_cont", env, [])
    assert "64x64x3 image" in text
    assert "6 float32 in [-1, 1]" in text
    assert "logged only: log/episode" in text
    assert "No problems found" in text
    text = describe("mine", Catch(), check_env(WrongShape(), steps=10))
    assert "Fix: return shape (16, 16, 3)" in text
    assert "errors" in text


class GymnasiumFaults:
    """A Gymnasium environment that breaks its declared spaces and never ends."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def __init__(self, obs: Any):
        self.obs = obs

    def reset(self, seed: int | None = None) -> Any:
        return self.obs, {}

    def step(self, action: Any) -> Any:
        return self.obs.copy(), 0.0, False, False, {}


@pytest.mark.parametrize(
    ("obs", "fix"),
    [
        (np.zeros(3, np.float32), "or correct `observation_space`"),
        (np.full(2, 5, np.float32), "widen `low` and `high` in `observation_space`"),
    ],
)
def test_fixes_use_the_names_of_gymnasium(obs: np.ndarray, fix: str) -> None:
    fixes = [x.fix for x in check_env(GymnasiumEnv(GymnasiumFaults(obs)), steps=20)]
    assert fix in [x[-len(fix) :] for x in fixes]
    assert "set finite bounds in `action_space`" in fixes
    assert any(x.startswith("return `truncated=True` from `step`") for x in fixes)
    assert not [x for x in fixes if "obs_space" in x or "is_last" in x]
