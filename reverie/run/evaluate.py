"""Measure a trained agent."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.api import Agent, Envs, Metrics
from reverie.data.replay import Replay
from reverie.run import checkpoint, device
from reverie.run.config import Config, with_flags
from reverie.run.folder import home_of, read_config
from reverie.run.parts import (
    EVAL_SEEDS,
    MakeEnv,
    for_agents,
    make_agent,
    make_envs,
    rest_at_end,
)


class Played(NamedTuple):
    """One finished episode."""

    score: float
    length: int


def evaluate(
    logdir: Path,
    episodes: int = 100,
    flags: Sequence[tuple[str, Any]] = (),
    make_env: MakeEnv | None = None,
) -> dict[str, Any]:
    """Play episodes with the newest checkpoint of a run, or with the one named.

    Writes the scores to `eval.json` in the run folder and returns the summary.
    """
    path = checkpoint.locate(logdir)
    home = home_of(path)
    config = with_flags(read_config(home), flags)
    count = min(config.run.eval_envs, episodes)
    envs = make_envs(config, count, EVAL_SEEDS, make_env)
    try:
        agent = load_agent(config, path, envs)
        played = play_episodes(agent, envs, episodes)
    finally:
        envs.close()
    result = {
        "checkpoint": path.name,
        "task": config.task,
        **{key: float(value) for key, value in summarize(played).items()},
        "scores": [episode.score for episode in played],
        "lengths": [episode.length for episode in played],
    }
    data = json.dumps(result, indent=1).encode()
    with contextlib.suppress(PermissionError):  # somebody else's run may be measured
        checkpoint.replace_file(home / "eval.json", data)
    return result


def load_agent(config: Config, path: Path, spaces: Any) -> Agent:
    """The agent of a config with the weights of a checkpoint."""
    where = device.pick_device(config.device)
    precision = device.pick_precision(config.precision, where)
    agent = make_agent(config, spaces, where, precision)
    agent.load_weights(checkpoint.read_part(path, "agent"))
    return agent


def play_episodes(
    agent: Agent, envs: Envs, episodes: int, replay: Replay | None = None
) -> list[Played]:
    """Play whole episodes, as many in each environment as in any other.

    Taking the first to finish would favour short episodes.
    """
    quota = np.full(len(envs), episodes // len(envs))
    quota[: episodes % len(envs)] += 1
    scores, lengths = np.zeros(len(envs)), np.full(len(envs), -1)
    played: list[list[Played]] = [[] for _ in quota]
    obs, memory = envs.reset(), agent.initial(len(envs))
    while True:
        memory, action, notes = agent.policy(memory, for_agents(obs), mode="eval")
        action = rest_at_end(action, obs)
        if replay is not None:
            replay.add({**obs, **action, **notes})
        scores += obs["reward"]
        lengths += 1
        for index in np.flatnonzero(obs["is_last"]):
            if len(played[index]) < quota[index]:
                played[index].append(Played(float(scores[index]), int(lengths[index])))
            scores[index], lengths[index] = 0, -1
        if all(len(p) >= q for p, q in zip(played, quota, strict=True)):
            return [episode for per_env in played for episode in per_env]
        obs = envs.step(action)


def summarize(played: Sequence[Played]) -> Metrics:
    """Mean, spread and range of the scores, and the mean length."""
    scores = np.array([episode.score for episode in played])
    return {
        "score": scores.mean(),
        "score_std": scores.std(),
        "score_min": scores.min(),
        "score_max": scores.max(),
        "length": np.mean([episode.length for episode in played]),
        "count": len(played),
    }
