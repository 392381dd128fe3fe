"""bsuite: names, seeds and observations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from reverie import envs
from reverie.api import Obs, UserError
from reverie.envs.suites.bsuite import (
    EXPERIMENTS,
    BSuiteConfig,
    is_experiment,
    make_bsuite,
)
from reverie.run.config import resolve

pytest.importorskip("bsuite")

OFFLINE = [name for name in EXPERIMENTS if not name.startswith("mnist")]


def play(name: str, seed: int, steps: int = 40) -> list[Obs]:
    env, rng = make_bsuite(name), np.random.default_rng(0)
    rows = [env.reset(seed=seed)]
    for _ in range(steps):
        if rows[-1]["is_last"]:
            rows.append(env.reset())
        else:
            rows.append(env.step({"action": env.act_space["action"].sample(rng)}))
    env.close()
    return rows


def test_the_default_task_needs_no_download() -> None:
    config = resolve(["bsuite"])
    assert config.task == "bsuite_catch/0"
    assert envs.make(config.task, config.env).reset()["vector"].shape == (10, 5)
    assert (config.run.envs, config.run.train_ratio) == (1, 1024)


def test_all_experiments_but_mnist_run() -> None:
    assert len(EXPERIMENTS) == 23
    assert len(OFFLINE) == 20
    for name in OFFLINE:
        rows = play(name, seed=0, steps=3)
        assert all(np.isfinite(row["reward"]) for row in rows)
        assert rows[0]["vector"].dtype == np.float32


@pytest.mark.parametrize("name", ["catch/0", "cartpole_noise/3", "umbrella_distract/5"])
def test_seeds_reproduce_episodes(name: str) -> None:
    def run(seed: int) -> list[bytes]:
        rows = play(name, seed)
        return [row["vector"].tobytes() + row["reward"].tobytes() for row in rows]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_seed_does_not_change_the_task() -> None:
    def arm_rewards(seed: int) -> list[float]:
        rewards = []
        for arm in range(11):
            env = make_bsuite("bandit/4")
            env.reset(seed=seed)
            rewards.append(float(env.step({"action": np.int32(arm)})["reward"]))
        return rewards

    assert arm_rewards(1) == arm_rewards(2)


def test_bandits_terminate_after_one_step() -> None:
    env = make_bsuite("bandit")
    env.reset(seed=0)
    row = env.step({"action": np.int32(0)})
    assert row["is_last"]
    assert row["is_terminal"]
    env = make_bsuite("cartpole")
    env.reset(seed=0)
    assert not env.step({"action": np.int32(1)})["is_last"]


def test_result_files_are_written(tmp_path: Path) -> None:
    env = make_bsuite("bandit/1", BSuiteConfig(results=str(tmp_path)))
    for _ in range(3):
        env.reset()
        env.step({"action": np.int32(0)})
    (file,) = tmp_path.glob("*.csv")
    assert "total_regret" in file.read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("catch", True),
        ("catch/3", True),
        ("catch/x", False),
        ("cach/0", False),
        ("mnist/0", True),
    ],
)
def test_is_experiment(name: str, expected: bool) -> None:
    assert is_experiment(name) == expected


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        ("bsuite_cach/0", "bsuite_catch"),
        ("bsuite_catch/99", "from 0 to 19"),
        ("bsuite", "bsuite_EXPERIMENT/NUMBER"),
    ],
)
def test_invalid_names_are_refused(task: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        envs.make(task)


def test_a_failed_download_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import bsuite

    def fail(*_: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(bsuite, "load", fail)
    with pytest.raises(UserError, match="bsuite_catch/0"):
        envs.make("bsuite_mnist/0")
