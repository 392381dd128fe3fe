"""Network size and replay capacity of runs whose settings do not give them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import yaml

import reverie
from reverie.agents.dreamer.agent import DreamerConfig
from reverie.api import UserError
from reverie.cli.main import main
from reverie.cli.train import command_config
from reverie.replay import memory_plan
from reverie.run import size as sizes
from reverie.run.config import resolve
from reverie.run.folder import read_config
from reverie.spaces import Space
from reverie.worlds.dreamerv3_torch.config import DreamerV3TorchConfig
from reverie.worlds.dreamerv3_torch.dynamics import DreamerV3TorchDynamics
from reverie.worlds.rssm.config import WEIGHTS_PER_SQUARED_UNIT, RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics
from reverie.worlds.vta.config import RecurrentVTAConfig
from reverie.worlds.vta.dynamics import RecurrentVTADynamics

GB = 10**9
ANY_TASK = {"task": "gym_X-v1"}
"""A task whose suite has no preset."""
SHORT = {
    "run.steps": 80,
    "run.envs": 1,
    "run.train_ratio": 1,
    "logger.outputs": "jsonl",
    "dreamer.batch_size": 2,
    "dreamer.batch_length": 4,
    "dreamer.report_length": 4,
    "dreamer.imag_length": 2,
}


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that pretends a CUDA GPU with this many free bytes."""

    def set_free(free: int) -> None:
        monkeypatch.setattr(sizes, "uses_cuda", lambda device: device != "cpu")
        monkeypatch.setattr(sizes, "free_gpu_memory", lambda device: free)

    return set_free


def is_size(config, name: str) -> bool:
    return config.dreamer == resolve([name], flags=ANY_TASK).dreamer


def test_a_run_without_a_size_chooses_the_smallest_on_a_cpu():
    config = resolve(flags={"task": "gym_CartPole-v1", "device": "cpu"})
    assert config.size == "size1m"
    assert is_size(config, "size1m")


@pytest.mark.parametrize(
    ("free", "name"),
    [
        (80 * GB, "size200m"),
        (15 * GB, "size200m"),
        (12 * GB, "size100m"),
        (7 * GB, "size50m"),
        (GB, "size1m"),
    ],
)
def test_a_gpu_gets_the_largest_size_that_fits(gpu, free, name):
    gpu(free)
    config = resolve(flags={"task": "gym_CartPole-v1"})
    assert config.size == name
    assert is_size(config, name)


def test_larger_batches_need_a_smaller_size(gpu):
    gpu(15 * GB)
    flags = ANY_TASK | {"dreamer.batch_size": 64}
    assert resolve(flags=flags).size == "size25m"


def test_the_memory_estimate_matches_the_measurements():
    path = "benchmarks/speed/growth.json"
    with open(path) as file:
        runs = json.load(file)
    rows = next(run["growth"] for run in runs if "size" in run["growth"][0])
    for row in rows:
        config = resolve([f"size{row['size']}m"], flags=ANY_TASK).dreamer
        measured = (row["gpu_peak_gb"] - row["gpu_replay_gb"]) * GB
        assert config.training_memory == pytest.approx(measured, rel=0.06), row


@pytest.mark.parametrize(
    ("dynamics", "config"),
    [
        (RSSMDynamics, RSSMConfig(deter=2048, hidden=256, classes=16)),
        (DreamerV3TorchDynamics, DreamerV3TorchConfig()),
        (RecurrentVTADynamics, RecurrentVTAConfig()),
    ],
)
def test_worlds_declare_the_size_of_their_dynamics(dynamics, config):
    module = dynamics(1, {"action": Space(np.float32, (1,))}, config)
    weights = sum(x.numel() for x in module.parameters())
    expected = WEIGHTS_PER_SQUARED_UNIT * config.equivalent_units**2
    assert expected == pytest.approx(weights, rel=0.1)


@pytest.mark.parametrize("world", ["vta", "dreamerv3_torch", "my_world:MyWorld"])
def test_the_memory_estimate_is_that_of_the_configured_world(world):
    other = DreamerConfig(world=world)
    rssm = dataclasses.replace(other.rssm, deter=64)
    assert dataclasses.replace(other, rssm=rssm).training_memory == (
        other.training_memory
    )
    wide = RecurrentVTAConfig(abs_belief=8192, obs_belief=8192)
    grown = dataclasses.replace(other, vta=wide).training_memory
    assert (grown > 2 * other.training_memory) == (world == "vta")


