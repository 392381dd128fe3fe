"""An environment with a fault that `CHAOS_FAULT` names, at step `CHAOS_STEP`.

Faults of the class `exceptions` are raised, `values` are returned, `crashes` end the
process, `hangs` block it, and `side effects` change its state. Crashes and hangs happen
once per run: they create the file `fault_happened` in the current folder, and do
nothing if it exists.
"""

from __future__ import annotations

import builtins
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np
from gymnasium import spaces

EXCEPTIONS = (
    "runtime_error",
    "every_step",
    "in_reset",
    "in_make",
    "exit_in_step",
    "exit_in_make",
    "keyboard_interrupt",
    "memory_error",
    "stop_iteration",
    "recursion",
    "long_message",
    "control_characters",
    "message_raises",
    "message_interrupts",
    "in_close",
)
VALUES = (
    "nan",
    "infinite",
    "nan_reset",
    "longer",
    "shorter",
    "scalar",
    "growing",
    "objects",
    "strings",
    "complex",
    "none",
    "wrong_dict",
    "reward_nan",
    "reward_infinite",
    "reward_overflow",
    "reward_none",
    "reward_text",
    "reward_array",
    "done_none",
    "done_array",
    "four_values",
    "no_values",
    "no_info",
    "same_buffer",
    "not_an_env",
)
CRASHES = (
    "exit_process",
    "abort",
    "segmentation_fault",
    "kill",
    "fork",
    "closes_connection",
)
HANGS = ("sleep", "stopped", "sleep_in_close", "sleep_in_make")
SIDE_EFFECTS = (
    "output",
    "closes_streams",
    "no_streams",
    "closes_files",
    "changes_folder",
    "ignores_signals",
    "blocks_signals",
    "timer",
    "no_print",
    "seeds_numpy",
    "default_dtype",
    "no_grad",
    "children",
    "threads",
)
FAULTS = {
    "exceptions": EXCEPTIONS,
    "values": VALUES,
    "crashes": CRASHES,
    "hangs": HANGS,
    "side effects": SIDE_EFFECTS,
}
HAPPENED = "fault_happened"
"""File that marks that a crash or hang has happened in this run."""


class MessageError(Exception):
    """Raises another exception when its message is formatted."""

    def __str__(self) -> str:
        raise ValueError("no message")


class InterruptingError(Exception):
    """Raises KeyboardInterrupt when its message is formatted."""

    def __str__(self) -> str:
        raise KeyboardInterrupt


