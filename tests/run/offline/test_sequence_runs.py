"""Runs of VTA on sequence datasets and on recorded episodes."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from offline_helpers import agent_state, metric
from sequence_helpers import vta_settings

import reverie
from reverie.api import UserError
from reverie.cli import main as cli
from reverie.datasets.sequences import SEQUENCE_DATASETS
from reverie.datasets.synthetic.balls import BouncingBalls
from reverie.datasets.synthetic.maze import write_maze
from reverie.evaluation.boundaries import open_sequence_run
from reverie.run import checkpoint
from reverie.run.config import resolve
from reverie.run.offline.datasets import OfflineSequences
from reverie.run.offline.run import OfflineRun
from reverie.run.offline.train import offline
from reverie.run.train import train


def test_a_run_logs_evaluates_and_saves(run):
    assert len(metric(run, "train/temperature")) == 2
    assert len(metric(run, "report/boundaries/exact/f1")) >= 2
    assert [p.name[:12] for p in sorted((run / "ckpt").iterdir())] == [
        "000000000002",
        "000000000004",
    ]


def test_the_best_checkpoint_is_the_one_with_the_lowest_loss(run):
    (best,) = (run / "best").iterdir()
    losses = metric(run, "report/loss")
    kept = checkpoint.read_part(best, "loop")["best_loss"]
    assert kept == pytest.approx(min(losses), rel=1e-5)
    opened = open_sequence_run(run / "best", 5)
    assert float(opened.agent.world.updates) == int(best.name[:12])
    opened.feed.close()


def test_a_resumed_run_keeps_the_best_checkpoint_of_the_last_evaluation(
    tmp_path, monkeypatch
):
    """The last evaluation comes after the last save, so only `best` has its result."""
    losses = iter([9.0, 5.0, 7.0, 4.0])
    real = OfflineSequences.evaluate

    def evaluate(self, agent, feed):
        return {**real(self, agent, feed), "loss": torch.tensor(next(losses))}

    monkeypatch.setattr(OfflineSequences, "evaluate", evaluate)
    kept = []
    for steps in (1, 2, 3, 4):
        flags = {"run.steps": steps, "run.report_every": 0, "run.save_every": 0}
        path = train(vta_settings(tmp_path / "run", **flags))
        (best,) = (path / "best").iterdir()
        kept.append(int(best.name[:12]))
    assert kept == [1, 2, 2, 4]


def test_an_agent_trained_on_sequences_cannot_act(run, tmp_path, capsys):
    with pytest.raises(UserError, match=r"cannot act(.|\n)*draw boundaries"):
        reverie.load(run)
    assert cli.main(["eval", str(run), "--videos", "2"]) == 2
    assert "remove --videos" in capsys.readouterr().err
    assert cli.main(["eval", str(run), "--task", "catch"]) == 2
    assert "Task catch is an environment" in capsys.readouterr().err
    flags = {"bc.run": str(run), "offline.data": str(tmp_path)}
    with pytest.raises(UserError, match="run of dreamer or iris"):
        offline(resolve(["offline", "bc"], flags=flags))


def test_a_dataset_is_closed_once(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr(BouncingBalls, "close", lambda self: closed.append(self))
    train(vta_settings(tmp_path / "run", **{"run.steps": 1}))
    assert len(closed) == 1
    with pytest.raises(UserError, match="offline training has no epochs"):
        train(vta_settings(tmp_path / "other", **{"run.clock": "epochs"}))


def test_without_events_in_training_data_no_threshold_is_fitted(tmp_path):
    write_maze(tmp_path / "maze", train=2, test=2, length=40)
    for path in (tmp_path / "maze" / "train").iterdir():
        with np.load(path) as data:
            rows = {"video": data["video"], "actions": data["actions"]}
        np.savez(path, **rows)
    flags = {"sequences.folder": str(tmp_path / "maze"), "run.steps": 1}
    path = train(vta_settings(tmp_path / "run", "vta_maze", **flags))
    opened = open_sequence_run(path, 5)
    report = opened.agent.report(opened.feed)
    opened.feed.close()
    assert "boundaries/exact/f1" in report
    assert "baselines/periodic/exact/f1" in report
    assert "baselines/pixels/exact/f1" not in report


def test_a_resumed_sequence_run_equals_an_uninterrupted_one(tmp_path, run):
    train(vta_settings(tmp_path / "run", **{"run.steps": 2}))
    path = train(vta_settings(tmp_path / "run", **{"run.steps": 4}))
    ours, theirs = (agent_state(p) for p in (path, run))
    for key, value in theirs["world"].items():
        np.testing.assert_array_equal(ours["world"][key], value)


def test_a_resumed_run_keeps_the_threshold_of_the_pixel_baseline(tmp_path):
    flags = {"sequences.refresh": 1, "run.steps": 2}
    path = train(vta_settings(tmp_path / "run", **flags))
    (first,) = {*metric(path, "report/baselines/pixels/exact/f1")}
    train(vta_settings(path, **flags | {"run.steps": 8}))
    assert {*metric(path, "report/baselines/pixels/exact/f1")} == {first}


def test_a_sequence_run_has_no_episodes_to_export(tmp_path, run, capsys):
    assert cli.main(["data", "export", str(run), str(tmp_path / "npz")]) == 2
    assert "has no saved replay buffer" in capsys.readouterr().err


def test_initial_weights_of_another_sequence_run(tmp_path, run):
    config = vta_settings(tmp_path / "run", **{"run.from_checkpoint": str(run)})
    with OfflineRun(config, OfflineSequences(config)) as other:
        other.start()
        assert float(other.agent.world.updates) == 4
        assert other.clock.step == 0


def test_a_run_with_only_damaged_checkpoints_is_refused(tmp_path):
    path = train(vta_settings(tmp_path / "run", **{"run.keep_last": 1}))
    for part in (path / "ckpt").glob("*/agent.safetensors"):
        part.write_bytes(b"nothing")
    with (
        pytest.warns(UserWarning, match="damaged"),
        pytest.raises(UserError, match="damaged"),
    ):
        train(vta_settings(tmp_path / "run"))


def test_images_are_written_with_every_evaluation(tmp_path):
    flags = {"logger.outputs": ("jsonl", "media"), "run.steps": 1}
    path = train(vta_settings(tmp_path / "run", **flags))
    names = {p.name.split("-")[1] for p in (path / "media").glob("report-*.png")}
    assert names == {"boundaries", "imagined", "imagined_segments"}


def test_the_maze_is_used_with_its_actions(tmp_path):
    write_maze(tmp_path / "maze", train=2, test=2, length=12)
    flags = {"sequences.folder": str(tmp_path / "maze"), "run.steps": 2}
    path = train(vta_settings(tmp_path / "run", "vta_maze", **flags))
    opened = open_sequence_run(path, 5)
    assert opened.run.config.vta.world.loss == "gaussian"
    assert opened.agent.world.actions.width == 3
    assert np.isfinite(metric(path, "report/loss")).all()
    opened.feed.close()


def test_the_preset_of_the_authors_uses_no_actions(tmp_path):
    write_maze(tmp_path / "maze", train=2, test=2, length=12)
    flags = {"sequences.folder": str(tmp_path / "maze"), "run.steps": 2}
    both = ["vta_maze", "vta_authors"]
    path = train(vta_settings(tmp_path / "run", *both, **flags))
    opened = open_sequence_run(path, 5)
    vta = opened.run.config.vta.world
    assert (vta.loss, vta.levels, vta.bits, vta.bias) == (
        "gaussian",
        "spread",
        5,
        False,
    )
    assert opened.agent.world.actions is None
    assert np.isfinite(metric(path, "report/loss")).all()
    opened.feed.close()


def test_recorded_episodes_are_used_with_their_actions(tmp_path, capsys):
    rng = np.random.default_rng(0)
    (tmp_path / "episodes").mkdir()
    for index in range(3):
        image = rng.integers(0, 256, (12, 16, 16, 1), np.uint8)
        rows = {"image": image, "action": rng.normal(size=(12, 2))}
        np.savez(tmp_path / "episodes" / f"e{index}.npz", **rows)
    folder = str(tmp_path / "episodes")
    flags = {"offline.data": folder, "logger.outputs": ("terminal", "jsonl")}
    names = ["offline", "vta_episodes"]
    path = offline(vta_settings(tmp_path / "run", *names, **flags))
    assert "temperature" in capsys.readouterr().out
    assert cli.main(["eval", str(path), "--episodes", "3"]) == 0
    out = capsys.readouterr().out
    assert f"3 held-out sequences of {folder}" in out
    assert "F1" not in out  # there are no rewards, so there are no events


def test_a_sequence_dataset_sets_the_reconstruction_loss():
    assert resolve(["vta_maze"]).vta.world.loss == "gaussian"
    assert resolve(["vta_balls"]).vta.world.loss == "bernoulli"
    mixed = resolve(["vta_balls"], flags={"task": "sequences_maze"})
    assert mixed.vta.world.loss == "gaussian"
    assert resolve(["offline", "vta_episodes"]).vta.world.loss == "gaussian"
    flags = {"vta.world.loss": "gaussian"}
    assert resolve(["vta_balls"], flags=flags).vta.world.loss == "gaussian"


def test_an_agent_that_needs_an_environment_is_refused(tmp_path):
    with pytest.raises(UserError, match="--agent vta"):
        train(vta_settings(tmp_path / "run", agent="dreamer"))


def test_every_nth_checkpoint_is_kept(tmp_path):
    flags = {"run.save_every": 1, "run.keep_last": 1, "run.keep_every": 2}
    path = train(vta_settings(tmp_path / "run", **flags, **{"run.steps": 5}))
    steps = sorted(int(p.name[:12]) for p in (path / "ckpt").iterdir())
    assert steps == [2, 4, 5]


def test_losses_and_images_are_written_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    flags = {"logger.outputs": "tensorboard", "run.steps": 2}
    path = train(vta_settings(tmp_path / "run", **flags))
    events = EventAccumulator(str(path), {"images": 0, "scalars": 0}).Reload()
    tags = events.Tags()
    assert {"train/loss/image", "train/temperature", "report/loss"} <= {
        *tags["scalars"]
    }
    assert {"report/boundaries", "report/imagined", "report/imagined_segments"} <= {
        *tags["images"]
    }


def test_the_temperature_is_in_the_progress_line(tmp_path, capsys):
    flags = {"logger.outputs": "terminal", "run.steps": 2}
    train(vta_settings(tmp_path / "run", **flags))
    out = capsys.readouterr().out
    assert "temperature" in next(x for x in out.splitlines() if x.startswith("step"))


def test_data_commands_write_files_that_their_tasks_read(tmp_path, capsys):
    few = ["--train", "3", "--test", "3", "--length", "12"]
    for name in ("balls", "maze"):
        folder = str(tmp_path / name)
        assert cli.main(["data", name, "--out", folder, *few]) == 0
        assert (
            f"--task sequences_{name} --sequences.folder {folder}"
            in capsys.readouterr().out
        )
        flags = {"sequences.folder": folder, "run.steps": 1}
        config = vta_settings(tmp_path / f"run_{name}", f"vta_{name}", **flags)
        assert (train(config) / "ckpt").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["data", "balls"], "needs an output folder"),
        (["data", "balls", "--out"], "--out needs a value.\n  Fix: --out VALUE"),
        (
            ["data", "maze", "--out", "x", "--train", "-1"],
            "train must be at least 1",
        ),
        (["data", "maze", "--uot", "x"], "no option --uot"),
        (["data", "maze", "--out", "x", "--length", "0"], "length must be at least 1"),
        (["data", "balls", "--out", "x", "--train", "0"], "train must be at least 1"),
        (
            ["data", "balls", "--out", "x", "--dt", "nan"],
            "--dt must be above 0",
        ),
        (["train", "--configs", "vta_balls", "--sequences.dt", "inf"], "dt must be"),
        (["train", "--configs", "vta_balls", "--vta.world.anneal", "-1"], "anneal"),
        (["train", "--configs", "vta_balls", "--vta.world.obs_std", "nan"], "finite"),
        (["train", "--configs", "vta_balls", "--vta.world.length", "1"], "length at"),
        (["train", "--configs", "vta_balls", "--vta.world.levels", "spread"], "spre"),
        (["data", "mazes"], "Did you mean 'maze'"),
        (
            ["train", "--configs", "vta_maze", "--sequences.folder", "x"],
            "data maze --out x",
        ),
        (["train", "--task", "sequences_bals"], "sequences_balls"),
        (["train", "--agent", "vta"], "--task sequences_balls"),
        (
            ["train_eval", "--agent", "vta", "--task", "gym_CartPole-v1"],
            "an environment",
        ),
        (
            ["offline", "--configs", "vta_episodes", "--offline.data", "x"],
            "x does not exist",
        ),
        (["bench", "--configs", "vta_balls", "--agent", "dreamer"], "--agent vta"),
        (["check-env", "sequences_balls"], "has no environment"),
    ],
)
def test_invalid_commands_exit_with_2_and_a_message(
    tmp_path, monkeypatch, capsys, arguments, complaint
):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_sequence_dataset_of_the_user(tmp_path, monkeypatch):
    class Dim(BouncingBalls):
        loss = "gaussian"

        def batch(self, step):
            rows = super().batch(step)
            return {**rows, "image": rows["image"] // 2}

    module = type(sys)("dim_source")
    module.Dim = Dim
    monkeypatch.setitem(sys.modules, "dim_source", module)
    monkeypatch.setitem(SEQUENCE_DATASETS, "dim", "dim_source:Dim")
    config = vta_settings(tmp_path / "run", task="sequences_dim", **{"run.steps": 1})
    assert config.vta.world.loss == "gaussian"
    assert (train(config) / "ckpt").exists()
