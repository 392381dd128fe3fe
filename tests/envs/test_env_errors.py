"""Environments that call `sys.exit()`, raise unusual errors or return infinities."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from failing_env import SOURCE

from reverie import envs
from reverie.api import Obs, StateDict, UserError
from reverie.cli.main import main
from reverie.envs import EnvFailure, VecEnvConfig, make_vec_env
from reverie.envs.checker import check_env
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.plugins import (
    MAX_MESSAGE,
    error_message,
    import_object,
    summarize_error,
)
from reverie.run.signals import Stopper
from reverie.spaces import Space, step_spaces

CONFIGS = [
    pytest.param(VecEnvConfig(workers=0, failures=3), id="local"),
    pytest.param(VecEnvConfig(workers=1, timeout=120, failures=3), id="workers"),
]
LENGTH = 10_000_000
OVERFLOW = "ignore:overflow encountered"


class Unprintable(Exception):
    def __init__(self, one: int, two: int):
        super().__init__("it cannot be pickled either")

    def __str__(self) -> str:
        raise ValueError("no text")


class NamelessType(type):
    @property
    def __name__(cls) -> str:
        sys.exit(0)


class Nameless(Exception, metaclass=NamelessType):
    pass


class BaseError(BaseException):
    pass


class Interrupting(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


def fail(how: str) -> None:
    if how == "exit":
        sys.exit(0)
    if how == "text":
        sys.exit("the license server is gone")
    if how == "unprintable":
        raise Unprintable(1, 2)
    if how == "long":
        raise RuntimeError("x" * LENGTH)
    if how == "control":
        raise RuntimeError("\ud800 \x00 \x1b[31m red")
    if how == "nameless":
        raise Nameless("without a name")
    if how == "base":
        raise BaseError("not an Exception")
    if how == "fork" and os.fork() == 0:
        time.sleep(0.1)  # the copy continues after the worker's next steps
    if how == "connection":
        os.closerange(3, 100)


MESSAGES = {
    "exit": r"SystemExit: 0 \(.*test_env_errors.py:\d+\)",
    "text": "SystemExit: the license server is gone",
    "unprintable": r"Unprintable: \(its message cannot be shown: ValueError\)",
    "long": rf"RuntimeError: x{{{MAX_MESSAGE}}}\.\.\. \(10,000,000 characters\)",
    "control": r"RuntimeError: \\ud800 \\x00 \\x1b\[31m red",
    "base": "BaseError: not an Exception",
    "nameless": "Nameless: without a name",
}


class Failing(Catch):
    """Catch that fails in one of its methods; in `step` if the paddle moves left."""

    def __init__(self, where: str, how: str):
        super().__init__(CatchConfig(rows=8, cols=8, size=(16, 16)), seed=0)
        self.where, self.how = where, how
        self._fail_in("init")

    def reset(self, seed: int | None = None) -> Obs:
        self._fail_in("reset")
        return super().reset(seed)

    def step(self, action: Any) -> Obs:
        if int(action["action"]) == 0:
            self._fail_in("step")
        return super().step(action)

    def close(self) -> None:
        self._fail_in("close")

    def state_dict(self) -> StateDict:
        self._fail_in("save")
        return super().state_dict()

    def load_state_dict(self, state: StateDict) -> None:
        self._fail_in("load")
        super().load_state_dict(state)

    def _fail_in(self, where: str) -> None:
        if self.where == where:
            fail(self.how)


def make_failing(where: str, how: str, index: int) -> Failing:
    return Failing(where, how)


def actions(value: int) -> dict[str, np.ndarray]:
    return {"action": np.full(1, value, np.int32)}


def step_left(vec_env: Any, steps: int) -> None:
    for _ in range(steps):
        vec_env.step(actions(0))


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", list(MESSAGES))
def test_any_error_in_a_step_restarts_the_environment(
    config: VecEnvConfig, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    vec_env = make_vec_env(partial(make_failing, "step", how), 1, config)
    try:
        vec_env.reset()
        with caplog.at_level(logging.WARNING):
            assert vec_env.step(actions(0))["is_last"].all()
        assert re.search(MESSAGES[how], caplog.text), caplog.text[:2000]
        assert len(caplog.text) < 2000
        assert vec_env.step(actions(1))["is_first"].all()
        assert vec_env.metrics()["env/errors"] == 1
        with pytest.raises(EnvFailure, match="3 times in a row") as failure:
            step_left(vec_env, 6)
        assert re.search(MESSAGES[how], str(failure.value))
        assert vec_env.state_dict()["envs"][0]["env"] is None
    finally:
        vec_env.close()


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("how", ["exit", "unprintable"])
@pytest.mark.parametrize("where", ["init", "reset"])
def test_sys_exit_in_the_constructor_or_reset_is_a_failure(
    config: VecEnvConfig, where: str, how: str
) -> None:
    with pytest.raises(EnvFailure) as failure:  # noqa: PT012
        vec_env = make_vec_env(partial(make_failing, where, how), 1, config)
        try:
            vec_env.reset()
        finally:
            vec_env.close()
    assert re.search(MESSAGES[how], str(failure.value))
    assert "\n  Fix: " in str(failure.value)


@pytest.mark.parametrize("config", CONFIGS)
def test_environments_that_fail_to_save_or_load_start_a_new_episode(
    config: VecEnvConfig,
) -> None:
    saved = make_vec_env(partial(make_failing, "save", "exit"), 1, config)
    saved.reset()
    state = saved.state_dict()
    assert state["envs"][0]["env"] is None
    assert not saved.step(actions(1))["is_first"].any()  # the episode continues
    saved.close()

    fine = make_vec_env(partial(make_failing, "close", "exit"), 1, config)
    fine.reset()
    fine.step(actions(1))
    state = fine.state_dict()
    assert state["envs"][0]["env"] is not None
    fine.close()
    loaded = make_vec_env(partial(make_failing, "load", "exit"), 1, config)
    try:
        assert loaded.load_state_dict(state)["is_first"].all()
        assert loaded.metrics()["env/errors"] == 1
        loaded.step(actions(1))
    finally:
        loaded.close()


def test_an_error_in_a_library_names_the_line_that_called_it() -> None:
    class Broken(Catch):
        def step(self, action: Any) -> Obs:
            return json.loads("{")  # type: ignore[no-any-return]

    line = Broken.step.__code__.co_firstlineno + 1
    where = rf"json\S+:\d+, called from {re.escape(__file__)}:{line}\)"
    vec_env = make_vec_env(lambda index: Broken(), 1, VecEnvConfig(failures=1))
    vec_env.reset()
    with pytest.raises(EnvFailure, match=where):
        vec_env.step(actions(1))
    vec_env.close()
    findings = [finding.message for finding in check_env(Broken())]
    assert any(re.search(where, message) for message in findings)


def test_an_error_of_the_environment_names_one_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 // 0
    assert re.search(r"\(\S+test_env_errors\.py:\d+\)$", summarize_error(caught.value))


def test_ctrl_c_is_not_a_failure_of_the_environment() -> None:
    class Interrupted(Catch):
        def step(self, action: Any) -> Obs:
            raise KeyboardInterrupt

    vec_env = make_vec_env(lambda index: Interrupted(), 1)
    vec_env.reset()
    # tests that run in the background inherit an ignored signal
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            vec_env.step(actions(1))
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_worker_with_a_closed_connection_is_restarted(
    capfd: pytest.CaptureFixture[str],
) -> None:
    config = VecEnvConfig(workers=1)
    vec_env = make_vec_env(partial(make_failing, "step", "connection"), 1, config)
    try:
        vec_env.reset()
        assert vec_env.step(actions(0))["is_last"].all()
        assert vec_env.step(actions(1))["is_first"].all()
    finally:
        vec_env.close()
    assert "Traceback" not in capfd.readouterr().err


def test_a_copy_of_a_worker_that_an_environment_forks_does_not_answer() -> None:
    config = VecEnvConfig(workers=1)
    forking = make_vec_env(partial(make_failing, "step", "fork"), 1, config)
    plain = make_vec_env(partial(make_failing, "", ""), 1)
    try:
        forking.reset()
        plain.reset()
        for action in (0, 1, 0, 2, 0):
            found, expected = (env.step(actions(action)) for env in (forking, plain))
            if not action:
                forking.step(actions(1)), plain.step(actions(1))
                found, expected = (x.step(actions(1)) for x in (forking, plain))
                time.sleep(0.15)
            assert {k: v.tolist() for k, v in found.items()} == {
                k: v.tolist() for k, v in expected.items()
            }
    finally:
        forking.close()
        plain.close()


def test_a_message_that_interrupts_is_not_ctrl_c() -> None:
    with Stopper():
        text = error_message(Interrupting())
    assert text == "(its message cannot be shown: KeyboardInterrupt)"


@pytest.mark.parametrize("is_signal", [True, False])
def test_only_an_interrupt_of_the_signal_ends_a_run(is_signal: bool) -> None:
    """In a run, the signal has a handler of its own."""

    class Interrupted(Catch):
        def step(self, action: Any) -> Obs:
            if not is_signal:
                raise KeyboardInterrupt
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)  # the second one stops immediately
            return super().step(action)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    vec_env = make_vec_env(lambda index: Interrupted(), 1)
    vec_env.reset()
    try:
        with Stopper():
            if is_signal:
                with pytest.raises(KeyboardInterrupt):
                    vec_env.step(actions(1))
            else:
                assert vec_env.step(actions(1))["is_last"].all()
                assert vec_env.metrics()["env/errors"] == 1
    finally:
        vec_env.close()
        signal.signal(signal.SIGINT, previous)


MODULE = f"""{SOURCE}
class Exits(Env):
    def fail(self):
        sys.exit(0)

