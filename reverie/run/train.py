"""Learn a task online: act, store, train, and now and then look up and save."""

from __future__ import annotations

from pathlib import Path

from reverie.run.config import Config
from reverie.run.factory import MakeEnv
from reverie.run.online_run import OnlineRun
from reverie.run.sequences import watch, watches


def train(config: Config, make_env: MakeEnv | None = None) -> Path:
    """Train until `run.steps`, resuming if the folder has a checkpoint.

    Sequences that are only there to be watched have a loop of their own (`watch.py`).
    Returns the run folder.
    """
    if watches(config):
        return watch(config)
    with OnlineRun(config, make_env) as run:
        feed, clock, logger = run.feed, run.clock, run.logger
        obs, carry = run.start()
        run.introduce()
        while clock.running and not run.stopper.asked:
            if clock.should_collect or not run.ready:
                carry, action, extras = run.act(carry, obs)
                stored = run.keep(obs, action, extras)
                run.send(action, obs, carry)  # the environments step ...
                clock.advance(stored)
                logger.progress(clock.frames)

            for _ in range(clock.updates_due(run.ready)):
                logger.add(run.update(), prefix="train")
            obs = run.receive(obs)  # ... while the agent trained

            if clock.every("report"):
                run.report(feed)
            if clock.every("log"):
                run.write_log()
            if clock.every("save"):
                run.save(obs, carry)
        run.finish(obs, carry)
    return run.path
