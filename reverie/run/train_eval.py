"""Learn a task online, and measure the policy in environments of its own."""

from __future__ import annotations

from pathlib import Path

from reverie.evaluation.episodes import play_episodes, summarize
from reverie.run.config import Config
from reverie.run.factory import MakeEnv
from reverie.run.online_run import OnlineRun
from reverie.run.sequences import watch, watches


def train_eval(config: Config, make_env: MakeEnv | None = None) -> Path:
    """As `train`, with `run.eval_eps` episodes every `run.eval_every`.

    Their scores are logged as `eval/episode/*`, apart from the training ones, and
    `eval/*` holds the report on them. Returns the run folder.
    """
    if watches(config):
        return watch(config)
    with OnlineRun(config, make_env) as run:
        agent, feed, clock, logger = run.agent, run.feed, run.clock, run.logger
        trial_envs = run.open_trials(config.run.eval_envs)
        trials = run.open_replay(config.run.eval_envs, None, share=0.1)
        trial_feed = run.open_feed(trials)
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
            if clock.every("eval"):
                count, stop = config.run.eval_eps, run.stopper.is_asked
                played = play_episodes(agent, trial_envs, count, trials, stop=stop)
                if played:  # and not stopped meanwhile
                    logger.add(summarize(played), prefix="eval/episode")
                    run.report(trial_feed, prefix="eval")
            if clock.every("log"):
                run.write_log()
            if clock.every("save"):
                run.save(obs, carry)
        run.finish(obs, carry)
    return run.path
