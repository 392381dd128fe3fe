"""Task names, suites and their error messages."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from reverie import envs
from reverie.api import Env, UserError
from reverie.envs.suite import Package
from reverie.envs.suites.atari import AtariConfig
from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.envs.suites.memory import MemoryConfig


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        ("catch", ("catch", "")),
        ("atari_montezuma_revenge", ("atari", "montezuma_revenge")),
        ("atari100k_pong", ("atari100k", "pong")),
        ("dmc_walker_walk", ("dmc", "walker_walk")),
        ("dmc_subtle_reacher", ("dmc_subtle", "reacher")),
        ("gym_CartPole-v1", ("gym", "CartPole-v1")),
        ("gym_some_package:Name-v0", ("gym", "some_package:Name-v0")),
        ("my_env:make_env", ("", "my_env:make_env")),
        ("memory_of_mine:make_env", ("", "memory_of_mine:make_env")),
    ],
)
def test_split_task(task: str, parts: tuple[str, str]) -> None:
    assert envs.split_task(task) == parts


@pytest.mark.parametrize(
    ("task", "hint"),
    [
        ("catsh", "catch"),
        ("pinpad_tree", "pinpad_three"),
        ("atari_breakuot", "atari_breakout"),
        ("crafter_rewards", "crafter_reward"),
        ("dummy", "dummy_disc"),
        ("dmc", "dmc_walker_walk"),
        ("", "Unknown task"),
        ("mine:", "package.module:function"),
    ],
)
def test_unknown_tasks_suggest_the_closest_name(task: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        envs.make(task)


def test_unknown_gym_ids_suggest_the_closest_name() -> None:
    with pytest.raises(UserError, match="gym_CartPole-v1"):
        envs.make("gym_CartPol-v1")


def test_a_missing_package_names_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '.*\[atari\]'"):
        envs.make("atari100k_pong")


def test_a_python_version_that_is_too_new_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    with pytest.raises(
        UserError, match=r"Python 3\.12 and older; this is Python 3\.14"
    ) as caught:
        envs.make("dmc_walker_walk")
    assert "python3.12 -m venv" in str(caught.value)


@pytest.mark.parametrize("error", [ImportError, AttributeError])
def test_incompatible_packages_are_a_user_error(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(name: str, config: object) -> Env:
        raise error("module 'mujoco' has no attribute 'flex_vertedge'")

    broken = dataclasses.replace(
        envs.SUITES["dmc"], make=fail, package=Package("numpy")
    )
    monkeypatch.setitem(envs.SUITES, "dmc", broken)
    with pytest.raises(UserError, match=r"flex_vertedge.*\n  Fix: pip install -e '"):
        envs.make("dmc_walker_walk")


def test_all_suites_are_found_and_listed() -> None:
    expected = """atari atari100k crafter dmc dmc_subtle dmlab minecraft procgen bsuite
        loconav pinpad memorymaze minigrid mujoco metaworld robosuite craftax gym dummy
        catch noisycatch memory reach"""
    assert set(expected.split()) <= envs.SUITES.keys()
    for name in envs.SUITES:
        assert f"\n{name} " in "\n" + envs.describe_suites()
    assert "pinpad_six" in envs.task_names()


def test_action_repeat_is_the_product_of_suite_and_wrapper() -> None:
    config = envs.EnvConfig(repeat=2, atari=AtariConfig(repeat=4))
    assert envs.action_repeat("atari_pong", config) == 8
    assert envs.action_repeat("atari100k_pong", config) == 8
    assert envs.action_repeat("catch", config) == 2
    assert envs.action_repeat("my:make", config) == 2


CUSTOM_ENV = """
import gymnasium
import numpy as np

class Corridor(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (5,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0
        return np.eye(5)[0], {}

    def step(self, action):
        self.position += int(action)
        return np.eye(5)[self.position], 1.0, self.position == 4, False, {}

def make_env():
    return Corridor()
"""


def test_an_import_path_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_corridor.py").write_text(CUSTOM_ENV)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    env = envs.make("my_corridor:make_env")
    obs = env.reset()
    assert obs["vector"].dtype == np.float32
    for _ in range(4):
        obs = env.step({"action": np.int32(1)})
    assert obs["is_terminal"]
    with pytest.raises(
        UserError, match=r"(?s)no 'make_en'.*did you mean my_corridor:make_env"
    ):
        envs.make("my_corridor:make_en")
    with pytest.raises(UserError, match="no module 'my_koridor'"):
        envs.make("my_koridor:make_env")


def test_environment_objects_and_functions_as_tasks() -> None:
    from_object = envs.make(gymnasium.make("CartPole-v1"))
    from_function = envs.make(lambda: gymnasium.make("CartPole-v1"))
    assert from_object.obs_space == from_function.obs_space
    assert envs.make(Catch()).reset()["is_first"]
    with pytest.raises(
        UserError, match="neither a Gymnasium nor a Reverie environment"
    ):
        envs.make(object())


def test_importing_envs_imports_no_simulator_and_no_torch() -> None:
    code = (
        "import sys, reverie.envs; "
        "print([m for m in ('torch', 'gymnasium', 'ale_py', 'crafter', 'PIL') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "make_config",
    [
        lambda: envs.EnvConfig(repeat=0),
        lambda: envs.VecEnvConfig(workers=-2),
        lambda: CatchConfig(rows=1),
        lambda: MemoryConfig(cues=1),
        lambda: AtariConfig(pooling=5),
    ],
)
def test_invalid_configs_are_refused(make_config: object) -> None:
    with pytest.raises(ValueError, match="needs"):
        make_config()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("task", "fix"),
    [
        ("atari", "write it as atari_TASK, such as atari_alien"),
        ("dmc", "write it as dmc_DOMAIN_TASK, such as dmc_walker_walk"),
        ("dmc_subtle", "write it as dmc_subtle_TASK, such as dmc_subtle_ball_in_cup"),
    ],
)
def test_the_name_of_a_suite_is_not_a_task(task: str, fix: str) -> None:
    with pytest.raises(UserError, match=f"{task!r} is not complete.\n  Fix: {fix}"):
        envs.split_task(task)
    assert envs.split_task("catch") == ("catch", "")
