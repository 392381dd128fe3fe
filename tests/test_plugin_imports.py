"""Importing classes that users name as `package.module:Class`."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from reverie.api import UserError
from reverie.envs import SUITES
from reverie.plugins import import_object, install_command

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("imported", "message"),
    [
        ("reverie.agents.missing", "correct the import of 'reverie.agents.missing'"),
        ("numpy.missing", "correct the import of 'numpy.missing'"),
        ("missing_package.part", "pip install missing_package"),
        ("plugin", "pip install plugin"),  # the name of the module starts with it
    ],
)
def test_a_missing_import_of_a_plugin_is_named(folder, imported, message):
    name = f"plugin_{imported.replace('.', '_')}"
    (folder / f"{name}.py").write_text(f"import {imported}\n")
    with pytest.raises(UserError) as error:
        import_object(f"{name}:Agent", "--agent")
    text = str(error.value)
    assert f"needs {imported.split('.part')[0]!r}" in text
    assert text.endswith(f"Fix: {message}") or text.endswith(f"Fix: {message}.")


def test_a_missing_module_is_an_error(folder):
    with pytest.raises(UserError, match=r"there is no module 'absent\.agent'"):
        import_object("absent.agent:Agent", "--agent")
    with pytest.raises(UserError, match="there is no module 'absent'"):
        import_object("absent:Agent", "--agent")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("plugin_file.py", "--agent plugin_file:Planner"),
        ("./plugin_file.py", "--agent plugin_file:Planner"),
        ("inner/plugin_file.py", "--agent inner.plugin_file:Planner"),
        ("{folder}/plugin_file.py", "--agent plugin_file:Planner, in the folder "),
    ],
)
def test_a_file_instead_of_a_module_is_an_error(folder, name, fix):
    (folder / "inner").mkdir()
    for place in (folder, folder / "inner"):
        (place / "plugin_file.py").write_text("class Planner: ...\n")
    with pytest.raises(UserError) as error:
        import_object(f"{name.format(folder=folder)}:Planner", "--agent")
    assert f"\n  Fix: {fix}" in str(error.value)


def test_a_misspelled_class_is_an_error(folder):
    (folder / "plugin_with_class.py").write_text("class Planner: ...\n")
    with pytest.raises(UserError, match="did you mean plugin_with_class:Planner"):
        import_object("plugin_with_class:Planer", "--agent")


def test_an_extra_is_installed_from_the_clone(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert install_command("hdf5") == "pip install -e '.[hdf5]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("hdf5") == f"pip install -e '{ROOT}[hdf5]'"
    clone = tmp_path / "it's here"
    (clone / "reverie").mkdir(parents=True)
    monkeypatch.setattr("reverie.plugins.__file__", str(clone / "reverie" / "x.py"))
    assert install_command("hdf5") == "pip install 'reverie[hdf5]'"
    (clone / "pyproject.toml").touch()
    assert shlex.split(install_command("hdf5"))[-1] == f"{clone}[hdf5]"


def test_every_extra_in_a_message_exists():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {
        suite.package.extra or name
        for name, suite in SUITES.items()
        if suite.package and not suite.package.script
    }
    call = r"""import_optional\(\s*[^,]+,\s*"(\w+)"|install_command\(["'](\w+)["']\)"""
    for path in (ROOT / "reverie").rglob("*.py"):
        named |= {a or b for a, b in re.findall(call, path.read_text())}
    assert {"atari", "hdf5", "sweep", "tensorboard", "video", "wandb"} <= named
    assert named <= set(project["optional-dependencies"])