@pytest.mark.parametrize(
    ("names", "flags"),
    [
        (["size12m"], {}),
        (["tiny"], {}),
        (["debug"], {}),
        ([], {"task": "catch"}),  # the preset of the suite sets sizes
        ([], {"dreamer.rssm.deter": 64}),
        ([], {r"dreamer\..*\.units": 64}),
    ],
)
def test_a_preset_or_flag_that_gives_a_size_is_used(names, flags):
    assert resolve(names, flags=ANY_TASK | flags).size == ""


def test_a_file_that_gives_a_size_is_used(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("task: gym_X-v1\ndreamer: {rssm: {deter: 128}}\n")
    config = resolve(files=[path])
    assert config.size == ""
    assert config.dreamer.enc == DreamerConfig().enc


@pytest.mark.parametrize("agent", ["iris", "vta", "bc", "random"])
def test_agents_without_sizes_choose_none(agent):
    assert resolve(flags={"agent": agent, "task": "gym_X-v1"}).size == ""


def test_a_size_as_a_flag_is_refused_with_the_preset():
    with pytest.raises(UserError, match=r"Fix: --configs size50m"):
        resolve(flags={"size": "size50m"})
    with pytest.raises(UserError, match=r"--size 64 64 has no effect"):
        resolve(flags={"size": ["64", "64"]})


@pytest.mark.extended
def test_a_resumed_run_keeps_its_size_and_says_so(tmp_path, gpu, capsys):
    task = {"task": "dummy_disc", "device": "cpu", "logdir": str(tmp_path / "run")}
    reverie.train(**{k.replace(".", "__"): v for k, v in (SHORT | task).items()})
    text = capsys.readouterr().err
    assert "network size size1m: chosen" in text
    assert "--configs size12m" in text
    saved = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert saved["size"] == "size1m"
    assert saved["dreamer"]["rssm"]["deter"] == 512

    gpu(80 * GB)
    words = [w for k, v in (SHORT | task).items() for w in (f"--{k}", str(v))]
    for extra in ([], ["--configs", "dmlab"]):
        flags = [w for w in words if w not in ("--device", "cpu")]
        config = command_config("train", [*flags, *extra])
        assert config.size == "size1m"
        assert config.dreamer.rssm.deter == 512
    assert main(["train", *words, "--run.steps", "90"]) == 0
    assert "size1m, chosen when the run was started" in capsys.readouterr().err

    assert main(["eval", str(tmp_path / "run"), "--episodes", "1"]) == 0
    result = json.loads((tmp_path / "run" / "eval.json").read_text())
    assert result["size"] == "size1m"


def test_all_trials_of_a_sweep_have_the_same_size(tmp_path):
    from reverie.cli.sweep import parse_sweep_arguments

    path = tmp_path / "sweep.yaml"
    path.write_text(
        "metric: report/loss\ngoal: min\nsettings: {task: gym_X-v1}\n"
        "ranges: {dreamer.opt.lr: {low: 1.0e-5, high: 1.0e-3}}\n"
    )
    spec = parse_sweep_arguments([str(path), "train"])
    words = spec.arguments({"dreamer.opt.lr": 1e-4})
    assert words[words.index("--configs") + 1] == "size1m"


@pytest.mark.extended
def test_a_capacity_that_the_user_did_not_give_is_fitted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory_plan, "available_memory", lambda: 10**6)
    monkeypatch.setattr(memory_plan, "free_space", lambda directory: 10**6)
    run = tmp_path / "run"
    settings = SHORT | {"task": "dummy_disc", "device": "cpu", "run.steps": 300}
    words = [w for k, v in settings.items() for w in (f"--{k}", str(v))]
    assert main(["train", *words, "--logdir", str(run)]) == 0
    text = capsys.readouterr().err
    assert "does not fit into memory or on disk, so its capacity is" in text
    fitted = read_config(run).replay
    assert fitted.fit
    assert fitted.capacity < 300
    # resumed by the same command, also with presets
    assert main(["train", *words, "--logdir", str(run), "--run.steps", "310"]) == 0
    assert read_config(run).replay == fitted

    given = ["--replay.capacity", "300", "--logdir", str(tmp_path / "other")]
    assert main(["train", *words, *given]) == 2
    error = capsys.readouterr().err
    assert "are latents of the agent" in error
    assert "--replay.capacity" in error.split("Fix:")[1]


def test_the_error_about_the_replay_names_the_flag_for_smaller_latents():
    config = resolve(["size50m"])
    assert sizes.smaller_size_flag(config) == "--configs size1m"
    assert sizes.smaller_size_flag(resolve(flags={"agent": "random"})) == ""
    assert sizes.smaller_size_flag(resolve(["size1m"])) == ""
    assert sizes.smaller_size_flag(resolve(["tiny"])) == ""  # is smaller
