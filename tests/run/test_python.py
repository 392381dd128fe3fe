"""`reverie.train` with environment objects, and `reverie.load`."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from PIL import Image

import reverie
from reverie.api import UserError
from reverie.envs.suites.catch import Catch
from reverie.evaluation import recorders
from reverie.evaluation.episodes import evaluate

QUICK = {
    "configs": ["debug"],
    "logger__outputs": (),
    "run__steps": 40,
    "run__train_ratio": 0,
}


class Valve(gymnasium.Env):
    """Has actions with other bounds than [-1, 1], and records them."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float64)
    action_space = gymnasium.spaces.Box(
        np.array([10, -np.inf], np.float32), np.array([30, np.inf], np.float32)
    )

    def __init__(self):
        self.actions: list[np.ndarray] = []

    def reset(self, seed=None, options=None):
        return np.zeros(2), {}

    def step(self, action):
        self.actions.append(np.array(action))
        return np.zeros(2), 0.0, False, len(self.actions) % 10 == 0, {}


def test_a_resumed_run_keeps_its_settings(tmp_path):
    logdir, flags = str(tmp_path / "run"), {"task": "catch", "agent": "random"}
    reverie.train(configs=["debug"], logdir=logdir, run__steps=16, **flags)
    assert reverie.train(logdir=logdir, run__steps=32) == tmp_path / "run"
    with pytest.raises(UserError, match="seed: 0 -> 4"):
        reverie.train(logdir=logdir, seed=4)


def test_an_env_and_a_task_exclude_each_other(tmp_path):
    with pytest.raises(UserError, match="remove one"):
        reverie.train(env=lambda: None, task="catch", logdir=str(tmp_path / "a"))
    flags = {"task": "catch", "agent": "random", "run__steps": 8}
    path = reverie.train(configs="debug", logdir=str(tmp_path / "b"), **flags)
    assert path == tmp_path / "b"


def test_an_environment_from_python_gets_actions_in_its_own_units(tmp_path):
    env = Valve()
    reverie.train(env=env, logdir=str(tmp_path / "run"), **QUICK)
    taken = np.array(env.actions)[:, 0]
    assert taken.min() >= 10
    assert taken.max() <= 30
    assert taken.max() - taken.min() > 5


def test_a_loaded_agent_acts_in_the_units_of_the_environment(tmp_path):
    path = reverie.train(env=Valve(), logdir=str(tmp_path / "run"), **QUICK)
    agent, env = reverie.load(path), Valve()
    obs, _ = env.reset()
    for _ in range(50):
        action = agent.act(obs)
        assert env.action_space.contains(action)
        obs, *_ = env.step(action)
    bounded, free = np.array(env.actions).T
    assert bounded.max() - bounded.min() > 5
    assert np.abs(free).max() < 5  # not rescaled without bounds


def test_reverie_environments_and_classes_are_accepted(tmp_path):
    settings = {**QUICK, "dreamer__enc__mults": (2, 4), "dreamer__dec__mults": (2, 4)}
    for name, env in (("object", Catch()), ("class", Catch)):
        path = reverie.train(env=env, logdir=str(tmp_path / name), **settings)
        action = reverie.load(path, device="cpu").act(np.zeros((12, 12, 3), np.uint8))
        assert int(action) in {0, 1, 2}


def test_environment_settings_apply_to_python_environments(tmp_path):
    env = Valve()
    settings = {**QUICK, "env__repeat": 3}
    reverie.train(env=env, logdir=str(tmp_path / "run"), **settings)
    first, second, third, *_ = (action[1] for action in env.actions)
    assert first == second == third


def test_a_run_on_a_python_environment_is_evaluated_with_its_import_path(
    tmp_path, monkeypatch
):
    settings = {**QUICK, "run__steps": 120, "run__train_ratio": 8}
    path = reverie.train(env=Valve(), logdir=str(tmp_path / "run"), **settings)
    with pytest.raises(UserError, match=r"Fix: add --task package.module:function"):
        evaluate(path, 1)
    monkeypatch.setitem(sys.modules, "my_env", sys.modules[__name__])
    assert evaluate(path, 1, [("task", "my_env:Valve")]).task == "my_env:Valve"


