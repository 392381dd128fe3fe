"""Vectorized environments: equal results with workers, and handling of failures."""

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
from reverie.envs.vector.workers import messages

LOCAL = VecEnvConfig(workers=0, failures=3)
WORKERS = VecEnvConfig(workers=2, timeout=120, failures=3)
CONFIGS = [pytest.param(LOCAL, id="local"), pytest.param(WORKERS, id="workers")]


class Fragile(Catch):
    """Catch that fails when the paddle moves left (action 0)."""

    def __init__(self, how: str, index: int = 0, marker: str = ""):
        super().__init__(CatchConfig(rows=8, cols=8, size=(16, 16)), seed=index)
        self.how, self.index, self.marker = how, index, marker

    def reset(self, seed: int | None = None) -> Obs:
        if self.how == "reset":
            raise RuntimeError("cannot reset")
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


class NotResumable(Catch):
    """Catch without a state that can be saved."""

    state_dict = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):
            raise AttributeError(name)
        return super().__getattribute__(name)


def fragile(how: str, index: int) -> Fragile:
    return Fragile(how, index)


def unbuildable(index: int) -> Fragile:
    raise OSError("no license for the simulator")


def not_resumable(index: int) -> NotResumable:
    return NotResumable(seed=index)


def actions(vec_env: Any, value: int = 1) -> dict[str, np.ndarray]:
    return {"action": np.full(len(vec_env), value, np.int32)}


def always_move_left(vec_env: Any) -> None:
    vec_env.reset()
    for _ in range(20):
        vec_env.step(actions(vec_env, 0))


def random_rows(vec_env: Any, steps: int, seed: int = 0) -> list[Obs]:
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(steps):
        action = {k: s.sample(rng, len(vec_env)) for k, s in vec_env.act_space.items()}
        rows.append(vec_env.step(action))
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
def test_workers_and_one_process_return_equal_rows(task: str) -> None:
    factory = TaskFactory(task, envs.EnvConfig(), seed=1)
    local, workers = (make_vec_env(factory, 3, config) for config in (LOCAL, WORKERS))
    try:
        assert same([local.reset()], [workers.reset()])
        assert same(random_rows(local, 120), random_rows(workers, 120))
    finally:
        workers.close()


def test_workers_that_poll_for_messages_return_equal_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "should_poll", lambda workers: True)
    factory = TaskFactory("catch", envs.EnvConfig(), seed=1)
    local, workers = (make_vec_env(factory, 3, config) for config in (LOCAL, WORKERS))
    try:
        assert same([local.reset()], [workers.reset()])
        first = random_rows(workers, 20)
        time.sleep(3 * messages.POLL_SECONDS)  # the workers do not poll any more
        rows = [*first, *random_rows(workers, 20, seed=1)]
        assert same([*random_rows(local, 20), *random_rows(local, 20, seed=1)], rows)
    finally:
        workers.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_the_row_after_the_last_is_the_first_of_a_new_episode(
    config: VecEnvConfig,
) -> None:
    vec_env = make_vec_env(partial(fragile, "fine"), 2, config)
    try:
        rows = [vec_env.reset()] + [vec_env.step(actions(vec_env)) for _ in range(20)]
    finally:
        vec_env.close()
    for before, after in itertools.pairwise(rows):
        assert np.array_equal(before["is_last"], after["is_first"])
        assert not after["reward"][after["is_first"]].any()
    assert sum(row["is_last"].sum() for row in rows) == 4


@pytest.mark.parametrize("config", CONFIGS)
def test_returned_arrays_are_not_overwritten(config: VecEnvConfig) -> None:
    vec_env = make_vec_env(partial(fragile, "fine"), 2, config)
    try:
        first = vec_env.reset()
        kept = {key: value.copy() for key, value in first.items()}
        for _ in range(3):
            vec_env.step(actions(vec_env))
        assert same([first], [kept])
    finally:
        vec_env.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_send_and_recv_equal_step(config: VecEnvConfig) -> None:
    whole, split = (make_vec_env(partial(fragile, "fine"), 2, config) for _ in range(2))
    try:
        assert same([whole.reset()], [split.reset()])
        for _ in range(5):
            split.send(actions(split, 2))
            assert same([whole.step(actions(whole, 2))], [split.recv()])
    finally:
        whole.close()
        split.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_an_exception_truncates_the_episode_and_is_counted(
    config: VecEnvConfig, caplog: pytest.LogCaptureFixture
) -> None:
    vec_env = make_vec_env(partial(fragile, "raise"), 2, config)
    try:
        before = vec_env.reset()
        with caplog.at_level(logging.WARNING):
            broken = vec_env.step(actions(vec_env, 0))
        assert broken["is_last"].tolist() == [True, False]
        assert not broken["is_terminal"].any()
        assert broken["reward"][0] == 0
        assert np.array_equal(broken["image"][0], before["image"][0])
        assert "divided by zero" in caplog.text
        after = vec_env.step(actions(vec_env))
        assert after["is_first"].tolist() == [True, False]
        assert vec_env.metrics()["env/restarts"] == 1
        assert vec_env.metrics()["env/errors"] == 1
    finally:
        vec_env.close()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", ["raise", "reset"])
