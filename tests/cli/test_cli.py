"""The command line: help, errors with their fix and exit code, resolved configs."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys

import pytest
import yaml

from reverie.cli.data import data_commands
from reverie.cli.main import COMMANDS, main
from reverie.cli.train import garbage_collection_disabled

INVALID = r"""
tarin | 'tarin'.*Did you mean 'train'
train --run.train_rato 3 | Did you mean 'run\.train_ratio'
train --train_ratio 3 | is `--run\.train_ratio` in Reverie
train --configs debug standardize --task dummy_disc --logdir run | standardize_batch
train --dreamer.slowvalue.every 0 | at least 1
train --dreamer.retnorm.perclo 200 | 0 to 100
train --dreamer.opt.wdregex ( | not a regular
train --dreamer.rssm.unimix 2 | from 0 to 1
train --dreamer.policy.unimix 2 | from 0 to 1
train --dreamer.dec.bspace -1 | at least 0
train --dreamer.imag_loss.lam 3 | from 0 to 1
train --dreamer.opt.warmup -3 | negative
train --agent vta --vta.length 3 | Did you mean 'vta\.world\.length'
train --vta.length 3 | no setting 'vta\.length' \(the flag --vta\.length\)\.\n
train --run.steps many | run\.steps must be a whole number
train --precision float8 | one of auto, float32
train --configs crafterr | Did you mean 'crafter'
train --dreamer.opt.lr nan | opt: lr and eps must not be
train --vta.opt.beta1 nan | opt: beta1 and beta2 must be
train --task | --task needs a value
train --task catsh | catch
train --task ataria_pong | atari
train --task atari_pnog | pong
train --device qpu | cuda, cpu or mps
train --device tpu | no device 'tpu'
train catch | Unexpected argument 'catch'
train --task dmlab_rooms_watermaze | install_dmlab
train --config nowhere.yaml | nowhere\.yaml
train --logger.outputs tensorbored | tensorbored
eval | reverie eval LOGDIR
eval nowhere | nowhere does not exist
eval run --episodes ten | episodes must be a whole
data convert SRC DST --map.final drop | no option --map\.final(.|\n)*--map\.last_obs
eval run --episodes ² | episodes must be a whole
eval run --episodes 0 | episodes must be at least 1
bench envs --task catch | Did you mean 'tasks'
demo --configs crafter | remove --configs and --config; single settings
plot run --configs crafter | remove --configs and --config\.
train --run.steps 0 | at least 1
train --deterministic | --run\.clock steps
"""


@pytest.mark.parametrize("case", INVALID.strip().splitlines())
def test_invalid_input_exits_with_2_and_a_fix(case, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words, message = case.split(" | ")
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Fix:" in error
    assert "Traceback" not in error


def test_error_names_a_logdir_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train", "--logdir", str(tmp_path / "file" / "run")]) == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "file" / "run") in error
    assert "--logdir" in error


def test_help_lists_every_command_and_preset(capsys):
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


def test_presets_apply_from_left_to_right_and_flags_last(capsys):
    config = resolved(capsys, "--configs crafter size50m --run.train-ratio 64")
    assert config["task"] == "crafter_reward"
    assert config["run"]["train_ratio"] == 64
    assert config["run"]["steps"] == 1_100_000
    assert config["dreamer"]["rssm"]["deter"] == 4096
    swapped = resolved(capsys, "--configs size50m size1m")
    assert swapped["dreamer"]["rssm"]["deter"] == 512


def test_preset_and_task_atari100k_give_the_same_settings(capsys):
    by_preset = resolved(capsys, "--configs atari100k --task atari_pong")
    by_task = resolved(capsys, "--task atari100k_pong")
    assert by_preset["env"]["atari"] == by_task["env"]["atari"]
    assert by_preset["run"] == by_task["run"]
    assert by_preset["env"]["atari"]["size"] == [64, 64]
    assert by_preset["run"]["steps"] == 110_000
    plain = resolved(capsys, "--task atari_pong")
    assert plain["env"]["atari"]["size"] == [96, 96]


STEPS_RATIO_ENVS = """
minecraft    1e10   32  16
dmlab        2.6e7  32  16
atari        5.1e7  32  16
procgen      1.1e8  64  16
atari100k    1.1e5  256  1
crafter      1.1e6  512  1
dmc_proprio  1.1e6  1024 16
dmc_vision   1.1e6  256  16
bsuite       1e10   1024 1
loconav      1e10   256  16
"""


def test_task_presets_have_the_steps_and_ratios_of_the_original(capsys):
    for line in STEPS_RATIO_ENVS.strip().splitlines():
        preset, *numbers = line.split()
        run = resolved(capsys, f"--configs {preset}")["run"]
        found = run["steps"], run["train_ratio"], run["envs"]
        assert found == tuple(map(float, numbers)), preset
    for preset in ("memorymaze", "pinpad", "catch", "debug"):
        resolved(capsys, f"--configs {preset}")


def test_config_file_overrides_presets_and_flags_override_it(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"run": {"steps": 1000, "envs": 3}, ".*\\\\.units": 7}')
    config = resolved(capsys, f"--configs size1m --config {path} --run.envs 5")
    assert (config["run"]["steps"], config["run"]["envs"]) == (1000, 5)
    assert config["dreamer"]["enc"]["units"] == 7


def test_printed_config_reads_back_unchanged(capsys, tmp_path):
    path = tmp_path / "all.yaml"
    first = resolved(capsys, "--configs atari100k size12m")
    path.write_text(yaml.safe_dump(first))
    assert resolved(capsys, f"--config {path}") == first


def test_python_m_reverie_exits_with_2_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "reverie", "train", "--nope", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_of_a_data_command_lists_its_options(capsys):
    assert main(["data", "convert", "--help"]) == 0
    out = capsys.readouterr().out
    assert "reverie data convert SRC DST" in out
    assert "  --jobs int  (default: 1)\n      " in out
    assert "  --map.last_obs {repeat,drop}  (default: repeat)" in out
    assert main(["data", "--help", "maze"]) == 0
    assert "--length int  (default: 300)" in capsys.readouterr().out
    assert main(["data", "--help"]) == 0
    assert "COMMAND --help" in capsys.readouterr().out


@pytest.mark.parametrize("name", data_commands())
def test_help_of_data_describes_every_command(name, capsys):
    assert main(["data", "--help"]) == 0
    (row,) = re.findall(rf"^  {name} +(\w.+\.)$", capsys.readouterr().out, re.M)
    assert main(["data", name, "--help"]) == 0
    assert f"\n  {row}\n\nOptions\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "task", "agent"),
    [
        ("train", "catch", "dreamer"),
        ("offline", "recordings", "dreamer"),
        ("bc", "recordings", "bc"),
    ],
)
def test_help_prints_the_defaults_of_the_command(command, task, agent, capsys):
    assert main([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"--task str  (default: {task})" in out
    assert f"--agent str  (default: {agent})" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"  reverie {command}" in capsys.readouterr().out


def test_train_help_lists_the_groups_of_settings(capsys):
    assert main(["train", "--help"]) == 0
    out = capsys.readouterr().out
    for group in ("run", "env", "replay", "logger", "dreamer", "iris", "bc", "vta"):
        assert re.search(rf"^  --{group}\.\* +\w", out, re.M), group
    assert "reverie config --explain PREFIX" in out


def test_explain_prints_type_default_and_meaning(capsys):
    assert main(["config", "--explain", "run.train-ratio"]) == 0
    out = capsys.readouterr().out
    assert re.fullmatch(
        r"  --run.train_ratio float  \(default: 32.0\)\n( {6}\w.*\n)+", out
    )
    assert main(["config", "--explain", "dreamer.rssm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    flags = [line for line in lines if line.startswith("  --")]
    assert flags
    assert all(line.startswith("  --dreamer.rssm.") for line in flags)
    assert main(["config", "--explain"]) == 0
    assert "--dreamer.*" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("dremer.rssm", "Did you mean 'dreamer.rssm'?"),
        ("run.stepz", "Did you mean 'run.steps'?"),
        ("run env", "takes one prefix"),
        ("run --configs debug", "takes one prefix"),
    ],
)
def test_explain_refuses_unknown_prefixes(words, message, capsys):
    assert main(["config", "--explain", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_a_checkpoint_to_evaluate_is_not_an_option(tmp_path, capsys):
    folder = tmp_path / "run" / "ckpt" / "000000000300-000002-epoch0002"
    assert main(["eval", str(tmp_path / "run"), "--checkpoint", folder.name]) == 2
    assert f"\n  Fix: reverie eval {folder}\n" in capsys.readouterr().err
    folder.mkdir(parents=True)
    assert main(["eval", str(tmp_path / "run"), "--checkpoint", str(folder)]) == 2
    assert f"\n  Fix: reverie eval {folder}\n" in capsys.readouterr().err
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    assert f"{tmp_path / 'nowhere'} does not exist." in capsys.readouterr().err


def test_the_command_is_parsed_without_importing_pytorch():
    code = "import sys, reverie.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_garbage_collection_is_enabled_after_the_imports():
    with pytest.raises(KeyError, match="False"), garbage_collection_disabled():
        raise KeyError(gc.isenabled())
    assert gc.isenabled()
