"""Measure a trained agent."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from reverie.api import (
    Action,
    Agent,
    Carry,
    Extras,
    Metrics,
    Mode,
    Obs,
    UserError,
    VecEnv,
)
from reverie.datasets.images import ImageCrop, check_obs_space
from reverie.evaluation.failures import Failures
from reverie.evaluation.videos import Films
from reverie.replay.buffer import Replay
from reverie.run import checkpoint, device
from reverie.run.checkpoint import Checkpoints
from reverie.run.collectors import agent_obs, zero_last_actions
from reverie.run.config import Config, for_evaluation, with_flags
from reverie.run.factory import EVAL_SEEDS, MakeEnv, in_workers, make_agent, make_envs
from reverie.run.folder import read_config, run_folder_of
from reverie.run.offline_data import images_of
from reverie.spaces import Spaces
from reverie.storage.atomic import ignore_unwritable, write_json
from reverie.storage.run_spaces import read_spaces

SUCCESS = "log/success"
FAILURES = 10
"""Failed episodes that an evaluation keeps, unless it is told how many."""


class Played(NamedTuple):
    """One finished episode."""

    score: float
    length: int
    success: float | None = None
    """Whether the task was done at any time, where an environment says so."""


def evaluate(
    logdir: Path,
    episodes: int = 100,
    flags: Sequence[tuple[str, Any]] = (),
    make_env: MakeEnv | None = None,
    videos: int = 0,
    failures: int = FAILURES,
) -> dict[str, Any]:
    """Play episodes with the newest checkpoint of a run, or with the one named.

    Writes the scores to `eval.json` in the run folder and returns the summary. With
    `videos`, so many episodes, and as many that failed, are filmed to `eval/`. Up to
    `failures` of those that failed are kept in `eval/failures`, as recordings.
    """
    path = checkpoint.find_checkpoint(logdir)
    home = run_folder_of(path)
    config = with_flags(read_config(home), flags)
    config = with_flags(for_evaluation(config), flags)  # they have the last word
    if config.offline.data and logdir.resolve() == home.resolve():
        path = Checkpoints(home / "best").newest(read_only=True) or path
    count = min(config.run.eval_envs, episodes)
    envs = make_envs(_placed(config, count, make_env), count, EVAL_SEEDS, make_env)
    try:
        agent = load_agent(config, path, envs)
        witnesses = _witnesses(home / "eval", envs, videos, failures)
        played = play_episodes(agent, envs, episodes, witnesses=witnesses)
    finally:
        envs.close()
    result = {
        "checkpoint": path.name,
        "task": config.task,
        **summarize(played),
        "scores": [episode.score for episode in played],
        "lengths": [episode.length for episode in played],
    }
    if "success" in result:
        result["successes"] = [bool(episode.success) for episode in played]
    written = [str(path) for witness in witnesses for path in witness.paths]
    if written:
        result["files"] = written
    with ignore_unwritable():
        write_json(home / "eval.json", result)
    return result


def _witnesses(folder: Path, envs: VecEnv, videos: int, failures: int) -> list[Witness]:
    """Those who write down what is played; nobody in somebody else's folder."""
    found: list[Witness] = []
    if not os.access(folder.parent, os.W_OK):
        if videos:
            why = f"{folder.parent} cannot be written, so nothing is filmed"
            warnings.warn(why, RuntimeWarning, stacklevel=2)
        return found
    if videos:
        found.append(Films(folder, envs.obs_space, len(envs), videos))
    if failures:
        spaces = envs.obs_space, envs.act_space
        found.append(Failures(folder / "failures", *spaces, len(envs), failures))
    return found


def _placed(config: Config, count: int, make_env: MakeEnv | None) -> Config:
    """Where a run would step environments in workers, several are evaluated there."""
    where = device.pick_device(config.device)
    aside = device.pick_overlap(config.run.overlap, where, config.deterministic)
    return in_workers(config) if aside and count > 1 and make_env is None else config


def load_agent(config: Config, path: Path, spaces: Any) -> Agent:
    """The agent of a config with the weights of a checkpoint.

    One that learnt from recordings is shown what it was shown there.
    """
    where = device.pick_device(config.device)
    precision = device.pick_precision(config.precision, where)
    images = images_of(path)
    shown = spaces
    if images:
        learnt = read_spaces(run_folder_of(path))
        check_obs_space(images, spaces.obs_space, config.task)
        check_same_actions(learnt.act_space, spaces.act_space, config.task)
        shown = learnt
    agent = make_agent(config, shown, where, precision)
    agent.load_weights(checkpoint.read_part(path, "agent"))
    return Prepared(agent, images) if images else agent


