"""Pools: the same rows in one process or several, and what happens when one fails."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reverie import envs
from reverie.api import Obs, UserError
from reverie.envs import EnvFailure, TaskFactory, VecEnvConfig, make_vec_env
from reverie.envs.suites.catch import Catch, CatchConfig

LOCAL = VecEnvConfig(workers=0, failures=3)
WORKERS = VecEnvConfig(workers=2, timeout=20, failures=3)
CONFIGS = [pytest.param(LOCAL, id="local"), pytest.param(WORKERS, id="workers")]


class Fragile(Catch):
    """Catch that misbehaves when the paddle goes left (action 0)."""

    def __init__(self, how: str, index: int = 0, marker: str = ""):
        super().__init__(CatchConfig(rows=8, cols=8, size=(16, 16)), seed=index)
        self.how, self.index, self.marker = how, index, marker

    def reset(self, seed: int | None = None) -> Obs:
        if self.how == "reset":
            raise RuntimeError("no way to begin")
        return super().reset(seed)

    def step(self, action: Any) -> Obs:
        if int(action["action"]) == 0 and self.index == 0:
            if self.marker:
                Path(self.marker).touch()
            if self.how == "raise":
                raise ZeroDivisionError("the simulator divided by zero")
            if self.how == "exit":
                os._exit(7)
            if self.how == "hang":
                time.sleep(1000)
            if self.how == "user":
                raise UserError("Turn the robot on.\n  Fix: press the button.")
        return super().step(action)


class Forgetful(Catch):
    """Catch without a state that can be saved."""

    state_dict = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def fragile(how: str, index: int) -> Fragile:
    return Fragile(how, index)


def unbuildable(index: int) -> Fragile:
    raise OSError("no licence for the simulator")


def forgetful(index: int) -> Forgetful:
    return Forgetful(seed=index)


def actions(pool: Any, value: int = 1) -> dict[str, np.ndarray]:
    return {"action": np.full(len(pool), value, np.int32)}


def play_left(pool: Any) -> None:
    pool.reset()
    for _ in range(20):
        pool.step(actions(pool, 0))


def random_rows(pool: Any, steps: int, seed: int = 0) -> list[Obs]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(steps):
        action = {k: s.sample(rng, len(pool)) for k, s in pool.act_space.items()}
        rows.append(pool.step(action))
    return rows


def same(one: list[Obs], two: list[Obs]) -> bool:
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
        for a, b in zip(one, two, strict=True)
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not (state.exists() and state.read_text().split()[2] == "Z")


@pytest.mark.parametrize("task", ["dummy_disc", "dummy_cont", "catch"])
def test_workers_give_the_rows_of_one_process(task: str) -> None:
    factory = TaskFactory(task, envs.EnvConfig(), seed=1)
    local, workers = (make_vec_env(factory, 3, config) for config in (LOCAL, WORKERS))
    try:
        assert same([local.reset()], [workers.reset()])
        assert same(random_rows(local, 120), random_rows(workers, 120))
    finally:
        workers.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_the_row_after_the_last_is_the_first_of_a_new_episode(
    config: VecEnvConfig,
) -> None:
    pool = make_vec_env(partial(fragile, "fine"), 2, config)
    try:
        rows = [pool.reset()] + [pool.step(actions(pool)) for _ in range(20)]
    finally:
        pool.close()
    for before, after in itertools.pairwise(rows):
        assert np.array_equal(before["is_last"], after["is_first"])
        assert not after["reward"][after["is_first"]].any()
    assert sum(row["is_last"].sum() for row in rows) == 4


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_stay_what_they_were(config: VecEnvConfig) -> None:
    pool = make_vec_env(partial(fragile, "fine"), 2, config)
    try:
        first = pool.reset()
        kept = {key: value.copy() for key, value in first.items()}
        for _ in range(3):
            pool.step(actions(pool))
        assert same([first], [kept])
    finally:
        pool.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_send_and_recv_are_a_step_in_two_halves(config: VecEnvConfig) -> None:
    whole, halves = (
        make_vec_env(partial(fragile, "fine"), 2, config) for _ in range(2)
    )
    try:
        assert same([whole.reset()], [halves.reset()])
        for _ in range(5):
            halves.send(actions(halves, 2))
            assert same([whole.step(actions(whole, 2))], [halves.recv()])
    finally:
        whole.close()
        halves.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_raised_error_closes_the_episode_and_is_counted(
    config: VecEnvConfig, caplog: pytest.LogCaptureFixture
) -> None:
    pool = make_vec_env(partial(fragile, "raise"), 2, config)
    try:
        before = pool.reset()
        with caplog.at_level(logging.WARNING):
            broken = pool.step(actions(pool, 0))
        assert broken["is_last"].tolist() == [True, False]
        assert not broken["is_terminal"].any()
        assert broken["reward"][0] == 0
        assert np.array_equal(broken["image"][0], before["image"][0])
        assert "divided by zero" in caplog.text
        after = pool.step(actions(pool))
        assert after["is_first"].tolist() == [True, False]
        assert pool.metrics()["env/restarts"] == 1
        assert pool.metrics()["env/errors"] == 1
    finally:
        pool.close()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", ["raise", "reset"])
def test_too_many_failures_in_a_row_stop_with_the_last_error(
    how: str, config: VecEnvConfig
) -> None:
    pool = make_vec_env(partial(fragile, how), 2, config)
    wanted = "no way to begin" if how == "reset" else "divided by zero"
    try:
        with pytest.raises(EnvFailure, match=f"failed 3 times in a row.*{wanted}"):
            play_left(pool)
        if how == "raise":  # a last checkpoint can be written, and resumed from
            state = pool.state_dict()
            other = make_vec_env(partial(fragile, "fine"), 2, config)
            assert other.load_state_dict(state)["is_first"].all()
            other.close()
    finally:
        pool.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_good_episodes_make_up_for_failures(config: VecEnvConfig) -> None:
    pool = make_vec_env(partial(fragile, "raise"), 1, config)
    try:
        pool.reset()
        for _ in range(5):  # more than three failures, but never in a row
            pool.step(actions(pool, 0))
            for _ in range(9):
                pool.step(actions(pool))
        assert pool.metrics()["env/restarts"] == 5
    finally:
        pool.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_errors_the_user_can_mend_are_told_at_once(config: VecEnvConfig) -> None:
    pool = make_vec_env(partial(fragile, "user"), 2, config)
    try:
        pool.reset()
        with pytest.raises(UserError, match="Turn the robot on"):
            pool.step(actions(pool, 0))
    finally:
        pool.close()
    with pytest.raises(EnvFailure, match="no licence for the simulator"):
        make_vec_env(unbuildable, 2, config)
    with pytest.raises(UserError, match="Did you mean catch"):
        make_vec_env(TaskFactory("catsh", envs.EnvConfig(), 0), 2, config)


def test_a_killed_worker_is_restarted_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_vec_env(partial(fragile, "fine"), 4, WORKERS)
    try:
        pool.reset()
        before = pool.step(actions(pool))
        victim = pool.pids[0]  # type: ignore[attr-defined]
        os.kill(victim, signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            row = pool.step(actions(pool))
        assert row["is_last"].tolist() == [True, True, False, False]
        assert not row["is_terminal"].any()
        assert np.array_equal(row["image"][:2], before["image"][:2])
        assert not np.array_equal(row["image"][2:], before["image"][2:])
        assert "killed by SIGKILL" in caplog.text
        row = pool.step(actions(pool))
        assert row["is_first"].tolist() == [True, True, False, False]
        assert pool.metrics() == {
            "env/restarts": 1,
            "env/errors": 0,
            "env/crashes": 1,
            "env/timeouts": 0,
        }
        assert not is_alive(victim)
    finally:
        pool.close()


def test_a_worker_killed_while_it_resets_still_gives_a_first_row() -> None:
    pool = make_vec_env(partial(fragile, "fine"), 2, WORKERS)
    try:
        row = pool.reset()
        while not row["is_last"].any():
            row = pool.step(actions(pool))
        os.kill(pool.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
        row = pool.step(actions(pool))
        assert row["is_first"].all()
        assert not row["is_last"].any()
    finally:
        pool.close()


def test_a_frozen_worker_is_restarted_after_the_timeout() -> None:
    pool = make_vec_env(partial(fragile, "fine"), 2, VecEnvConfig(workers=2, timeout=1))
    try:
        pool.reset()
        victim = pool.pids[0]  # type: ignore[attr-defined]
        os.kill(victim, signal.SIGSTOP)
        row = pool.step(actions(pool))
        assert row["is_last"].tolist() == [True, False]
        assert pool.step(actions(pool))["is_first"].tolist() == [True, False]
        assert pool.metrics()["env/timeouts"] == 1
        assert not is_alive(victim)
    finally:
        pool.close()


@pytest.mark.parametrize("how", ["hang", "exit"])
def test_a_step_that_hangs_or_exits_is_survived(how: str) -> None:
    pool = make_vec_env(partial(fragile, how), 2, VecEnvConfig(workers=2, timeout=1))
    try:
        pool.reset()
        row = pool.step(actions(pool, 0))
        assert row["is_last"].tolist() == [True, False]
        assert pool.step(actions(pool))["is_first"].tolist() == [True, False]
        assert pool.metrics()["env/timeouts"] == (how == "hang")
        assert pool.metrics()["env/crashes"] == (how == "exit")
    finally:
        pool.close()


def test_a_worker_that_always_dies_stops_the_run() -> None:
    pool = make_vec_env(partial(fragile, "exit"), 2, WORKERS)
    try:
        with pytest.raises(EnvFailure, match=r"3 times in a row.*exited with code 7"):
            play_left(pool)
        assert [seat["env"] for seat in pool.state_dict()["envs"]] == [None, None]
    finally:
        pool.close()


def test_a_restarted_environment_plays_other_episodes() -> None:
    pool = make_vec_env(TaskFactory("dummy_disc", envs.EnvConfig(), 0), 1, WORKERS)
    try:
        first = pool.reset()["image"]
        os.kill(pool.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
        action = {k: s.zeros(1) for k, s in pool.act_space.items()}
        assert pool.step(action)["is_last"].all()
        again = pool.step(action)
        assert again["is_first"].all()
        assert not np.array_equal(first, again["image"])
    finally:
        pool.close()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("steps", [3, 7, 8])
def test_a_saved_pool_continues_exactly(config: VecEnvConfig, steps: int) -> None:
    factory = TaskFactory("catch", envs.EnvConfig(), seed=5)
    pool = make_vec_env(factory, 3, config)
    other = make_vec_env(factory, 3, config)
    try:
        pool.reset()
        last = random_rows(pool, steps)[-1]
        state = pool.state_dict()
        whole = random_rows(pool, 60, seed=2)
        assert same([last], [other.load_state_dict(state)])  # type: ignore[list-item]
        assert same(whole, random_rows(other, 60, seed=2))
    finally:
        pool.close()
        other.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_environments_without_state_begin_a_new_episode(config: VecEnvConfig) -> None:
    pool = make_vec_env(forgetful, 2, config)
    try:
        pool.reset()
        random_rows(pool, 3)
        state = pool.state_dict()
        assert [seat["env"] for seat in state["envs"]] == [None, None]
        rows = pool.load_state_dict(state)
        assert rows is not None
        assert rows["is_first"].all()
        assert not pool.step(actions(pool))["is_first"].any()
    finally:
        pool.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_state_of_another_size_is_refused(config: VecEnvConfig) -> None:
    small, large = (make_vec_env(forgetful, n, config) for n in (1, 2))
    try:
        small.reset()
        with pytest.raises(UserError, match=r"(?s)holds 1 .*--run.envs 1"):
            large.load_state_dict(small.state_dict())
    finally:
        small.close()
        large.close()


def test_lambdas_and_local_classes_travel_to_workers() -> None:
    class Local(Catch):
        pass

    pool = make_vec_env(lambda index: Local(seed=index), 2, WORKERS)
    try:
        assert pool.reset()["is_first"].all()
    finally:
        pool.close()


def test_what_cannot_travel_is_refused_with_the_way_out() -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"vector.workers 0"):
        make_vec_env(lambda index: (lock, Catch())[1], 2, WORKERS)


def test_environments_must_agree_on_their_spaces() -> None:
    def make(index: int) -> Catch:
        return Catch(CatchConfig(size=(16, 16 + index)))

    with pytest.raises(UserError, match="other spaces"):
        make_vec_env(make, 2, LOCAL)
    with pytest.raises(UserError, match="other spaces"):
        make_vec_env(make, 2, WORKERS)


def test_nothing_is_left_after_close_or_when_forgotten() -> None:
    files = set(os.listdir("/proc/self/fd"))
    shared = set(os.listdir("/dev/shm"))
    pids = []
    for forget in (False, True):
        pool = make_vec_env(partial(fragile, "fine"), 3, WORKERS)
        pool.reset()
        pids += pool.pids  # type: ignore[attr-defined]
        if not forget:
            pool.close()
            pool.close()  # closing twice is harmless
        del pool
        gc.collect()
    assert not any(map(is_alive, pids))
    assert set(os.listdir("/dev/shm")) <= shared
    assert len(os.listdir("/proc/self/fd")) <= len(files) + 1


PARENT = """
import sys, time
from reverie import envs
config = envs.VecEnvConfig(workers=2)
pool = envs.make_vec_env(envs.TaskFactory("catch", envs.EnvConfig(), 0), 2, config)
pool.reset()
print(*pool.pids, flush=True)
time.sleep(60)
"""


def test_workers_die_with_a_killed_parent_even_when_stopped() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    deadline = time.monotonic() + 20
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_workers_do_not_load_torch() -> None:
    probe = (
        "import sys\n"
        "from reverie.envs import EnvConfig, VecEnvConfig, TaskFactory, make_vec_env\n"
        "pool = make_vec_env(TaskFactory('catch', EnvConfig(), 0), 1, "
        "VecEnvConfig(workers=1))\n"
        "maps = open(f'/proc/{pool.pids[0]}/maps').read()\n"
        "print('libtorch' in maps)\n"
        "pool.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr
