"""Sweep files and the command line of `reverie sweep`."""

from __future__ import annotations

import pytest
import yaml
from sweep_helpers import rows

from reverie.cli.main import main

VALID = {
    "metric": "episode/score",
    "goal": "max",
    "ranges": {"run.train_ratio": {"low": 1, "high": 8}},
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranges": {"dreamer.opt.lrr": [1]}}, "Did you mean 'dreamer.opt.lr'?"),
        ({"ranges": {}}, "has no ranges"),
        ({"ranges": None}, "has no ranges"),
        ({"ranges": [1]}, "`ranges` in"),
        ({"ranges": {"run.steps": []}}, "range of run.steps is empty"),
        ({"ranges": {"run.steps": 3}}, "range of run.steps is 3"),
        ({"ranges": {"run.steps": {"low": 5, "high": 2}}}, "5 is above 2"),
        ({"ranges": {"run.steps": {"low": 5}}}, "has no `high`"),
        ({"ranges": {"run.steps": {"low": 1, "hihg": 2}}}, "Did you mean 'high'?"),
        ({"ranges": {"run.steps": {"low": 1, "high": 2.5}}}, "a whole number"),
        ({"ranges": {"run.steps": {"low": "a", "high": 2}}}, "a whole number"),
        (
            {"ranges": {"run.train_ratio": {"low": 0, "high": 2, "log": True}}},
            "starts at 0",
        ),
        (
            {"ranges": {"run.steps": {"low": 1, "high": 2, "log": 3}}},
            "needs true or false",
        ),
        (
            {"ranges": {"run.steps": {"low": 1, "high": 2, "log": True, "step": 1}}},
            "both `log` and `step`",
        ),
        ({"ranges": {"run.steps": {"low": 1, "high": 2, "count": 0}}}, "above zero"),
        ({"ranges": {"task": {"low": 1, "high": 2}}}, "is not a number"),
        ({"ranges": {"run.steps": [10, "ten"]}}, "must be a whole number"),
        ({"ranges": {"run.steps": [{"low": 1}]}}, "is not a valid value"),
        ({"ranges": {"logdir": ["a"]}}, "sets logdir"),
        ({"ranges": {"seed": [1, 2]}, "seeds": 2}, "range of seeds"),
        ({"settings": {"run": {"train_ratio": 3}}}, "both a range and a fixed"),
        ({"settings": {"run.stps": 3}}, "Did you mean 'run.steps'?"),
        ({"settings": {"configs": ["nosuch"]}}, "no preset 'nosuch'"),
        ({"metric": ""}, "has no metric"),
        ({"goal": None}, "has no goal"),
        ({"goal": "minimise"}, "goal must be one of"),
        ({"command": "trian"}, "Did you mean 'train'?"),
        ({"command": "bench"}, "'bench' is not a training command"),
        ({"rangse": {}}, "Did you mean 'ranges'?"),
        ({"run.steps": 3}, "is a setting of runs"),
        ({"jobs": 0}, "jobs must be at least 1"),
        ({"jobs": 10**9}, "jobs must be at most 10,000"),
        ({"seeds": 10**9}, "seeds must be at most 10,000"),
        (
            {"sampler": "grid", "ranges": {"run.steps": {"low": 1, "high": 1e12}}},
            "1,000,000,000,000 values",
        ),
        (
            {
                "sampler": "grid",
                "ranges": {
                    "run.steps": {"low": 1, "high": 1000},
                    "seed": {"low": 1, "high": 1000},
                },
            },
            "1,000,000 points",
        ),
        ({"eval": "--episods 3"}, "Did you mean 'episodes'?"),
        ({"eval": "--task 'reach"}, "Cannot parse the flags"),
        (
            {"sampler": "grid", "ranges": {"run.train_ratio": {"low": 1, "high": 2}}},
            "count",
        ),
    ],
)
def test_invalid_sweep_file_is_refused_before_the_first_run(
    tmp_path, capsys, changes, words
):
    data = {k: v for k, v in {**VALID, **changes}.items() if v is not None}
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(data))
    assert main(["sweep", str(path), "--logdir", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "  Fix: " in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ranges: {a: [1", "is not valid"),
        ("- a", "not a mapping"),
        ("", "has no metric"),
        (None, "Cannot read the config file"),
    ],
)
def test_error_names_a_file_that_cannot_be_read(tmp_path, capsys, text, words):
    path = tmp_path / "sweep.yaml"
    if text is not None:
        path.write_text(text)
    assert main(["sweep", str(path)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs a YAML file"),
        (["FILE", "train", "more"], "needs a YAML file"),
        (["FILE", "--job", "2"], "Did you mean 'jobs'?"),
        (["FILE", "--jobs", "two"], "jobs must be a whole number"),
        (["FILE", "--run.train_ratio", "2"], "both a range and a fixed value"),
        (["FILE", "trian"], "Did you mean 'train'?"),
    ],
)
def test_invalid_command_line_is_refused(tmp_path, capsys, arguments, words):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(VALID))
    assert main(["sweep", *(a.replace("FILE", str(path)) for a in arguments)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.extended
def test_sweep_command_runs_the_train_command(tmp_path, capsys):
    path, folder = tmp_path / "sweep.yaml", tmp_path / "out"
    data = {
        "metric": "episode/length",
        "goal": "min",
        "sampler": "grid",
        "settings": {"agent": "random", "run": {"log_every": 0}},
        "ranges": {"run.steps": [400], "task": ["catch", "gym_NoSuch-v0"]},
    }
    path.write_text(yaml.safe_dump(data))
    arguments = ["sweep", str(path), "train", "--jobs", "2", "--trials", "2"]
    assert main([*arguments, "--logdir", str(folder), "--seed", "5"]) == 0
    assert "Best: reverie train --agent random" in capsys.readouterr().out
    states = {row["task"]: row["state"] for row in rows(folder)}
    assert states == {"catch": "done", "gym_NoSuch-v0": "failed"}
    config = yaml.safe_load((folder / "trials/0000-seed0/config.yaml").read_text())
    assert (config["seed"], config["run"]["steps"]) == (5, 400)
    # the folder contains the specification; all trials are finished
    assert main(["sweep", "--logdir", str(folder)]) == 0
    assert len(rows(folder)) == 2