class ClosesStreams(Env):
    def fail(self):
        sys.stdout.close()
        sys.stderr.close()
        raise RuntimeError("not shown")

def exit_at_once():
    sys.exit(0)
"""
FLAGS = (
    "--configs debug --agent random --device cpu --run.clock steps --run.envs 1 "
    "--run.save_every 0 --logger.outputs jsonl --logdir run"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unusual.py").write_text(MODULE)
    (tmp_path / "exits_at_import.py").write_text("import sys\nsys.exit(0)\n")
    return tmp_path


@pytest.fixture
def modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the modules in the folder importable in this process."""
    monkeypatch.syspath_prepend(folder)
    yield
    for name in ("unusual", "exits_at_import"):
        sys.modules.pop(name, None)


def run_process(line: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "reverie", *line.split()]
    return subprocess.run(words, capture_output=True, text=True, timeout=300)


@pytest.mark.extended
def test_sys_exit_stops_a_run_with_a_checkpoint(folder: Path) -> None:
    line = f"train {FLAGS} --task unusual:Exits --env.vector.failures 1"
    done = run_process(f"{line} --run.steps 100")
    assert done.returncode == 2, done.stderr
    assert "SystemExit: 0" in done.stderr
    assert "Saved at agent step" in done.stderr
    assert list((folder / "run" / "ckpt").glob("0*"))


