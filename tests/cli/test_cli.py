"""What a user can get wrong on the command line: one sentence, its fix, exit code 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import yaml

from reverie.cli.main import main

BAD = {
    "unknown command": ("tarin", r"'tarin'.*Did you mean 'train'"),
    "unknown flag": ("train --run.train_rato 3", r"Did you mean 'run\.train_ratio'"),
    "short flag": ("train --train_ratio 3", r"Did you mean 'run\.train_ratio'"),
    "statistics of nothing": (
        "train --configs debug standardize --task dummy_disc --logdir run",
        r"standardize_batch",
    ),
    "range of slowvalue.every": ("train --dreamer.slowvalue.every 0", r"at least 1"),
    "range of retnorm.perclo": ("train --dreamer.retnorm.perclo 200", r"0 to 100"),
    "range of opt.wdregex": ("train --dreamer.opt.wdregex (", r"no pattern"),
    "range of rssm.unimix": ("train --dreamer.rssm.unimix 2", r"from 0 to 1"),
    "range of policy.unimix": ("train --dreamer.policy.unimix 2", r"from 0 to 1"),
    "range of dec.bspace": ("train --dreamer.dec.bspace -1", r"at least 0"),
    "range of imag_loss.lam": ("train --dreamer.imag_loss.lam 3", r"from 0 to 1"),
    "range of opt.warmup": ("train --dreamer.opt.warmup -3", r"negative"),
    "same end": ("train --vta.layers 3", r"Did you mean 'vta\.world\.layers'"),
    "bad value": ("train --run.steps many", r"run\.steps should be a whole number"),
    "bad choice": ("train --precision float8", r"one of auto, float32"),
    "unknown block": ("train --configs crafterr", r"Did you mean 'crafter'"),
    "no rate": ("train --dreamer.opt.lr nan", r"opt: lr, agc and wd must not be"),
    "no momentum": ("train --vta.opt.beta1 nan", r"opt: beta1 and beta2 must be"),
    "no task": ("train --task", r"--task needs a value"),
    "unknown task": ("train --task catsh", r"catch"),
    "unknown suite": ("train --task ataria_pong", r"atari"),
    "unknown game": ("train --task atari_pnog", r"pong"),
    "unknown device": ("train --device qpu", r"cuda, cpu or mps"),
    "tpu": ("train --device tpu", r"does not support TPUs"),
    "stray word": ("train catch", r"'catch' stands where a flag"),
    "missing package": ("train --task dmlab_rooms_watermaze", r"install_dmlab"),
    "missing config file": ("train --config nowhere.yaml", r"nowhere\.yaml"),
    "bad output": ("train --logger.outputs tensorbored", r"tensorbored"),
    "eval without run": ("eval", r"reverie eval LOGDIR"),
    "eval of nothing": ("eval nowhere", r"no checkpoint in nowhere"),
    "episodes in words": ("eval run --episodes ten", r"--episodes takes a whole"),
    "episodes squared": ("eval run --episodes ²", r"--episodes takes a whole"),
    "one task to bench": ("bench envs --task catch", r"Did you mean 'tasks'"),
    "another demo": ("demo --configs crafter", r"leave out --configs"),
    "no steps": ("train --run.steps 0", r"at least 1"),
    "deterministic by wall clock": ("train --deterministic", r"--run\.clock steps"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_gets_one_sentence_with_its_fix(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words, says = BAD[case]
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert re.search(says, error), error
    assert "Fix:" in error
    assert "Traceback" not in error


def test_a_logdir_that_cannot_be_written_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train", "--logdir", str(tmp_path / "file" / "run")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file" / "run") in error
    assert "--logdir" in error


def test_help_lists_every_command_and_block(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("train", "eval", "check-env", "config"))
    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("size12m", "atari100k", "crafter", "debug"))
    assert main(["--version"]) == 0


def resolved(capsys, words: str) -> dict:
    assert main(["config", *words.split()]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def test_blocks_stack_from_left_to_right_and_flags_come_last(capsys):
    found = resolved(capsys, "--configs crafter size50m --run.train-ratio 64")
    assert found["task"] == "crafter_reward"
    assert found["run"]["train_ratio"] == 64
    assert found["run"]["steps"] == 1_100_000
    assert found["dreamer"]["rssm"]["deter"] == 4096
    swapped = resolved(capsys, "--configs size50m size1m")
    assert swapped["dreamer"]["rssm"]["deter"] == 512


def test_both_ways_to_ask_for_the_100k_settings_mean_the_same(capsys):
    by_block = resolved(capsys, "--configs atari100k --task atari_pong")
    by_task = resolved(capsys, "--task atari100k_pong")
    assert by_block["env"]["atari"] == by_task["env"]["atari"]
    assert by_block["run"] == by_task["run"]
    assert by_block["env"]["atari"]["size"] == [64, 64]
    assert by_block["run"]["steps"] == 110_000
    plain = resolved(capsys, "--task atari_pong")
    assert plain["env"]["atari"]["size"] == [96, 96]


def test_every_task_block_of_the_original_exists(capsys):
    expected = {
        # block: (steps, train_ratio, envs)
        "minecraft": (1e10, 32, 16),
        "dmlab": (2.6e7, 32, 16),
        "atari": (5.1e7, 32, 16),
        "procgen": (1.1e8, 64, 16),
        "atari100k": (1.1e5, 256, 1),
        "crafter": (1.1e6, 512, 1),
        "dmc_proprio": (1.1e6, 1024, 16),
        "dmc_vision": (1.1e6, 256, 16),
        "bsuite": (1e10, 1024, 1),
        "loconav": (1e10, 256, 16),
    }
    for block, numbers in expected.items():
        run = resolved(capsys, f"--configs {block}")["run"]
        assert (run["steps"], run["train_ratio"], run["envs"]) == numbers, block
    for block in ("memorymaze", "pinpad", "catch", "debug"):
        resolved(capsys, f"--configs {block}")


def test_a_config_file_is_laid_between_blocks_and_flags(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"run": {"steps": 1000, "envs": 3}, ".*\\\\.units": 7}')
    found = resolved(capsys, f"--configs size1m --config {path} --run.envs 5")
    assert (found["run"]["steps"], found["run"]["envs"]) == (1000, 5)
    assert found["dreamer"]["enc"]["units"] == 7


def test_a_printed_config_reads_back_as_itself(capsys, tmp_path):
    path = tmp_path / "all.yaml"
    first = resolved(capsys, "--configs atari100k size12m")
    path.write_text(yaml.safe_dump(first))
    assert resolved(capsys, f"--config {path}") == first


def test_the_console_script_exits_2_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "reverie.cli.main", "train", "--nope", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_with_a_verb_lists_its_options(capsys):
    assert main(["data", "convert", "--help"]) == 0
    out = capsys.readouterr().out
    assert "reverie data convert SRC DST" in out
    assert "  --jobs 1\n      Threads that work side by side." in out
    assert "  --map.final repeat\n      What to do about the missing last" in out
    assert main(["data", "--help", "maze"]) == 0
    assert "--length 300" in capsys.readouterr().out
    assert main(["data", "--help"]) == 0
    assert "VERB --help" in capsys.readouterr().out
