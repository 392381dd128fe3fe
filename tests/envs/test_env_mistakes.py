"""User errors with suites and simulators: a message with a fix, and exit code 2."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from failing_env import SOURCE

from reverie import envs
from reverie.api import UserError
from reverie.cli.main import main
from reverie.envs import suite as suite_module
from reverie.plugins import install_command

RunCommand = Callable[[str], tuple[int, str]]
SMALL = "--configs debug --device cpu --run.clock steps --logger.outputs jsonl"
FAILING_ENVS = f"""{SOURCE}
class Raises(Env):
    fails_in = 3

    def fail(self):
        raise ConnectionError("the simulator is gone")

class Exits(Env):
    fails_in = 3

    def fail(self):
        os._exit(7)
"""


@pytest.fixture
def run_command(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[RunCommand]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "failing.py").write_text(FAILING_ENVS)

    def run(line: str) -> tuple[int, str]:
        code = main(line.split())
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return code, error

    yield run
    sys.modules.pop("failing", None)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("atary_pong", r"Did you mean .*atari"),
        ("atari_foo", r"has no task 'foo'\.\n"),  # none is similar
        ("atari_breakot", r"Did you mean atari_breakout"),
        ("CartPole-v1", r"Fix: --task gym_CartPole-v1"),
        ("ALE/Pong-v5", r"Did you mean atari_pong or atari100k_pong\?"),
        ("PongNoFrameskip-v4", r"Did you mean atari_pong or atari100k_pong\?"),
        ("mine/Own-v3", r"Fix: --task gym_mine/Own-v3"),
        ("cartpole", r"Did you mean gym_CartPole-v1 or .*bsuite_cartpole\?"),
        ("Pendulum", r"Did you mean gym_Pendulum-v1"),
        ("LunarLander-v2", r"Did you mean gym_LunarLander-v3\?"),
        ("walker_walk", r"Did you mean dmc_walker_walk\?"),
        ("dmc_subtle_reachr", r"Did you mean dmc_subtle_reacher\?"),
        ("dmc_reacher_subtle", r"Did you mean dmc_subtle_reacher\?"),  # R2-Dreamer
        ("dmc_subtle_foo", r"'foo'\.\n.*dmc_subtle_ball.*, dmc_subtle_reacher$"),
        ("MiniGrid-Empty-5x5-v0", r"Did you mean minigrid_Empty-5x5\?"),
        ("robosuite_lift", r"Did you mean robosuite_Lift\?"),
        ("Crafter", r"Did you mean crafter\?"),
        ("gym_Foo-v0", r"`Foo` doesn't exist\.\n  Fix"),  # nothing similar
        ("minecraft_diamnd", r"Did you mean minecraft_diamond"),
        ("dmlab_rooms_watermase", r"Did you mean dmlab_rooms_watermaze"),
        ("procgen_coinrn", r"Did you mean procgen_coinrun"),
        ("craftax_pixel", r"Did you mean craftax_pixels"),
        ("bsuite_deepsea/0", r"Did you mean bsuite_deep_sea"),
        ("minigrid_DoorKey-8x9", r"Did you mean minigrid_DoorKey-8x8"),
    ],
)
def test_unknown_tasks_suggest_the_closest_name(
    run_command: RunCommand, task: str, message: str
) -> None:
    for command in (f"train {SMALL} --task {task} --logdir run", f"check-env {task}"):
        code, error = run_command(command)
        assert code == 2
        assert re.search(message, error), error
        assert error.count("Fix:") == 1


@pytest.mark.parametrize(
    "name", [name for name, suite in envs.SUITES.items() if suite.package]
)
def test_a_missing_package_prints_the_install_command(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    suite = envs.SUITES[name]
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    code, error = run_command(f"check-env {suite.example}")
    assert code == 2
    assert re.search(rf"needs the package '{suite.package.module}'", error), error
    assert suite.install_command in error
    assert suite.install_command in envs.describe_suites(name)


def test_a_python_version_that_is_too_new_suggests_an_older_one(
    run_command: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    newer = SimpleNamespace(version_info=(3, 19, 0))
    monkeypatch.setattr(suite_module, "sys", newer)
    code, error = run_command("check-env procgen_coinrun")
    assert code == 2
    assert "Python 3.12 and older; this is Python 3.19" in error
    command = f"python3.12 -m venv VENV && VENV/bin/{install_command('procgen')}"
    assert command in error
    _, error = run_command("check-env minecraft_diamond")
    assert "Python 3.11 and older; this is Python 3.19" in error
    assert "sh tools/install_minecraft.sh VENV python3.11" in error


def test_repeated_exceptions_stop_the_run(run_command: RunCommand) -> None:
    line = f"train {SMALL} --agent random --task failing:Raises --logdir run"
    code, error = run_command(f"{line} --run.envs 1 --env.vector.failures 2")
    assert code == 2
    assert re.search(
        r"Environment 0 failed 2 times in a row.*the simulator is gone", error
    )
    assert error.count("Fix:") == 1


def test_repeated_process_exits_stop_the_run(
    run_command: RunCommand,
) -> None:
    line = f"train {SMALL} --agent random --task failing:Exits --logdir run"
    workers = "--run.envs 1 --env.vector.workers 1 --env.vector.failures 2"
    code, error = run_command(f"{line} {workers}")
    assert code == 2
    assert re.search(r"failed 2 times in a row.*exited with code 7", error), error


def test_check_env_reports_exceptions(
    run_command: RunCommand, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check-env", "failing:Raises"]) == 2
    assert "the simulator is gone" in capsys.readouterr().out


def test_the_list_of_suites_has_tasks_and_install_commands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["envs"]) == 0
    page = capsys.readouterr().out
    for name, suite in envs.SUITES.items():
        assert f"\n{name} " in "\n" + page
        if not suite.is_installed:
            assert suite.install_command in page
    assert main(["envs", "minigrid"]) == 0
    page = capsys.readouterr().out
    for task in envs.SUITES["minigrid"].tasks:
        assert f"minigrid_{task}" in page.split()
    assert main(["envs", "minigird"]) == 2
    assert "Did you mean minigrid" in capsys.readouterr().err
    assert main(["envs", "catch", "dmc"]) == 2


def test_the_example_of_every_suite_is_a_task() -> None:
    for name, suite in envs.SUITES.items():
        assert envs.split_task(suite.example)[0] == name
        assert suite.license


def test_unlisted_tasks_need_the_package() -> None:
    def not_installed(name: str) -> bool:
        raise ImportError(name)

    def make(name: str, config: object) -> Any:
        raise NotImplementedError

    suite = suite_module.Suite("x", "", make, tasks=("a",))
    assert suite.has_task("a")
    assert not suite.has_task("y")
    assert not dataclasses.replace(suite, accepts=not_installed).has_task("y")
    with pytest.raises(UserError, match="no suite"):
        envs.describe_suites("x")
