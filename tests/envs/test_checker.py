"""check-env finds each of the usual mistakes, and says how to mend it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import Obs
from reverie.envs.checker import check_env, describe
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.spaces import Space, Spaces

F32 = np.dtype(np.float32)


class Base(Catch):
    """Catch, to be broken in one place by each subclass."""

    def __init__(self) -> None:
        super().__init__(CatchConfig(rows=8, cols=8, size=(16, 16)))

    def space(self, **changes: Any) -> Spaces:
        spaces = {**super().obs_space, **changes}
        return {key: space for key, space in spaces.items() if space is not None}


class Missing(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        row = super()._obs(*args, **kwargs)
        del row["image"]
        return row


class Extra(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        return {**super()._obs(*args, **kwargs), "lives": np.int32(3)}


class NoFlag(Base):
    @property
    def obs_space(self) -> Spaces:
        return self.space(is_last=None)


class WrongDtype(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        row = super()._obs(*args, **kwargs)
        return {**row, "image": row["image"].astype(np.float32)}


class WrongShape(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        row = super()._obs(*args, **kwargs)
        return {**row, "image": row["image"][:4]}


class WrongRange(Base):
    def _obs(self, reward: float, *args: Any, **kwargs: Any) -> Obs:
        return super()._obs(5 * reward, *args, **kwargs)


class NotANumber(Base):
    def _obs(self, reward: float, *args: Any, **kwargs: Any) -> Obs:
        row = super()._obs(reward, *args, **kwargs)
        return {**row, "reward": np.float32(np.nan)} if reward else row


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
    picture = np.zeros((16, 16, 3), np.uint8)

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        row = super()._obs(*args, **kwargs)
        self.picture[:] = row["image"]
        return {**row, "image": self.picture}


class Endless(Base):
    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        self._row = 0
        flags = {"is_last": np.bool_(False), "is_terminal": np.bool_(False)}
        return {**super()._obs(*args, **kwargs), **flags}


class StaysOver(Base):
    def reset(self, seed: int | None = None) -> Obs:
        return {**super().reset(seed), "is_last": np.bool_(True)}


class Unseeded(Base):
    def reset(self, seed: int | None = None) -> Obs:
        self.games = getattr(self, "games", 0) + 1
        obs = super().reset(self.games)
        self._ball = self.games % self.config.cols  # never the same twice in a row
        return {**obs, **self._obs(0.0, first=True)}


class FloatImage(Base):
    @property
    def obs_space(self) -> Spaces:
        return self.space(image=Space(F32, (16, 16, 3), 0, 1))

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        row = super()._obs(*args, **kwargs)
        return {**row, "image": row["image"].astype(np.float32) / 255}


class ChannelsFirst(Base):
    @property
    def obs_space(self) -> Spaces:
        return self.space(image=Space(np.dtype(np.uint8), (3, 16, 16)))

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        row = super()._obs(*args, **kwargs)
        return {**row, "image": row["image"].transpose(2, 0, 1).copy()}


class Unbounded(Base):
    @property
    def act_space(self) -> Spaces:
        return {"action": Space(F32, (2,))}

    def step(self, action: Any) -> Obs:
        return super().step({"action": 1})


class Blind(Base):
    @property
    def obs_space(self) -> Spaces:
        return self.space(image=None)

    def _obs(self, *args: Any, **kwargs: Any) -> Obs:
        row = super()._obs(*args, **kwargs)
        del row["image"]
        return row


class NamesClash(Base):
    @property
    def act_space(self) -> Spaces:
        return {"reward": Space(np.dtype(np.int32), (), 0, 3)}

    def step(self, action: Any) -> Obs:
        return super().step({"action": action["reward"]})


class Raises(Base):
    def step(self, action: Any) -> Obs:
        raise KeyError("gripper")


class NotSpaces(Base):
    @property
    def obs_space(self) -> Any:
        return {"image": (16, 16, 3)}


@pytest.mark.parametrize(
    ("kind", "severity", "what", "fix"),
    [
        (Missing, "error", "did not return 'image'", "return 'image'"),
        (Extra, "error", "returned 'lives'", "add 'lives' to `obs_space`"),
        (NoFlag, "error", "lacks 'is_last'", "add 'is_last'"),
        (WrongDtype, "error", "dtype float32", "np.uint8"),
        (WrongShape, "error", "has shape", "correct `obs_space`"),
        (WrongRange, "error", "has values", "widen"),
        (NotANumber, "error", "NaN", "division by zero"),
        (AlwaysFirst, "error", "`step` returned is_first=True", "nowhere else"),
        (NeverFirst, "error", "`reset` returned is_first=False", "set is_first"),
        (EarlyTerminal, "error", "`is_terminal` was set without", "set both"),
        (EarlyReward, "error", "`reset` returned the reward", "return 0"),
        (Aliasing, "warning", "the same array", ".copy()"),
        (Endless, "warning", "no episode ended", "--env.length"),
        (StaysOver, "error", "`reset` returned a row with `is_last`", "begin a new"),
        (Unseeded, "warning", "same seed and actions", "generator made in `reset"),
        (FloatImage, "error", "looks like an image but is float32", "uint8"),
        (ChannelsFirst, "warning", "channels first", "transpose"),
        (Unbounded, "warning", "no finite bounds", "give it bounds"),
        (Blind, "error", "nothing an agent may look at", "add an image"),
        (NamesClash, "error", "has the name of something else", "rename"),
        (Raises, "error", "`step` raised KeyError", "mend that first"),
        (NotSpaces, "error", "not a dict of reverie.spaces.Space", "Space(dtype"),
    ],
)
def test_each_mistake_is_found(kind: Any, severity: str, what: str, fix: str) -> None:
    findings = check_env(kind(), steps=60)
    found = [f for f in findings if what in f.what]
    assert len(found) == 1, findings
    assert found[0].severity == severity
    assert fix in found[0].fix
    assert findings == sorted(findings, key=lambda finding: finding.severity)


def test_wrappers_do_not_hide_mistakes() -> None:
    wrapped = envs.make(WrongRange())
    assert any("has values" in f.what for f in check_env(wrapped, steps=60))


def test_a_slow_environment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reverie.envs.checker.SLOW_STEP", 0.0)
    assert any("a step takes" in f.what for f in check_env(Catch(), steps=20))


def test_the_description_shows_spaces_and_findings() -> None:
    env = envs.make("dummy_cont")
    text = describe("dummy_cont", env, [])
    assert "64x64x3 image" in text
    assert "6 float32 in [-1, 1]" in text
    assert "for people only: log/episode" in text
    assert "Nothing wrong" in text
    text = describe("mine", Catch(), check_env(WrongShape(), steps=10))
    assert "Fix: return shape (16, 16, 3)" in text
    assert "errors" in text