def test_too_many_consecutive_failures_raise_the_last_error(
    how: str, config: VecEnvConfig
) -> None:
    vec_env = make_vec_env(partial(fragile, how), 2, config)
    message = "cannot reset" if how == "reset" else "divided by zero"
    try:
        with pytest.raises(EnvFailure, match=f"failed 3 times in a row.*{message}"):
            always_move_left(vec_env)
        if how == "raise":  # a final checkpoint can be saved and loaded
            state = vec_env.state_dict()
            other = make_vec_env(partial(fragile, "fine"), 2, config)
            assert other.load_state_dict(state)["is_first"].all()
            other.close()
    finally:
        vec_env.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_finished_episode_resets_the_failure_count(config: VecEnvConfig) -> None:
    vec_env = make_vec_env(partial(fragile, "raise"), 1, config)
    try:
        vec_env.reset()
        for _ in range(5):  # more than three failures, but never in a row
            vec_env.step(actions(vec_env, 0))
            for _ in range(9):
                vec_env.step(actions(vec_env))
        assert vec_env.metrics()["env/restarts"] == 5
    finally:
        vec_env.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_user_errors_are_raised_immediately(config: VecEnvConfig) -> None:
    vec_env = make_vec_env(partial(fragile, "user"), 2, config)
    try:
        vec_env.reset()
        with pytest.raises(UserError, match="Turn the robot on"):
            vec_env.step(actions(vec_env, 0))
    finally:
        vec_env.close()
    with pytest.raises(EnvFailure, match="no license for the simulator"):
        make_vec_env(unbuildable, 2, config)
    with pytest.raises(UserError, match="Did you mean catch"):
        make_vec_env(TaskFactory("catsh", envs.EnvConfig(), 0), 2, config)


