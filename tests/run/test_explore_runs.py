"""Exploration policies in training runs: when they act, and how runs resume."""

from __future__ import annotations

from pathlib import Path

import pytest
from state_helpers import assert_same

from reverie.agents.dreamer.agent import Dreamer
from reverie.evaluation.episodes import evaluate
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import resolve
from reverie.run.train import train

ENVS = 4


def settings(logdir: Path, steps: int, *presets: str, **flags):
    flags = {
        "logdir": str(logdir),
        "task": "catch",
        "run.steps": steps,
        "run.save_every": 1000,
        "run.report_every": 1000,
        "logger.outputs": "jsonl",
        **flags,
    }
    return resolve(["debug", "deterministic", *presets], flags=flags)


def read_state(path: Path) -> dict:
    newest = Checkpoints(path / "ckpt").newest()
    return {x: checkpoint.read_part(newest, x) for x in ("agent", "collector")}


@pytest.fixture
def modes(monkeypatch) -> list[str]:
    """The modes in which the policy of Dreamer acts."""
    seen: list[str] = []
    policy = Dreamer.policy

    def record(self, carry, obs, mode="train"):
        seen.append(mode)
        return policy(self, carry, obs, mode)

    monkeypatch.setattr(Dreamer, "policy", record)
    return seen


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"explore.until": 24}, ["explore"] * 6 + ["train"] * 4),
        ({}, ["explore"] * 10),
        ({"explore.until": 24, "run.prefill": 16}, ["explore"] * 2 + ["train"] * 4),
        ({"explore.policy": "random", "explore.until": 24}, ["train"] * 4),
        ({"explore.policy": "random"}, []),
        ({"explore.policy": "none"}, ["train"] * 10),
    ],
)
def test_the_policy_that_acts(tmp_path, modes, flags, expected):
    flags = {"run.train_ratio": 0, **flags}
    train(settings(tmp_path / "run", 40, "plan2explore", **flags))
    assert modes == expected


@pytest.mark.extended
@pytest.mark.parametrize(
    "preset", ["rssm", pytest.param("dreamerv3_torch", marks=pytest.mark.slow)]
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, preset):
    presets = ["plan2explore"] if preset == "rssm" else ["dreamerv3_torch"]
    flags = {"explore.until": 120, "explore.policy": "plan2explore"}
    if preset != "rssm":  # the preset has the sizes of the original
        flags |= {
            "dreamer.dreamerv3_torch.deter": 8,
            "dreamer.dreamerv3_torch.stoch": 2,
        }
        flags |= {r"dreamer\..*\.units": 8, r"dreamer\..*\.depth": 2}
    train(settings(tmp_path / "whole", 140, *presets, **flags))
    train(settings(tmp_path / "split", 100, *presets, **flags))
    train(settings(tmp_path / "split", 140, *presets, **flags))
    whole, split = (read_state(tmp_path / name) for name in ("whole", "split"))
    assert whole["agent"]["explore_opt"]["ensemble"]["step"] > 1
    assert_same(whole, split)


@pytest.mark.extended
def test_a_resumed_run_of_iris_equals_an_uninterrupted_one(tmp_path):
    flags = {
        "run.clock": "steps",
        "explore.until": 100,
        "iris.schedule.epochs": 9,
        "iris.schedule.collect_epochs": 9,
        "iris.schedule.first_steps": 30,
        "iris.schedule.steps": 15,
        r"iris.training\..*\.(steps|first_steps)": 1,
        r"iris.training\..*\.batch": 2,
    }
    presets = ("iris_tiny", "plan2explore")
    train(settings(tmp_path / "whole", 140, *presets, **flags))
    train(settings(tmp_path / "split", 80, *presets, **flags))
    train(settings(tmp_path / "split", 140, *presets, **flags))
    whole, split = (read_state(tmp_path / name) for name in ("whole", "split"))
    for component in ("ensemble", "explore_actor_critic"):
        assert whole["agent"]["opt"][component]["step"] > 1
    assert_same(whole, split)


def test_evaluation_of_an_exploring_run_uses_the_task_policy(tmp_path, modes):
    path = train(settings(tmp_path / "run", 100, "plan2explore"))
    modes.clear()
    evaluate(path, 2)
    assert set(modes) == {"eval"}
