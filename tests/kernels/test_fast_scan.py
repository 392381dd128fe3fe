"""The fast posterior scans against the loop of `RSSMDynamics`, gradients included."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from reverie.kernels.scan import loop as scan_loop
from reverie.kernels.scan import scan as fast
from reverie.kernels.scan.persistent import scan as persistent
from reverie.nets.blocks import initialize
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics, RSSMState

SMALL = {"deter": 24, "hidden": 6, "stoch": 5, "classes": 4, "blocks": 3}


class Recorded(Rng):
    """Lets the given clocks race, one step after another."""

    def __init__(self, clocks: Tensor):
        self.steps = iter(clocks.unbind(1))

    def categorical(self, probs: Tensor) -> Tensor:
        return torch.argmax(probs / next(self.steps), -1)


@pytest.fixture
def _exact(monkeypatch):
    """Keep what is wider than float32 as wide as it is."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)


def make_dynamics(tokens: int, **sizes: int) -> RSSMDynamics:
    space = {"move": Space(np.dtype("float32"), (3,), -2.0, 2.0)}
    dynamics = RSSMDynamics(tokens, space, RSSMConfig(**sizes))
    generator = torch.Generator().manual_seed(0)
    initialize(dynamics, generator)
    with torch.no_grad():
        for parameter in dynamics.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.1 * noise  # biases and scales count too
    return dynamics


def make_inputs(
    dynamics: RSSMDynamics, batch: int, length: int, tokens: int, dtype: torch.dtype
) -> tuple[RSSMState, Tensor, dict[str, Tensor], Tensor, Tensor]:
    config, draw = dynamics.config, torch.Generator().manual_seed(1)
    shape = (batch, config.stoch, config.classes)
    index = torch.randint(config.classes, shape[:2], generator=draw)
    state = RSSMState(
        torch.randn(batch, config.deter, generator=draw).mul(0.5).to(dtype),
        torch.nn.functional.one_hot(index, config.classes).to(dtype),
    )
    seen = torch.randn(batch, length, tokens, generator=draw).to(dtype)
    action = {"move": torch.randn(batch, length, 3, generator=draw)}
    reset = torch.rand(batch, length, generator=draw) < 0.3
    clocks = torch.empty(batch, length, *shape[1:]).exponential_(generator=draw)
    wide = torch.promote_types(dtype, torch.float32)
    return state, seen, action, reset, clocks.to(wide)


