"""Config files of the PyTorch port of VTA."""

from __future__ import annotations

import json

import pytest

from reverie.api import UserError
from reverie.cli import main as cli
from reverie.run import checkpoint
from reverie.run.config import resolve


def agent_state(run):
    return checkpoint.read_part(checkpoint.find_checkpoint(run), "agent")


def write_json(path, **keys):
    path.write_text(json.dumps(keys))
    return path


def test_settings_of_the_port_are_converted(tmp_path):
    path = write_json(
        tmp_path / "bouncing_balls.json",
        env_type="bouncing_balls",
        exp_name="first",
        work_dir=str(tmp_path),
        max_iters=50000,
        batch_size=128,
        epoch_data_size=24000,
        beta_anneal=75,
        seg_len=9,
        learn_rate=1e-3,
        use_amp=False,
        obs_bit=None,
    )
    config = resolve(files=[path])
    assert (config.agent, config.task) == ("vta", "sequences_balls")
    assert (config.run.steps, config.seed) == (50000, 111)
    assert config.logdir == f"{tmp_path}/first"
    assert config.precision == "float32"
    assert (config.sequences.chunk, config.sequences.refresh) == (24000, 0)
    vta = config.vta
    assert (vta.batch_size, vta.opt.lr) == (128, 1e-3)
    vta = vta.world
    assert (vta.anneal, vta.max_segment, vta.max_segments) == (75, 9, 5)
    assert (vta.loss, vta.levels) == ("bernoulli", "all")


def test_the_command_line_accepts_a_config_file_of_the_port(tmp_path, capsys):
    path = write_json(
        tmp_path / "a.json",
        env_type="bouncing_balls",
        seq_size=4,
        init_size=2,
        belief_size=8,
        batch_size=3,
        epoch_data_size=6,
        max_iters=2,
        gamma=0.99,
    )
    run = tmp_path / "run"
    words = ["--sequences.evaluation", "5", "--logger.outputs", "jsonl"]
    words += ["--device", "cpu", "--logdir", str(run)]
    with pytest.warns(UserWarning, match="gamma"):
        assert cli.main(["train", "--config", str(path), *words]) == 0
    world = agent_state(run)["world"]
    assert world["flag_prior.weight"].shape == (2, 8)
    assert float(world["updates"]) == 2


def test_missing_settings_have_the_defaults_of_the_port(tmp_path):
    config = resolve(files=[write_json(tmp_path / "a.json", env_type="3d_maze")])
    assert (config.task, config.run.steps) == ("sequences_maze", 10000)
    assert (config.vta.batch_size, config.sequences.chunk) == (64, 2000)
    vta = config.vta.world
    assert (vta.loss, vta.levels, vta.bits) == ("gaussian", "floor", 5)


def test_presets_override_defaults_of_the_port_but_not_its_config_file(tmp_path):
    path = write_json(tmp_path / "a.json", env_type="bouncing_balls", seg_num=7)
    vta = resolve(["vta_static"], files=[path]).vta.world
    assert (vta.static_lower_belief, vta.anneal, vta.max_segment) == (True, 5, 20)
    assert vta.max_segments == 7
    config = resolve(["vta_maze"], files=[path])
    assert (config.task, config.vta.world.loss) == ("sequences_balls", "bernoulli")


def test_the_maze_is_searched_in_the_folders_of_the_port(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_json(tmp_path / "a.json", env_type="3d_maze")
    assert resolve(files=[path]).sequences.folder == "data/3d_maze_default"
    (tmp_path / "3d_maze_default").mkdir()
    assert resolve(files=[path]).sequences.folder == "3d_maze_default"
    (tmp_path / "mine" / "3d_maze_default").mkdir(parents=True)
    path = write_json(tmp_path / "b.json", env_type="3d_maze", data_root="mine")
    assert resolve(files=[path]).sequences.folder == "mine/3d_maze_default"
    path = write_json(tmp_path / "d.json", env_type="bouncing_balls", maze_data_dir="m")
    assert resolve(files=[path]).sequences.folder == ""  # not used by balls
    path = write_json(tmp_path / "c.json", env_type="3d_maze", maze_data_dir="there")
    assert resolve(files=[path]).sequences.folder == "there"


def test_unknown_keys_are_warned_about_and_flags_override_the_file(tmp_path):
    path = write_json(
        tmp_path / "a.json", env_type="bouncing_balls", colour="blue", horizon=15
    )
    with pytest.warns(UserWarning, match="colour, horizon"):
        config = resolve(files=[path], flags={"vta.batch_size": 7})
    assert config.vta.batch_size == 7


def test_unknown_keys_of_other_files_are_errors(tmp_path):
    path = write_json(tmp_path / "a.json", agent="vta", colour="blue")
    with pytest.raises(UserError, match="no setting 'colour'"):
        resolve(files=[path])


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"env_type": "pong"}, "bouncing_balls or 3d_maze"),
        ({"env_type": None}, "bouncing_balls or 3d_maze"),
        ({"env_type": ["3d_maze"]}, "bouncing_balls or 3d_maze"),
        ({"loss_type": "l1"}, "bce or mse"),
        ({"use_amp": "false"}, "true or false"),
        ({"exp_name": ["a"]}, "not a path"),
        ({"env_type": "3d_maze", "data_root": {}}, "not a path"),
        ({"seq_size": "many"}, "whole number"),
    ],
)
def test_invalid_values_of_the_port_are_errors(tmp_path, keys, complaint):
    path = write_json(tmp_path / "a.json", **{"env_type": "bouncing_balls", **keys})
    with pytest.raises(UserError, match=complaint):
        resolve(files=[path])


def test_a_temperature_without_annealing(tmp_path):
    keys = {"env_type": "bouncing_balls", "beta_anneal": None}
    path = write_json(tmp_path / "a.json", **keys)
    assert resolve(files=[path]).vta.world.anneal == 0


def test_config_files_may_start_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"env_type": "bouncing_balls"}')
    assert resolve(files=[path]).task == "sequences_balls"
