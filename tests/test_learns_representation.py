"""Options of Dreamer help to represent objects of two pixels on moving noise.

The world model is trained on recorded episodes of `noisycatch`, of which about half end
with a catch. At the last row of held-out episodes it has to predict whether the ball
was caught: the metric is the mean predicted reward of catches minus that of misses (2
if all predictions are right, 0 if they do not depend on the ball).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.envs.suites.noisycatch import NoisyCatch
from reverie.nets.rng import Rng
from reverie.replay.buffer import Replay
from reverie.replay.feed import ReplayFeed
from reverie.run.config import resolve
from reverie.worlds.prototypes import PROTOTYPE_DIM, PROTOTYPES, TEMPERATURE

EPISODES, HELD_OUT, UPDATES = 1000, 100, 300
CONFIG = {
    "task": "noisycatch",
    r"dreamer\.(enc|dec)\.mults": [1, 2, 4, 4],
    r"dreamer\.(enc|dec)\.kernel": 3,
    "dreamer.batch_length": 6,
    "dreamer.behaviour": False,
}


def play(env: NoisyCatch, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Play an episode: towards the ball, or at random."""
    is_good, rows, obs = rng.random() < 0.5, [], env.reset()
    while True:
        action = int(rng.integers(3))
        if is_good:
            action = 1 + int(np.sign(env._ball - env._paddle))
        rows.append({**obs, "action": np.int32(0 if obs["is_last"] else action)})
        if obs["is_last"]:
            return {k: np.stack([row[k] for row in rows]) for k in rows[0]}
        obs = env.step({"action": action})


def prepare(seed: int, **flags) -> tuple[Dreamer, ReplayFeed, list]:
    """Return an agent, its batches and held-out episodes."""
    torch.set_num_threads(1)
    flags = {f"dreamer.{key}": value for key, value in flags.items()}
    config = resolve(["tiny"], flags={**CONFIG, **flags})
    env, rng = NoisyCatch(seed=seed), np.random.default_rng(seed)
    options = BuildOptions(torch.device("cpu"), seed=seed)
    agent = Dreamer(env.obs_space, env.act_space, config.dreamer, options)
    episodes = [play(env, rng) for _ in range(EPISODES + HELD_OUT)]
    replay = Replay(
        {**env.obs_space, **env.act_space},
        agent.extras,
        replace(config.replay, storage="ram", save=False, online=False),
        capacity=10_000,
        num_envs=1,
        windows=agent.windows,
        directory=None,
        seed=seed,
    )
    for episode in episodes[HELD_OUT:]:
        replay.add_episode(episode)
    return agent, ReplayFeed(replay, agent.windows), episodes[:HELD_OUT]


@cache
def separation(seed: int, updates: int = UPDATES, **flags) -> float:
    """Train a world model; return how well it tells catches from misses."""
    agent, feed, held_out = prepare(seed, **flags)
    for _ in range(updates):
        agent.train(feed)
    batch = {k: torch.tensor(np.stack([e[k] for e in held_out])) for k in held_out[0]}
    action = batch["action"]
    batch["prevact"] = {"action": torch.cat([action[:, :1] * 0, action[:, :-1]], 1)}
    with torch.no_grad():
        start = agent.world.initial(HELD_OUT)
        states = agent.world.observe(start, batch, Rng(0, "test", agent.device))
        reward = agent.world.reward_and_cont(agent.world.features(states))[0][:, -1]
    is_caught = batch["reward"][:, -1] > 0
    return float(reward[is_caught].mean() - reward[~is_caught].mean())


OPTIONS = {
    "barlow": ({"representation": "barlow"}, 0.2),
    "infonce": ({"representation": "infonce"}, 0.1),
    # with the default of 3e-3, the scales do not settle in so few updates
    "harmony": ({"harmony": True, "harmony_opt.lr": 0.03}, 0.1),
}
"""Settings, and by how much the metric has to be larger than without them."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", OPTIONS)
def test_a_ball_of_two_pixels_is_represented(name, seed):
    settings, margin = OPTIONS[name]
    assert separation(seed, **settings) > separation(seed) + margin


def log_partition() -> float:
    """Return the expected log of the sum of exp(score / temperature) over prototypes.

    A score is a coordinate of a random unit vector. The mean of exp(k x) for such a
    coordinate x in d dimensions is the hypergeometric function 0F1(d / 2, k^2 / 4).
    """
    mean = term = 1.0
    for i in range(60):
        term *= (1 / TEMPERATURE) ** 2 / 4 / ((PROTOTYPE_DIM / 2 + i) * (i + 1))
        mean += term
    return float(np.log(PROTOTYPES * mean))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_prototypes_are_predicted_from_the_other_view_and_from_the_latent_state(seed):
    """The metric above does not change in so few updates, but the losses do.

    A loss is log Z - z . m / temperature. Z is the sum over all prototypes, z the unit
    vector that predicts, and m the mean of the prototypes, weighted with the target.

    - At first, z and m are unrelated, and the loss is log Z. All z have almost the same
      direction, in which log Z has a standard deviation of 0.07 over initial weights.
    - The loss can fall because z moves to a direction with few prototypes. But a
      prediction that is equal for all steps has at least the entropy of the mean target
      as its loss. The Sinkhorn algorithm makes the mean target uniform, so this entropy
      is log 2500. Only predictions that depend on the step have a smaller loss.
    """
    agent, feed, _ = prepare(seed, representation="prototypes")
    metrics = [agent.train(feed) for _ in range(400)]
    first, last = metrics[:1], metrics[-20:]

    def mean(updates: list, name: str) -> float:
        return float(np.mean([float(x[f"loss/proto_{name}"]) for x in updates]))

    for name in ("swav", "temp"):
        assert mean(first, name) == pytest.approx(log_partition(), abs=3 * 0.07)
        assert mean(last, name) < np.log(PROTOTYPES) - 0.2
    assert mean(last, "norm") < 0.2 < mean(first, "norm")
