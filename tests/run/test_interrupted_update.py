"""An update that a signal interrupts is aborted, and repeated when the run resumes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from state_helpers import assert_same

from reverie.cli.main import main
from reverie.nets import abort
from reverie.nets.abort import AbortWindow, UpdateAborted
from reverie.nets.optim.adam import AdamConfig
from reverie.nets.optim.optimizer import Optimizer
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import resolve
from reverie.run.offline.train import offline
from reverie.run.repeatable import train_or_abort
from reverie.run.signals import Interrupted
from reverie.run.train import train

COMMON = {
    "device": "cpu",
    "deterministic": True,
    "run.clock": "steps",
    "run.log_every": 30,
    "run.save_every": 0,
    "run.report_every": 70,
    "logger.outputs": "jsonl",
    "logger.timing_metrics": False,
}
ONLINE = {"task": "catch", "run.envs": 2, "replay.capacity": 300, "run.steps": 100}
OFFLINE = {"run.steps": 12, "run.log_every": 3, "run.report_every": 5}
OFFLINE |= {"offline.split": 0.5, "offline.eval.context": 2}
OFFLINE |= {"offline.eval.horizon": 3, "offline.eval.ensemble.samples": 2}
LARGER = {"offline.read.size": (8, 8), r".*\.(enc|dec)\.mults": (4,)}
IRIS = {
    "iris.schedule.epochs": 2,
    "iris.schedule.collect_epochs": 2,
    "iris.schedule.first_steps": 40,
    "iris.schedule.steps": 20,
    r"iris.training\..*\.batch": 2,
    r"iris.training\..*\.steps": 3,
    r"iris.training\..*\.first_steps": 3,
    "iris.training.tokenizer.accumulate": 2,
    "iris.actor_critic.horizon": 2,
}
CASES = {
    "dreamer": (["debug"], ONLINE | {"run.train_ratio": 40}),
    "dreamer with priorities": (
        ["debug"],
        ONLINE
        | {"run.train_ratio": 20, "dreamer.priosignal": "model"}
        | {"replay.fracs.uniform": 0.5, "replay.fracs.priority": 0.5},
    ),
    "dreamer with vta": (["debug", "vta"], ONLINE | {"run.train_ratio": 20}),
    "dreamer on batch statistics": (
        ["debug", "standardize_batch"],
        ONLINE | {"run.train_ratio": 20, "dreamer.retnorm.impl": "meanstd"},
    ),
    "iris": (["iris_tiny"], ONLINE | IRIS),
    "offline dreamer": (["debug", "offline"], OFFLINE | LARGER),
    "offline iris": (["iris_tiny", "offline", "in_updates"], OFFLINE | IRIS),
    "bc": (["offline", "bc", "debug"], OFFLINE | LARGER | {"offline.epochs": 0}),
    "vta": (
        ["vta_balls", "debug"],
        {"run.steps": 12, "run.log_every": 3, "run.report_every": 5},
    ),
}


def run_case(name: str, logdir: Path, data: Path) -> None:
    presets, flags = CASES[name]
    where = {"logdir": str(logdir)}
    if "offline" in presets:
        where["offline.data"] = str(data)
    config = resolve(presets, flags={**COMMON, **flags, **where})
    (offline if "offline" in presets else train)(config)


def read_run(path: Path) -> dict:
    newest = Checkpoints(path / "ckpt").newest()
    parts = checkpoint.read_manifest(newest)["parts"]
    state = {part: checkpoint.read_part(newest, part) for part in parts}
    state["loop"]["logger"].pop("sinks", None)  # byte offsets of this folder's files
    if "replay" in state:
        state["replay"].pop("files")
        for sampler in state["replay"]["samplers"].values():
            sampler.pop("put_back")
    for name in ("metrics", "scores"):
        file = path / f"{name}.jsonl"
        text = file.read_text() if file.exists() else ""
        state[name] = [json.loads(line) for line in text.splitlines()]
    return state


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return a folder with recorded episodes of `catch`."""
    folder = tmp_path_factory.mktemp("data")
    words = "train --configs debug iris_tiny random --task catch --run.steps 100"
    words += " --run.clock steps --logger.outputs jsonl --logdir"
    assert main([*words.split(), str(folder / "run")]) == 0
    assert main(["data", "export", str(folder / "run"), str(folder / "episodes")]) == 0
    return folder / "episodes"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data):
    """Return a function that returns the state after an uninterrupted run."""
    states = {}

    def state(name: str) -> dict:
        if name not in states:
            folder = tmp_path_factory.mktemp("uninterrupted")
            run_case(name, folder / "run", data)
            states[name] = read_run(folder / "run")
        return states[name]

    return state


