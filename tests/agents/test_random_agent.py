"""The random agent."""

from __future__ import annotations

import numpy as np
import torch

from reverie import agents
from reverie.agents.options import BuildOptions
from reverie.agents.random import RandomConfig
from reverie.spaces import Space

ACT = {
    "move": Space(np.dtype("int32"), (), 0, 3),
    "arm": Space(np.dtype("float32"), (2,), -1, 1),
}


def make(seed=0):
    return agents.make(
        "random", {}, ACT, RandomConfig(), BuildOptions(torch.device("cpu"), seed=seed)
    )


def act(agent, count=5):
    return agent.policy(agent.initial(count), {"is_first": np.ones(count, bool)})[1]


def test_actions_are_in_the_action_space():
    action = act(make())
    for key, space in ACT.items():
        assert all(space.problem(row) is None for row in action[key])


def test_a_restored_agent_continues_identically():
    agent, other = make(1), make(2)
    act(agent)
    other.load_state_dict(agent.state_dict())
    one, two = act(agent), act(other)
    np.testing.assert_array_equal(one["move"], two["move"])
    np.testing.assert_array_equal(one["arm"], two["arm"])


def test_it_never_trains():
    agent = make()
    assert agent.schedule.updates_due(100) == 0
    assert agent.extras == {}
