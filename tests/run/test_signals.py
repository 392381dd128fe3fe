"""Signals that ask a process to end set a flag, and runs save before they stop."""

from __future__ import annotations

import builtins
import os
import pty
import signal

import pytest

from reverie.envs import make
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import resolve
from reverie.run.online_run import OnlineRun
from reverie.run.signals import (
    Interrupted,
    StoppedWithoutSaving,
    Stopper,
    discard_closed_output,
)
from reverie.run.train import train

SIGNALS = {
    "SIGHUP": 129,
    "SIGINT": 130,
    "SIGUSR1": 138,
    "SIGUSR2": 140,
    "SIGTERM": 143,
    "SIGXCPU": 152,
}
"""Signals, and the documented exit codes on Linux."""
BATCH_SIGNALS = ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")


@pytest.fixture(autouse=True)
def _default_handlers():
    """Tests may have been started with ignored signals, for example by nohup."""
    batch = [getattr(signal, name) for name in BATCH_SIGNALS]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in batch}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("name", SIGNALS)
def test_signals_set_the_flag_and_the_exit_code(name):
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with Stopper() as stopper:
        assert not stopper.is_set()
        signal.raise_signal(number)
        assert stopper.is_set()
        with pytest.raises(Interrupted, match=name) as error:
            stopper.raise_if_stopped()
    assert error.value.exit_code == 128 + number == SIGNALS[name]
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("name", BATCH_SIGNALS)
@pytest.mark.parametrize("is_ignored", [True, False])
def test_ignored_signals_and_own_handlers_are_kept(name, is_ignored):
    number, received = getattr(signal, name), []
    handler = signal.SIG_IGN if is_ignored else lambda *_: received.append(1)
    before = signal.signal(number, handler)
    try:
        with Stopper() as stopper:
            signal.raise_signal(number)
            assert not stopper.is_set()
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert received == ([] if is_ignored else [1])


def test_a_repeated_signal_is_reported_once(capfd):
    with Stopper() as stopper:
        signal.raise_signal(signal.SIGXCPU)
        first = stopper.time
        signal.raise_signal(signal.SIGXCPU)
        signal.raise_signal(signal.SIGTERM)
        assert (stopper.signal, stopper.time) == (signal.SIGXCPU, first)
        with pytest.raises(KeyboardInterrupt):  # Ctrl-C after any other signal
            signal.raise_signal(signal.SIGINT)
    assert capfd.readouterr().err.count("saving, then stopping") == 1


def test_output_to_a_closed_terminal_is_discarded():
    terminal, output = pty.openpty()
    read_end, write_end = os.pipe()
    discard_closed_output([output, write_end])
    assert os.isatty(output)  # not closed yet
    os.close(terminal)
    with pytest.raises(OSError, match="Input/output"):
        os.write(output, b"text")
    discard_closed_output([output, write_end])
    assert os.write(output, b"text") == 4
    assert os.write(write_end, b"kept") == 4
    assert os.read(read_end, 10) == b"kept"
    for descriptor in (output, read_end, write_end):
        os.close(descriptor)


@pytest.mark.parametrize("name", BATCH_SIGNALS)
def test_a_run_saves_and_can_be_resumed(tmp_path, monkeypatch, name):
    steps = 0

    def make_env(index):
        env = make("catch")
        step = env.step

        def step_with_signal(action):
            nonlocal steps
            steps += 1
            if steps == 20:
                signal.raise_signal(getattr(signal, name))
            return step(action)

        monkeypatch.setattr(env, "step", step_with_signal)
        return env

    flags = {"agent": "random", "task": "catch", "run.envs": 1, "device": "cpu"}
    flags |= {"run.steps": 50, "logger.outputs": "jsonl", "logdir": str(tmp_path)}
    config = resolve(flags=list(flags.items()))
    with pytest.raises(Interrupted, match=name):
        train(config, make_env)
    saved = Checkpoints(tmp_path / "ckpt").newest()
    assert saved
    assert 20 <= checkpoint.read_manifest(saved)["step"] < 50
    train(config, make_env)
    finished = Checkpoints(tmp_path / "ckpt").newest()
    assert checkpoint.read_manifest(finished)["step"] == 50


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_a_new_run_is_built_ends_it_immediately(tmp_path, name):
    def make_env(index):
        signal.raise_signal(getattr(signal, name))
        raise AssertionError("the run was not stopped")

    flags = {"agent": "random", "task": "catch", "run.envs": 1, "device": "cpu"}
    with pytest.raises(StoppedWithoutSaving) as stop:
        train(resolve(flags={**flags, "logdir": str(tmp_path / "run")}), make_env)
    assert stop.value.exit_code == 128 + getattr(signal, name)
    assert not (tmp_path / "run").exists()


def test_a_run_without_new_steps_is_not_saved(tmp_path):
    is_stopped = False

    def make_env(index):
        if is_stopped:
            signal.raise_signal(signal.SIGTERM)
        return make("catch")

    flags = {"agent": "random", "task": "catch", "run.envs": 1, "device": "cpu"}
    flags |= {"run.steps": 8, "logger.outputs": "jsonl", "logdir": str(tmp_path)}
    train(resolve(flags=flags), make_env)
    saved = Checkpoints(tmp_path / "ckpt").paths()
    is_stopped = True
    with pytest.raises(Interrupted) as stop:
        train(resolve(flags={**flags, "run.steps": 16}), make_env)
    assert stop.value.is_saved
    assert Checkpoints(tmp_path / "ckpt").paths() == saved


def test_a_run_that_stops_before_its_first_step_leaves_no_folder(tmp_path, monkeypatch):
    print_summary = OnlineRun.print_summary

    def stop(run):
        print_summary(run)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(OnlineRun, "print_summary", stop)
    flags = {"agent": "random", "task": "catch", "run.envs": 1, "device": "cpu"}
    with pytest.raises(Interrupted) as interrupted:
        train(resolve(flags={**flags, "logdir": str(tmp_path / "run")}))
    assert not interrupted.value.is_saved
    assert not (tmp_path / "run").exists()


def test_changes_of_an_environment_to_signals_are_undone(monkeypatch):
    """Its timer would end the run, and without handlers Ctrl-C would not save it."""
    monkeypatch.setattr("builtins.print", print)
    received = []
    before = signal.signal(signal.SIGALRM, lambda *_: received.append(1))
    try:
        with Stopper() as stopper:
            stopper.undo_env_changes()
            builtins.print = None
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            signal.setitimer(signal.ITIMER_REAL, 60)
            stopper.undo_env_changes(always=True)
            assert callable(builtins.print)
            assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
            signal.raise_signal(signal.SIGTERM)
            assert stopper.is_set()
        signal.setitimer(signal.ITIMER_REAL, 60)  # of the program that starts the run
        with Stopper() as stopper:
            stopper.undo_env_changes()
            assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not received
