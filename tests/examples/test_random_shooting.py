"""Train, resume, evaluate and benchmark the example agent from outside the package."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from reverie.api import Rollout

ROOT = Path(__file__).resolve().parents[2]
SMALL = """--random_shooting.candidates 8 --random_shooting.horizon 3
    --random_shooting.model.rssm.deter 32 --random_shooting.model.rssm.hidden 16
    --random_shooting.model.rssm.stoch 4 --random_shooting.model.rssm.classes 4
    --random_shooting.model.batch_size 4 --random_shooting.model.batch_length 8
    --random_shooting.model.report_length 8 --random_shooting.model.enc.depth 4
    --random_shooting.model.dec.depth 4 --random_shooting.model.enc.mults 2 4
    --random_shooting.model.dec.mults 2 4"""


def run(folder: Path, words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "reverie", *words.split()],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A user's folder with the example in it and a run that was trained there."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copy(ROOT / "examples" / "random_shooting.py", folder)
    done = run(
        folder,
        "train --configs debug --agent random_shooting:RandomShooting --task catch "
        f"--logdir run --run.steps 80 {SMALL}",
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_it_trains_with_its_own_settings_and_loss(folder):
    config = (folder / "run" / "config.yaml").read_text()
    assert "agent: random_shooting:RandomShooting" in config
    assert "candidates: 8" in config
    assert '"train/loss/inverse"' in (folder / "run" / "metrics.jsonl").read_text()


def test_reward_of_a_terminal_state_counts(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    module = importlib.import_module("examples.random_shooting")
    agent = object.__new__(module.RandomShooting)
    agent.config = module.RandomShootingConfig(candidates=2, horizon=1)
    agent.device, agent.rng = torch.device("cpu"), {"policy": None}
    rollout = Rollout(None, {"action": torch.tensor([[1, 0], [2, 0]])})
    reward, cont = torch.tensor([[[0.0, 0], [0, 1]], [[1, 1], [1, 0]]])
    agent.world = SimpleNamespace(
        imagine=lambda *_: rollout,
        features=lambda states: states,
        reward_and_cont=lambda feat: (reward, cont),
    )
    assert agent.plan((torch.zeros(1),), 1)["action"].tolist() == [2]


@pytest.mark.extended
def test_it_resumes(folder):
    done = run(folder, "train --logdir run --run.steps 100")
    assert done.returncode == 0, done.stderr
    assert "Resumed" in done.stderr


def test_it_is_evaluated(folder):
    done = run(folder, "eval run --episodes 2")
    assert done.returncode == 0, done.stderr
    assert "score" in done.stdout


@pytest.mark.extended
def test_it_is_benchmarked(folder):
    done = run(
        folder,
        "bench --configs debug --agent random_shooting:RandomShooting --task catch "
        f"--bench.seconds 0.05 --bench.repeats 1 --bench.steps 200 {SMALL}",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.extended
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--agent nowhere:Agent", "there is no module 'nowhere'"),
        ("--agent random_shooting:Shooting", "did you mean random_shooting:Random"),
        ("--agent random_shooting:shift", "has no attribute `Config`"),
        ("--agent dreamers", "did you mean --agent dreamer"),
        (
            "--agent random_shooting:RandomShooting --random_shooting.candidate 3",
            "random_shooting.candidates",
        ),
    ],
)
def test_mistakes_are_explained(folder, words, complaint):
    done = run(folder, f"train --task catch --logdir other {words}")
    assert done.returncode == 2
    assert complaint in done.stderr
    assert "Fix:" in done.stderr
    assert "Traceback" not in done.stderr