def test_an_agent_is_evaluated_in_an_environment_from_python(tmp_path):
    settings = {**QUICK, "run__steps": 120, "run__train_ratio": 8}
    path = reverie.train(env=Valve(), logdir=str(tmp_path / "run"), **settings)
    env = Valve()
    result = reverie.evaluate(path, env=env, episodes=3)
    assert [episode["length"] for episode in result.episodes] == [10, 10, 10]
    assert len(env.actions) == 30
    assert result.summary["count"] == 3
    assert (path / "eval.json").exists()
    assert reverie.evaluate(path, env=Valve, episodes=2).summary["count"] == 2
    with pytest.raises(UserError, match="remove one"):
        reverie.evaluate(path, env=Valve, task="catch")
    with pytest.raises(UserError, match="an evaluation does not train"):
        reverie.evaluate(path, env=Valve, run__steps=3)
    with pytest.raises(UserError, match="episodes=1"):
        reverie.evaluate(path, env=Valve, episodes=0)


class Goal(Valve):
    """Reports success in every other episode, and renders itself."""

    render_mode = "rgb_array"
    metadata: ClassVar[dict[str, Any]] = {"render_fps": 5}

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"is_success": self.is_solved()}

    def is_solved(self):
        return len(self.actions) // 10 % 2 == 1

    def render(self):
        return np.full((64, 48, 3), len(self.actions), np.uint8)


def test_success_and_videos_of_an_environment_from_python(tmp_path, monkeypatch):
    settings = {**QUICK, "agent": "random", "logger__outputs": ("jsonl",)}
    del settings["run__train_ratio"]  # the random agent is not trained
    path = reverie.train(env=Goal(), logdir=str(tmp_path / "run"), **settings)
    lines = (path / "metrics.jsonl").read_text().splitlines()
    rates = [json.loads(line).get("episode/success") for line in lines]
    assert 0 < np.mean([rate for rate in rates if rate is not None]) <= 1
    monkeypatch.setattr(recorders, "video_suffix", lambda: "gif")
    result = reverie.evaluate(path, env=Goal(), episodes=4, videos=1)
    assert [episode["success"] for episode in result.episodes] == [1, 1, 1, 1]
    assert result.summary["success"] == 1
    assert len(result.files) == 1
    video, durations = Image.open(result.files[0]), []
    for index in range(video.n_frames):
        video.seek(index)
        durations.append(video.info["duration"])
    assert durations == [200] * 10 + [1200]  # 11 frames, and a pause before it loops


def test_a_vector_environment_is_refused_by_name(tmp_path):
    vector = gymnasium.make_vec("CartPole-v1", num_envs=2)
    for env in (vector, lambda: vector):
        with pytest.raises(UserError, match=r"CartPoleVectorEnv, (.|\n)*run__envs"):
            reverie.train(env=env, logdir=str(tmp_path / "run"), **QUICK)


class Interrupting(Valve):
    """Sends a signal to this process during its tenth step."""

    number = signal.SIGINT

    def step(self, action):
        if len(self.actions) == 9:
            os.kill(os.getpid(), self.number)
        return super().step(action)


class Terminating(Interrupting):
    number = signal.SIGTERM


def test_ctrl_c_saves_and_raises_keyboard_interrupt(tmp_path):
    logdir = str(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        reverie.train(env=Interrupting(), logdir=logdir, **QUICK)
    env = Valve()
    reverie.train(env=env, logdir=logdir, **QUICK)
    assert 25 <= len(env.actions) <= 31
    with pytest.raises(SystemExit, match="143"):
        reverie.train(env=Terminating(), logdir=str(tmp_path / "other"), **QUICK)
