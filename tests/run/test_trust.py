"""Code that the config of a run names is imported only for trusted runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading

import pytest
import yaml

import reverie
from reverie import agents
from reverie.api import UserError
from reverie.cli.main import main
from reverie.datasets.sequences import find_sequence_class
from reverie.plugins import import_object
from reverie.run import trust
from reverie.run.folder import read_config
from reverie.storage.run_spaces import read_spaces

MODULE = """
import pathlib
pathlib.Path(__file__).with_suffix(".imported").touch()
from reverie.envs.suites.catch import Catch
def make(): return Catch()
class Plugin:
    class Config: ...
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with the module `evilmod`, and an empty state directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "evilmod", raising=False)
    (tmp_path / "evilmod.py").write_text(MODULE)
    yield tmp_path
    sys.modules.pop("evilmod", None)


def was_imported(folder) -> bool:
    return (folder / "evilmod.imported").exists()


def train(task: str, logdir: str = "run", steps: int = 16) -> int:
    words = f"train --configs debug --agent random --task {task} --logdir {logdir}"
    return main([*words.split(), "--run.steps", str(steps), "--run.envs", "1"])


def change(folder, **settings) -> None:
    """Change settings in the config of a run, as another user could."""
    path = folder / "config.yaml"
    data = yaml.safe_load(path.read_text())
    for name, value in settings.items():
        group, _, key = name.rpartition("__")
        (data[group] if group else data)[key] = value
    path.write_text(yaml.safe_dump(data))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run without modules in its config."""
    logdir = tmp_path_factory.mktemp("trained") / "run"
    assert train("catch", str(logdir)) == 0
    return logdir


@pytest.fixture
def foreign(folder, trained):
    """A run of another user, without modules in its config yet."""
    return shutil.copytree(trained, folder / "run")


COMMANDS = [
    "train --logdir run --run.steps 24",
    "eval run --episodes 1",
    "eval run run",
    "draw boundaries run",
    "data export run episodes",
    "bc --bc.run run --offline.data run --configs debug --logdir clone",
    "train --config run/config.yaml --logdir other",
    "bench --config run/config.yaml",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_refuses_code_of_a_foreign_run(foreign, folder, capsys, command):
    change(foreign, task="evilmod:make")
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert "was not created by you on this machine" in error
    assert "task 'evilmod:make'" in error
    assert "--trust" in error
    assert not was_imported(folder)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ("task", "evilmod:make"),
        ("task", "sequences_evilmod:Plugin"),
        ("task", "gym_evilmod:Name-v0"),
        ("agent", "evilmod:Plugin"),
        ("dreamer__world", "evilmod:Plugin"),
        ("bc__run_agent", "evilmod:Plugin"),
        ("zz|dreamer.world", "evilmod:Plugin"),
        ("dreamer.world", "evilmod:Plugin"),
    ],
)
def test_every_setting_that_names_code_is_checked(foreign, folder, setting, name):
    change(foreign, **{setting: name})
    with pytest.raises(UserError) as error:
        read_config(foreign)
    assert repr(name) in str(error.value)
    assert not was_imported(folder)


def test_a_base_agent_that_does_not_exist_is_refused(foreign):
    for name in ("bc", "task", "-1.5"):
        change(foreign, agent="bc", bc__run_agent=name)
        with pytest.raises(UserError, match="The base agent of 'bc' cannot be"):
            read_config(foreign)


@pytest.mark.parametrize("spaces", [[["a", "b"]], [[1]], 3, [["a", {}]], None])
def test_spaces_of_another_form_are_refused(foreign, spaces):
    (foreign / "spaces.json").write_text(json.dumps({"obs": spaces, "act": []}))
    with pytest.raises(UserError, match="cannot be read"):
        read_spaces(foreign)


def test_trust_runs_the_code(foreign, folder):
    change(foreign, task="evilmod:make")
    assert main(["eval", "run", "--episodes", "1", "--trust"]) == 0
    assert was_imported(folder)


def test_a_module_that_the_command_names_needs_no_flag(foreign, folder, capsys):
    change(foreign, task="evilmod:make", agent="random")
    assert main(["train", "--logdir", "run", "--task", "evilmod:make"]) == 0
    change(foreign, agent="other:Plugin", task="evilmod:make")
    assert main(["train", "--logdir", "run", "--task", "evilmod:make"]) == 2
    assert "other:Plugin" in capsys.readouterr().err


def test_a_task_that_is_replaced_needs_no_trust(foreign, folder):
    change(foreign, task="evilmod:make")
    assert main(["eval", "run", "--episodes", "1", "--task", "catch"]) == 0
    reverie.evaluate(foreign, env=reverie.envs.make("catch"), episodes=1)
    assert not was_imported(folder)


def test_python_functions_refuse_and_trust(foreign, folder):
    change(foreign, task="evilmod:make", agent="evilmod:Plugin")
    for function in (
        lambda: reverie.load(foreign),
        lambda: reverie.evaluate(foreign, episodes=1),
        lambda: reverie.train(logdir=str(foreign)),
    ):
        with pytest.raises(UserError, match="trust=True"):
            function()
    assert not was_imported(folder)
    change(foreign, agent="random")
    reverie.load(foreign, trust=True)
    assert len(reverie.evaluate(foreign, episodes=1, trust=True).episodes) == 1
    with pytest.raises(UserError, match="trust=True"):
        reverie.evaluate(foreign, episodes=1)


def test_own_runs_need_no_flag_and_can_be_moved_and_copied(folder):
    assert train("evilmod:make") == 0
    assert main(["eval", "run", "--episodes", "1"]) == 0
    shutil.copytree("run", "copy")
    (folder / "run").rename("moved")
    assert main(["eval", "moved", "--episodes", "1"]) == 0
    assert main(["train", "--logdir", "copy", "--run.steps", "24"]) == 0


def test_an_id_counts_only_on_its_machine_and_for_its_modules(
    folder, monkeypatch, capsys
):
    assert train("evilmod:make") == 0
    change(folder / "run", agent="evilmod:Plugin")
    assert main(["eval", "run", "--episodes", "1"]) == 2
    change(folder / "run", agent="random")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "other"))
    assert main(["eval", "run", "--episodes", "1"]) == 2
    assert capsys.readouterr().err.count("--trust") == 2


def test_a_trusted_run_that_is_resumed_is_a_run_of_this_user(foreign, folder):
    change(foreign, task="evilmod:make")
    assert main(["train", "--logdir", "run", "--run.steps", "24", "--trust"]) == 0
    assert main(["eval", "run", "--episodes", "1"]) == 0


@pytest.mark.parametrize("kind", ["missing", "empty", "link", "pipe", "folder", "long"])
def test_an_id_file_that_is_no_id_is_not_trusted(folder, kind):
    (run := folder / "run").mkdir()
    trust.register(run, ["evilmod:make"])
    identity = run / trust.ID_FILE
    trust.check_trusted(run, [("task", "evilmod:make")])
    text = identity.read_text()
    identity.unlink()
    if kind == "link":
        (folder / "id").write_text(text)
        identity.symlink_to(folder / "id")
    elif kind == "pipe":
        os.mkfifo(identity)
    elif kind == "folder":
        identity.mkdir()
    elif kind != "missing":
        identity.write_text("" if kind == "empty" else text.strip() + "0" * 10**6)
    with pytest.raises(UserError, match="--trust"):
        trust.check_trusted(run, [("task", "evilmod:make")])


@pytest.mark.parametrize("state", ["file", "no home", "relative"])
def test_training_works_without_a_state_directory(folder, monkeypatch, capsys, state):
    if state == "file":
        (folder / "state").write_text("")
    else:
        home = str(folder / "home")
        monkeypatch.setenv("XDG_STATE_HOME", "state" if state == "relative" else "")
        monkeypatch.setenv("HOME", home if state == "relative" else "/dev/null")
    with pytest.warns(RuntimeWarning) if state != "relative" else open(os.devnull):
        assert train("evilmod:make") == 0
    assert main(["eval", "run", "--episodes", "1", "--trust"]) == 0
    if state == "relative":  # ignored, as the XDG specification says
        assert (folder / "home/.local/state/reverie/runs.jsonl").exists()


def test_the_list_is_bounded_and_complete_with_parallel_runs(folder, monkeypatch):
    monkeypatch.setattr(trust, "MAX_RUNS", 30)
    runs = [folder / str(index) for index in range(40)]
    for run in runs:
        run.mkdir()

    def register(part) -> None:
        for run in part:
            trust.register(run, ["evilmod:make"])

    threads = [
        threading.Thread(target=register, args=(runs[i:20:4],)) for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs[:20]:
        trust.check_trusted(run, [("task", "evilmod:make")])
    register(runs[20:])
    lines = (folder / "state/reverie/runs.jsonl").read_text().splitlines()
    assert len(lines) == 30
    assert all(json.loads(line)[1:] == ["evilmod:make"] for line in lines)
    trust.check_trusted(runs[-1], [("task", "evilmod:make")])


def test_long_import_paths_are_not_listed(folder):
    with pytest.warns(RuntimeWarning, match="too long"):
        trust.register(folder, ["m" * 5000 + ":make"])
    assert not (folder / "state").exists()


def test_a_run_without_modules_writes_no_id(foreign, folder):
    assert not (foreign / trust.ID_FILE).exists()
    assert not (folder / "state").exists()


def test_the_current_folder_is_not_searched_for_built_in_agents(folder):
    agents.find_class("random")
    find_sequence_class("sequences_balls")
    assert str(folder) not in sys.path
    import_object("evilmod:make", "--task")
    assert sys.path[0] == str(folder)


def test_help_names_the_flag(capsys):
    main(["--help"])
    assert re.search(r"--trust +import the Python modules", capsys.readouterr().out)
