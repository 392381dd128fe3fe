"""Checkpoints of other implementations are evaluated, drawn, loaded and trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from original_checkpoints import (
    STAMP,
    dreamerv3_env,
    iris_env,
    iris_state,
    load,
    write_dreamerv3,
    write_iris,
    write_vta,
)

import reverie
from reverie.api import UserError
from reverie.cli import main as cli
from reverie.run.config import resolve
from reverie.run.load import open_run

HEADS = "iris.world_model.transformer.heads"
STOCH = "dreamer.rssm.stoch"
IRIS_TASK = "original_checkpoints:iris_env"
DREAMER_TASK = "original_checkpoints:dreamerv3_env"
BALLS = {"env_type": "bouncing_balls", "seq_size": 6, "init_size": 2}


def run_cli(*words: object) -> int:
    return cli.main([str(word) for word in words])


def asked_flags(message: str) -> list[str]:
    """Return the flags of the example in an error message."""
    return message.partition("for example ")[2].split()


def test_sizes_of_iris_are_inferred(tmp_path):
    path = write_iris(tmp_path)
    run = open_run(path, [("task", IRIS_TASK), (HEADS, 4)])
    iris = run.config.iris
    transformer, tokenizer = iris.world_model.transformer, iris.tokenizer
    assert run.config.agent == "iris"
    assert (tokenizer.tokens, tokenizer.action_planes) == (4, 3)
    assert (tokenizer.quantizer.codes, tokenizer.quantizer.width) == (16, 8)
    assert (tokenizer.encoder.mults, tokenizer.encoder.halve) == ((1, 2), (1, 1))
    assert (tokenizer.decoder.mults, tokenizer.frame.mults) == ((1, 2), (1, 1))
    assert (transformer.layers, transformer.heads, transformer.blocks) == (2, 4, 8)
    assert (transformer.width, transformer.attention) == (64, "causal")
    assert iris.world_model.two_hot_rewards
    assert iris.actor_critic.two_hot_values
    assert iris.actor_critic.width == 24
    assert iris.rollout_frames <= 8


def test_block_causal_attention_of_iris_is_inferred(tmp_path):
    state = iris_state()
    state["world_model.transformer.blocks.0.sa.mask"] = torch.ones(48, 48)
    torch.save(state, tmp_path / "last.pt")
    config = open_run(tmp_path, [("task", IRIS_TASK), (HEADS, 4)]).config
    assert config.iris.world_model.transformer.attention == "block_causal"


def test_presets_of_iris_follow_the_task(tmp_path):
    write_iris(tmp_path)
    flags = {"run.from_checkpoint": str(tmp_path), HEADS: 4}
    atari = resolve(flags={**flags, "task": "atari_pong"})
    assert (atari.agent, atari.env.atari.size) == ("iris", (64, 64))
    assert atari.run.eval_configs == ("atari_whole_games",)
    crafter = resolve(flags={**flags, "task": "crafter_reward"})
    assert (crafter.task, crafter.run.eval_envs) == ("crafter_reward", 32)
    # only the selected component determines settings
    some = resolve(["iris_tiny"], flags={**flags, "run.from_components": "tokenizer"})
    assert some.iris.tokenizer.tokens == 4
    assert some.iris.world_model.transformer.blocks == 5


def test_iris_is_evaluated(tmp_path, capsys):
    path = write_iris(tmp_path)
    words = ["eval", path, "--task", IRIS_TASK, "--episodes", 2]
    assert run_cli(*words) == 2
    flags = asked_flags(capsys.readouterr().err)
    assert flags[0] == f"--{HEADS}"
    assert run_cli(*words, *flags) == 0
    assert "2 episodes" in capsys.readouterr().out
    result = json.loads((path.parent / "eval.json").read_text())
    assert result["checkpoint"] == "last.pt"
    assert run_cli("draw", "boundaries", path) == 2
    assert "its agent is 'iris'" in capsys.readouterr().err


def test_python_plays_iris(tmp_path):
    write_iris(tmp_path)
    player = reverie.load(
        tmp_path, task=IRIS_TASK, iris__world_model__transformer__heads=4
    )
    state = player.agent.state_dict()["actor_critic"]
    wanted = iris_state()["actor_critic.model.actor_linear.weight"]
    assert torch.equal(state["online.actor.weight"], wanted)
    obs, _ = iris_env().reset(seed=0)
    assert player.act(obs) in range(5)


def test_dreamerv3_is_evaluated(tmp_path, capsys):
    path = write_dreamerv3(tmp_path)
    words = ["--task", DREAMER_TASK, "--episodes", 2]
    assert run_cli("eval", path, *words) == 2
    flags = asked_flags(capsys.readouterr().err)
    assert flags == [f"--{STOCH}", "4", "--dreamer.rssm.classes", "4"]
    assert run_cli("eval", path, *words, *flags) == 0
    assert "2 episodes" in capsys.readouterr().out
    for folder in (path.parent, tmp_path / "ckpt", tmp_path):
        run = open_run(folder, [("task", DREAMER_TASK), (STOCH, 4)])
        assert (run.checkpoint, run.folder) == (path, folder)


def test_sizes_of_dreamerv3_are_inferred(tmp_path):
    path = write_dreamerv3(tmp_path)
    dreamer = open_run(path, [("task", DREAMER_TASK), (STOCH, 4)]).config.dreamer
    rssm = dreamer.rssm
    assert (rssm.deter, rssm.hidden, rssm.stoch, rssm.classes) == (32, 16, 4, 4)
    assert (rssm.blocks, rssm.imglayers, rssm.obslayers) == (4, 2, 1)
    for part in (dreamer.enc, dreamer.dec):
        assert (part.depth, part.mults, part.kernel) == (4, (2, 3, 4), 5)
        assert (part.layers, part.units) == (3, 16)
        assert part.mlp_keys == "height|token|vector"
    assert (dreamer.rewhead.layers, dreamer.value.layers) == (1, 3)
    assert dreamer.value.bins == 255
    both = resolve(
        ["size1m"],
        flags={
            "run.from_checkpoint": str(path),
            "task": DREAMER_TASK,
            "dreamer.rssm.classes": 4,
            "dreamer.enc.units": 7,
        },
    )
    assert both.dreamer.rssm.stoch == 4
    assert both.dreamer.enc.units == 7  # flags override the file; loading will fail
    with pytest.raises(UserError, match="16 entries"):
        open_run(path, [("task", DREAMER_TASK), (STOCH, 5)])


def test_a_run_folder_of_dreamerv3_has_its_settings(tmp_path):
    options = {"task": "crafter_reward", "batch_size": 3, "run": {"train_ratio": 8.0}}
    write_dreamerv3(tmp_path, **options, logdir="elsewhere", jax={"platform": "cpu"})
    run = open_run(tmp_path)
    assert (run.folder, run.checkpoint.parent.name) == (tmp_path, STAMP)
    assert run.config.task == "crafter_reward"
    assert (run.config.dreamer.batch_size, run.config.run.train_ratio) == (3, 8.0)
    assert (run.config.dreamer.rssm.stoch, run.config.dreamer.imag_length) == (4, 4)
    assert run.config.logdir != "elsewhere"
    player = reverie.load(tmp_path, task=DREAMER_TASK)
    wanted = load("dreamerv3/disc_params")["dyn/obs0/kernel"].T
    kernel = player.agent.state_dict()["dyn"]["obs0.weight"]
    np.testing.assert_array_equal(kernel, wanted)
    obs, _ = dreamerv3_env().reset(seed=0)
    assert player.act(obs) in range(6)
    result = reverie.evaluate(tmp_path, env=dreamerv3_env, episodes=2)
    assert result.summary["count"] == 2
    assert (tmp_path / "eval.json").is_file()


def test_a_config_of_dreamerv3_cannot_name_code(tmp_path):
    write_dreamerv3(tmp_path, task="os:getcwd")
    with pytest.raises(UserError, match=r"its task.\n  Fix: --task"):
        open_run(tmp_path)
    file = tmp_path / "config.yaml"
    options = yaml.safe_load(file.read_text())
    options["agent"]["world"] = "nowhere:World"
    file.write_text(yaml.safe_dump(options))
    assert open_run(tmp_path, [("task", "catch")]).config.dreamer.world == "rssm"


def test_settings_of_an_atari_run_of_dreamerv3(tmp_path):
    atari = {"size": [64, 64], "repeat": 4, "sticky": True, "unknown": 1}
    write_dreamerv3(tmp_path, task="atari100k_pong", env={"atari100k": atari})
    config = open_run(tmp_path).config
    assert config.env.atari.size == (64, 64)
    assert config.env.atari.sticky == 0.25


def test_vta_is_evaluated_with_the_config_in_its_folder(tmp_path, capsys):
    path = write_vta(tmp_path)
    sizes = ("--sequences.chunk", 128, "--episodes", 3)
    assert run_cli("eval", path, *sizes) == 2
    assert "--config FILE.json" in capsys.readouterr().err
    (tmp_path / "port.json").write_text(json.dumps(BALLS))
    world = open_run(tmp_path).config.vta.world
    assert (world.belief, world.state, world.layers) == (8, 3, 2)
    assert (world.length, world.context, world.bias) == (6, 2, True)
    assert run_cli("eval", tmp_path, *sizes) == 0
    assert "3 new sequences" in capsys.readouterr().out
    figures = tmp_path / "figures"
    words = ("draw", "boundaries", path, "--out", figures, "--num-samples", 2)
    assert run_cli(*words) == 0
    assert len(list(figures.iterdir())) == 4
    other = write_vta(tmp_path / "other")
    config = ("--config", tmp_path / "port.json")
    capsys.readouterr()
    assert run_cli("eval", path, other, *config, *sizes) == 0
    assert "Agreement of the boundaries" in capsys.readouterr().out


def test_the_model_of_the_authors_of_vta(tmp_path):
    path = write_vta(tmp_path, "orig_mse")
    config = open_run(path, [("task", "sequences_maze")]).config
    assert not config.sequences.actions
    assert (config.vta.world.bias, config.vta.world.levels) == (False, "spread")
    with_actions = write_vta(tmp_path / "act", "main_mse_act")
    config = open_run(with_actions, [("task", "sequences_maze")]).config
    assert config.sequences.actions
    assert (config.vta.world.bias, config.vta.world.levels) == (True, "floor")


@pytest.mark.parametrize("function", [reverie.load, reverie.evaluate])
def test_python_refuses_vta(function, tmp_path):
    write_vta(tmp_path)
    with pytest.raises(UserError, match=r"cannot act.\n  Fix: `reverie eval"):
        function(tmp_path, task="sequences_balls")


def test_training_starts_from_a_run_folder(tmp_path, capsys):
    write_dreamerv3(tmp_path / "original", task="crafter_reward")
    logdir = tmp_path / "run"
    words = [
        "train",
        "--task",
        DREAMER_TASK,
        "--run.from_checkpoint",
        tmp_path / "original",
        "--device",
        "cpu",
    ]
    words += ["--logdir", logdir, "--run.steps", 2, "--run.envs", 1]
    assert run_cli(*words, "--logger.outputs", "jsonl") == 0
    assert "agent.pkl" in capsys.readouterr().err
    saved = open_run(logdir)
    state = saved.load_agent(saved.spaces()).state_dict()
    wanted = load("dreamerv3/disc_params")["enc/cnn0/bias"]
    np.testing.assert_array_equal(state["enc"]["cnn0.bias"], wanted)
    assert run_cli("eval", logdir, "--configs", "catch") == 2


def test_base_runs_are_files_with_an_encoder(tmp_path):
    path = write_iris(tmp_path)
    flags = {"bc.run": str(path), "task": "recordings"}
    with pytest.raises(UserError, match=r"Δ-IRIS, whose encoder cannot be imported"):
        resolve(["offline", "bc"], flags=flags)


def test_files_of_other_programs_are_not_changed(tmp_path):
    path = write_dreamerv3(tmp_path)
    before = {file: file.stat().st_mtime_ns for file in Path(tmp_path).rglob("*")}
    open_run(path, [("task", DREAMER_TASK), (STOCH, 4)])
    assert before == {f: f.stat().st_mtime_ns for f in Path(tmp_path).rglob("*")}
