"""The lines that a run prints before its first step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from reverie.agents.remote import LimitsEnvSteps
from reverie.run.size import describe_size
from reverie.spaces import Spaces

if TYPE_CHECKING:
    from reverie.run.online_run import OnlineRun


def describe_online_run(run: OnlineRun) -> str:
    """Return agent, task, device, run folder, number of steps and replay buffer."""
    config = run.config
    epochs = config.agent_config.epochs
    limit = f"{epochs:,} epochs, at most " if epochs else ""
    repeat = run.clock.repeat
    frames = f"{repeat} frame{'s' * (repeat > 1)}"
    return (
        f"{config.agent} on {config.task}, {run.device} in {run.precision}\n"
        f"{describe_size(config, not run.clock.step)}"
        f"  run folder {run.path}\n"
        f"  {limit}{config.run.steps:,} agent steps of {frames} each, "
        f"in {config.actors.num_envs or config.run.envs} environments\n"
        f"{_describe_updates(run)}"
        f"  {run.replay.memory_plan.describe()}{run.feed.describe()}"
        f"{'' if run.shard.is_single else ', on each rank'}"
        f"{describe_unbounded_actions(run.envs.act_space)}"
    )


def _describe_updates(run: OnlineRun) -> str:
    """Return a line about when updates are due, if it is known; otherwise nothing."""
    schedule, window = run.agent.schedule, run.agent.windows.get("train")
    if isinstance(schedule, LimitsEnvSteps) and not run.clock.step:
        steps = schedule.env_steps_left
        if math.isinf(steps):
            return ""
        return f"  updates start after {steps:,} actions\n"
    if schedule is None and window and run.config.run.train_ratio:
        rows = window.batch * window.length
        return (
            f"  one update trains on {window.batch} x {window.length} steps and is "
            f"due every {rows / run.config.run.train_ratio:.4g} agent steps\n"
        )
    return ""


def describe_unbounded_actions(act_space: Spaces) -> str:
    """Return a warning about continuous actions without finite bounds, if any."""
    names = [repr(key) for key, x in sorted(act_space.items()) if not x.is_bounded]
    if not names:
        return ""
    return (
        f"\n  warning: entries of the action {' and '.join(names)} have no finite "
        "bounds. They are not rescaled; agents output values of about [-1, 1].\n"
        "  Fix: set finite bounds in the action space of the environment."
    )
