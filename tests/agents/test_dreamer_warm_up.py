"""Kernels are loaded before the first update, without a change of the agent."""

from __future__ import annotations

import copy
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from dreamer_helpers import CPU, TINY, RandomFeed, make

import reverie.agents.random as agents
from reverie.agents.options import BuildOptions
from reverie.nets.tree import tree_leaves
from reverie.replay.buffer import Replay
from reverie.run import warm_up


@pytest.mark.parametrize("world", ["rssm", "vta"])
def test_a_warm_up_does_not_change_the_agent(world, monkeypatch):
    agent = make(replace(TINY, world=world), random_heads=True)
    feed = RandomFeed(agent)
    agent.train(feed)
    losses, loss = [], agent.loss

    def count_losses(*args, **options):
        losses.append(args)
        return loss(*args, **options)

    monkeypatch.setattr(agent, "loss", count_losses)
    before = copy.deepcopy(agent.state_dict())
    agent.warm_up({key: torch.zeros_like(x) for key, x in feed("train").items()})
    # VTA has running statistics, which policy steps use at the same time
    assert len(losses) == (world == "rssm")
    after = agent.state_dict()
    for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
        assert torch.equal(torch.as_tensor(old), torch.as_tensor(new))
    assert all(leaf.grad is None for leaf in agent.opt.leaves)
    assert agent.world.training


class RecordingAgent:
    """Keeps the batch of its warm-up, and fails like an agent without enough memory."""

    def warm_up(self, batch):
        self.batch = batch
        self.interval = sys.getswitchinterval()
        raise RuntimeError("out of memory")


class ReplayOfOnes(Replay):
    """Has batches of two sequences of three steps."""

    def __init__(self):
        pass

    def empty_batch(self, name):
        assert name == "train"
        return {"reward": np.ones((2, 3), np.float32)}


def test_the_thread_passes_zeros_and_restores_the_switch_interval():
    agent, interval = RecordingAgent(), sys.getswitchinterval()
    warm_up.WarmUp(agent, ReplayOfOnes(), CPU).wait()
    assert torch.equal(agent.batch["reward"], torch.zeros(2, 3))
    assert agent.interval == pytest.approx(warm_up.SWITCH_SECONDS)
    assert sys.getswitchinterval() == pytest.approx(interval)


class SlowAgent:
    """Its warm-up ends when `can_end` is set."""

    def __init__(self):
        self.can_end = threading.Event()

    def warm_up(self, batch):
        self.can_end.wait()


def test_a_run_that_stops_does_not_wait_for_the_thread():
    agent = SlowAgent()
    thread = warm_up.WarmUp(agent, ReplayOfOnes(), CPU)
    thread.wait(lambda: True)
    assert thread._thread.is_alive()
    agent.can_end.set()
    thread.wait()
    assert not thread._thread.is_alive()


def test_some_runs_have_no_warm_up(monkeypatch):
    agent, replay, gpu = make(), ReplayOfOnes(), torch.device("cuda")
    free = [0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 0))
    monkeypatch.setattr(warm_up.WarmUp, "__init__", lambda *args: None)
    assert warm_up.start_warm_up(agent, replay, gpu, False) is None  # without memory
    free[0] = warm_up.MIN_FREE_BYTES
    assert warm_up.start_warm_up(agent, replay, gpu, False) is not None
    assert warm_up.start_warm_up(agent, replay, gpu, True) is None  # deterministic
    assert warm_up.start_warm_up(agent, replay, CPU, False) is None
    assert warm_up.start_warm_up(RandomAgent(), replay, gpu, False) is None


class RandomAgent(agents.RandomAgent):
    def __init__(self):
        super().__init__({}, {}, agents.RandomConfig(), BuildOptions(CPU))
