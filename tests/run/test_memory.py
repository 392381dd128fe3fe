"""Runs that do not fit into memory: refused before anything is built, or explained."""

from __future__ import annotations

import errno
import resource
import subprocess
import sys

import numpy as np
import pytest
import torch

from reverie.agents.dreamer.agent import Dreamer
from reverie.api import UserError
from reverie.cli.main import main
from reverie.run import memory
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import resolve
from reverie.run.memory import check_memory, is_out_of_memory
from reverie.run.train import train

HUGE = [
    ("dreamer", "run.envs"),
    ("dreamer", "run.eval_envs"),
    ("dreamer", "dreamer.batch_size"),
    ("dreamer", "dreamer.batch_length"),
    ("dreamer", "dreamer.imag_length"),
    ("iris", "iris.training.tokenizer.batch"),
    ("iris", "iris.training.world_model.batch"),
    ("iris", "iris.training.actor_critic.batch"),
    ("bc", "bc.batch_size"),
    ("vta", "vta.batch_size"),
    ("vta", "vta.world.length"),
]


def settings(path, *presets: str, **flags):
    flags = {
        "logdir": str(path),
        "task": "catch",
        "device": "cpu",
        "run.envs": 2,
        "run.steps": 200,
        "run.clock": "steps",
        "run.save_every": 50,
        "run.report_every": 0,
        "logger.outputs": "jsonl",
        **flags,
    }
    return resolve(["debug", *presets], flags=flags)


@pytest.mark.parametrize(("agent", "setting"), HUGE)
def test_huge_settings_are_refused_with_a_fix_that_works(tmp_path, agent, setting):
    flags = {"agent": agent, setting: "1e9"}
    with pytest.raises(UserError) as error:
        check_memory(settings(tmp_path, **flags))
    text, _, fix = str(error.value).partition("\n  Fix: ")
    assert setting in text
    assert "1,000,000,000" in text or "1000000000" in text
    name, value = fix.split()
    assert name == f"--{setting}"
    check_memory(settings(tmp_path, **{**flags, setting: value}))


@pytest.mark.parametrize("setting", ["run.envs", "dreamer.batch_size"])
def test_refused_runs_build_nothing(tmp_path, monkeypatch, capsys, setting):
    monkeypatch.chdir(tmp_path)
    words = f"train --configs debug --logdir run --device cpu --{setting} 1e9"
    assert main(words.split()) == 2
    assert f"  Fix: --{setting} 16" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("agent", "setting", "value"),
    [
        ("dreamer", "dreamer.policy.layers", 10_000_000),
        ("dreamer", "dreamer.rssm.dynlayers", 1001),
        ("dreamer", "explore.ensemble.models", 1e6),
        ("dreamer", "dreamer.value.units", 200_000),
        ("iris", "iris.world_model.transformer.layers", 1e6),
        ("iris", "iris.world_model.transformer.width", 1 << 20),
        ("vta", "vta.world.layers", 1e6),
        ("bc", "bc.head.layers", 1e6),
    ],
)
def test_networks_that_are_too_large_are_not_built(tmp_path, agent, setting, value):
    more = {"dreamer.value.layers": 3, "iris.world_model.transformer.layers": 2}
    flags = {"agent": agent, **more, setting: value}
    with pytest.raises(UserError, match=f"--{setting} {int(value)}") as error:
        check_memory(settings(tmp_path, **flags))
    name, fix = str(error.value).partition("\n  Fix: --")[2].split()
    assert name == setting
    check_memory(settings(tmp_path, **{**flags, setting: fix}))


def test_processes_and_estimates_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "available_memory", lambda: 10**9)
    check_memory(settings(tmp_path))
    many = {"env.vector.workers": 60, "run.envs": 60}
    with pytest.raises(UserError, match=r"60 worker processes need at least 1\.2 GB"):
        check_memory(settings(tmp_path, **many))
    monkeypatch.setattr(memory, "available_memory", lambda: 10**8)
    with pytest.raises(UserError, match=r"about .* GB of memory.*\n  Fix: --configs "):
        check_memory(resolve(["size400m"], flags={"device": "cpu"}))


def fail_to_allocate(kind: str) -> None:
    if kind == "gpu":
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total "
            "capacity of 139.80 GiB of which 1.20 GiB is free."
        )
    if kind == "cublas":
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...")
    if kind == "torch":
        torch.empty(1 << 58, dtype=torch.uint8)
    if kind == "numpy":
        np.empty(1 << 58, np.uint8)
    if kind == "mmap":
        raise OSError(errno.ENOMEM, "Cannot allocate memory")


MESSAGES = {
    "gpu": "The GPU ran out of memory while training: 2.50 GiB could not be allocated",
    "cublas": r"The GPU ran out of memory while training\.",
    "torch": r"This machine ran out of memory while training: 288230.4 TB could",
    "numpy": "This machine ran out of memory while training: 256. PiB could",
    "mmap": r"This machine ran out of memory while training\.",
}


@pytest.mark.extended_except("gpu", "numpy")
@pytest.mark.parametrize("kind", list(MESSAGES))
def test_running_out_of_memory_in_training_is_explained(tmp_path, monkeypatch, kind):
    config = settings(tmp_path, **{"dreamer.batch_size": 12, "run.train_ratio": 8})

    def fail_after_a_save(agent, feed):
        if Checkpoints(tmp_path / "ckpt").paths():
            fail_to_allocate(kind)
        return {}

    monkeypatch.setattr(Dreamer, "train", fail_after_a_save)
    with pytest.raises(UserError, match=MESSAGES[kind]) as error:
        train(config)
    text = str(error.value)
    assert "--dreamer.batch_size 6 (now 12)" in text
    assert "new --logdir" in text
    assert Checkpoints(tmp_path / "ckpt").newest()  # the last checkpoint is kept


def test_other_errors_are_not_explained():
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(OSError(errno.EIO, "I/O error"))
    assert not is_out_of_memory(ValueError("out of memory"))


def limit_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30))


@pytest.mark.extended
def test_running_out_of_memory_while_building_is_explained(tmp_path):
    sizes = "--dreamer.policy.units 4000000000 --dreamer.policy.layers 1"
    words = f"train --configs debug --device cpu --run.steps 10 {sizes}"
    done = subprocess.run(
        [sys.executable, "-m", "reverie", *words.split(), "--logdir", tmp_path / "run"],
        capture_output=True,
        text=True,
        preexec_fn=limit_memory,
        timeout=300,
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "ran out of memory while building the agent: 256 GB could" in done.stderr
