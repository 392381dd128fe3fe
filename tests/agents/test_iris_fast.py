"""Δ-IRIS with fast module versions and CUDA graphs trains and acts like without.

On a CPU the kernels run in Triton's interpreter. CUDA graphs need a GPU.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from iris_helpers import collected_feed, make_env, settings

from reverie.agents.iris.actor_critic import LSTMState
from reverie.agents.iris.agent import Iris
from reverie.agents.iris.config import COMPONENTS
from reverie.agents.iris.fast import FastPixelNet
from reverie.agents.options import BuildOptions
from reverie.kernels import accelerate
from reverie.kernels.graphs.runner import CapturedGraph
from reverie.kernels.optim.low_precision_weights import LowPrecisionWeights

pytest.importorskip("triton")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICE = CUDA if torch.cuda.is_available() else CPU


SMALL = {
    "iris.training.tokenizer.batch": 2,
    "iris.training.tokenizer.length": 2,
    "iris.training.world_model.batch": 2,
    "iris.training.world_model.length": 2,
    "iris.training.actor_critic.batch": 1,
    "iris.actor_critic.horizon": 2,
    "iris.world_model.transformer.layers": 1,
}


def make(device=CPU, compile="none", precision="float32", **flags) -> Iris:
    env = make_env()
    return Iris(
        env.obs_space,
        env.act_space,
        settings(**SMALL, **flags),
        BuildOptions(device, precision=precision, compile=compile),
    )


def batches(count=1):
    """Batches for each component from data that a random agent collected."""
    agent = make()
    feed = collected_feed(agent)
    return {name: [feed(name) for _ in range(count)] for name in COMPONENTS}


def on_device(batches_):
    return {
        name: [{key: x.to(DEVICE) for key, x in batch.items()} for batch in window]
        for name, window in batches_.items()
    }


def class_names(module):
    return {type(submodule).__name__ for submodule in module.modules()}


@pytest.mark.extended
@pytest.mark.parametrize(
    "name",
    ["tokenizer", *(pytest.param(x, marks=pytest.mark.slow) for x in COMPONENTS[1:])],
)
def test_fast_modules_train_like_the_plain_ones(name, monkeypatch):
    monkeypatch.setattr(accelerate, "kernels_available", lambda device: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain, fast = (make(DEVICE, compile) for compile in ("none", "step"))
    for module in (fast.world, fast.actor_critic, fast.imagination_world):
        assert "FastFrameEncoder" in class_names(module)
    window = on_device(batches())[name]
    expected, actual = (agent.update(name, window) for agent in (plain, fast))
    assert expected.keys() == actual.keys()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-3, atol=1e-4, msg=key)
    for weight, fast_weight in zip(
        plain.opt[name].tensors, fast.opt[name].tensors, strict=True
    ):
        torch.testing.assert_close(fast_weight, weight, rtol=1e-3, atol=2e-3)


def test_the_fast_lstm_matches_the_plain_one():
    plain = make(DEVICE).actor_critic.online
    fast = copy.deepcopy(plain)
    fast.__class__ = FastPixelNet
    features = torch.randn(3, 4, plain.lstm.input_size, device=DEVICE)
    start = LSTMState(*torch.randn(2, 3, plain.width, device=DEVICE))
    inputs = [x.requires_grad_() for x in (features, *start)]
    results = []
    for net in (plain, fast):
        state, hidden = net.run_lstm(start, features)
        leaves = [*inputs, *net.lstm.parameters()]
        grads = torch.autograd.grad(hidden.cos().sum(), leaves)
        results.append((state, hidden, grads))
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
    state, hidden = fast.run_lstm(start, features[:, :0])
    assert state is start
    assert hidden.shape == (3, 0, plain.width)


@torch.no_grad()
def test_fast_policy_steps_match_the_plain_ones():
    plain = make(DEVICE).actor_critic.online
    fast = copy.deepcopy(plain)
    fast.__class__ = FastPixelNet
    image = torch.randint(0, 256, (3, *make_env().obs_space["image"].shape))
    image = image.to(DEVICE, torch.uint8)
    start = LSTMState(*torch.randn(2, 3, plain.width, device=DEVICE))
    expected, actual = (net.policy_step(start, image) for net in (plain, fast))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_the_low_precision_world_has_fast_modules(monkeypatch):
    monkeypatch.setattr(accelerate, "kernels_available", lambda device: True)
    fast = make(DEVICE, "step", "bfloat16")
    assert fast.imagination_world is not fast.world
    assert {"FastFrameDecoder", "FastTransformer"} <= class_names(
        fast.imagination_world
    )


def test_without_triton_modules_are_plain(monkeypatch):
    monkeypatch.setattr(accelerate, "kernels_available", lambda device: False)
    assert make(compile="step").accelerator.has_graphs is False
    assert "FastFrameEncoder" not in class_names(make(compile="step").world)


@pytest.mark.usefixtures("_without_onednn")
@pytest.mark.parametrize("name", COMPONENTS)
def test_every_weight_is_used_through_its_low_precision_copy(name):
    window = batches()[name][0]
    results = []
    for low_precision in (False, True):
        agent = make(precision="bfloat16")
        tensors = agent.opt[name].tensors
        if low_precision:
            encoders = [net.frame for net in agent.actor_critic.children()]
            copies = LowPrecisionWeights([agent.world, *encoders], torch.bfloat16)
            tensors = [copies.leaf(tensor) for tensor in tensors]
        losses, _ = agent.losses(name, agent._to_segment(window))[name]
        total = torch.stack([x.mean() for x in losses.values()]).sum()
        results.append(torch.autograd.grad(total, tensors))
    for grad, low_precision_grad in zip(*results, strict=True):
        assert torch.equal(grad, low_precision_grad.float())


def test_sections_have_their_own_graphs():
    agent = make()
    sections = agent.sections(collected_feed(agent))
    assert list(sections) == list(COMPONENTS)
    updates = [section.args[-1] for section in sections.values()]
    assert not set(map(id, updates)) & set(map(id, agent._run_update.values()))
    agent.schedule.add_env_steps(0)
    before = agent.opt["tokenizer"].step.clone()
    sections["tokenizer"]()
    assert agent.opt["tokenizer"].step == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", COMPONENTS)
def test_updates_as_graphs_equal_plain_updates(name, count):
    batches_ = on_device(batches(count))
    results = []
    flags = {f"iris.training.{name}.accumulate": count}
    for compile in ("none", "step", "graph"):
        agent = make(CUDA, compile, "bfloat16", **flags)
        losses = []
        for _ in range(6):
            metrics = agent.update(name, batches_[name])
            losses.append(float(metrics[f"{name}/opt/loss"]))
        results.append(losses)
    update = agent._run_update[name]
    assert update.can_capture
    assert any(not isinstance(x, int) for x in update.graphs.values())
    assert agent.opt[name].step == 6
    assert results[1] == pytest.approx(results[0], rel=5e-2, abs=1e-3)
    assert results[2] == pytest.approx(results[1], rel=5e-2, abs=1e-3)


@pytest.mark.gpu
def test_imagination_in_graphs_uses_the_current_world():
    batches_ = on_device(batches())
    agent = make(CUDA, "graph", "bfloat16")
    for _ in range(4):
        agent.update("actor_critic", batches_["actor_critic"])
    for _ in range(5):
        agent.update("tokenizer", batches_["tokenizer"])
    agent.update("actor_critic", batches_["actor_critic"])
    world, copied = agent.world.tokenizer, agent.imagination_world.tokenizer
    torch.testing.assert_close(copied.quantizer.codebook, world.quantizer.codebook)
    expected, actual = world.frame.layers[0].weight, copied.frame.layers[0].weight
    torch.testing.assert_close(actual, expected.to(actual.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", COMPONENTS)
def test_updates_do_not_synchronize_with_the_device(name):
    batches_ = on_device(batches())
    agent = make(CUDA, "graph", "bfloat16")
    for _ in range(4):
        agent.update(name, batches_[name])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            agent.update(name, batches_[name])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_policy_steps_in_graphs_equal_plain_ones():
    flags = {"iris.acting.eval_sample": False}
    rng = np.random.default_rng(0)
    agents = [make(CUDA, mode, **flags) for mode in ("step", "graph")]
    carries = [agent.initial(3) for agent in agents]
    for step in range(8):
        obs = {
            "image": rng.integers(0, 256, (3, 4, 4, 3), dtype=np.uint8),
            "is_first": np.array([step == 0, step in (0, 5), step == 0]),
            "is_last": np.array([False, step == 4, False]),
        }
        for i, agent in enumerate(agents):
            carries[i], action, _ = agent.policy(carries[i], obs, mode="eval")
            assert isinstance(action["action"], np.ndarray)
        plain, graphed = carries
        assert torch.equal(plain.frames, graphed.frames)
        torch.testing.assert_close(plain.lstm, graphed.lstm, rtol=1e-3, atol=1e-3)
    graphs = agents[1]._policy._policy_steps["eval"]._run.graphs
    assert any(isinstance(graph, CapturedGraph) for graph in graphs.values())
