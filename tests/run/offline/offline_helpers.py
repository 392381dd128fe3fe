"""Small recordings and settings that the tests of offline runs share."""

from __future__ import annotations

import json

import numpy as np

from reverie.envs.suites.catch import Catch, CatchConfig
from reverie.envs.suites.reach import Reach, ReachConfig
from reverie.recordings.demonstrate import successful_episodes
from reverie.run import checkpoint
from reverie.run.config import resolve
from reverie.storage.episodes import write_episode

SIDE = 16
TINY = {
    "device": "cpu",
    "logger.outputs": "jsonl",
    "run.steps": 4,
    "run.log_every": 2,
    "run.report_every": 2,
    "run.save_every": 2,
    "dreamer.batch_size": 3,
    "dreamer.batch_length": 5,
    "dreamer.enc.mults": (1, 1),
    "dreamer.dec.mults": (1, 1),
    "dreamer.enc.depth": 8,
    "dreamer.dec.depth": 8,
    "bc.enc.mults": (1, 1),
    "bc.enc.depth": 2,
    "bc.enc.units": 8,
    "bc.head.units": 8,
    "bc.head.layers": 1,
    "bc.batch_size": 4,
    "offline.epochs": 0,
    "offline.eval.context": 2,
    "offline.eval.horizon": 3,
    "offline.eval.batch": 2,
    "offline.eval.ensemble.samples": 3,
    "offline.eval.ensemble.horizon": 4,
}


def settings(data, logdir, *names, **flags):
    paths = {"offline.data": str(data), "logdir": str(logdir)}
    return resolve(["debug", "offline", *names], flags={**TINY, **paths, **flags})


def metric(run, key):
    """Return all logged values of a metric."""
    rows = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def agent_state(run):
    """Return the state of the agent in the newest checkpoint."""
    return checkpoint.read_part(checkpoint.find_checkpoint(run), "agent")


def write_reach(folder, count, change=lambda episode: episode):
    """Write demonstrations of `reach`, each changed by a function."""
    env = Reach(ReachConfig(size=(SIDE, SIDE)))
    episodes = successful_episodes(env, "reach", 0, 0.0)
    for i, episode in zip(range(count), episodes, strict=False):
        rows = {k: v for k, v in episode.items() if k[:4] != "log/"}
        write_episode(folder, f"demo_{i}", change(rows))


def write_catch(folder):
    """Write random episodes of `catch`."""
    env, rng = Catch(CatchConfig(rows=4, cols=4, size=(4, 4))), np.random.default_rng(0)
    for i in range(6):
        rows, obs = [], env.reset(i)
        while True:
            last = bool(obs["is_last"])
            space = env.act_space["action"]
            action = space.zeros() if last else space.sample(rng)
            rows.append({**obs, "action": action})
            if last:
                break
            obs = env.step({"action": action})
        keys = [key for key in rows[0] if key[:4] != "log/"]
        episode = {k: np.stack([np.asarray(row[k]) for row in rows]) for k in keys}
        write_episode(folder, f"demo_{i}", episode)
