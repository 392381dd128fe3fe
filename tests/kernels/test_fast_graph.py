"""Captured functions, copies of weights, and the policy as a graph."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from reverie.kernels.graphs.policy import GraphedPolicy, WeightCopies
from reverie.kernels.graphs.runner import (
    WARM_UP,
    CudaGraphRunner,
    clone_outputs,
    pack_scalars,
)
from reverie.kernels.optim.low_precision_weights import LowPrecisionWeights
from reverie.nets.blocks import MLP, MLPConfig, initialize
from reverie.nets.streams import SideStream, on_stream, wait_for

CPU = torch.device("cpu")


def make_mlp(device=CPU):
    mlp = MLP(4, MLPConfig(2, 8))
    initialize(mlp, torch.Generator().manual_seed(0))
    return mlp.to(device)


def test_without_a_gpu_the_function_is_called():
    runner = CudaGraphRunner(lambda x: {"y": x + 1}, "sum", CPU)
    for n in range(WARM_UP + 3):
        assert runner(torch.tensor(n))["y"] == n + 1
    assert not runner.graphs


def test_cloned_outputs_are_independent():
    outputs = {"x": torch.ones(2), "n": 3.0}
    cloned = clone_outputs(outputs)
    outputs["x"].zero_()
    assert cloned["x"].tolist() == [1, 1]
    assert cloned["n"] == 3.0


def test_packed_scalars_are_elements_of_one_vector_per_dtype():
    outputs = {
        "a": torch.tensor(1.0, requires_grad=True),
        "b": (torch.tensor(2), torch.ones(3)),
        "c": torch.tensor(3.0),
        "d": 4.0,
    }
    packed = pack_scalars(outputs)
    assert [packed["a"].item(), packed["b"][0].item(), packed["c"].item()] == [1, 2, 3]
    assert packed["c"].data_ptr() == packed["a"].data_ptr() + 4
    assert packed["b"][0].dtype == torch.int64
    assert packed["b"][1] is outputs["b"][1]
    assert packed["d"] == 4.0
    assert not packed["a"].requires_grad
    assert list(packed) == list(outputs)


@pytest.mark.gpu
def test_a_graph_does_not_wait_for_a_side_stream_that_it_does_not_use():
    stream = SideStream("test")
    runner = CudaGraphRunner(
        lambda x: (wait_for(x, stream), x + 1)[1], "sum", torch.device("cuda")
    )
    x = torch.tensor(1.0, device="cuda")
    with on_stream(x, stream):
        x.add_(1)
    for _ in range(WARM_UP + 2):
        assert runner(x).item() == 3.0
    assert runner.find_graph(x)


@pytest.mark.parametrize("half", [True, False])
def test_a_copied_module_keeps_the_weights_until_refreshed(half):
    mlp = make_mlp()
    dtype = torch.bfloat16 if half else torch.float32
    if half:
        LowPrecisionWeights([mlp], dtype)
    copies = WeightCopies()
    copied = copies.copy_module(mlp)
    x = torch.randn(3, 4, dtype=dtype)
    before = mlp(x)
    assert torch.equal(copied(x), before)
    with torch.no_grad():
        for layer in (mlp.linear0, mlp.linear1):
            for tensor in layer.low_precision or (layer.weight, layer.bias):
                tensor.add_(0.5)
        mlp.norm0.scale.mul_(2)
    assert torch.equal(copied(x), before)
    assert not torch.equal(mlp(x), before)
    copies.refresh()
    assert torch.equal(copied(x), mlp(x))


def test_parameters_of_any_other_module_are_copied_too():
    lstm = torch.nn.LSTMCell(4, 3)
    copies, x = WeightCopies(), torch.randn(2, 4)
    copied, before = copies.copy_module(lstm), lstm(x)[0]
    with torch.no_grad():
        lstm.weight_ih.mul_(2)
    assert torch.equal(copied(x)[0], before)
    copies.refresh()
    assert torch.equal(copied(x)[0], lstm(x)[0])


def test_a_copied_module_shares_weights_that_it_does_not_compute_with():
    mlp = make_mlp()
    copied = WeightCopies().copy_module(mlp)
    assert copied is not mlp
    assert copied.linear0.weight is mlp.linear0.weight


def test_the_loss_is_differentiated_by_low_precision_weights():
    mlp = make_mlp()
    low_precision = LowPrecisionWeights([mlp], torch.bfloat16)
    leaves = [low_precision.leaf(parameter) for parameter in mlp.parameters()]
    loss = mlp(torch.randn(3, 4, dtype=torch.bfloat16)).float().square().mean()
    grads = torch.autograd.grad(loss, leaves)
    dtypes = {grad.dtype for grad in grads}
    assert dtypes == {torch.bfloat16, torch.float32}  # norms have no copies
    assert all(grad.abs().sum() > 0 for grad in grads)


@pytest.mark.gpu
def test_a_replay_changes_state_and_draws_new_random_numbers():
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)
    total = torch.zeros(2, device=device)

    def step(x):
        noise = torch.empty(2, device=device).exponential_(generator=generator)
        total.add_(x)
        return noise, total.clone()

    runner = CudaGraphRunner(step, "sum", device, [generator])
    draws, sums = [], []
    for _ in range(WARM_UP + 4):
        noise, current = clone_outputs(runner(torch.ones(2)))  # from host memory
        draws.append(tuple(noise.tolist()))
        sums.append(current[0].item())
    assert sums == [float(n + 1) for n in range(WARM_UP + 4)]
    assert len(set(draws)) == len(draws)
    generator = torch.Generator(device).manual_seed(0)
    for draw in draws:
        noise = torch.empty(2, device=device).exponential_(generator=generator)
        assert tuple(noise.tolist()) == draw


@pytest.mark.gpu
def test_a_function_that_cannot_be_captured_runs_eagerly_with_one_message(capfd):
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(0)

    def step(x):
        noise = torch.empty(2, device=device).exponential_(generator=generator)
        return noise, x + x.sum().item()  # `item` is not allowed in a capture

    runner = CudaGraphRunner(step, "sum", device, [generator])
    draws = []
    for _ in range(WARM_UP + 3):
        noise, total = runner(torch.ones(2, device="cuda"))
        draws.append(tuple(noise.tolist()))
        assert total.tolist() == [3, 3]
    assert capfd.readouterr().err.count("cannot be captured") == 1
    # the failed capture has not changed the random numbers
    generator = torch.Generator(device).manual_seed(0)
    for draw in draws:
        noise = torch.empty(2, device=device).exponential_(generator=generator)
        assert tuple(noise.tolist()) == draw


@pytest.mark.gpu
def test_the_policy_is_one_update_behind_and_returns_arrays():
    device = torch.device("cuda")
    net = MLP(4, MLPConfig(1, 8)).to(device)
    for parameter in net.parameters():
        torch.nn.init.ones_(parameter)
    copies = WeightCopies()
    copied = copies.copy_module(net)

    def act(carry, obs):
        y = copied(obs["x"].to(device))
        return carry + 1, {"y": y}, {"sum": y.sum(-1)}

    policy = GraphedPolicy(act, device, [], copies)
    carry, obs = torch.zeros(3, device=device), {"x": torch.rand(3, 4)}
    carry, first, extras = policy(carry, obs)
    assert isinstance(first["y"], np.ndarray)
    np.testing.assert_allclose(extras["sum"], first["y"].sum(-1), rtol=1e-5)
    for count in range(2, 7):
        policy.before_update()
        with torch.no_grad():
            net.norm0.scale.mul_(2)
        carry, action, _ = policy(carry, obs)
        assert carry.tolist() == [count] * 3
        if count == 2:  # the weights from before the first update
            np.testing.assert_allclose(action["y"], first["y"], rtol=1e-5)
        else:
            assert (action["y"] > first["y"]).all()


@pytest.mark.gpu
def test_a_carry_of_an_earlier_step_can_be_continued():
    device = torch.device("cuda")

    def act(carry, obs):
        total = carry[0] + obs["x"]
        return (total, carry[1] + 1), {"y": total.clone()}, {}

    policy = GraphedPolicy(act, device, [])
    carry = torch.zeros(2, 3, device=device), torch.zeros(2, 1, device=device).long()
    carries, ones = [carry], {"x": torch.ones(2, 3)}
    for _ in range(WARM_UP + 3):
        carry, action, _ = policy(carries[-1], ones)
        carries.append(carry)
        np.testing.assert_array_equal(action["y"], len(carries) - 1.0)
    for count, carry in enumerate(carries):  # later steps have not overwritten them
        assert carry[0].tolist() == [[count] * 3] * 2
        assert carry[1].tolist() == [[count]] * 2
        _, action, _ = policy(carry, {"x": torch.full((2, 3), 0.5)})
        np.testing.assert_array_equal(action["y"], count + 0.5)


@pytest.mark.gpu
def test_inputs_that_stay_in_place_are_not_copied():
    device = torch.device("cuda")
    runner = CudaGraphRunner(lambda x: x + 1, "sum", device, static_inputs=True)
    x = torch.zeros(2, device=device)
    for n in range(WARM_UP + 3):
        x.fill_(n)
        assert runner(x).tolist() == [n + 1] * 2
    assert runner.find_graph(x).inputs[0] is x
    assert runner(torch.full((2,), 7.0, device=device)).tolist() == [8, 8]
