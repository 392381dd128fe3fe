"""What goes wrong with suites and simulators: one clear sentence each, exit code 2."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from reverie import envs
from reverie.api import UserError
from reverie.cli.main import main
from reverie.envs import suite as suite_module

Say = Callable[[str], tuple[int, str]]
SMALL = "--configs debug --device cpu --run.clock steps --logger.outputs jsonl"
DYING = """
import os
import gymnasium
import numpy as np

class Mortal(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.clock = 0
        return np.zeros(3, np.float32), {}

    def step(self, action):
        self.clock += 1
        if self.clock == 3:
            self.die()
        return np.zeros(3, np.float32), 0.0, False, False, {}

class Raises(Mortal):
    def die(self):
        raise ConnectionError("the simulator is gone")

class Exits(Mortal):
    def die(self):
        os._exit(7)
"""


@pytest.fixture
def say(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Say]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "dying.py").write_text(DYING)

    def run(line: str) -> tuple[int, str]:
        code = main(line.split())
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return code, error

    yield run
    sys.modules.pop("dying", None)


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ("atary_pong", r"Did you mean .*atari"),
        ("minecraft_diamnd", r"Did you mean minecraft_diamond"),
        ("dmlab_rooms_watermase", r"Did you mean dmlab_rooms_watermaze"),
        ("procgen_coinrn", r"Did you mean procgen_coinrun"),
        ("craftax_pixel", r"Did you mean craftax_pixels"),
        ("bsuite_deepsea/0", r"Did you mean bsuite_deep_sea"),
        ("minigrid_DoorKey-8x9", r"Did you mean minigrid_DoorKey-8x8"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(
    say: Say, task: str, says: str
) -> None:
    for command in (f"train {SMALL} --task {task} --logdir run", f"check-env {task}"):
        code, error = say(command)
        assert code == 2
        assert re.search(says, error), error
        assert error.count("Fix:") == 1


@pytest.mark.parametrize(
    "name", [name for name, suite in envs.SUITES.items() if suite.package]
)
def test_a_missing_package_names_what_to_type(
    say: Say, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    suite = envs.SUITES[name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    code, error = say(f"check-env {suite.example}")
    assert code == 2
    assert re.search(rf"needs the package '{suite.package}'", error), error
    assert suite.install in error
    assert suite.install in envs.describe_suites(name)


def test_a_python_that_is_too_new_names_one_that_is_not(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    here = SimpleNamespace(version_info=(3, 19, 0))
    monkeypatch.setattr(suite_module, "sys", here)
    code, error = say("check-env procgen_coinrun")
    assert code == 2
    assert "Python 3.12 at most, and this is 3.19" in error
    assert "python3.12 -m venv OTHER && OTHER/bin/pip install" in error
    _, error = say("check-env minecraft_diamond")
    assert "Python 3.11 at most, and this is 3.19" in error
    assert "sh tools/install_minecraft.sh VENV python3.11" in error


def test_a_simulator_that_keeps_failing_ends_the_run_with_a_sentence(say: Say) -> None:
    line = f"train {SMALL} --agent random --task dying:Raises --logdir run"
    code, error = say(f"{line} --run.envs 1 --env.vector.failures 2")
    assert code == 2
    assert re.search(
        r"Environment 0 failed 2 times in a row.*the simulator is gone", error
    )
    assert error.count("Fix:") == 1


def test_a_simulator_that_ends_its_process_ends_the_run_with_a_sentence(
    say: Say,
) -> None:
    line = f"train {SMALL} --agent random --task dying:Exits --logdir run"
    workers = "--run.envs 1 --env.vector.workers 1 --env.vector.failures 2"
    code, error = say(f"{line} {workers}")
    assert code == 2
    assert re.search(r"failed 2 times in a row.*exited with code 7", error), error


def test_check_env_says_that_a_simulator_fails(
    say: Say, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-env", "dying:Raises"]) == 2
    assert "the simulator is gone" in capsys.readouterr().out


def test_the_list_of_suites_shows_tasks_and_what_is_missing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["envs"]) == 0
    page = capsys.readouterr().out
    for name, suite in envs.SUITES.items():
        assert f"\n{name} " in "\n" + page
        if not suite.is_installed:
            assert suite.install in page
    assert main(["envs", "minigrid"]) == 0
    page = capsys.readouterr().out
    for task in envs.SUITES["minigrid"].tasks:
        assert f"minigrid_{task}" in page.split()
    assert main(["envs", "minigird"]) == 2
    assert "Did you mean minigrid" in capsys.readouterr().err
    assert main(["envs", "catch", "dmc"]) == 2


def test_every_suite_has_an_example_that_is_a_task() -> None:
    for name, suite in envs.SUITES.items():
        assert envs.split_task(suite.example)[0] == name
        assert suite.licence


def test_more_tasks_are_found_only_where_the_package_can_say() -> None:
    def absent(name: str) -> bool:
        raise ImportError(name)

    assert not suite_module.Suite("x", "", "", more=absent).has_more("y")
    assert not suite_module.Suite("x", "", "").has_more("y")
    with pytest.raises(UserError, match="no suite"):
        envs.describe_suites("x")
