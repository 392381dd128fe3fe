"""Evaluate a trained agent by playing episodes in an environment."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reverie.api import Agent, Metrics, VecEnv
from reverie.evaluation.recorders import (
    DatasetRecorder,
    EpisodeRecorder,
    FailureRecorder,
    VideoRecorder,
)
from reverie.evaluation.result import EvalResult, make_result, output_folder
from reverie.render.video import FPS
from reverie.replay.buffer import Replay
from reverie.run import device
from reverie.run.collectors import agent_obs, zero_last_actions
from reverie.run.config import for_evaluation, with_flags
from reverie.run.factory import FIRST_EVAL_ENV, MakeEnv, make_envs, with_env_workers
from reverie.run.load import open_run
from reverie.spaces import SUCCESS

FAILURES = 10
"""Default number of failed episodes to save."""
KEPT_EPISODES = "episodes"
"""Folder of all played episodes, in the folder of the evaluation."""


class PlayedEpisode(NamedTuple):
    """Score, length and success of one episode."""

    score: float
    length: int
    success: float | None = None
    """Above zero if the task was solved at any step; None if the environment does not
    report success."""


def evaluate(
    logdir: Path,
    episodes: int = 100,
    flags: Sequence[tuple[str, Any]] = (),
    make_env: MakeEnv | None = None,
    videos: int = 0,
    failures: int = FAILURES,
    keep_episodes: bool = False,
    presets: Sequence[str] = (),
    files: Sequence[str] = (),
) -> EvalResult:
    """Play episodes with the newest checkpoint of a run, or with a given checkpoint.

    For an offline run, the best checkpoint is used instead of the newest. Writes
    `eval.json`, videos of the first `videos` episodes and of the first `videos` failed
    episodes to `eval/`, and the first `failures` failed episodes as dataset episodes to
    `eval/failures`. With `keep_episodes`, all episodes are written as dataset episodes
    to `eval/episodes`. `presets` and `files` supply the config of an imported
    checkpoint that has none.
    """
    run = open_run(
        logdir,
        flags,
        prefer_best=True,
        presets=presets,
        files=files,
        replaces_task=make_env is not None,
    )
    # flags also override the presets of `run.eval_configs`
    config = with_flags(for_evaluation(run.config), flags)
    run = replace(run, config=config)
    count = min(config.run.eval_envs, episodes)
    overlap = device.pick_overlap(
        config.run.overlap, device.pick_device(config.device), config.deterministic
    )
    if videos:
        config = replace(config, env=replace(config.env, render=True))
    if overlap and count > 1 and make_env is None:  # as in a training run
        config = with_env_workers(config)
    envs = make_envs(config, count, FIRST_EVAL_ENV, make_env)
    with contextlib.closing(envs):
        agent = run.load_policy(envs)
        kept = episodes if keep_episodes else 0
        recorders = _make_recorders(
            output_folder(run.folder), envs, videos, failures, kept
        )
        played = play_episodes(agent, envs, episodes, recorders=recorders)
    table = [
        {k: v for k, v in episode._asdict().items() if v is not None}
        for episode in played
    ]
    written = [str(path) for recorder in recorders for path in recorder.paths]
    return make_result(run, "episodes", summarize(played), table, files=written)


def _make_recorders(
    folder: Path, envs: VecEnv, videos: int, failures: int, kept: int
) -> list[EpisodeRecorder]:
    """Return the recorders; none, with a warning, if the run folder is read-only."""
    recorders: list[EpisodeRecorder] = []
    if not os.access(folder.parent, os.W_OK):
        if videos or kept:
            message = f"{folder.parent} is not writable, so no episodes are recorded"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
        return recorders
    obs_space, act_space, count = envs.obs_space, envs.act_space, len(envs)
    if videos:
        fps = envs.render_fps or FPS
        recorders.append(VideoRecorder(folder, obs_space, count, videos, fps))
    if failures:
        path = folder / "failures"
        recorders.append(FailureRecorder(path, obs_space, act_space, count, failures))
    if kept:
        path = folder / KEPT_EPISODES
        recorders.append(DatasetRecorder(path, obs_space, act_space, count, kept))
    return recorders


def play_episodes(
    agent: Agent,
    envs: VecEnv,
    episodes: int,
    replay: Replay | None = None,
    recorders: Sequence[EpisodeRecorder] = (),
    stop: Callable[[], bool] = lambda: False,
) -> list[PlayedEpisode]:
    """Play complete episodes, the same number (or one more) in every environment.

    Counting the first episodes that end in any environment would favor short ones.
    Returns an empty list if `stop` returns True before all episodes have ended.
    """
    quota = np.full(len(envs), episodes // len(envs))  # episodes per environment
    quota[: episodes % len(envs)] += 1
    # success is -1 if the environment does not report it
    scores, success = np.zeros(len(envs)), np.full(len(envs), -1.0)
    lengths = np.full(len(envs), -1)  # the first row of an episode is not a step
    played: list[list[PlayedEpisode]] = [[] for _ in quota]
    obs, carry = envs.reset(), agent.initial(len(envs))
    while not stop():
        carry, action, extras = agent.policy(carry, agent_obs(obs), mode="eval")
        action = zero_last_actions(action, obs)
        if replay is not None:
            replay.add({**obs, **action, **extras})
        for recorder in recorders:
            recorder.add(obs, action)
        scores += obs["reward"]
        lengths += 1
        solved = obs.get(SUCCESS)
        if solved is not None:
            success = np.maximum(success, solved)
        for index in np.flatnonzero(obs["is_last"]):
            if len(played[index]) < quota[index]:
                result = float(success[index]) if success[index] >= 0 else None
                score, length = float(scores[index]), int(lengths[index])
                played[index].append(PlayedEpisode(score, length, result))
                for recorder in recorders:
                    recorder.end(int(index), result)
            scores[index], lengths[index], success[index] = 0, -1, -1
        if all(len(p) >= q for p, q in zip(played, quota, strict=True)):
            return [episode for per_env in played for episode in per_env]
        obs = envs.step(action)
    return []


def summarize(played: Sequence[PlayedEpisode]) -> Metrics:
    """Return statistics of the scores, the mean length, and the success rate."""
    scores = np.array([episode.score for episode in played])
    summary = {
        "score": float(scores.mean()),
        "score_std": float(scores.std()),
        "score_min": float(scores.min()),
        "score_max": float(scores.max()),
        "length": float(np.mean([episode.length for episode in played])),
        "count": float(len(played)),
    }
    solved = [episode.success > 0 for episode in played if episode.success is not None]
    if solved:
        low, high = wilson_interval(sum(solved), len(solved))
        rate = float(np.mean(solved))
        summary |= {"success": rate, "success_low": low, "success_high": high}
    return summary


def describe(result: EvalResult) -> str:
    """Return the result as lines of text."""
    task, summary, lines = result.task, result.summary, []
    if "success" in summary:
        low, high = 100 * summary["success_low"], 100 * summary["success_high"]
        lines.append(
            f"{task}: success {100 * summary['success']:.1f} % "
            f"(95 % confidence interval: {low:.1f} to {high:.1f} %)"
        )
    lines.append(
        f"{task}: score {summary['score']:.4g} ± {summary['score_std']:.4g} (mean ± "
        f"standard deviation of the episodes; min {summary['score_min']:.4g}, max "
        f"{summary['score_max']:.4g}), mean length {summary['length']:.4g} steps, "
        f"{summary['count']:.0f} episodes"
    )
    kept = [x for x in map(Path, result.files) if x.parent.name == KEPT_EPISODES]
    if kept:
        lines.append(f"All {len(kept)} episodes: {kept[0].parent}")
    if others := [file for file in result.files if Path(file) not in kept]:
        lines += ["Videos and failed episodes:", *others]
    return "\n".join(lines)


def wilson_interval(successes: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a success rate (95 % for the default z)."""
    rate, square = successes / count, z * z / count
    middle = (rate + square / 2) / (1 + square)
    half = z * math.sqrt(rate * (1 - rate) / count + square / count / 4) / (1 + square)
    return max(0.0, middle - half), min(1.0, middle + half)