def test_a_killed_worker_is_restarted_while_others_continue(
    caplog: pytest.LogCaptureFixture,
) -> None:
    vec_env = make_vec_env(partial(fragile, "fine"), 4, WORKERS)
    try:
        vec_env.reset()
        pid = vec_env.pids[0]  # type: ignore[attr-defined]
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
            os.kill(pid, number)  # ignored: the main process stops the run
        before = vec_env.step(actions(vec_env))
        os.kill(pid, signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            row = vec_env.step(actions(vec_env))
        assert row["is_last"].tolist() == [True, True, False, False]
        assert not row["is_terminal"].any()
        assert np.array_equal(row["image"][:2], before["image"][:2])
        assert not np.array_equal(row["image"][2:], before["image"][2:])
        assert "killed by SIGKILL" in caplog.text
        row = vec_env.step(actions(vec_env))
        assert row["is_first"].tolist() == [True, True, False, False]
        assert vec_env.metrics() == {
            "env/restarts": 1,
            "env/errors": 0,
            "env/crashes": 1,
            "env/timeouts": 0,
        }
        assert not is_alive(pid)
    finally:
        vec_env.close()


def test_a_worker_killed_before_a_reset_returns_a_first_row() -> None:
    vec_env = make_vec_env(partial(fragile, "fine"), 2, WORKERS)
    try:
        row = vec_env.reset()
        while not row["is_last"].any():
            row = vec_env.step(actions(vec_env))
        os.kill(vec_env.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
        row = vec_env.step(actions(vec_env))
        assert row["is_first"].all()
        assert not row["is_last"].any()
    finally:
        vec_env.close()


@pytest.mark.extended
def test_a_stopped_worker_is_restarted_after_the_timeout() -> None:
    vec_env = make_vec_env(
        partial(fragile, "fine"), 2, VecEnvConfig(workers=2, timeout=3)
    )
    try:
        vec_env.reset()
        pid = vec_env.pids[0]  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        row = vec_env.step(actions(vec_env))
        assert row["is_last"].tolist() == [True, False]
        assert vec_env.step(actions(vec_env))["is_first"].tolist() == [True, False]
        assert vec_env.metrics()["env/timeouts"] == 1
        assert not is_alive(pid)
    finally:
        vec_env.close()


@pytest.mark.extended
@pytest.mark.parametrize("how", ["hang", "exit"])
def test_a_step_that_hangs_or_exits_restarts_the_worker(how: str) -> None:
    vec_env = make_vec_env(partial(fragile, how), 2, VecEnvConfig(workers=2, timeout=3))
    try:
        vec_env.reset()
        row = vec_env.step(actions(vec_env, 0))
        assert row["is_last"].tolist() == [True, False]
        assert vec_env.step(actions(vec_env))["is_first"].tolist() == [True, False]
        assert vec_env.metrics()["env/timeouts"] == (how == "hang")
        assert vec_env.metrics()["env/crashes"] == (how == "exit")
    finally:
        vec_env.close()


def test_a_worker_that_always_exits_stops_the_run() -> None:
    vec_env = make_vec_env(partial(fragile, "exit"), 2, WORKERS)
    try:
        with pytest.raises(EnvFailure, match=r"3 times in a row.*exited with code 7"):
            always_move_left(vec_env)
        assert [slot["env"] for slot in vec_env.state_dict()["envs"]] == [None, None]
    finally:
        vec_env.close()


def test_a_restarted_environment_has_a_new_seed() -> None:
    vec_env = make_vec_env(TaskFactory("dummy_disc", envs.EnvConfig(), 0), 1, WORKERS)
    try:
        first = vec_env.reset()["image"]
        os.kill(vec_env.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
        action = {k: s.zeros(1) for k, s in vec_env.act_space.items()}
        assert vec_env.step(action)["is_last"].all()
        again = vec_env.step(action)
        assert again["is_first"].all()
        assert not np.array_equal(first, again["image"])
    finally:
        vec_env.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_resuming_is_exact(config: VecEnvConfig) -> None:
    factory = TaskFactory("catch", envs.EnvConfig(), seed=5)
    vec_env = make_vec_env(factory, 3, config)
    other = make_vec_env(factory, 3, config)
    try:
        for steps in (3, 7, 8):  # `other` is new, then within other episodes
            vec_env.reset()
            last = random_rows(vec_env, steps)[-1]
            state = vec_env.state_dict()
            expected = random_rows(vec_env, 60, seed=2)
            loaded = other.load_state_dict(state)
            assert loaded is not None
            assert same([last], [loaded])
            assert same(expected, random_rows(other, 60, seed=2))
    finally:
        vec_env.close()
        other.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_environments_without_state_start_a_new_episode(config: VecEnvConfig) -> None:
    vec_env = make_vec_env(not_resumable, 2, config)
    try:
        vec_env.reset()
        random_rows(vec_env, 3)
        state = vec_env.state_dict()
        assert [slot["env"] for slot in state["envs"]] == [None, None]
        rows = vec_env.load_state_dict(state)
        assert rows is not None
        assert rows["is_first"].all()
        assert not vec_env.step(actions(vec_env))["is_first"].any()
    finally:
        vec_env.close()


@pytest.mark.parametrize("config", CONFIGS)
def test_a_state_of_another_size_is_refused(config: VecEnvConfig) -> None:
    small, large = (make_vec_env(not_resumable, n, config) for n in (1, 2))
    try:
        small.reset()
        with pytest.raises(UserError, match=r"(?s)has 1 .*--run.envs 1"):
            large.load_state_dict(small.state_dict())
    finally:
        small.close()
        large.close()


def test_lambdas_and_local_classes_can_be_sent_to_workers() -> None:
    class Local(Catch):
        pass

    vec_env = make_vec_env(lambda index: Local(seed=index), 2, WORKERS)
    try:
        assert vec_env.reset()["is_first"].all()
    finally:
        vec_env.close()


def test_factories_that_cannot_be_pickled_are_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(UserError, match=r"vector.workers 0"):
        make_vec_env(lambda index: (lock, Catch())[1], 2, WORKERS)


def test_environments_must_have_equal_spaces() -> None:
    def make(index: int) -> Catch:
        return Catch(CatchConfig(size=(16, 16 + index)))

    with pytest.raises(UserError, match="spaces of environment 1 differ"):
        make_vec_env(make, 2, LOCAL)
    with pytest.raises(UserError, match="spaces of environment 1 differ"):
        make_vec_env(make, 2, WORKERS)


def test_resources_are_freed_by_close_or_garbage_collection() -> None:
    files = set(os.listdir("/proc/self/fd"))
    shared = set(os.listdir("/dev/shm"))
    pids = []
    for is_deleted in (False, True):
        vec_env = make_vec_env(partial(fragile, "fine"), 3, WORKERS)
        vec_env.reset()
        pids += vec_env.pids  # type: ignore[attr-defined]
        if not is_deleted:
            vec_env.close()
            vec_env.close()  # closing twice is allowed
        del vec_env
        gc.collect()
    assert not any(map(is_alive, pids))
    assert set(os.listdir("/dev/shm")) <= shared
    assert len(os.listdir("/proc/self/fd")) <= len(files) + 1


PARENT = """
import sys, time
from reverie import envs
config = envs.VecEnvConfig(workers=2)
vec_env = envs.make_vec_env(envs.TaskFactory("catch", envs.EnvConfig(), 0), 2, config)
vec_env.reset()
print(*vec_env.pids, flush=True)
time.sleep(60)
"""


def test_workers_exit_with_a_killed_parent_even_if_stopped() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    deadline = time.monotonic() + 120
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(pids) == 2
    assert not any(map(is_alive, pids))


def test_workers_do_not_load_torch() -> None:
    script = (
        "import sys\n"
        "from reverie.envs import EnvConfig, VecEnvConfig, TaskFactory, make_vec_env\n"
        "vec_env = make_vec_env(TaskFactory('catch', EnvConfig(), 0), 1, "
        "VecEnvConfig(workers=1))\n"
        "maps = open(f'/proc/{vec_env.pids[0]}/maps').read()\n"
        "print('libtorch' in maps)\n"
        "vec_env.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr
