"""Settings without effect are refused, with the reason and what to type instead."""

from __future__ import annotations

import dataclasses
import re

import pytest

import reverie
from reverie.api import UserError
from reverie.capabilities import AgentConfig
from reverie.cli.train import BASE_PRESETS, command_config
from reverie.config import settings_of
from reverie.run.clock import INTERVALS
from reverie.run.config import Config, resolve
from reverie.run.unused_by_command import IN_ENVIRONMENT
from reverie.run.used_settings import (
    check_flags_used,
    unused_in_environment,
    unused_settings,
    used_names,
    with_used_flags,
)

REFUSED = r"""
train --agent random --configs size12m | preset 'size12m' .*agent 'dreamer'.*remove size
train --configs vta_balls size12m | preset 'size12m' .*agent 'dreamer'
offline --configs debug curious_replay | preset 'curious_replay' .*without environments
train --bc.batch_size 16 | agent 'bc', not of 'dreamer'.*--dreamer\.batch_size 16
train --agent iris --dreamer.opt.lr 1 | agent 'dreamer', not of 'iris'.*remove
train --task catch --env.atari.sticky 0.9 | task 'catch'.*remove --env\.atari\.sticky
train --task catch --env.atari.size 8 8 | --env\.catch\.size 8 8
train --task gym_CartPole-v1 --env.dmc.repeat 2 | suite 'dmc'
train --configs iris_tiny --run.train_ratio 999 | epochs.*--iris\.schedule\.steps
train --agent random --run.train_ratio 3 | not trained
train --task catch --run.keep_epochs 5 | not trained in epochs(.|\n)*--run\.keep_every 5
offline --agent iris --iris.schedule.epochs 5 | without env.*--run\.steps sets
offline --agent iris --iris.training.tokenizer.steps 5 | without env.*--run\.steps sets
offline --agent iris --iris.acting.epsilon 1 | only the world model.*iris\.behaviour
offline --configs iris_tiny --run.keep_epochs 5 | --run\.keep_every 5
train --offline.data nowhere | collects its own data.*--run\.episodes nowhere
train --offline.split 0.5 | collects its own data
train --run.eval_every 60 | does not evaluate.*reverie train_eval
train --sequences.dt 1 | the task is an environment
train --dreamer.vta.hidden 3 | world model is 'rssm'
train --configs vta --dreamer.rssm.deter 8 | world model is 'vta'
train --env.resample nearest | not resized.*--env\.resize 64 64
train --run.from_components dyn | no initial weights.*--run\.from_checkpoint PATH
train --configs vta_balls --run.envs 3 | without environments
train --configs vta_balls --offline.data x | sequence dataset.*--sequences\.folder x
train --configs vta_balls --replay.capacity 9 | without environments
train --configs vta_balls --sequences.actions False | have no actions
train --configs vta_balls --sequences.folder x --sequences.dt 3 | read from files
train --configs vta_maze --sequences.dt 3 | setting of the task sequences_balls
offline --configs vta_episodes --sequences.folder x | recorded episodes
offline --configs vta_episodes --offline.cache.memory 3 | --sequences\.memory 3
offline --configs vta_episodes --offline.cache.bad stop | trains on sequences
train_eval --offline.epochs 3 | collects its own data
offline --env.resize 32 32 | without environments.*--offline\.read\.size 32 32
offline --run.episodes x | --offline\.data x
offline --run.train_ratio 3 | --run\.steps
offline --run.eval_every 50 | --run\.report_every 50
offline --replay.capacity 1e4 | without environments
offline --dreamer.imag_length 5 | only the world model.*--dreamer\.behaviour True
offline --offline.epochs 3 | not counted in epochs.*--run\.steps
offline --sequences.dt 1 | trains on episodes
train --explore.log False | exploration policy is 'none'.*--explore\.policy plan2explore
train --explore.policy random --explore.target deter | exploration policy is 'random'
train --configs plan2explore --explore.heads.units 8 | 'dreamer' does not use it
train --configs iris_tiny plan2explore --explore.log False | 'iris' does not use it
train --configs iris_tiny plan2explore --explore.ensemble.models 3 | 'iris' does not
offline --configs plan2explore --dreamer.behaviour True --explore.until 3 | without env
offline --explore.policy random | without environments
bc --explore.until 3 | without environments
bc --dreamer.opt.lr 1 | agent 'dreamer', not of 'bc'.*--bc\.opt\.lr 1
train --bc\..*\.units 3 | agent 'bc'
train --offline.read.map.action a | no recorded episodes.*--run\.episodes PATH
train --run.episodes x --offline.split 0.5 | collects its own data
train --sequences.folder x | environment.*--configs vta_maze --sequences\.folder x
train --configs vta_balls --run.eval_eps 9 | --sequences\.evaluation 9
train --configs vta_balls --env.resize 8 8 | remove --env\.resize
train --configs iris_tiny --run.pretrain 9 | alternates between acting and training
train --run.from_checkpoint x --run.pretrain 9 | starts from a checkpoint
offline --run.pretrain 9 | without environments
train --actors.count 2 --run.envs 8 | actors step the env.*--actors\.envs 8
train --actors.count 2 --run.overlap on | actors collect while the agent trains
train --device cpu --env.vector.timeout 5 | worker pro.*add --env\.vector\.workers 1
train_eval --device cpu --env.vector.start_timeout 5 | not stepped in worker processes
train --device cpu --actors.count 2 --env.vector.timeout 5 | worker processes
train --actors.lockstep True | it has no actors.*--actors\.count 8
offline --actors.count 2 | without environments
bc --bc.finetune True | new encoder is trained.*--bc\.run PATH
bc --bc.dreamerv3_torch.images shift | new encoder is trained
bc --bc.run x --bc.enc.units 9 | features are those of --bc\.run
bc --bc.head.modes 3 | head\.kind is 'mlp'.*--bc\.head\.kind mixture
bc --bc.head.kind mixture --bc.head.loss l1 | head\.kind is 'mixture'
bc --offline.eval.horizon 3 | not a world model
bc --bc.run_agent iris | set automatically
"""

ACCEPTED = """
train --run.episodes x --offline.read.map.action a --offline.read.size 64 64
train --task atari_pong --env.atari.sticky 0.9
train --task atari100k_pong --env.atari.sticky 0.9
train --configs iris_tiny --iris.schedule.steps 30
train --configs vta --dreamer.vta.hidden 8
train --configs debug --.*\\.units 8
train --configs debug bc_tiny
train --configs plan2explore --explore.until 100 --explore.ensemble.units 8
train --explore.policy random --explore.until 100
train --configs iris_tiny plan2explore --explore.heads.models 3 --explore.until 100
offline --configs plan2explore --dreamer.behaviour True --explore.log False
train --env.resize 32 32 --env.resample nearest
train --device cpu --env.vector.workers 1 --env.vector.timeout 5
train_eval --device cpu --run.overlap on --env.vector.timeout 5
train --device cuda --env.vector.start_timeout 5
train --configs vta_balls --sequences.dt 1 --offline.patience 3
train_eval --run.eval_every 60 --run.eval_eps 2
offline --offline.data x --dreamer.behaviour True --dreamer.imag_length 5
offline --task robosuite_Lift --env.robosuite.size 64 64 --run.eval_envs 2
offline --configs vta_episodes --offline.data x --sequences.actions False
bc --offline.data x --offline.epochs 3 --bc.opt.lr 1e-3
"""


@pytest.mark.parametrize("case", REFUSED.strip().splitlines())
def test_setting_without_effect_is_refused(case):
    words, message = case.split(" | ")
    command, *arguments = words.split()
    with pytest.raises(UserError) as error:
        command_config(command, arguments)
    text = str(error.value)
    assert re.search(message, text, re.S), text
    assert "has no effect in this run" in text
    assert "\n  Fix: " in text


@pytest.mark.parametrize("line", ACCEPTED.strip().splitlines())
def test_setting_with_effect_is_accepted(line):
    command, *arguments = line.split()
    command_config(command, arguments)


@pytest.mark.parametrize("command", BASE_PRESETS)
def test_every_declaration_names_settings_that_exist(command):
    names = settings_of(Config)
    agents = [
        field.name
        for field in dataclasses.fields(Config)
        if isinstance(getattr(Config(), field.name), AgentConfig)
    ]
    assert "dreamer" in agents
    for agent in agents:
        for task in ("catch", "recordings", "sequences_balls"):
            config = Config(agent=agent, task=task)
            if command.startswith("train") and task == "recordings":
                continue
            if task == "sequences_balls" and agent != "vta":
                continue
            unused = unused_settings(config, command)
            for each in unused:
                is_group = each.name.endswith(".")
                assert any(
                    n == each.name or (is_group and n.startswith(each.name))
                    for n in (*names, "random.")  # an agent without settings
                ), each
                for flag in re.findall(r"--([\w.]+)", each.instead):
                    assert flag.rstrip(".") in (*names, "configs"), each
            assert set(used_names(config, command)) < set(names)


def test_python_arguments_without_effect_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--bc\.batch_size has no effect"):
        reverie.train(task="catch", bc__batch_size=3, logdir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("command", "name", "fix"),
    [
        ("eval", "bc.batch_size", "--dreamer.batch_size 7"),
        ("eval", "env.atari.sticky", "remove"),
        ("eval", "run.eval_eps", "--episodes 7"),
        ("eval", "run.envs", "--run.eval_envs 7"),
        ("eval", "replay.capacity", "remove"),
        ("bench", "bc.batch_size", "--dreamer.batch_size 7"),
    ],
)
def test_evaluation_and_benchmarks_refuse_settings_without_effect(command, name, fix):
    with pytest.raises(UserError, match=f"Fix: {fix}"):
        check_flags_used(Config(), command, {name: 7})
    check_flags_used(Config(), command, {"run.eval_envs": 7, "env.catch.size": (8, 8)})


def test_a_timeout_of_workers_in_a_saved_run_does_not_prevent_its_evaluation():
    config = resolve(["debug"], flags={"task": "catch", "env.vector.timeout": 5})
    assert config.env.vector.workers == 0
    for flags in ([], [("env.vector.timeout", "7")]):
        with_used_flags(config, "eval", flags)
    with_used_flags(config, "train", [("run.steps", "7")])  # resumed on a CPU


def test_agents_that_need_recordings_do_not_train_in_environments(tmp_path):
    with pytest.raises(UserError, match=r"recorded episodes(.|\n)*reverie bc"):
        reverie.train(task="catch", agent="bc", logdir=str(tmp_path / "run"))
    with pytest.raises(UserError, match=r"is a sequence dataset(.|\n)*--agent vta"):
        reverie.train(task="sequences_balls", logdir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


SUGGESTED = """
train --batch_size 16 | dreamer.batch_size
train --agent vta --batch_size 16 | vta.batch_size
bc --batch_size 16 | bc.batch_size
offline --lr 1 | dreamer.opt.lr
train --configs iris_tiny --epochs 3 | iris.schedule.epochs
train --agent iris --batch_size 16 |
train --greedy 1 |
train --foo 1 |
train --bc.batch 3 |
"""


@pytest.mark.parametrize("case", SUGGESTED.strip().splitlines())
def test_only_used_settings_are_suggested(case):
    words, _, name = case.partition(" |")
    command, *arguments = words.split()
    with pytest.raises(UserError, match="There is no setting") as error:
        command_config(command, arguments)
    found = re.findall(r"Did you mean '(.+)'\?", str(error.value))
    assert found == ([name.strip()] if name else [])


def intervals(run) -> dict[str, float]:
    return {name: getattr(run, f"{name}_every") for name in INTERVALS["steps"]}


def test_a_flag_for_the_clock_brings_intervals_in_its_unit():
    task = ("task", "gym_CartPole-v1")
    assert intervals(resolve(flags=[task]).run) == INTERVALS["seconds"]
    steps = [("run.clock", "steps")]
    for presets in ((), ("debug",), ("catch",)):
        assert intervals(resolve(presets, flags=steps).run) == INTERVALS["steps"]
    run = resolve(flags=[("run.log_every", "7"), *steps]).run
    assert intervals(run) == {**INTERVALS["steps"], "log": 7}
    run = resolve(["deterministic"], flags=steps).run  # the unit does not change
    assert intervals(run) == intervals(resolve(["deterministic"]).run)
    run = resolve(["iris_tiny"], flags=steps).run
    assert intervals(run) == INTERVALS["steps"]
    assert min(INTERVALS["steps"].values()) >= 1000


def test_suggestions_for_a_saved_run_are_settings_that_its_command_uses():
    config = resolve(["debug"], flags={"task": "catch"})
    for command in ("eval", "train"):
        with pytest.raises(UserError) as error:
            with_used_flags(config, command, [("batch_size", "4")])
        assert "bc.batch_size" not in str(error.value)
    with pytest.raises(UserError, match=r"Did you mean 'run\.eval_envs'"):
        with_used_flags(config, "eval", [("run.eval_env", "4")])
    for options in ((), ("episodes",)):  # never `offline.eval.episodes`
        suggestion = " Did you mean 'episodes'" if options else "\n"
        with pytest.raises(UserError, match=rf"\)\.{suggestion}"):
            with_used_flags(config, "eval", [("episode", "4")], IN_ENVIRONMENT, options)


def test_an_evaluation_in_an_environment_reads_no_recordings():
    config = resolve(["debug"], flags={"task": "catch"})
    for name in ("offline.data", "sequences.folder", "explore.policy"):
        with_used_flags(config, "eval", [(name, "random")])
        with pytest.raises(UserError, match="evaluated in an environment"):
            with_used_flags(config, "eval", [(name, "random")], IN_ENVIRONMENT)
    unused = unused_in_environment(config)
    for name, value in {
        "dreamer.opt.lr": "3",
        "dreamer.batch_size": "3",
        "dreamer.harmony": "True",
        "dreamer.harmony_opt.lr": "3",
        "dreamer.priosignal": "model",
        "dreamer.representation": "barlow",
        "dreamer.draw": "True",
    }.items():
        with pytest.raises(UserError, match="an evaluation does not train"):
            with_used_flags(config, "eval", [(name, value)], unused)


RUNS = """
train
train --agent random
train --configs iris_tiny
train --configs vta_balls
train --configs vta_maze
train --configs dreamerv3_torch
train --explore.policy random
train_eval --task atari_pong
offline --offline.data x --task robosuite_Lift
offline --configs vta_episodes --offline.data x
bc --offline.data x --bc.run y
"""


@pytest.mark.extended_except("train", "bc --offline.data x --bc.run y")
@pytest.mark.parametrize("line", RUNS.strip().splitlines())
def test_a_proposed_setting_has_an_effect(line):
    command, *words = line.split()
    config = command_config(command, words)
    used = used_names(config, command)
    for name in set(settings_of(Config)) - set(used):
        with pytest.raises(UserError) as error:
            check_flags_used(config, command, [(name, "VALUE")])
        fix = str(error.value).rpartition("Fix: ")[2]
        proposed = re.match(r"(?:add )?--(\S+)", fix)
        assert proposed is None or proposed[1] in (*used, "configs"), (name, fix)