@pytest.mark.usefixtures("modules")
def test_sys_exit_in_a_checked_environment_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(f"check-env unusual:Exits {FLAGS}".split()) == 2
    assert "`step` raised SystemExit: 0" in capsys.readouterr().out


@pytest.mark.usefixtures("modules")
@pytest.mark.parametrize("task", ["unusual:exit_at_once", "exits_at_import:Env"])
def test_sys_exit_while_building_is_an_error(
    capsys: pytest.CaptureFixture[str], task: str
) -> None:
    for command in (f"train {FLAGS} --task {task}", f"check-env {task} {FLAGS}"):
        assert main(command.split()) == 2
        error = capsys.readouterr().err
        assert "SystemExit: 0" in error
        assert "\n  Fix: " in error
        assert "Traceback" not in error


@pytest.mark.extended
def test_a_run_ends_normally_after_its_streams_were_closed(folder: Path) -> None:
    line = f"train {FLAGS} --task unusual:ClosesStreams"
    done = run_process(f"{line} --run.steps 12")
    assert done.returncode == 0, done.stderr
    assert [p.name for p in (folder / "run" / "ckpt").glob("0*")] == [
        "000000000012-000001"
    ]
    done = run_process(f"{line} --run.steps 100 --env.vector.failures 1")
    assert done.returncode == 2


