"""Recorded functions, weights to act with, and acting itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.kernels.graphs.graph import WARM_UP, Replayed, fresh
from reverie.kernels.graphs.snapshot import Snapshot
from reverie.kernels.optim.low_precision_weights import Shadows
from reverie.nets.blocks import MLP, initialize

CPU = torch.device("cpu")


def make_mlp(device=CPU):
    mlp = MLP(4, 2, 8, "silu", "rms")
    initialize(mlp, torch.Generator().manual_seed(0))
    return mlp.to(device)


def test_without_a_gpu_a_function_simply_runs():
    replayed = Replayed(lambda x: {"y": x + 1}, "sum", CPU)
    for n in range(WARM_UP + 3):
        assert replayed(torch.tensor(n))["y"] == n + 1
    assert not replayed.recordings


def test_copies_are_not_shared():
    first = {"x": torch.ones(2), "n": 3.0}
    second = fresh(first)
    first["x"].zero_()
    assert second["x"].tolist() == [1, 1]
    assert second["n"] == 3.0


@pytest.mark.parametrize("half", [True, False])
def test_a_snapshot_acts_with_the_weights_it_was_taken_of(half):
    mlp = make_mlp()
    dtype = torch.bfloat16 if half else torch.float32
    if half:
        Shadows([mlp], dtype)
    snapshot = Snapshot()
    twin = snapshot.of(mlp)
    x = torch.randn(3, 4, dtype=dtype)
    before = mlp(x)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for layer in (mlp.linear0, mlp.linear1):
            for tensor in layer.shadow or (layer.weight, layer.bias):
                tensor.add_(0.5)
        mlp.norm0.scale.mul_(2)
    assert torch.equal(twin(x), before)
    assert not torch.equal(mlp(x), before)
    snapshot.refresh()
    assert torch.equal(twin(x), mlp(x))


def test_a_snapshot_shares_what_it_does_not_compute_with():
    mlp = make_mlp()
    twin = Snapshot().of(mlp)
    assert twin is not mlp
    assert twin.linear0.weight is mlp.linear0.weight


def test_the_loss_is_differentiated_by_the_copies():
    mlp = make_mlp()
    shadows = Shadows([mlp], torch.bfloat16)
    leaves = [shadows.leaf(parameter) for parameter in mlp.parameters()]
    loss = mlp(torch.randn(3, 4, dtype=torch.bfloat16)).float().square().mean()
    grads = torch.autograd.grad(loss, leaves)
    kinds = {grad.dtype for grad in grads}
    assert kinds == {torch.bfloat16, torch.float32}  # norms have no copies
    assert all(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.gpu
def test_a_replay_changes_state_and_draws_anew():
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    total = torch.zeros(2, device=device)

    def step(x):
        noise = torch.empty(2, device=device).exponential_(generator=generator)
        total.add_(x)
        return noise, total.clone()

    replayed = Replayed(step, "sum", device, [generator])
    draws, sums = [], []
    for _ in range(WARM_UP + 4):
        noise, now = fresh(replayed(torch.ones(2)))  # from host memory
        draws.append(tuple(noise.tolist()))
        sums.append(now[0].item())
    assert sums == [float(n + 1) for n in range(WARM_UP + 4)]
    assert len(set(draws)) == len(draws)
    again = torch.Generator(device).manual_seed(0)
    for draw in draws:
        noise = torch.empty(2, device=device).exponential_(generator=again)
        assert tuple(noise.tolist()) == draw


@pytest.mark.gpu
def test_what_cannot_be_recorded_runs_plainly_and_says_so_once(capfd):
    replayed = Replayed(lambda x: x + x.sum().item(), "sum", torch.device("cuda"))
    for _ in range(WARM_UP + 3):
        assert replayed(torch.ones(2, device="cuda")).tolist() == [3, 3]
    assert capfd.readouterr().err.count("cannot be recorded") == 1


@pytest.mark.gpu
def test_acting_is_one_update_behind_and_answers_in_host_memory():
    from reverie.kernels.graphs.policy import Acting

    device = torch.device("cuda")
    weight = MLP(4, 1, 8, "silu", "rms").to(device)
    for parameter in weight.parameters():
        torch.nn.init.ones_(parameter)
    snapshot = Snapshot()
    twin = snapshot.of(weight)

    def act(carry, seen):
        y = twin(seen["x"].to(device))
        return carry + 1, {"y": y}, {"sum": y.sum(-1)}

    acting = Acting(act, device, [], snapshot)
    carry, seen = torch.zeros(3, device=device), {"x": torch.rand(3, 4)}
    carry, first, extras = acting(carry, seen)
    assert isinstance(first["y"], np.ndarray)
    np.testing.assert_allclose(extras["sum"], first["y"].sum(-1), rtol=1e-5)
    for count in range(2, 7):
        acting.before_update()
        with torch.no_grad():
            weight.norm0.scale.mul_(2)
        carry, action, _ = acting(carry, seen)
        assert carry.tolist() == [count] * 3
        if count == 2:  # the weights from before the first update
            np.testing.assert_allclose(action["y"], first["y"], rtol=1e-5)
        else:
            assert (action["y"] > first["y"]).all()
