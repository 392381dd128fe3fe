"""Options of DreamerV3: runs with them resume bit for bit, settings without effect."""

from __future__ import annotations

import pytest
from state_helpers import assert_same

from reverie.api import UserError
from reverie.run import checkpoint
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import resolve
from reverie.run.train import train
from reverie.run.used_settings import resolve_for_command

OPTIONS = {
    "curious_replay": (["curious_replay"], {}),
    "harmony": ([], {"dreamer.harmony": True}),
    "prototypes": ([], {"dreamer.representation": "prototypes"}),
    "infonce": ([], {"dreamer.representation": "infonce"}),
    "barlow": ([], {"dreamer.representation": "barlow", "dreamer.draw": True}),
}


def run(path, steps, presets, flags):
    flags = {
        "logdir": str(path),
        "task": "catch",
        "run.steps": steps,
        "run.envs": 2,
        "run.train_ratio": 16,
        "run.save_every": 60,
        "run.report_every": 50,
        "replay.capacity": 120,
        "logger.outputs": "jsonl",
        **flags,
    }
    train(resolve(["debug", "deterministic", *presets], flags=flags))
    newest = Checkpoints(path / "ckpt").newest()
    parts = {x: checkpoint.read_part(newest, x) for x in ("agent", "replay")}
    parts["replay"].pop("files")
    return parts


@pytest.mark.extended_except("curious_replay")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name):
    presets, flags = OPTIONS[name]
    whole = run(tmp_path / "whole", 160, presets, flags)
    run(tmp_path / "split", 100, presets, flags)
    assert_same(whole, run(tmp_path / "split", 160, presets, flags))


def test_curious_replay_samples_in_proportion_to_priorities_only():
    replay = resolve(["curious_replay"]).replay
    assert (replay.fracs.uniform, replay.fracs.priority, replay.online) == (0, 1, False)
    config = resolve(["debug", "curious_replay"])
    assert config.dreamer.priosignal == "model"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"replay.prio.exponent": 0.5}, "curious_replay"),
        ({"replay.recexp": 2.0}, "replay.fracs.recency"),
        ({"dreamer.harmony_opt.lr": 0.1}, "--dreamer.harmony True"),
        ({"dreamer.priosignal": "model"}, "--configs curious_replay"),
        ({"dreamer.loss_scales.boundary": 2.0}, "the world model is 'rssm'"),
        (
            {"dreamer.world": "vta", "dreamer.loss_scales.boundary_rate": 2.0},
            r"--dreamer\.vta\.boundary_rate",
        ),
        *(
            (
                {"dreamer.repval_loss": False, f"dreamer.{name}": value},
                r"add --dreamer\.repval_loss True",
            )
            for name, value in {
                "loss_scales.repval": 2.0,
                "repl_loss.lam": 0.5,
                "repval_grad": False,
            }.items()
        ),
    ],
)
def test_settings_without_effect_are_refused(flags, message):
    with pytest.raises(UserError, match=message):
        resolve_for_command("train", flags=flags)


def test_scales_of_losses_that_are_computed_are_accepted():
    flags = {"dreamer.loss_scales.repval": 2.0, "dreamer.repl_loss.lam": 0.5}
    resolve_for_command("train", flags=flags)
    rate = {"dreamer.vta.boundary_rate": 0.2, "dreamer.loss_scales.boundary_rate": 2.0}
    resolve_for_command("train", flags={"dreamer.world": "vta", **rate})


@pytest.mark.parametrize("value", [-1.0, "nan", "inf"])
def test_loss_scales_must_be_finite_and_not_negative(value):
    with pytest.raises(UserError, match=r"loss_scales\.rew must be .*(.|\n)*Fix: --"):
        resolve(flags={"dreamer.loss_scales.rew": value})
    resolve(flags={"dreamer.loss_scales.rew": 0.0})


def test_offline_training_refuses_priorities():
    with pytest.raises(UserError, match="'curious_replay' has no effect"):
        resolve_for_command("offline", ["curious_replay"])
    with pytest.raises(UserError, match=r"dreamer\.priosignal has no effect"):
        resolve_for_command("offline", flags={"dreamer.priosignal": "model"})


def test_an_agent_without_priorities_refuses_curious_replay():
    with pytest.raises(UserError, match=r"replay\.fracs\.uniform 1"):
        resolve(["curious_replay"], flags={"agent": "iris"})
    fixed = {"replay.fracs.priority": 0.0, "replay.fracs.uniform": 1.0}
    resolve(["curious_replay"], flags={"agent": "iris", **fixed})


@pytest.mark.parametrize(
    ("name", "value"),
    [("initial", "nan"), ("exponent", "inf"), ("offset", "nan"), ("visit_scale", -1)],
)
def test_priorities_must_be_numbers(name, value):
    with pytest.raises(UserError, match="only initial may be infinite"):
        resolve(["curious_replay"], flags={f"replay.prio.{name}": value})


def test_a_decay_without_a_scale_is_refused():
    flags = {"replay.prio.visit_scale": 0, "replay.prio.visit_decay": 0.5}
    with pytest.raises(UserError, match="visit_scale"):
        resolve_for_command("train", ["curious_replay"], flags=flags)