def interrupt(monkeypatch, calls: set[int], where: str) -> list[int]:
    """Send SIGTERM in these calls of `Optimizer.gradients`; returns their numbers."""
    original, seen, sent = Optimizer.gradients, [], []

    def gradients(self, loss):
        seen.append(loss)
        if len(seen) not in calls:
            return original(self, loss)
        sent.append(len(seen))
        if where == "forward":
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the update was not aborted")
        scaled = loss * 1.0
        scaled.register_hook(lambda grad: signal.raise_signal(signal.SIGTERM))
        return original(self, scaled)

    monkeypatch.setattr(Optimizer, "gradients", gradients)
    return sent


@pytest.mark.extended_except("dreamer-forward", "bc-backward")
@pytest.mark.parametrize(
    ("name", "where"),
    [(name, "forward") for name in CASES]
    + [(name, "backward") for name in ("dreamer", "iris", "bc")],
)
def test_an_interrupted_update_is_repeated_exactly(
    tmp_path, monkeypatch, uninterrupted, data, name, where
):
    calls = {1, 6} if where == "forward" else {4}
    sent = interrupt(monkeypatch, calls, where)
    for _ in calls:
        with pytest.raises(Interrupted):
            run_case(name, tmp_path / "run", data)
    run_case(name, tmp_path / "run", data)
    assert len(sent) == len(calls)
    assert_same(uninterrupted(name), read_run(tmp_path / "run"))


def test_an_update_after_its_optimizer_step_is_completed():
    weight = torch.nn.Parameter(torch.ones(3))
    opt = Optimizer({"weight": weight}, AdamConfig(lr=0.1))
    with AbortWindow() as window:
        window.open()
        opt.update(weight.sum())
        abort.request_abort()  # does not raise
        window.open()  # nor does a second batch of the same update
        assert not window.is_open
    assert (weight < 1).all()
    with contextlib.suppress(UpdateAborted), AbortWindow() as window:
        window.open()
        abort.request_abort()
        raise AssertionError
    abort.request_abort()  # no update is running


def test_hooks_are_added_only_to_slow_updates():
    x = torch.ones(3, requires_grad=True)
    for seconds, expected in ((0.1, 0), (5.0, 1)):
        loss = (x * 2).sum()
        with AbortWindow() as window:
            window.open()
            AbortWindow.last_seconds = seconds
            abort.add_abort_hooks(loss)
            window.is_requested = True
            if expected:
                with pytest.raises(UpdateAborted):
                    torch.autograd.grad(loss, x)
            else:
                torch.autograd.grad(loss, x)


SLOW = """
import sys, time
import torch
from reverie.agents.dreamer.agent import Dreamer
from reverie.cli.main import main

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        print("backward", flush=True)
        time.sleep(1)
        return grad

original = Dreamer.total_loss

def total_loss(self, losses):
    loss = original(self, losses)
    for _ in range(300):
        loss = Slow.apply(loss)
    return loss

Dreamer.total_loss = total_loss
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_in_an_update_of_minutes_is_obeyed_in_seconds(tmp_path, number):
    flags = {**COMMON, **ONLINE, "run.train_ratio": 8, "logdir": str(tmp_path / "run")}
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    program = [sys.executable, "-c", SLOW, "train", "--configs", "debug", *words]
    process = subprocess.Popen(
        program,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "backward\n"
    process.send_signal(number)
    output, error = process.communicate(timeout=300)
    assert process.returncode == 128 + number, error
    assert output.count("backward") < 10  # of 300 that take a second each
    newest = Checkpoints(tmp_path / "run" / "ckpt").newest()
    assert newest
    assert checkpoint.read_part(newest, "loop")["clock"]["updates"] == 0


def test_an_update_has_gradients_if_an_environment_has_disabled_them():
    agent = MagicMock()
    agent.train.side_effect = lambda feed: {"grad": float(torch.is_grad_enabled())}
    with torch.no_grad():
        assert train_or_abort(agent, None, torch.device("cuda")) == {"grad": 1.0}
