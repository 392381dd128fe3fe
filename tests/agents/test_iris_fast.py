"""Δ-IRIS with its GPU twins in place learns and acts as without them.

On a CPU the kernels run in Triton's interpreter. Recorded updates need a GPU.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from test_iris import lived, make_env, settings

from reverie.agents.iris.actor_critic import Recall
from reverie.agents.iris.agent import Iris
from reverie.agents.iris.config import PARTS
from reverie.agents.iris.fast import FastPixelNet
from reverie.kernels import accelerate
from reverie.kernels.optim.low_precision_weights import LowPrecisionWeights

pytest.importorskip("triton")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEVICE = CUDA if torch.cuda.is_available() else CPU


SMALL = {
    "iris.learn.tokenizer.batch": 2,
    "iris.learn.tokenizer.length": 2,
    "iris.learn.world_model.batch": 2,
    "iris.learn.world_model.length": 2,
    "iris.learn.actor_critic.batch": 1,
    "iris.actor_critic.horizon": 2,
    "iris.world_model.transformer.layers": 1,
}


def make(device=CPU, compile="none", precision="float32", **flags) -> Iris:
    env = make_env()
    return Iris(
        env.obs_space,
        env.act_space,
        settings(**SMALL, **flags),
        device=device,
        precision=precision,
        compile=compile,
    )


def batches(count=1):
    """What an agent lived through, to be learnt from by others."""
    agent = make()
    feed = lived(agent)
    return {name: [feed(name) for _ in range(count)] for name in PARTS}


def on_device(windows_):
    return {
        name: [{key: x.to(DEVICE) for key, x in batch.items()} for batch in window]
        for name, window in windows_.items()
    }


def kinds(module):
    return {type(part).__name__ for part in module.modules()}


@pytest.mark.parametrize(
    "name", ["tokenizer", *(pytest.param(x, marks=pytest.mark.slow) for x in PARTS[1:])]
)
def test_twins_learn_what_plain_parts_learn(name, monkeypatch):
    monkeypatch.setattr(accelerate, "available", lambda device: True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain, quick = (make(DEVICE, compile) for compile in ("none", "step"))
    for module in (quick.world, quick.actor_critic, quick.dreamt):
        assert "FastFrameEncoder" in kinds(module)
    window = on_device(batches())[name]
    one, two = (agent.update(name, window) for agent in (plain, quick))
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4, msg=key)
    for mine, other in zip(
        plain.opts[name].tensors, quick.opts[name].tensors, strict=True
    ):
        torch.testing.assert_close(other, mine, rtol=1e-3, atol=2e-3)


def test_an_lstm_that_multiplies_all_inputs_at_once_remembers_the_same():
    plain = make(DEVICE).actor_critic.online
    quick = copy.deepcopy(plain)
    quick.__class__ = FastPixelNet
    features = torch.randn(3, 4, plain.lstm.input_size, device=DEVICE)
    start = Recall(*torch.randn(2, 3, plain.width, device=DEVICE))
    given = [x.requires_grad_() for x in (features, *start)]
    found = []
    for net in (plain, quick):
        recall, hidden = net.watch(start, features)
        leaves = [*given, *net.lstm.parameters()]
        grads = torch.autograd.grad(hidden.cos().sum(), leaves)
        found.append((recall, hidden, grads))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    recall, hidden = quick.watch(start, features[:, :0])
    assert recall is start
    assert hidden.shape == (3, 0, plain.width)


@torch.no_grad()
def test_what_is_remembered_beside_decides_the_same():
    plain = make(DEVICE).actor_critic.online
    quick = copy.deepcopy(plain)
    quick.__class__ = FastPixelNet
    image = torch.randint(0, 256, (3, *make_env().obs_space["image"].shape))
    image = image.to(DEVICE, torch.uint8)
    start = Recall(*torch.randn(2, 3, plain.width, device=DEVICE))
    wanted, got = (net.decide(start, image) for net in (plain, quick))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_the_copy_to_dream_in_has_the_twins_too(monkeypatch):
    monkeypatch.setattr(accelerate, "available", lambda device: True)
    quick = make(DEVICE, "step", "bfloat16")
    assert quick.dreamt is not quick.world
    assert {"FastFrameDecoder", "FastTransformer"} <= kinds(quick.dreamt)


def test_without_twins_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(accelerate, "available", lambda device: False)
    assert make(compile="step").fast.has_graphs is False
    assert "FastFrameEncoder" not in kinds(make(compile="step").world)


@pytest.fixture
def _without_onednn():
    """Whose half precision ends the process on some machines."""
    before = torch.backends.mkldnn.set_flags(False)
    yield
    torch.backends.mkldnn.set_flags(*before)


@pytest.mark.usefixtures("_without_onednn")
@pytest.mark.parametrize("name", PARTS)
def test_every_weight_is_used_through_its_copy(name):
    window = batches()[name][0]
    found = []
    for shadowed in (False, True):
        agent = make(precision="bfloat16")
        tensors = agent.opts[name].tensors
        if shadowed:
            seeing = [net.frame for net in agent.actor_critic.children()]
            shadows = LowPrecisionWeights([agent.world, *seeing], torch.bfloat16)
            tensors = [shadows.leaf(tensor) for tensor in tensors]
        losses, _ = agent.losses(name, agent._segment(window))
        total = torch.stack([x.mean() for x in losses.values()]).sum()
        found.append(torch.autograd.grad(total, tensors))
    for plain, copied in zip(*found, strict=True):
        assert torch.equal(plain, copied.float())


def test_parts_are_timed_with_learners_of_their_own():
    agent = make()
    pieces = agent.sections(lived(agent))
    assert list(pieces) == list(PARTS)
    learners = [piece.args[-1] for piece in pieces.values()]
    assert not set(map(id, learners)) & set(map(id, agent.learning.values()))
    agent.schedule.add_env_steps(0)
    before = agent.opts["tokenizer"].step.clone()
    pieces["tokenizer"]()
    assert agent.opts["tokenizer"].step == before + 1


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", PARTS)
def test_a_recorded_update_is_the_update(name, count):
    windows_ = on_device(batches(count))
    found = []
    flags = {f"iris.learn.{name}.accumulate": count}
    for compile in ("none", "step", "graph"):
        agent = make(CUDA, compile, "bfloat16", **flags)
        losses = []
        for _ in range(6):
            metrics = agent.update(name, windows_[name])
            losses.append(float(metrics[f"{name}/opt/loss"]))
        found.append(losses)
    learner = agent.learning[name]
    assert learner.can_capture
    assert any(not isinstance(x, int) for x in learner.graphs.values())
    assert agent.opts[name].step == 6
    assert found[1] == pytest.approx(found[0], rel=5e-2, abs=1e-3)
    assert found[2] == pytest.approx(found[1], rel=5e-2, abs=1e-3)


@pytest.mark.gpu
def test_recorded_dreams_see_the_world_of_now():
    windows_ = on_device(batches())
    agent = make(CUDA, "graph", "bfloat16")
    for _ in range(4):
        agent.update("actor_critic", windows_["actor_critic"])
    for _ in range(5):
        agent.update("tokenizer", windows_["tokenizer"])
    agent.update("actor_critic", windows_["actor_critic"])
    world, dreamt = agent.world.tokenizer, agent.dreamt.tokenizer
    torch.testing.assert_close(dreamt.quantizer.codebook, world.quantizer.codebook)
    mine, other = world.frame.layers[0].weight, dreamt.frame.layers[0].weight
    torch.testing.assert_close(other, mine.to(other.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PARTS)
def test_updates_never_wait_for_the_device(name):
    windows_ = on_device(batches())
    agent = make(CUDA, "graph", "bfloat16")
    for _ in range(4):
        agent.update(name, windows_[name])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            agent.update(name, windows_[name])
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_recorded_acting_remembers_and_chooses_as_running_does():
    flags = {"iris.acting.eval_sample": False}
    rng = np.random.default_rng(0)
    agents = [make(CUDA, mode, **flags) for mode in ("step", "graph")]
    memories = [agent.initial(3) for agent in agents]
    for step in range(8):
        obs = {
            "image": rng.integers(0, 256, (3, 4, 4, 3), dtype=np.uint8),
            "is_first": np.array([step == 0, step in (0, 5), step == 0]),
            "is_last": np.array([False, step == 4, False]),
        }
        for i, agent in enumerate(agents):
            memories[i], action, _ = agent.policy(memories[i], obs, mode="eval")
            assert isinstance(action["action"], np.ndarray)
        one, two = memories
        assert torch.equal(one.frames, two.frames)
        torch.testing.assert_close(one.recall, two.recall, rtol=1e-3, atol=1e-3)
    assert agents[1].acting["eval"].act.graphs