def test_importing_an_agent_that_fails_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    with pytest.raises(UserError, match="SystemExit: 0"):
        import_object("exits_at_import:Agent", "--agent")


@pytest.mark.parametrize("value", [np.inf, -np.inf, 1e300, np.nan])
@pytest.mark.parametrize("name", ["reward", "value"])
@pytest.mark.filterwarnings(OVERFLOW)
def test_values_that_are_not_finite_are_refused(
    folder: Path, name: str, value: float
) -> None:
    sys.path.insert(0, str(folder))
    try:
        task = import_object("unusual:Env", "--task")
    finally:
        sys.path.remove(str(folder))
        del sys.modules["unusual"]
    env = envs.make(type("Env", (task,), {name: value}))
    env.reset(0)
    key = "reward" if name == "reward" else "vector"
    problem = "NaN" if np.isnan(value) else "infinite"
    with pytest.raises(UserError, match=f"'{key}' has {problem} entries"):
        env.step({"action": np.int32(0)})
    finding = "\n".join(map(str, check_env(env)))
    assert f"{key!r} has {problem} entries" in finding


@pytest.mark.filterwarnings(OVERFLOW)
def test_rewards_that_overflow_when_they_are_added_are_refused() -> None:
    class Rewarding(Catch):
        def step(self, action: Any) -> Obs:
            return {**super().step(action), "reward": np.float32(3e38)}

    rewarding: Any = Rewarding()
    rewarding.obs_space["reward"] = step_spaces()["reward"]
    env = envs.make(rewarding, envs.EnvConfig(repeat=2))
    env.reset(0)
    with pytest.raises(UserError, match="'reward' has infinite entries"):
        env.step({"action": np.int32(1)})


def test_spaces_without_values_are_refused() -> None:
    env: Any = Catch()
    env.obs_space = {**env.obs_space, "vector": Space(np.dtype(np.float32), (0,))}
    with pytest.raises(UserError, match=r"obs_space\['vector'\] has the shape \(0,\)"):
        envs.make(env, envs.EnvConfig())


class WithoutHook(Catch):
    def step(self, action: Any) -> Obs:
        sys.excepthook = None  # type: ignore[assignment]
        return super().step(action)


def test_threads_start_after_an_environment_removed_the_excepthook(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    vec_env = make_vec_env(lambda index: WithoutHook(), 1)
    vec_env.reset()
    vec_env.send({key: space.zeros(1) for key, space in vec_env.act_space.items()})
    vec_env.recv()
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()


@pytest.mark.parametrize("number", [-3, 0])
@pytest.mark.parametrize("kind", ["action_space", "observation_space"])
def test_a_space_without_values_is_an_error(kind: str, number: int) -> None:
    gymnasium = pytest.importorskip("gymnasium")

    class Env(gymnasium.Env):
        action_space = observation_space = gymnasium.spaces.Discrete(2)

    env, space = Env(), gymnasium.spaces.Discrete(2)
    space.n = number  # the constructor refuses it
    setattr(env, kind, space)
    with pytest.raises(UserError, match=f"allows no values: .* from 0 to {number}"):
        envs.make(env)


def test_bounds_that_are_not_numbers_are_an_error() -> None:
    env = Catch(CatchConfig(rows=8, cols=8, size=(16, 16)), seed=0)
    env.act_space = {"action": Space(np.float32, 2, np.full(2, np.nan), 1)}
    with pytest.raises(UserError, match=r"allows no values: .* from nan to 1"):
        envs.make(env)
