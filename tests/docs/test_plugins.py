"""Train, resume and evaluate the agent, world and losses of the how-to pages."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from reverie.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
SHORT = "--configs catch debug --logdir run --run.steps 80"


def code_block(page: str, language: str = "python") -> str:
    """Return the first code block of a page in this language."""
    return (DOCS / page).read_text().split(f"```{language}\n")[1].split("```")[0]


def reverie(folder: Path, command: str, package: Path = ROOT) -> str:
    """Run a command in a user's folder and return its output."""
    done = subprocess.run(
        [sys.executable, "-m", "reverie", *command.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.mark.extended_except("change-a-loss*")
@pytest.mark.parametrize(
    ("page", "file", "flags", "metric"),
    [
        (
            "add-an-agent.md",
            "my_agent.py",
            "--agent my_agent:DQN --dqn.batch_size 8",
            "train/loss/q",
        ),
        (
            "add-a-world.md",
            "my_world.py",
            "--dreamer.world my_world:GRUWorld --dreamer.gru_world.deter 16",
            "train/loss/dyn",
        ),
        (
            "change-a-loss.md",
            "my_loss.py",
            "--dreamer.world my_loss:InverseRSSM --config my_loss.yaml",
            "train/loss/inverse",
        ),
    ],
)
def test_plugin_trains_resumes_and_is_evaluated(
    tmp_path, monkeypatch, capsys, page, file, flags, metric
):
    (tmp_path / file).write_text(code_block(page))
    if "my_loss.yaml" in flags:
        (tmp_path / "my_loss.yaml").write_text(code_block(page, "yaml"))
    resume, evaluate = "train --logdir run --run.steps 100", "eval run --episodes 2"
    reverie(tmp_path, f"train {SHORT} {flags}")
    assert f'"{metric}"' in (tmp_path / "run" / "metrics.jsonl").read_text()
    if page == "add-an-agent.md":  # in other processes, as users do
        assert "Resumed" in reverie(tmp_path, resume)
        assert "score" in reverie(tmp_path, evaluate)
    else:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
        assert main(resume.split()) == 0
        assert "Resumed" in capsys.readouterr().err
        assert main(evaluate.split()) == 0
        assert "score" in capsys.readouterr().out


@pytest.mark.extended
def test_edits_for_a_loss_in_the_package_work(tmp_path):
    shutil.copytree(ROOT / "reverie", tmp_path / "package" / "reverie")
    page = (DOCS / "change-a-loss.md").read_text()
    edits = re.findall(r"```diff\n--- (\S+)\n(.*?)```", page, re.S)
    assert len(edits) == 2
    for name, lines in edits:
        path, new = tmp_path / "package" / name, ""
        old = "".join(f"{x[1:]}\n" for x in lines.splitlines() if x[0] != "+")
        new = "".join(f"{x[1:]}\n" for x in lines.splitlines() if x[0] != "-")
        text = path.read_text()
        assert text.count(old) == 1, f"{name}:\n{old}"
        path.write_text(text.replace(old, new))
    flags = "--dreamer.loss_scales.deter_l2 0.1"
    reverie(tmp_path, f"train {SHORT} {flags}", tmp_path / "package")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert '"train/loss/deter_l2"' in metrics
