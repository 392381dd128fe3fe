"""Environments that wait for each other before they begin anew."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.envs.vector.vec_env import VecEnvConfig, make_vec_env
from reverie.run.config import resolve
from reverie.run.online_run import OnlineRun
from reverie.spaces import FLAGS, Space


class Countdown:
    """Ends after a number of steps; the image shows how many were taken."""

    def __init__(self, length):
        self.length, self.steps = length, 0
        self.act_space = {"action": Space(np.int32, (), 0, 3)}

    @property
    def obs_space(self):
        kinds = {key: Space(np.float32 if key == "reward" else bool) for key in FLAGS}
        return {"image": Space(np.uint8, (4, 4, 3)), **kinds}

    def reset(self, seed=None):
        self.steps = 0
        return self.row()

    def step(self, action):
        assert self.steps < self.length, "stepped beyond the end"
        self.steps += 1
        return self.row()

    def row(self):
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


@pytest.fixture(params=[0, 2], ids=["here", "workers"])
def pool(request):
    pool = make_vec_env(make_env, 3, VecEnvConfig(workers=request.param, lockstep=True))
    yield pool
    pool.close()


def test_all_begin_anew_together(pool):
    obs = pool.reset()
    steps, waiting, firsts = [], [], []
    for _ in range(12):
        steps.append(obs["image"][:, 0, 0, 0].tolist())
        waiting.append(pool.waiting.tolist())
        firsts.append(obs["is_first"].tolist())
        obs = pool.step(ACTION)
    one = [[0, 0, 0], [1, 1, 1], [2, 2, 2], [2, 3, 3], [2, 4, 4], [2, 4, 5]]
    assert steps == one * 2
    assert [sum(w) for w in waiting] == [0, 0, 0, 1, 1, 2] * 2
    assert waiting[3] == [True, False, False]
    assert firsts[6] == [True, True, True]


def test_a_saved_pool_still_waits(pool):
    pool.reset()
    for _ in range(3):
        pool.step(ACTION)
    state = pool.state_dict()
    again = make_vec_env(make_env, 3, VecEnvConfig(lockstep=True))
    obs = again.load_state_dict(state)
    assert again.waiting.tolist() == [True, False, False]
    assert obs["image"][:, 0, 0, 0].tolist() == [2, 3, 3]
    assert again.step(ACTION)["image"][:, 0, 0, 0].tolist() == [2, 4, 4]


def test_without_it_nobody_waits():
    pool = make_vec_env(make_env, 3, VecEnvConfig())
    pool.reset()
    for _ in range(12):
        pool.step(ACTION)
        assert not pool.waiting.any()


def test_rows_of_those_who_wait_are_neither_stored_nor_counted(tmp_path):
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
        assert run.agent.schedule.taken == 2 * (2 + 4 + 5) + 3
        assert run.replay.episodes.rows.tolist() == [3, 5, 6, 3, 5, 6, 1, 1, 1]
        summary = run.collector.summary()
        assert summary["episodes"] == 6
        assert summary["return_min"] == 2
        assert summary["return_max"] == 5
        assert summary["length_mean"] == pytest.approx(11 / 3)