def fast_observe(
    dynamics: RSSMDynamics,
    state: RSSMState,
    seen: Tensor,
    action: dict[str, Tensor],
    reset: Tensor,
    clocks: Tensor,
    scan=fast.scan,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `RSSMDynamics.observe` does, by way of the fast scan."""
    dtype, deter = seen.dtype, dynamics.config.deter
    layer = {name: getattr(dynamics, name) for name in dir(dynamics)}

    def normed(name: str) -> fast.Normed:
        kernel, norm = layer[name], layer[f"{name}norm"]
        return fast.Normed(kernel.weight.to(dtype), kernel.bias.to(dtype), norm.scale)

    def dense(name: str) -> fast.Dense:
        return fast.Dense(layer[name].weight.to(dtype), layer[name].bias.to(dtype))

    obs = dense("obs0")
    weights = fast.ScanWeights(
        normed("dynin0"),
        normed("dynin1"),
        normed("dynhid0"),
        dense("dyngru"),
        fast.Unbiased(obs.weight[:, :deter], dynamics.obs0norm.scale),
        dense("obslogit"),
    )
    actions = dynamics.embed_action(action, reset, seen)
    tokens = torch.nn.functional.linear(seen, obs.weight[:, deter:], obs.bias)
    return scan(
        weights,
        state.deter,
        state.stoch,
        actions,
        tokens,
        reset,
        clocks,
        dynamics.config.unimix,
        dynamics.dynin0norm.eps,
    )


def weigh(outputs: tuple[Tensor, ...]) -> Tensor:
    """A scalar that depends on every output at every step in its own way."""
    draw = torch.Generator().manual_seed(2)
    total = outputs[0].new_zeros(())
    for x in outputs:
        total = total + (x * torch.randn(x.shape, generator=draw).to(x)).sum()
    return total


def gradients(dynamics: RSSMDynamics, inputs: list[Tensor], loss: Tensor) -> dict:
    named = dict(dynamics.named_parameters())
    found = torch.autograd.grad(loss, [*inputs, *named.values()], allow_unused=True)
    names = [*(f"input {i}" for i in range(len(inputs))), *named]
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize(("batch", "length"), [(3, 7), (1, 1), (5, 2)])
@pytest.mark.usefixtures("_exact")
def test_step_twin_equals_the_plain_loop(batch: int, length: int):
    dynamics = make_dynamics(8, **SMALL).double()
    made = make_inputs(dynamics, batch, length, 8, torch.float64)
    state, seen, action, reset, clocks = made
    inputs = [x.requires_grad_() for x in (*state, seen)]

    states, logits = dynamics.observe(state, seen, action, reset, Recorded(clocks))
    plain = (*states, logits)
    plain_grads = gradients(dynamics, inputs, weigh(plain))
    quick = fast_observe(dynamics, *made)
    quick_grads = gradients(dynamics, inputs, weigh(quick))

    for left, right in zip(quick, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    assert {key for key, grad in quick_grads.items() if grad is None} == {
        key for key, grad in plain_grads.items() if grad is None
    }
    for name, grad in plain_grads.items():
        if grad is not None:
            torch.testing.assert_close(
                quick_grads[name], grad, rtol=1e-9, atol=1e-9, msg=name
            )
    assert sum(grad is not None for grad in plain_grads.values()) > 20


def test_a_reset_forgets_what_came_before():
    dynamics = make_dynamics(8, **SMALL)
    state, seen, action, reset, clocks = make_inputs(dynamics, 2, 4, 8, torch.float32)
    reset[:] = False
    reset[:, 2] = True
    whole = fast_observe(dynamics, state, seen, action, reset, clocks)
    late = {key: value[:, 2:] for key, value in action.items()}
    other = RSSMState(state.deter + 1, state.stoch)
    alone = fast_observe(
        dynamics, other, seen[:, 2:], late, reset[:, 2:], clocks[:, 2:]
    )
    for left, right in zip(whole, alone, strict=True):
        torch.testing.assert_close(left[:, 2:], right)


def test_choices_are_one_hot_and_follow_the_clocks():
    dynamics = make_dynamics(8, **SMALL)
    made = make_inputs(dynamics, 2, 3, 8, torch.float32)
    favourite = torch.full_like(made[-1], 1e3)
    favourite[..., 2] = 1e-3
    _, stochs, _ = fast_observe(dynamics, *made[:-1], favourite)
    assert (stochs.argmax(-1) == 2).all()
    assert torch.equal(stochs.sum(-1), torch.ones_like(stochs[..., 0]))


SIZE12M = {"deter": 2048, "hidden": 256, "stoch": 32, "classes": 16, "blocks": 8}


def decisive(clocks: Tensor) -> Tensor:
    """Clocks that choose by themselves, so that rounding cannot change a choice."""
    first = torch.nn.functional.one_hot(clocks.argmin(-1), clocks.shape[-1])
    return torch.where(first.bool(), 1e-4, 1e4).to(clocks.dtype)


def results(
    scan, dynamics: RSSMDynamics, batch: int, length: int, dtype: torch.dtype
) -> tuple[tuple[Tensor, ...], dict]:
    """Outputs and all gradients of one scan on the GPU."""
    made = make_inputs(dynamics, batch, length, 64, torch.float32)
    *made, clocks = [
        {key: y.cuda() for key, y in x.items()}
        if isinstance(x, dict)
        else RSSMState(*(y.cuda().to(dtype) for y in x))
        if isinstance(x, RSSMState)
        else x.cuda()
        for x in made
    ]
    made[1] = made[1].to(dtype).requires_grad_()
    outputs = fast_observe(dynamics, *made, decisive(clocks), scan)
    loss = weigh(tuple(x.float().cpu() for x in outputs))
    return outputs, gradients(dynamics, [made[1]], loss)


def apart(left: Tensor, right: Tensor) -> float:
    left, right = left.detach().double(), right.detach().double()
    return float((left - right).norm() / right.norm())


def by(loop: ModuleType):
    """The scan by one form of its loop."""

    def scan(weights, deter, stoch, actions, tokens, reset, noise, unimix, eps):
        inputs = fast.Inputs(deter, stoch.flatten(1), actions, tokens, reset, noise)
        settings = fast.Settings(noise.shape[-1], unimix, eps)
        return fast.run(loop, weights, inputs, settings)

    return scan


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(16, 64), (8, 3), (19, 1), (64, 5)])
def test_persistent_scan_is_as_close_to_float32_as_the_plain_loop(batch, length):
    dynamics = make_dynamics(64, **SIZE12M).cuda()
    exact, exact_grads = results(by(scan_loop), dynamics, batch, length, torch.float32)
    plain, plain_grads = results(by(scan_loop), dynamics, batch, length, torch.bfloat16)
    quick, quick_grads = results(
        by(persistent), dynamics, batch, length, torch.bfloat16
    )
    assert persistent.kernels(torch.device("cuda", 0)) is not None
    assert not persistent._refused
    for left, right, goal in zip(quick, plain, exact, strict=True):
        assert apart(left, goal) < 1.3 * apart(right, goal) + 1e-3
    for name, goal in exact_grads.items():
        if goal is not None:
            error, usual = (apart(x[name], goal) for x in (quick_grads, plain_grads))
            assert error < 1.5 * usual + 1e-3, (name, error, usual)


@pytest.mark.gpu
def test_persistent_scan_repeats_itself_also_from_a_graph():
    dynamics = make_dynamics(64, **SIZE12M).cuda()
    made = make_inputs(dynamics, 16, 16, 64, torch.float32)
    state, seen, action, reset, clocks = made
    state = RSSMState(*(x.cuda().bfloat16() for x in state))
    seen, reset, clocks = seen.cuda().bfloat16(), reset.cuda(), clocks.cuda()
    action = {key: value.cuda() for key, value in action.items()}
    parameters = list(dynamics.parameters())

    def update() -> list[Tensor]:
        outputs = fast_observe(
            dynamics, state, seen, action, reset, clocks, by(persistent)
        )
        loss = sum(x.float().square().mean() for x in outputs)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [x.detach() for x in (*outputs, *found) if x is not None]

    first = [x.clone() for x in update()]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        update()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = update()
    for _ in range(3):
        graph.replay()
        for left, right in zip(captured, first, strict=True):
            assert torch.equal(left, right)
