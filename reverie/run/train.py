"""The online training loop: act, store, train, report, log and save."""

from __future__ import annotations

from pathlib import Path

from reverie.api import UserError
from reverie.run.config import Config
from reverie.run.factory import MakeEnv
from reverie.run.memory import explain_out_of_memory
from reverie.run.offline.datasets import trains_on_sequences
from reverie.run.offline.train import train_on_sequences
from reverie.run.online_run import OnlineRun
from reverie.run.precompile import stop_early_compiler


def train(
    config: Config,
    make_env: MakeEnv | None = None,
    evaluate: bool = False,
    profile: int = 0,
) -> Path:
    """Train until `run.steps`, resuming if the run folder has a checkpoint.

    With `evaluate`, play `run.eval_eps` episodes every `run.eval_every` in separate
    environments and log them under `eval/`. With `profile`, write a trace of this
    number of updates. Agents that train on sequences are trained with the offline loop
    instead. Returns the run folder.
    """
    if trains_on_sequences(config):
        # The command line may have started a compiler process, which this loop does not
        # use.
        stop_early_compiler()
        return train_on_sequences(config, profile)
    if config.agent_config.needs_recordings:
        raise UserError(
            f"The agent {config.agent!r} trains on recorded episodes, not in an "
            "environment.\n  Fix: reverie bc --offline.data PATH, or another --agent"
        )
    return train_online(OnlineRun(config, make_env, evaluate, profile))


def train_online(run: OnlineRun) -> Path:
    """Build the parts of a run, restore or start it, and train; return its folder."""
    with explain_out_of_memory(run.config, "training"), run:
        feed, clock, logger = run.feed, run.clock, run.logger
        run.start()
        run.print_summary()
        while clock.running and not run.stopper.is_set():
            if clock.should_collect or not run.is_ready:
                run.collect()  # act in the environments, store the rows
                logger.progress(clock.frames)

            for _ in range(clock.updates_due(run.is_ready)):
                if (metrics := run.update()) is None:
                    break
                logger.add(metrics, prefix="train")
            # If updates are left, the run was asked to stop. When it is resumed, it
            # first computes these updates.
            if clock.updates_left:
                break

            if clock.every("report"):
                run.report(feed)
            if clock.every("eval"):
                run.evaluate()
            if clock.every("log"):
                run.write_log()
            if clock.every("save"):
                run.save()
        run.finish()
    return run.path
