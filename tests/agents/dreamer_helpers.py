"""A small Dreamer and random batches for its tests."""

from __future__ import annotations

import numpy as np
import torch

from reverie.agents.dreamer.agent import Dreamer, DreamerConfig
from reverie.agents.options import BuildOptions
from reverie.nets.decoder import DecoderConfig
from reverie.nets.encoder import EncoderConfig
from reverie.nets.heads import HeadConfig, PolicyConfig
from reverie.nets.optim.laprop import LaPropConfig
from reverie.spaces import Space
from reverie.worlds.rssm.config import RSSMConfig

CPU = torch.device("cpu")
F32, I32, BOOL, U8 = (np.dtype(x) for x in ("float32", "int32", "bool", "uint8"))
FLAGS = {
    "reward": Space(F32),
    "is_first": Space(BOOL),
    "is_last": Space(BOOL),
    "is_terminal": Space(BOOL),
}
OBS = {"image": Space(U8, (12, 12, 1)), "vector": Space(F32, (3,)), **FLAGS}
ACT = {"action": Space(I32, (), 0, 4)}

TINY = DreamerConfig(
    batch_size=3,
    batch_length=6,
    report_length=5,
    rssm=RSSMConfig(deter=16, hidden=8, stoch=4, classes=3, blocks=4),
    enc=EncoderConfig(depth=8, mults=(1, 2), units=8, layers=1),
    dec=DecoderConfig(depth=8, mults=(1, 2), units=8, layers=1),
    rewhead=HeadConfig(1, 8, bins=15),
    conhead=HeadConfig(1, 8, output="binary", outscale=1.0),
    policy=PolicyConfig(1, 8),
    value=HeadConfig(1, 8, bins=15),
    imag_length=3,
    opt=LaPropConfig(lr=1e-3, warmup=0),
)


def make(
    config=TINY, obs=OBS, act=ACT, seed=0, precision="float32", random_heads=False
) -> Dreamer:
    """With `random_heads`, the heads do not have their zero initial weights."""
    options = BuildOptions(CPU, precision=precision, seed=seed)
    agent = Dreamer(obs, act, config, options)
    if random_heads:
        ac = agent.actor_critic
        for part in (agent.world.rew, ac.val, ac.slowval):
            part.head["logits"].weight.data.normal_(generator=torch.manual_seed(0))
    return agent


class RandomFeed:
    """Random batches; records what the agent writes back."""

    def __init__(self, agent, obs=OBS, act=ACT, seed=0):
        self.agent, self.rng = agent, np.random.default_rng(seed)
        self.spaces = {**obs, **act, **agent.extras}
        self.change = {}
        self.batches, self.written, self.priorities = [], [], []

    def __call__(self, name):
        window = self.agent.windows[name]
        count, length = window.batch, window.context + window.length
        batch = {
            k: torch.tensor(s.sample(self.rng, count, length))
            for k, s in self.spaces.items()
        }
        for key in ("is_first", "is_last", "is_terminal"):
            batch[key] = torch.tensor(self.rng.random((count, length)) < 0.1)
        if "dyn/deter" in batch:
            batch["dyn/deter"] = torch.tanh(batch["dyn/deter"])
        batch["stepid"] = torch.arange(count * length).reshape(count, length)
        batch["consec"] = torch.zeros(count, length, dtype=torch.int64)
        for key, change in self.change.items():
            batch[key] = change(batch[key])
        self.batches.append(batch)
        return batch

    def ready(self, name):
        return True

    def write_back(self, stepid, extras):
        self.written.append((stepid, extras))

    def prioritize(self, stepid, priority):
        self.priorities.append((stepid, priority))

    def count_uses(self, name, on):
        raise AssertionError("Dreamer does not sample episodes")


def flatten(tree, prefix=""):
    if isinstance(tree, dict):
        items = [flatten(v, f"{prefix}{k}/") for k, v in tree.items()]
        return {k: v for item in items for k, v in item.items()}
    return {prefix: torch.as_tensor(tree).clone()}


def changed(before, after):
    assert before.keys() == after.keys()
    return {
        key.split("/")[0] for key in before if not torch.equal(before[key], after[key])
    }


def observations(count=2, obs=OBS, seed=0):
    rng = np.random.default_rng(seed)
    batch = {k: s.sample(rng, count) for k, s in obs.items()}
    return batch | {"is_first": np.zeros(count, bool), "is_last": np.zeros(count, bool)}
