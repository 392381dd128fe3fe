"""Presets that a task applies, and invalid settings."""

from __future__ import annotations

import pytest
import torch

from reverie.api import UserError
from reverie.run.config import for_evaluation, resolve
from reverie.run.device import pick_compile, pick_precision


def test_a_task_in_a_file_applies_the_preset_of_its_suite(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("task: crafter_reward\nrun.envs: 3\n")
    config = resolve(files=[path])
    assert config.run.train_ratio == 512
    assert config.run.envs == 3


def test_a_named_preset_applies_also_if_a_flag_changes_its_task():
    config = resolve(["atari100k"], flags={"task": "atari_pong"})
    same = resolve(flags={"task": "atari100k_pong"})
    assert config.env == same.env
    assert config.run == same.run
    assert not config.env.atari.gray


def test_the_last_task_selects_the_preset_of_its_suite(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("task: crafter_reward\n")
    config = resolve(files=[path], flags={"task": "atari100k_pong"})
    assert config.run.train_ratio == 256


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("seed", 10**40),
        ("run.train_ratio", "nan"),
        ("dreamer.enc.cnn_keys", "("),
        ("dreamer.dec.kernel", 0),
        ("dreamer.rssm.classes", 0),
        ("dreamer.rssm.store", "float64"),
        ("dreamer.value.bins", 1),
        ("dreamer.policy.minstd", 0),
        ("dreamer.conhead.output", "mse"),
        ("dreamer.value.output", "binary"),
        ("replay.segment", 0),
    ],
)
def test_invalid_values_are_refused_before_the_start(name, value):
    with pytest.raises(UserError, match=r"(?s).*\n  Fix: "):
        resolve(flags={name: value})


def test_eval_configs_change_the_environments_of_evaluations():
    config = resolve(["iris_atari"], flags={"env.atari.sticky": 0.25})
    trained, judged = config.env.atari, for_evaluation(config).env.atari
    assert (trained.lives, trained.min_noops, trained.noops) == ("reset", 1, 30)
    assert (judged.lives, judged.min_noops, judged.noops) == ("unused", 1, 1)
    assert (trained.length, judged.length) == (20_000, 108_000)
    assert judged.sticky == 0.25
    assert for_evaluation(config).run == config.run
    assert for_evaluation(resolve()) == resolve()
    with pytest.raises(UserError, match="atari_whole_games"):
        resolve(flags={"run.eval_configs": "atari_whole_game"})


def test_priorities_need_a_signal():
    flags = {"replay.fracs.priority": 0.5, "replay.fracs.uniform": 0.5}
    with pytest.raises(UserError, match="priosignal model"):
        resolve(flags=flags)
    resolve(flags={**flags, "dreamer.priosignal": "model"})


def test_cuda_graphs_are_used_on_cuda_and_refused_elsewhere():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert pick_compile(resolve().compile, cuda) == "graph"
    assert pick_compile(resolve().compile, cpu) == "step"
    assert pick_compile(resolve(flags={"compile": "none"}).compile, cpu) == "none"
    with pytest.raises(UserError, match="--compile auto"):
        pick_compile("graph", cpu)


@pytest.mark.parametrize(
    ("device", "capability", "precision"),
    [
        ("cpu", None, "float32"),
        ("cuda", (7, 5), "float16"),
        ("cuda", (8, 0), "bfloat16"),
        ("cuda", (9, 0), "bfloat16"),
    ],
)
def test_the_default_precision_depends_on_the_device(
    monkeypatch, device, capability, precision
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert pick_precision("auto", torch.device(device)) == precision
    assert pick_precision("float32", torch.device(device)) == "float32"
