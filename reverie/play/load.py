"""Load environment, policy, world model and recorded episodes of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from reverie import envs
from reverie.api import Agent, Env, UserError
from reverie.capabilities import (
    HasWorldModelEnv,
    PolicyWorldModelEnv,
    WorldModelEnv,
)
from reverie.datasets.action_units import ActionConverter, make_action_converter
from reverie.datasets.images import ImageCrop
from reverie.play.controls import Control, make_controls
from reverie.play.recorded_episodes import RecordedEpisodes
from reverie.run.config import Config, for_evaluation, with_flags
from reverie.run.factory import FIRST_EVAL_ENV
from reverie.run.load import SavedRun, open_run
from reverie.spaces import STEP_KEYS, Spaces

AGENT_ENV, HUMAN_ENV = "agent-env", "human-env"
AGENT_MODEL, HUMAN_MODEL = "agent-model", "human-model"
RECORDED = "recorded"
MODES = {
    AGENT_ENV: "agent in the environment",
    HUMAN_ENV: "human in the environment",
    AGENT_MODEL: "agent in the world model",
    HUMAN_MODEL: "human in the world model",
    RECORDED: "recorded episodes",
}
"""Modes of a session and their labels on the page."""


@dataclass
class LoadedRun:
    """Environment, agent, world model and recorded episodes of a run."""

    run: SavedRun
    episodes: RecordedEpisodes
    agent: Agent
    policy: Agent | None
    """The agent, adapted to the action units and image sizes of the environment."""
    world_model_env: WorldModelEnv | None
    env: Env | None
    obs_space: Spaces
    act_space: Spaces
    controls: list[Control]
    crop: ImageCrop | None  # how offline training cropped its images, if it did
    to_model_units: ActionConverter  # converts actions from the units of `env`
    missing: dict[str, str]
    """Why `env`, `policy` or `model` (the world model) is missing, by name."""

    def unavailable_reasons(self) -> dict[str, str]:
        """Return, by mode, why it is not available; an empty string if it is."""
        env = self.missing.get("env", "")
        policy = self.missing.get("policy", "")
        model = self.missing.get("model", "")
        episodes = ""
        if self.episodes.is_empty():
            episodes = "the run has no recorded episodes"
        # rollouts start from a reset of the environment, or from a recorded episode
        no_start = env and episodes and f"{env}, and {episodes}"
        cannot_act = ""
        if not model and not isinstance(self.world_model_env, PolicyWorldModelEnv):
            cannot_act = "the policy cannot act in the world model"
        return {
            AGENT_ENV: env or policy,
            HUMAN_ENV: env,
            AGENT_MODEL: policy or model or cannot_act or no_start,
            HUMAN_MODEL: model or no_start,
            RECORDED: episodes,
        }

    @property
    def fps(self) -> float:
        """Steps per second in real time; 0 if the environment does not declare it."""
        return float(getattr(self.env, "render_fps", 0) or 0)

    def close(self) -> None:
        if self.env is not None:
            self.env.close()


def load_run(
    logdir: Path,
    flags: Sequence[tuple[str, Any]] = (),
    presets: Sequence[str] = (),
    files: Sequence[str] = (),
) -> LoadedRun:
    """Load the newest checkpoint of a run (offline runs: the best), or a given one.

    `flags`, `presets` and config `files` override the config of the run.
    """
    run = open_run(logdir, flags, prefer_best=True, presets=presets, files=files)
    config = with_flags(for_evaluation(run.config), flags)
    run = replace(run, config=config)
    missing: dict[str, str] = {}
    env = _try_env(config, missing)
    spaces = run.spaces()
    if not set(STEP_KEYS) <= set(spaces.obs_space):
        raise UserError(
            f"The agent of {logdir} was trained on sequences and cannot act.\n"
            f"  Fix: `reverie eval {logdir}` or `reverie draw boundaries {logdir}`"
        )
    env_spaces: Any = spaces if env is None else env
    crop, trained_spaces = run.image_crop(), spaces
    policy: Agent | None = None
    try:
        source = run.policy_source(env_spaces)
        trained_spaces = source.trained_spaces
        agent = run.load_agent(trained_spaces)
        policy = source.adapt(agent)
    except UserError as error:
        missing["policy"] = _first_line(error)
        agent = run.load_agent(spaces)
    model = None
    if isinstance(agent, HasWorldModelEnv):
        model = agent.world_model_env(config.seed)
    else:
        missing["model"] = f"the agent {config.agent!r} has no world model"
    to_model_units, _ = make_action_converter(
        env_spaces.act_space, trained_spaces.act_space, config.task, "the recordings"
    )
    names = getattr(env, "action_names", ())
    controls = make_controls(env_spaces.act_space, names)
    return LoadedRun(
        run,
        RecordedEpisodes(run.folder, run.config),
        agent,
        policy,
        model,
        env,
        env_spaces.obs_space,
        env_spaces.act_space,
        controls,
        crop,
        to_model_units,
        missing,
    )


def _try_env(config: Config, missing: dict[str, str]) -> Env | None:
    """Return the environment of the task, with rendered images if it supports them.

    If it cannot be made, return None and add the reason to `missing`.
    """
    if config.task == "recordings":
        missing["env"] = (
            "the run was trained on recorded episodes, without a simulator "
            "(`reverie play LOGDIR --task TASK` adds one)"
        )
        return None
    with contextlib.suppress(UserError):
        rendered = replace(config.env, render=True)
        return envs.TaskFactory(config.task, rendered, config.seed)(FIRST_EVAL_ENV)
    try:
        return envs.TaskFactory(config.task, config.env, config.seed)(FIRST_EVAL_ENV)
    except UserError as error:
        missing["env"] = _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
