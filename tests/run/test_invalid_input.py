"""Invalid environments, folders and checkpoints: one message, exit code 2."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

import reverie
from reverie.api import UserError
from reverie.cli.main import main
from reverie.run.checkpoint import Checkpoints
from reverie.run.folder import lock_folder

MODULES = {
    "empty": "",
    "torn": "def make_env(:\n",
    "unlucky": "def make_env():\n    raise ValueError('no display')\n",
    "needy": "import a_package_that_is_not_here\n",
    "needs_statistics": "def make_env(size):\n    pass\n",
    "shy": "def make_env():\n    pass\n",
    "spaces": """
import gymnasium
import numpy as np

Box, Text = gymnasium.spaces.Box, gymnasium.spaces.Text


class Base(gymnasium.Env):
    observation_space = Box(0, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    start, then = np.zeros(3, np.float32), np.zeros(3, np.float32)

    def reset(self, seed=None, options=None):
        return self.start, {}

    def step(self, action):
        return self.then, 0.0, False, False, {}


class Words(Base):
    observation_space = Text(5)


class Speech(Base):
    action_space = Text(5)


class Longer(Base):
    start = np.zeros(4, np.float32)


class Beyond(Base):
    then = np.full(3, 7, np.float32)


class Nothing(Base):
    then = np.full(3, np.nan, np.float32)


class Taken(Base):
    observation_space = gymnasium.spaces.Dict({"reward": Box(0, 1, (3,), np.float32)})
""",
}

ENVIRONMENTS = {
    "empty:make_env": r"module 'empty' has no 'make_env'",
    "nowhere_at_all:make_env": r"no module 'nowhere_at_all'",
    "torn:make_env": r"SyntaxError.*torn\.py",
    "unlucky:make_env": r"no display.*unlucky\.py:2",
    "needy:make_env": r"a_package_that_is_not_here",
    "needs_statistics:make_env": r"missing 1 required positional argument: 'size'",
    "shy:make_env": r"returned a NoneType",
    "spaces:Words": r"observation space.*Text.*\n.*Box, Discrete",
    "spaces:Speech": r"action space.*Text.*\n.*Box, Discrete",
    "spaces:Longer": r"'vector' has shape \(4,\), expected \(3,\)",
    "spaces:Beyond": r"'vector' has values in \[7\.0, 7\.0\]",
    "spaces:Nothing": r"'vector' has NaN",
    "spaces:Taken": r"'reward'",
    "gym_NoSuch-v1": r"Gymnasium cannot make 'NoSuch-v1'",
}

SMALL = "--configs debug --device cpu --run.clock steps --logger.outputs jsonl"


@pytest.fixture
def run_command(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command and returns exit code and error text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(line: str | list[str]) -> tuple[int, str]:
        code = main(line.split() if isinstance(line, str) else line)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return code, error

    yield run
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("task", ENVIRONMENTS)
def test_an_invalid_environment_is_an_error_with_the_reason(run_command, task):
    code, error = run_command(
        f"train {SMALL} --agent random --task {task} --logdir run"
    )
    assert code == 2, error
    assert re.search(ENVIRONMENTS[task], error), error
    assert error.count("reverie: ") == error.count("Fix:") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize("task", ["unlucky:make_env", "spaces:Longer"])
def test_an_error_in_a_worker_has_the_reason(run_command, task):
    more = "--env.vector.workers 1 --run.envs 1"
    code, error = run_command(
        f"train {SMALL} --agent random --task {task} --logdir run {more}"
    )
    assert code == 2
    assert re.search(ENVIRONMENTS[task], error), error


@pytest.mark.parametrize("task", ["torn:make_env", "unlucky:make_env", "spaces:Words"])
def test_check_env_reports_environments_that_cannot_be_built(run_command, task):
    code, error = run_command(f"check-env {task}")
    assert code == 2
    assert re.search(ENVIRONMENTS[task], error), error
    assert "Fix:" in error


def test_a_run_without_a_checkpoint_can_be_restarted_with_other_settings(run_command):
    start = f"train {SMALL} --agent random --run.steps 8 --logdir run"
    assert run_command(f"{start} --task unlucky:make_env")[0] == 2
    assert run_command(f"{start} --task catch")[0] == 0
    code, error = run_command(f"{start} --task dummy_disc --seed 3")
    assert code == 2
    assert "task: 'catch' -> 'dummy_disc'" in error
    assert "seed: 0 -> 3" in error


def test_a_refused_run_deletes_only_what_it_has_written(run_command):
    start = f"train {SMALL} --agent random --task unlucky:make_env --logdir"
    assert run_command(f"{start} new/folder/run")[0] == 2
    assert not Path("new").exists()
    Path("mine/media").mkdir(parents=True)
    Path("mine/media/text").write_text("kept")
    before = sorted(Path("mine").rglob("*"))
    assert run_command(f"{start} mine")[0] == 2
    assert sorted(Path("mine").rglob("*")) == before


def test_a_refused_command_keeps_the_run_in_its_folder(copy, run_command):
    before = sorted(copy.rglob("*"))
    with lock_folder(copy):
        assert run_command(f"train --logdir {copy} --run.steps 99")[0] == 2
    assert sorted(copy.rglob("*")) == before


def test_flags_are_compared_with_the_saved_settings(copy, run_command):
    before = sorted(copy.rglob("*"))
    code, error = run_command(f"train --logdir {copy} --seed 3 --run.steps 99")
    assert code == 2
    assert error.splitlines()[1:-1] == ["    seed: 0 -> 3"]
    assert sorted(copy.rglob("*")) == before
    same = f"train --logdir {copy} --seed 0 --run.steps 8"
    assert run_command(same)[0] == 0  # the saved value


def test_an_empty_logdir_is_refused(run_command):
    code, error = run_command(["train", "--logdir", ""])
    assert code == 2
    assert "--logdir is empty" in error


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    line = f"train {SMALL} --task catch --run.steps 90 --logdir {folder}"
    assert main(line.split()) == 0
    return folder


@pytest.fixture
def copy(trained, tmp_path):
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def test_weights_of_another_size_are_an_error_with_the_matching_preset(
    run_command, tmp_path
):
    small = "--device cpu --logger.outputs jsonl --run.envs 1 --replay.capacity 200"
    small += " --task catch --run.steps 2"
    assert run_command(f"train --configs size1m {small} --logdir one")[0] == 0
    start = f"train --configs catch {small} --logdir two --run.from_checkpoint"
    code, error = run_command(f"{start} one")
    assert code == 2
    assert "--configs size1m" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--run.from_checkpoint nowhere", r"nowhere does not exist"),
        ("--dreamer.rssm.deter 16 {}", r"dynin0\.weight has shape \(3, 8\)"),
        ("--run.from_components nope {}", r"No component matches 'nope'"),
        ("--run.from_components ( {}", r"No component matches '\("),
        ("--run.episodes nowhere", r"nowhere does not exist"),
    ],
)
def test_weights_and_episodes_that_do_not_fit(run_command, trained, flags, message):
    flags = flags.format(f"--run.from_checkpoint {trained}")
    code, error = run_command(f"train {SMALL} --task catch --logdir new {flags}")
    assert code == 2
    assert re.search(message, error), error
    assert "Fix:" in error


@pytest.mark.parametrize("text", [b"task: [\n", b"\xff\x00\x81", b"nope: 3\n"])
def test_an_unreadable_config_is_an_error_with_its_path(run_command, copy, text):
    (copy / "config.yaml").write_bytes(text)
    for line in (f"train --logdir {copy}", f"eval {copy} --episodes 1"):
        code, error = run_command(line)
        assert code == 2
        assert str(copy / "config.yaml") in error
        assert "Fix:" in error


def test_a_checkpoint_without_a_config_is_an_error(run_command, copy):
    (copy / "config.yaml").unlink()
    code, error = run_command(f"eval {copy} --episodes 1")
    assert code == 2
    assert "no config.yaml" in error
    with pytest.raises(UserError, match=r"no config\.yaml"):
        reverie.load(copy)


@pytest.mark.parametrize("inner", ["ckpt", "replay/more"])
def test_a_run_inside_the_folder_of_another_run_is_refused(run_command, copy, inner):
    before = sorted(copy.rglob("*"))
    code, error = run_command(f"train {SMALL} --logdir {copy / inner}")
    assert code == 2
    assert f"Fix: --logdir {copy} " in error
    assert sorted(copy.rglob("*")) == before
    command = f"train {SMALL} --agent random --task catch --run.steps 8"
    assert run_command(f"{command} --logdir {copy / 'other'}")[0] == 0


def test_a_damaged_checkpoint_cannot_be_evaluated(run_command, copy):
    (path,) = Checkpoints(copy / "ckpt").paths()
    (path / "agent.safetensors").write_bytes(b"torn")
    code, error = run_command(f"eval {path} --episodes 1")
    assert code == 2
    assert "agent.safetensors has 4 bytes" in error
    with pytest.warns(UserWarning, match="is damaged"):
        code, error = run_command(f"eval {copy} --episodes 1")
    assert code == 2
    assert f"Every checkpoint in {copy} is damaged" in error


def test_videos_that_cannot_be_written_are_warned_about(
    run_command, trained, monkeypatch
):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.warns(RuntimeWarning, match="no episodes are recorded"):
        assert run_command(f"eval {trained} --episodes 1 --videos 1")[0] == 0


def test_an_evaluation_with_other_spaces_is_refused(run_command, trained):
    code, error = run_command(f"eval {trained} --episodes 1 --task dummy_disc")
    assert code == 2
    assert "was trained with (12, 12, 3)" in error