class BadEnv(gymnasium.Env):
    """Episodes of ten steps with vector observations, and one fault."""

    observation_space = spaces.Box(-1, 1, (4,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self, fault: str, at: int):
        self.fault, self.at = fault, at  # the fault starts at this step
        self.steps = self.total = 0  # in this episode, and in all episodes
        self.buffer = np.zeros(4, np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        obs = np.full(4, 0.1, np.float32)
        if self.total < self.at:
            return obs, {}
        if self.fault == "in_reset":
            raise RuntimeError("reset failed")
        if self.fault == "nan_reset":
            obs[:] = np.nan
        return obs if self.fault == "no_info" else (obs, {})

    def step(self, action):
        self.steps += 1
        self.total += 1
        if self.total == self.at:
            raise_fault(self.fault)
            if self.fault in (*CRASHES, *HANGS) and not Path(HAPPENED).exists():
                Path(HAPPENED).touch()
                stop_process(self.fault)
            change_process(self.fault)
        if self.fault == "every_step" and self.total >= self.at:
            raise RuntimeError("every step fails")
        obs = np.full(4, self.steps / 20, np.float32)
        if self.fault == "same_buffer":
            self.buffer[:] = self.steps / 20
            obs = self.buffer
        row = (obs, 1.0, self.steps >= 10, False, {})
        return change_row(self.fault, row) if self.total >= self.at else row

    def close(self) -> None:
        if self.fault == "in_close":
            raise RuntimeError("close failed")
        if self.fault == "sleep_in_close":
            time.sleep(3600)


def make_env():
    """Return the environment, or fail with a fault that concerns its creation."""
    fault = os.environ.get("CHAOS_FAULT", "")
    if fault == "in_make":
        raise RuntimeError("no environment")
    if fault == "exit_in_make":
        sys.exit(0)
    if fault == "not_an_env":
        return 3
    if fault == "sleep_in_make" and not Path(HAPPENED).exists():
        Path(HAPPENED).touch()
        time.sleep(3600)
    return BadEnv(fault, int(os.environ.get("CHAOS_STEP", "1")))


def raise_fault(fault: str) -> None:
    """Raise the exception of a fault of the class `exceptions`."""
    if fault == "recursion":
        raise_fault(fault)
    if fault == "exit_in_step":
        sys.exit(0)
    errors = {
        "runtime_error": RuntimeError("the step failed"),
        "keyboard_interrupt": KeyboardInterrupt(),
        "memory_error": MemoryError(),
        "stop_iteration": StopIteration(),
        "long_message": RuntimeError("x" * 5_000_000),
        "control_characters": RuntimeError("\ud800 \x00 \x1b[31m text"),
        "message_raises": MessageError(),
        "message_interrupts": InterruptingError(),
    }
    if fault in errors:
        raise errors[fault]


def stop_process(fault: str) -> None:
    """Crash or block this process, for a fault of the class `crashes` or `hangs`."""
    if fault == "exit_process":
        os._exit(7)
    elif fault == "abort":
        os.abort()
    elif fault == "segmentation_fault":
        ctypes.string_at(0)
    elif fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "fork":
        os.fork()
    elif fault == "closes_connection":
        os.closerange(3, 60)
    elif fault == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "sleep":
        time.sleep(3600)


def change_process(fault: str) -> None:
    """Change the state of this process, for a fault of the class `side effects`."""
    if fault == "output":
        os.write(1, os.urandom(3000))
        os.write(2, os.urandom(3000))
    elif fault == "closes_streams":
        sys.stdout.close()
        sys.stderr.close()
    elif fault == "no_streams":
        sys.stdout = sys.stderr = None
    elif fault == "closes_files":
        os.closerange(60, 200)
    elif fault == "changes_folder":
        os.chdir("/")
    elif fault == "ignores_signals":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    elif fault == "blocks_signals":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    elif fault == "timer":
        signal.setitimer(signal.ITIMER_REAL, 1)
    elif fault == "no_print":
        builtins.print = None
    elif fault == "seeds_numpy":
        np.random.seed(0)
    elif fault == "children":
        subprocess.Popen(["sleep", "600"])
    elif fault == "threads":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif fault in ("default_dtype", "no_grad"):
        import torch

        if fault == "no_grad":
            torch.set_grad_enabled(False)
        else:
            torch.set_default_dtype(torch.float64)


def change_row(fault: str, row: tuple) -> tuple | None:
    """Return the result of `step`, changed by a fault of the class `values`."""
    obs, reward, terminated, truncated, info = row
    observations = {
        "nan": np.full(4, np.nan, np.float32),
        "infinite": np.full(4, np.inf, np.float32),
        "longer": np.zeros(5, np.float32),
        "shorter": np.zeros(3, np.float32),
        "scalar": np.float32(0),
        "growing": np.zeros(4 + int(obs[0] * 20), np.float32),
        "objects": np.array([None] * 4, object),
        "strings": np.array(["a"] * 4),
        "complex": np.array([1j] * 4),
        "none": None,
        "wrong_dict": {"other": 1},
    }
    rewards = {
        "reward_nan": float("nan"),
        "reward_infinite": float("inf"),
        "reward_overflow": 1e300,
        "reward_none": None,
        "reward_text": "one",
        "reward_array": np.array([1.0, 2.0]),
    }
    terminations = {"done_none": None, "done_array": np.array([True, False])}
    if fault == "four_values":
        return obs, reward, terminated, info
    if fault == "no_values":
        return None
    return (
        observations.get(fault, obs),
        rewards.get(fault, reward),
        terminations.get(fault, terminated),
        truncated,
        info,
    )