class Prepared:
    """An agent that sees prepared images; everything else is its own."""

    def __init__(self, agent: Agent, images: ImageCrop):
        self.agent, self.images = agent, images

    def __getattr__(self, name: str) -> Any:
        return getattr(self.agent, name)

    def policy(
        self, carry: Carry, obs: Obs, mode: Mode = "train"
    ) -> tuple[Carry, Action, Extras]:
        return self.agent.policy(carry, self.images.center_crop(obs), mode)


def check_same_actions(learnt: Spaces, wanted: Spaces, task: str) -> None:
    """Raise unless an environment takes the actions of the recordings."""
    shapes = [
        {k: (s.shape, s.is_discrete) for k, s in x.items()} for x in (learnt, wanted)
    ]
    if shapes[0] != shapes[1]:
        words = [", ".join(f"{k} {s[0]}" for k, s in x.items()) for x in shapes]
        raise UserError(
            f"The recordings have the actions {words[0]}, {task} takes {words[1]}.\n"
            "  Fix: evaluate in the environment that they were made in."
        )


class Witness(Protocol):
    """Whoever follows what is played: films, or a record of what failed."""

    paths: list[Path]
    """What it has written."""

    def add(self, obs: Obs, action: Action) -> None:
        """What all environments show now, and what is done about it."""
        ...

    def end(self, index: int, success: float | None) -> None:
        """The episode of one environment is over, and was asked for."""
        ...


def play_episodes(
    agent: Agent,
    envs: VecEnv,
    episodes: int,
    replay: Replay | None = None,
    witnesses: Sequence[Witness] = (),
    stop: Callable[[], bool] = lambda: False,
) -> list[Played]:
    """Play whole episodes, as many in each environment as in any other.

    Taking the first to finish would favour short episodes. Who has to `stop` before
    all are over gets none.
    """
    quota = np.full(len(envs), episodes // len(envs))
    quota[: episodes % len(envs)] += 1
    scores, lengths = np.zeros(len(envs)), np.full(len(envs), -1)
    success = np.zeros(len(envs))
    played: list[list[Played]] = [[] for _ in quota]
    obs, carry = envs.reset(), agent.initial(len(envs))
    while not stop():
        carry, action, extras = agent.policy(carry, agent_obs(obs), mode="eval")
        action = zero_last_actions(action, obs)
        if replay is not None:
            replay.add({**obs, **action, **extras})
        for witness in witnesses:
            witness.add(obs, action)
        scores += obs["reward"]
        lengths += 1
        done = obs.get(SUCCESS)
        success = success if done is None else np.maximum(success, done)
        for index in np.flatnonzero(obs["is_last"]):
            if len(played[index]) < quota[index]:
                found = None if done is None else float(success[index])
                score, length = float(scores[index]), int(lengths[index])
                played[index].append(Played(score, length, found))
                for witness in witnesses:
                    witness.end(int(index), found)
            scores[index], lengths[index], success[index] = 0, -1, 0
        if all(len(p) >= q for p, q in zip(played, quota, strict=True)):
            return [episode for per_env in played for episode in per_env]
        obs = envs.step(action)
    return []


def summarize(played: Sequence[Played]) -> Metrics:
    """Mean, spread and range of the scores, the mean length, and what succeeded."""
    scores = np.array([episode.score for episode in played])
    found = {
        "score": float(scores.mean()),
        "score_std": float(scores.std()),
        "score_min": float(scores.min()),
        "score_max": float(scores.max()),
        "length": float(np.mean([episode.length for episode in played])),
        "count": float(len(played)),
    }
    known = [episode.success for episode in played if episode.success is not None]
    if known:
        low, high = interval(sum(value > 0 for value in known), len(known))
        rate = float(np.mean([value > 0 for value in known]))
        found |= {"success": rate, "success_low": low, "success_high": high}
    return found


def in_words(result: dict[str, Any]) -> str:
    """The result of an evaluation as a person wants it."""
    task, lines = result["task"], []
    if "success" in result:
        low, high = 100 * result["success_low"], 100 * result["success_high"]
        lines.append(
            f"{task}: success {100 * result['success']:.1f} % "
            f"(95 % between {low:.1f} and {high:.1f})"
        )
    lines.append(
        f"{task}: score {result['score']:.4g} ± {result['score_std']:.4g} "
        f"(min {result['score_min']:.4g}, max {result['score_max']:.4g}), "
        f"length {result['length']:.4g}, over {result['count']:.0f} episodes"
    )
    if "files" in result:
        lines += ["Films, and episodes that failed:", *result["files"]]
    return "\n".join(lines)


def interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Where the true rate probably lies (Wilson's score interval, 95 %)."""
    rate, square = successes / count, z * z / count
    middle = (rate + square / 2) / (1 + square)
    half = z * math.sqrt(rate * (1 - rate) / count + square / count / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
