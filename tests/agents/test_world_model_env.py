"""Steps of the Δ-IRIS world model, captured as CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from iris_helpers import make_agent, make_env, settings

from reverie.agents.iris.agent import Iris
from reverie.agents.options import BuildOptions
from reverie.agents.world_model_env import IrisWorldModelEnv
from reverie.nets.tree import tree_map

STEPS = 14
"""More than twice the context of the transformer, which is cleared when it is full."""


class FakeGraph:
    """Runs a function on its own memory, as a CUDA graph does.

    Inputs are copied to buffers, and outputs are overwritten by the next call.
    """

    def __init__(self, function, rng):
        self.function, self.buffers, self.outputs = function, None, None

    def __call__(self, inputs):
        if self.buffers is None:
            self.buffers = tree_map(torch.empty_like, inputs)
        tree_map(lambda buffer, x: buffer.copy_(x), self.buffers, inputs)
        outputs = self.function(self.buffers)
        if self.outputs is None:
            self.outputs = tree_map(torch.empty_like, outputs)
        tree_map(lambda buffer, x: buffer.copy_(x), self.outputs, outputs)
        return self.outputs


def rollout(agent: Iris, env: IrisWorldModelEnv, resume: bool) -> list[dict]:
    """Return the rows of a rollout from the first frame of an episode."""
    first = make_env().reset(0)
    context = {key: np.asarray(value)[None, None] for key, value in first.items()}
    context["action"] = np.zeros((1, 1), np.int32)
    env.seed(3)
    if resume:
        obs = {key: value[:, 0] for key, value in context.items()}
        carry, _, _ = agent.policy(agent.initial(1), obs, "eval")
        state = env.resume(carry, context)
    else:
        state = env.begin(context)
    rows = []
    for number in range(STEPS):
        state, row = env.step(state, {"action": np.array([number % 3], np.int32)})
        value = {"value": np.array(env.inspect(state).value)} if resume else {}
        rows.append({**row, **value})
    return rows


def assert_same(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for key in row:
            np.testing.assert_allclose(row[key], other[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("resume", [False, True])
def test_captured_steps_predict_the_same(resume):
    agent = make_agent()
    plain = agent.world_model_env()
    assert isinstance(plain, IrisWorldModelEnv)
    graphed = IrisWorldModelEnv(
        *(plain.world, plain.net, agent.obs_space, agent.act_space, agent.device),
        value=agent.actor_critic.value,
        capture=FakeGraph,
    )
    expected = rollout(agent, plain, resume)
    for _ in range(2):  # the second rollout uses the graphs of the first one
        assert_same(rollout(agent, graphed, resume), expected)
    # one kind of step for the first frame, and one for each length of the context
    blocks = agent.config.world_model.transformer.blocks
    assert len(graphed._captured) == 1 + blocks < STEPS / 2


@pytest.mark.gpu
@pytest.mark.parametrize("resume", [False, True])
def test_cuda_graphs_predict_the_same(resume):
    env = make_env()
    spaces = (env.obs_space, env.act_space)
    agents = [
        Iris(*spaces, settings(), BuildOptions(torch.device("cuda"), compile=compile))
        for compile in ("step", "graph")
    ]
    agents[1].load_weights(agents[0].state_dict())
    plain, graphed = (agent.world_model_env() for agent in agents)
    expected = rollout(agents[0], plain, resume)
    for _ in range(4):  # graphs are captured in the third call of a kind of step
        assert_same(rollout(agents[1], graphed, resume), expected)
