"""Dreamer with the fast versions for a CPU equals the plain one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from dreamer_helpers import ACT, CPU, FLAGS, OBS, TINY, RandomFeed

from reverie.agents.dreamer.agent import Dreamer
from reverie.agents.options import BuildOptions
from reverie.kernels.conv import upsample_cpu
from reverie.kernels.optim.flat_cpu import FlatOptimizer
from reverie.spaces import Space
from reverie.worlds.rssm.fast_cpu import CpuRSSMDynamics

VECTOR = {"vector": OBS["vector"], **FLAGS}
AXES = {"action": Space(np.dtype(np.float32), (2,), -1, 1)}


def make_pair(obs: Any, act: Any, **options: Any) -> list[Dreamer]:
    """Return the plain agent and the one with fast versions, with equal weights."""
    config = dataclasses.replace(TINY, **options)
    agents = [
        Dreamer(obs, act, config, BuildOptions(CPU, compile=compile))
        for compile in ("none", "step")
    ]
    generator = torch.Generator().manual_seed(0)
    for parameter in agents[0].opt.tensors:  # some are initially zero
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data += 0.05 * noise
    for plain, fast in zip(*(agent.opt.tensors for agent in agents), strict=True):
        fast.data.copy_(plain)
    assert isinstance(agents[1].world.dyn, CpuRSSMDynamics)
    assert isinstance(agents[1].opt, FlatOptimizer)
    return agents


@pytest.mark.parametrize(("obs", "act"), [(OBS, ACT), (VECTOR, AXES)])
@pytest.mark.parametrize("kernel", [3, 5])
def test_losses_and_gradients_equal_the_plain_ones(monkeypatch, obs, act, kernel):
    monkeypatch.setattr(upsample_cpu, "MIN_PIXELS", 0)
    parts = {
        name: dataclasses.replace(getattr(TINY, name), kernel=kernel)
        for name in ("enc", "dec")
    }
    results = []
    for agent in make_pair(obs, act, **parts):
        data = RandomFeed(agent, obs, act)("train")
        _, state, batch = agent.prepare_batch("train", data)
        loss = agent.loss(state, batch, agent.rng["train"], training=True)
        grads = agent.opt.gradients(agent.total_loss(loss.losses))
        named = dict(zip(agent.opt.names, grads, strict=True))
        results.append((loss.losses, tuple(loss.states), loss.metrics, named))
    torch.testing.assert_close(results[1], results[0], rtol=1e-3, atol=1e-5)


def test_updates_equal_the_plain_ones():
    plain, fast = make_pair(OBS, ACT)
    for agent in (plain, fast):
        feed = RandomFeed(agent)
        for _ in range(2):
            metrics = agent.train(feed)
        assert metrics["opt/skipped"] == 0
    for a, b in zip(fast.opt.tensors, plain.opt.tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    keys = fast.state_dict()["opt"].keys()
    assert keys == plain.state_dict()["opt"].keys()
