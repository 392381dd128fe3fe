"""Kernels are loaded before the first update, without a change of the agent."""

from __future__ import annotations

import copy
import sys

import numpy as np
import pytest
import torch
from dreamer_helpers import CPU, RandomFeed, make

from reverie.nets.tree import tree_leaves
from reverie.replay.buffer import Replay
from reverie.run import warm_up


def test_a_warm_up_does_not_change_the_agent():
    agent = make(random_heads=True)
    feed = RandomFeed(agent)
    agent.train(feed)
    before = copy.deepcopy(agent.state_dict())
    agent.warm_up({key: torch.zeros_like(x) for key, x in feed("train").items()})
    after = agent.state_dict()
    for old, new in zip(tree_leaves(before), tree_leaves(after), strict=True):
        assert torch.equal(torch.as_tensor(old), torch.as_tensor(new))
    assert all(leaf.grad is None for leaf in agent.opt.leaves)


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
    warm_up.WarmUp(agent, ReplayOfOnes(), CPU).join()
    assert torch.equal(agent.batch["reward"], torch.zeros(2, 3))
    assert agent.interval == pytest.approx(warm_up.SWITCH_SECONDS)
    assert sys.getswitchinterval() == pytest.approx(interval)


def test_a_run_on_a_cpu_and_a_deterministic_run_have_no_warm_up():
    agent = make()
    assert warm_up.start_warm_up(agent, ReplayOfOnes(), CPU, False) is None
    gpu = torch.device("cuda")
    assert warm_up.start_warm_up(agent, ReplayOfOnes(), gpu, True) is None
