"""Lockstep: environments wait for each other and are reset together."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.envs.vector.vec_env import VecEnvConfig, make_vec_env
from reverie.spaces import STEP_KEYS, Space


class Countdown:
    """Episodes of fixed length; the image contains the number of steps."""

    def __init__(self, length):
        self.length, self.steps = length, 0
        self.act_space = {"action": Space(np.int32, (), 0, 3)}

    @property
    def obs_space(self):
        kinds = {
            key: Space(np.float32 if key == "reward" else bool) for key in STEP_KEYS
        }
        return {"image": Space(np.uint8, (4, 4, 3)), **kinds}

    def reset(self, seed=None):
        self.steps = 0
        return self.obs()

    def step(self, action):
        assert self.steps < self.length, "stepped beyond the end"
        self.steps += 1
        return self.obs()

    def obs(self):
        last = self.steps == self.length
        return {
            "image": np.full((4, 4, 3), self.steps, np.uint8),
            "reward": np.float32(self.steps > 0),
            "is_first": np.bool_(self.steps == 0),
            "is_last": np.bool_(last),
            "is_terminal": np.bool_(last),
        }

    def close(self):
        pass

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = int(state["steps"])


def make_env(index):
    return Countdown([2, 4, 5][index])


ACTION = {"action": np.zeros(3, np.int32)}


@pytest.fixture(params=[0, 2], ids=["sync", "workers"])
def vec_env(request):
    vec_env = make_vec_env(
        make_env, 3, VecEnvConfig(workers=request.param, lockstep=True)
    )
    yield vec_env
    vec_env.close()


def test_all_environments_are_reset_together(vec_env):
    obs = vec_env.reset()
    steps, waiting, firsts = [], [], []
    for _ in range(12):
        steps.append(obs["image"][:, 0, 0, 0].tolist())
        waiting.append(vec_env.waiting.tolist())
        firsts.append(obs["is_first"].tolist())
        obs = vec_env.step(ACTION)
    episode = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 3, 3], [2, 4, 4], [2, 4, 5]]
    assert steps == episode * 2
    assert [sum(w) for w in waiting] == [0, 0, 0, 1, 1, 2] * 2
    assert waiting[3] == [True, False, False]
    assert firsts[6] == [True, True, True]


def test_waiting_environments_are_restored(vec_env):
    vec_env.reset()
    for _ in range(3):
        vec_env.step(ACTION)
    state = vec_env.state_dict()
    restored = make_vec_env(make_env, 3, VecEnvConfig(lockstep=True))
    obs = restored.load_state_dict(state)
    assert restored.waiting.tolist() == [True, False, False]
    assert obs["image"][:, 0, 0, 0].tolist() == [2, 3, 3]
    assert restored.step(ACTION)["image"][:, 0, 0, 0].tolist() == [2, 4, 4]


def test_without_lockstep_no_environment_waits():
    vec_env = make_vec_env(make_env, 3, VecEnvConfig())
    vec_env.reset()
    for _ in range(12):
        vec_env.step(ACTION)
        assert not vec_env.waiting.any()


def test_rows_of_waiting_environments_are_not_stored_or_counted(tmp_path):
    # Workers import this file for `make_env`; torch would take them seconds.
    from reverie.run.config import resolve
    from reverie.run.online_run import OnlineRun

    flags = {
        "task": "catch",
        "device": "cpu",
        "logdir": str(tmp_path / "run"),
        "run.envs": 3,
        "run.steps": 1000,
        "env.vector.lockstep": True,
        "logger.outputs": ["jsonl"],
        "iris.schedule.first_steps": 1000,
    }
    with OnlineRun(resolve(["iris_tiny"], flags=flags), make_env) as run:
        run.start()
        for _ in range(13):
            run.collect()
        # two rounds of 3 + 5 + 6 rows, and the first rows of a third
        assert len(run.replay) == run.clock.step == 2 * (3 + 5 + 6) + 3
        assert run.agent.schedule.env_steps == 2 * (2 + 4 + 5) + 3
        assert run.replay.episodes.rows.tolist() == [3, 5, 6, 3, 5, 6, 1, 1, 1]
        summary = run.collector.summary()
        assert summary["episodes"] == 6
        assert summary["return_min"] == 2
        assert summary["return_max"] == 5
        assert summary["length_mean"] == pytest.approx(11 / 3)
