"""The online training loop, with small agents in built-in environments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import reverie
from reverie import config as configs
from reverie.agents.options import BuildOptions
from reverie.agents.random import RandomAgent, RandomConfig
from reverie.api import UserError
from reverie.cli.main import main
from reverie.envs.suites.catch import Catch
from reverie.envs.vector.vec_env import make_vec_env
from reverie.evaluation import episodes as evaluations
from reverie.evaluation.episodes import evaluate
from reverie.evaluation.result import EvalResult
from reverie.run import checkpoint, parts
from reverie.run.checkpoint import Checkpoints
from reverie.run.config import resolve
from reverie.run.folder import open_run_folder
from reverie.run.online_run import OnlineRun
from reverie.run.train import train

SMALL = {
    "run.envs": 2,
    "run.clock": "steps",
    "run.log_every": 40,
    "run.save_every": 60,
    "run.report_every": 80,
    "replay.capacity": 1000,
    "device": "cpu",
    "logger.outputs": "jsonl",
}


def settings(logdir: Path, task: str = "dummy_disc", **more):
    flags = {**SMALL, "logdir": str(logdir), "task": task, **more}
    return resolve(["debug"], flags=flags)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_run_folder_has_the_files_of_the_readme(tmp_path):
    path = train(settings(tmp_path / "run", task="catch", **{"run.steps": 200}))
    names = {p.name for p in path.iterdir()}
    assert {"config.yaml", "about.json", "spaces.json"} <= names
    assert {"metrics.jsonl", "scores.jsonl", "ckpt", "replay"} <= names
    about = json.loads((path / "about.json").read_text())
    assert about[0]["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    metrics = lines(path / "metrics.jsonl")
    keys = set().union(*metrics)
    assert {"episode/score", "episode/length", "train/loss/dyn"} <= keys
    assert any(key.startswith("replay/") for key in keys)
    newest = Checkpoints(path / "ckpt").newest()
    assert newest
    assert checkpoint.read_manifest(newest)["step"] == 200


def test_a_run_is_resumed_in_its_logdir_with_its_settings(tmp_path, capsys):
    path = tmp_path / "run"
    train(settings(path, agent="random", **{"run.steps": 100}))
    words = ["train", "--logdir", str(path), "--run.steps", "160"]
    assert main(words) == 0
    said = capsys.readouterr().err
    assert "Resumed" in said
    assert "No update was run" not in said  # a random agent is never trained
    newest = Checkpoints(path / "ckpt").newest()
    assert checkpoint.read_manifest(newest)["step"] == 160


def test_resuming_with_fewer_steps_keeps_the_replay(tmp_path):
    path = tmp_path / "run"
    flags = {"agent": "random", "run.envs": 2}
    train(settings(path, **flags, **{"run.steps": 200}))
    for _ in range(3):
        train(settings(path, **flags, **{"run.steps": 10}))
    with OnlineRun(settings(path, **flags, **{"run.steps": 240})) as run:
        run.start()
        assert len(run.replay) >= 200


def test_changed_settings_are_listed_on_resume(tmp_path):
    path = tmp_path / "run"
    train(settings(path, agent="random", **{"run.steps": 40}))
    with pytest.raises(UserError) as caught:
        train(settings(path, agent="random", **{"run.steps": 80, "run.envs": 3}))
    assert "run.envs: 2 -> 3" in str(caught.value)
    assert "run.steps" not in str(caught.value)


def test_the_command_of_the_first_start_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "run"

    def start(steps, **more):
        monkeypatch.setattr("sys.argv", ["reverie", "train", str(steps)])
        config = settings(path, agent="random", **{"run.steps": steps, **more})
        open_run_folder(path, config).close()
        return json.loads((path / "about.json").read_text())[-1]["first_command"]

    assert start(40)[2:] == ["40"]
    assert start(41)[2:] == ["40"]
    monkeypatch.setattr("reverie.run.folder.MAX_STARTS", 1)
    assert start(42)[2:] == ["40"]
    assert start(43)[2:] == ["40"]
    # without a checkpoint, a start with other settings is a new run
    assert start(44, **{"run.envs": 3})[2:] == ["44"]
    assert start(45, **{"run.envs": 3})[2:] == ["44"]


def test_two_processes_cannot_share_a_run_folder(tmp_path):
    config = settings(tmp_path / "run", agent="random", **{"run.steps": 40})
    with (
        open_run_folder(tmp_path / "run", config),
        pytest.raises(UserError, match="Another process"),
    ):
        train(config)
    train(config)


def test_an_evaluation_can_be_stopped():
    asked = iter([False] * 3 + [True])
    envs = make_vec_env(lambda index: Catch(seed=index), 2)
    agent = RandomAgent(
        envs.obs_space,
        envs.act_space,
        RandomConfig(),
        BuildOptions(torch.device("cpu")),
    )
    assert evaluations.play_episodes(agent, envs, 50, stop=lambda: next(asked)) == []


def test_evaluation_needs_only_the_run_folder(tmp_path, capsys):
    path = train(settings(tmp_path / "run", task="catch", **{"run.steps": 120}))
    result = evaluate(path, episodes=5)
    scores = [episode["score"] for episode in result.episodes]
    assert len(scores) == 5
    assert set(scores) <= {-1.0, 1.0}
    assert result.summary["score"] == np.mean(scores)
    assert main(["eval", str(path), "--episodes", "3", "--run.eval_envs", "2"]) == 0
    assert "3 episodes" in capsys.readouterr().out
    assert len(json.loads((path / "eval.json").read_text())["episodes"]) == 3


def test_the_description_of_an_evaluation():
    played = [evaluations.PlayedEpisode(1.0, 4, 1.0)]
    played.append(evaluations.PlayedEpisode(0.0, 6, 0.0))
    summary = evaluations.summarize(played)
    result = EvalResult("episodes", "000-1", "catch", "", 0, "", summary, [])
    score = (
        "catch: score 0.5 ± 0.5 (mean ± standard deviation of the episodes; min 0, "
        "max 1), mean length 5 steps, 2 episodes"
    )
    success = "catch: success 50.0 % (95 % confidence interval: 9.5 to 90.5 %)"
    assert evaluations.describe(result) == f"{success}\n{score}"
    scores = {key: x for key, x in summary.items() if not key.startswith("success")}
    with_files = replace(result, summary=scores, files=["a.gif"])
    text = f"{score}\nVideos and failed episodes:\na.gif"
    assert evaluations.describe(with_files) == text
    kept = replace(result, summary=scores, files=["eval/episodes/a.gif"])
    assert evaluations.describe(kept) == f"{score}\nAll 1 episodes: eval/episodes"


@pytest.mark.parametrize("storage", ["ram", "disk"])
def test_train_eval_logs_evaluation_scores_separately(tmp_path, storage):
    more = {"run.steps": 120, "run.eval_every": 60, "run.eval_eps": 2}
    more["replay.storage"] = storage
    config = settings(tmp_path / "run", task="catch", **more, **{"run.eval_envs": 2})
    path = train(config, evaluate=True)
    keys = set().union(*lines(path / "metrics.jsonl"))
    assert {"episode/score", "eval/episode/score"} <= keys


def test_evaluations_use_the_presets_of_eval_configs(tmp_path, monkeypatch):
    presets = {**configs.presets(), "low": {"env.catch.rows": 4}}
    monkeypatch.setattr(configs, "presets", lambda: presets)
    asked = []
    for module in (evaluations, parts):

        def spy(config, count, *rest, make=module.make_envs):
            asked.append(config.env.catch.rows)
            return make(config, count, *rest)

        monkeypatch.setattr(module, "make_envs", spy)
    flags = {"run.steps": 40, "agent": "random", "run.eval_configs": ["low"]}
    path = train(settings(tmp_path, "catch", **flags), evaluate=True)
    evaluate(path, episodes=1)
    evaluate(path, episodes=1, flags=[("env.catch.rows", 5)])
    evaluate(path, episodes=1, flags=[("run.eval_configs", [])])
    usual = asked[0]
    assert asked == [usual, 4, 4, 5, usual]
    assert usual not in (4, 5)


def test_prefill_uses_random_actions_at_the_start(tmp_path, monkeypatch):
    from reverie.agents.dreamer.agent import Dreamer

    seen = []
    policy = Dreamer.policy
    monkeypatch.setattr(
        Dreamer, "policy", lambda self, *a, **k: seen.append(1) or policy(self, *a, **k)
    )
    train(settings(tmp_path / "run", **{"run.steps": 60, "run.prefill": 40}))
    assert len(seen) == 10  # of 30 turns with 2 environments


@pytest.mark.extended
def test_initial_weights_of_another_online_run(tmp_path, capsys):
    first = train(settings(tmp_path / "first", **{"run.steps": 120}))
    flags = {"run.steps": 2, "run.from_checkpoint": str(first)}
    train(settings(tmp_path / "second", **flags))
    assert "Loaded weights of" in capsys.readouterr().err
    old = checkpoint.read_part(Checkpoints(first / "ckpt").newest(), "agent")
    new = Checkpoints(tmp_path / "second" / "ckpt").newest()
    new = checkpoint.read_part(new, "agent")
    for name in ("enc", "pol", "val"):
        for key, value in old[name].items():
            assert torch.equal(value, new[name][key]), (name, key)


@pytest.mark.extended_except("2")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_with_the_documented_code(tmp_path, number):
    path = tmp_path / "run"
    flags = {**SMALL, "agent": "random", "logdir": str(path), "task": "catch"}
    flags |= {"run.steps": 10**9, "run.save_every": 0, "run.log_every": 500}
    words = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "reverie",
            "train",
            "--configs",
            "debug",
            *words,
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (path / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error
    newest = Checkpoints(path / "ckpt").newest()
    assert newest
    assert checkpoint.read_manifest(newest)["step"] > 0


@pytest.mark.extended
def test_nonfinite_updates_stop_the_run_and_are_named(tmp_path, monkeypatch):
    path = tmp_path / "run"
    train(settings(path, **{"run.steps": 100}))
    before = Checkpoints(path / "ckpt").newest()
    from reverie.replay.feed import ReplayFeed

    serve = ReplayFeed.__call__

    def poisoned(self, name):
        batch = serve(self, name)
        return {**batch, "vector": batch["vector"] * float("nan")}

    monkeypatch.setattr(ReplayFeed, "__call__", poisoned)
    flags = {"run.steps": 4000, "run.max_nonfinite": 3, "run.save_every": 0}
    with pytest.raises(
        UserError, match=r"3 updates in a row.*vector.* and \d+ more was"
    ):
        train(settings(path, **flags))
    assert Checkpoints(path / "ckpt").newest() == before
    with pytest.raises(UserError, match="The run has no checkpoint yet"):
        train(settings(tmp_path / "other", **flags))


def test_a_trained_agent_acts_in_three_lines(tmp_path):
    path = train(settings(tmp_path / "run", task="catch", **{"run.steps": 60}))
    agent = reverie.load(path)
    image = np.zeros((12, 12, 3), np.uint8)
    actions = [int(agent.act(image)) for _ in range(5)]
    assert set(actions) <= {0, 1, 2}
    agent.reset()
    assert int(agent.act({"image": image, "is_first": True})) in {0, 1, 2}
    with pytest.raises(UserError, match="image"):
        agent.act({"picture": image})
    with pytest.raises(UserError, match="shape"):
        agent.act(image[:8])


def test_training_accepts_a_gymnasium_environment_or_a_factory(tmp_path):
    import gymnasium

    flags = {key.replace(".", "__"): value for key, value in SMALL.items()}
    del flags["run__envs"]
    path = reverie.train(
        env=lambda: gymnasium.make("CartPole-v1"),
        configs=["debug"],
        logdir=str(tmp_path / "a"),
        run__steps=60,
        run__envs=2,
        **flags,
    )
    assert (path / "ckpt").is_dir()
    env = gymnasium.make("Pendulum-v1")
    path = reverie.train(
        env=env, configs=["debug"], logdir=str(tmp_path / "b"), run__steps=60, **flags
    )
    action = reverie.load(path).act(env.reset()[0])
    assert action.shape == (1,)
    with pytest.raises(UserError, match="as several"):
        reverie.train(env=env, logdir=str(tmp_path / "c"), run__envs=2)


def test_importing_reverie_loads_neither_torch_nor_gymnasium():
    code = (
        "import sys, reverie; print(sorted({'torch', 'gymnasium'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert done.stdout.strip() == "[]"


def test_replay_files_of_deleted_checkpoints_are_deleted(tmp_path):
    config = settings(tmp_path / "run", agent="random", **{"run.keep_last": 2})
    with OnlineRun(config) as run:
        run.start()
        for _ in range(5):
            run.collect()
            run.save()
        kept = list(run.replay_states)
        assert kept == run.checkpoints.paths()
        assert len(kept) == 2
