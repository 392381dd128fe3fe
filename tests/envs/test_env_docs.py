"""Commands and code of the environment docs work as printed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reverie import envs
from reverie.cli.main import main

DOCS = Path(__file__).parents[2] / "docs"


def test_the_example_passes_check_env_and_runs_in_workers(tmp_path: Path) -> None:
    page = (DOCS / "add-an-environment.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    (tmp_path / "my_env.py").write_text(code)
    checked = subprocess.run(
        [sys.executable, "-m", "reverie", "check-env", "my_env:make_env"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "No problems found" in checked.stdout
    script = (
        "from reverie import envs\n"
        "make = envs.TaskFactory('my_env:make_env', envs.EnvConfig(), 0)\n"
        "vec_env = envs.make_vec_env(make, 2, envs.VecEnvConfig(workers=2))\n"
        "vec_env.reset()\n"
        "for _ in range(7): obs = vec_env.step({'action': [1, 1]})\n"
        "print(obs['reward'].tolist(), obs['is_terminal'].tolist())\n"
        "vec_env.close()\n"
    )
    stepped = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert stepped.stdout.strip() == "[1.0, 1.0] [True, True]", stepped.stderr


def test_the_train_command_of_the_example_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / "add-an-environment.md").read_text()
    (tmp_path / "my_env.py").write_text(page.split("```python\n")[1].split("```")[0])
    (line,) = (x for x in page.splitlines() if x.startswith("reverie train"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    small = "--run.steps 40 --run.envs 4 --dreamer.batch_size 2 --device cpu"
    words = f"{line} {small} --logger.outputs jsonl --logdir run".split()
    assert main(words[1:]) == 0
    sys.modules.pop("my_env", None)
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    rows = [json.loads(row) for row in lines]
    assert any("train/loss/image" in row for row in rows)
    assert list(Path("run/ckpt").iterdir())


def test_every_suite_is_listed_with_its_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(DOCS.parent)
    page = (DOCS / "environments.md").read_text()
    for name, suite in envs.SUITES.items():
        rows = [line for line in page.splitlines() if line.startswith(f"| `{name}` ")]
        assert len(rows) == 1, name
        assert suite.install_command in rows[0] or name == "dmlab"


NEW_SUITE = """
import sys
import reverie
from reverie import envs
from reverie.cli.explain import explain
from reverie.cli.main import main
from reverie.run.config import Config

assert reverie.__file__.startswith(sys.argv[1]), reverie.__file__
assert "line_walk" in envs.task_names()
assert "move to the end of a line" in envs.describe_suites()
assert "Number of cells." in explain(Config, "env.line")
env = envs.make("line_run", envs.EnvConfig(line=envs.SUITES["line"].config(cells=5)))
env.reset()
rewards = [float(env.step({"action": 1})["reward"]) for _ in range(2)]
assert rewards == [0.0, 1.0], rewards
assert main(["check-env", "line_walk"]) == 0
assert main(["train", "--task", "line_walk", "--env.line.cell", "5"]) == 2
flags = "--configs debug --task line_walk --env.line.cells 5 --run.steps 40"
other = "--run.envs 2 --device cpu --dreamer.batch_size 2 --logdir run"
assert main(["train", *flags.split(), *other.split()]) == 0
"""


@pytest.mark.extended
def test_a_new_suite_is_one_new_file(tmp_path: Path) -> None:
    page = (DOCS / "add-an-environment.md").read_text()
    ignore = shutil.ignore_patterns("__pycache__")
    package = tmp_path / "package" / "reverie"
    shutil.copytree(DOCS.parent / "reverie", package, ignore=ignore)
    code = page.split("```python\n")[2].split("```")[0]
    (package / "envs" / "suites" / "line.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-c", NEW_SUITE, str(package.parent)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Did you mean 'env.line.cells'" in done.stderr
    assert list((tmp_path / "run" / "ckpt").iterdir())
