"""Fast posterior scans against `RSSMDynamics.observe`, gradients included."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import reference
from scan_helpers import decisive_noise

from reverie.kernels.scan import posterior
from reverie.kernels.scan.persistent import launch as persistent
from reverie.kernels.scan.tensors import (
    ForwardPass,
    ScanInputs,
    ScanSettings,
    ScanWeights,
)
from reverie.nets.blocks import initialize
from reverie.nets.rng import Rng
from reverie.spaces import Space
from reverie.worlds.rssm.config import RSSMConfig
from reverie.worlds.rssm.dynamics import RSSMDynamics, RSSMState

SMALL = {"deter": 24, "hidden": 6, "stoch": 5, "classes": 4, "blocks": 3}


class GivenNoise(Rng):
    """Samples with the given exponential noise, one step after another."""

    def __init__(self, noise: Tensor):
        self.steps = iter(noise.unbind(1))

    def categorical(self, probs: Tensor) -> Tensor:
        return torch.argmax(probs / next(self.steps), -1)


@pytest.fixture
def _float64(monkeypatch):
    """Make `Tensor.float` keep float64, so that all computations are in float64."""
    monkeypatch.setattr(torch.Tensor, "float", lambda x: x)


def make_dynamics(tokens: int, **sizes: int) -> RSSMDynamics:
    space = {"move": Space(np.dtype("float32"), (3,), -2.0, 2.0)}
    dynamics = RSSMDynamics(tokens, space, RSSMConfig(**sizes))
    generator = torch.Generator().manual_seed(0)
    initialize(dynamics, generator)
    with torch.no_grad():
        for parameter in dynamics.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter += 0.1 * noise  # biases and scales are not trivial
    return dynamics


def make_inputs(
    dynamics: RSSMDynamics, batch: int, length: int, tokens: int, dtype: torch.dtype
) -> tuple[RSSMState, Tensor, dict[str, Tensor], Tensor, Tensor]:
    config, generator = dynamics.config, torch.Generator().manual_seed(1)
    shape = (batch, config.stoch, config.classes)
    index = torch.randint(config.classes, shape[:2], generator=generator)
    state = RSSMState(
        torch.randn(batch, config.deter, generator=generator).mul(0.5).to(dtype),
        torch.nn.functional.one_hot(index, config.classes).to(dtype),
    )
    embed = torch.randn(batch, length, tokens, generator=generator).to(dtype)
    action = {"move": torch.randn(batch, length, 3, generator=generator)}
    is_first = torch.rand(batch, length, generator=generator) < 0.3
    noise = torch.empty(batch, length, *shape[1:]).exponential_(generator=generator)
    wide = torch.promote_types(dtype, torch.float32)
    return state, embed, action, is_first, noise.to(wide)


def fast_observe(
    dynamics: RSSMDynamics,
    state: RSSMState,
    embed: Tensor,
    action: dict[str, Tensor],
    is_first: Tensor,
    noise: Tensor,
    implementation: ModuleType = reference,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `RSSMDynamics.observe` with an implementation of the scan."""
    dtype, deter = embed.dtype, dynamics.config.deter
    named = dict(dynamics.named_parameters())

    def layer(name: str) -> list[Tensor]:
        norm = [named[f"{name}norm.scale"]] if f"{name}norm.scale" in named else []
        return [*(named[f"{name}.{x}"].to(dtype) for x in ("weight", "bias")), *norm]

    obs_weight, obs_bias, obs_scale = layer("obs0")
    weights = ScanWeights(
        *layer("dynin0"),
        *layer("dynin1"),
        *layer("dynhid0"),
        *layer("dyngru"),
        *(obs_weight[:, :deter], obs_scale),
        *layer("obslogit"),
    )
    actions = dynamics.embed_action(action, is_first, embed)
    tokens = torch.nn.functional.linear(embed, obs_weight[:, deter:], obs_bias)
    stoch = state.stoch.flatten(1)
    inputs = ScanInputs(state.deter, stoch, actions, tokens, is_first, noise)
    unimix, eps = dynamics.config.unimix, dynamics.dynin0norm.eps
    settings = ScanSettings(noise.shape[-1], unimix, eps)
    scan = ForwardPass(weights, inputs, settings)
    return posterior.posterior_scan(implementation, scan)


def random_loss(outputs: tuple[Tensor, ...]) -> Tensor:
    """Return a sum of all outputs with random weights."""
    generator = torch.Generator().manual_seed(2)
    total = outputs[0].new_zeros(())
    for x in outputs:
        total = total + (x * torch.randn(x.shape, generator=generator).to(x)).sum()
    return total


def gradients(dynamics: RSSMDynamics, inputs: list[Tensor], loss: Tensor) -> dict:
    named = dict(dynamics.named_parameters())
    grads = torch.autograd.grad(loss, [*inputs, *named.values()], allow_unused=True)
    names = [*(f"input {i}" for i in range(len(inputs))), *named]
    return dict(zip(names, grads, strict=True))


@pytest.mark.parametrize(("batch", "length"), [(3, 7), (1, 1), (5, 2)])
@pytest.mark.usefixtures("_float64")
def test_reference_equals_observe(batch: int, length: int):
    dynamics = make_dynamics(8, **SMALL).double()
    arguments = make_inputs(dynamics, batch, length, 8, torch.float64)
    state, embed, action, is_first, noise = arguments
    inputs = [x.requires_grad_() for x in (*state, embed)]

    rng = GivenNoise(noise)
    states, logits = dynamics.observe(state, embed, action, is_first, rng)
    plain = (*states, logits)
    plain_grads = gradients(dynamics, inputs, random_loss(plain))
    fast = fast_observe(dynamics, *arguments)
    fast_grads = gradients(dynamics, inputs, random_loss(fast))

    for left, right in zip(fast, plain, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-10)
    assert {key for key, grad in fast_grads.items() if grad is None} == {
        key for key, grad in plain_grads.items() if grad is None
    }
    for name, grad in plain_grads.items():
        if grad is not None:
            torch.testing.assert_close(
                fast_grads[name], grad, rtol=1e-9, atol=1e-9, msg=name
            )
    assert sum(grad is not None for grad in plain_grads.values()) > 20


def test_nothing_before_is_first_matters():
    dynamics = make_dynamics(8, **SMALL)
    state, embed, action, is_first, noise = make_inputs(
        dynamics, 2, 4, 8, torch.float32
    )
    is_first[:] = False
    is_first[:, 2] = True
    complete = fast_observe(dynamics, state, embed, action, is_first, noise)
    late_action = {key: value[:, 2:] for key, value in action.items()}
    other = RSSMState(state.deter + 1, state.stoch)
    late = fast_observe(
        dynamics, other, embed[:, 2:], late_action, is_first[:, 2:], noise[:, 2:]
    )
    for left, right in zip(complete, late, strict=True):
        torch.testing.assert_close(left[:, 2:], right)


def test_samples_are_one_hot_and_determined_by_the_noise():
    dynamics = make_dynamics(8, **SMALL)
    *arguments, noise = make_inputs(dynamics, 2, 3, 8, torch.float32)
    noise = torch.full_like(noise, 1e3)
    noise[..., 2] = 1e-3
    _, stochs, _ = fast_observe(dynamics, *arguments, noise)
    assert (stochs.argmax(-1) == 2).all()
    assert torch.equal(stochs.sum(-1), torch.ones_like(stochs[..., 0]))


SIZE12M = {"deter": 2048, "hidden": 256, "stoch": 32, "classes": 16, "blocks": 8}


def to_cuda(value, dtype: torch.dtype | None = None):
    if isinstance(value, dict):
        return {key: x.cuda() for key, x in value.items()}
    if isinstance(value, RSSMState):
        return RSSMState(*(x.cuda().to(dtype) for x in value))
    return value.cuda()


def outputs_and_gradients(
    implementation: ModuleType,
    dynamics: RSSMDynamics,
    batch: int,
    length: int,
    dtype: torch.dtype,
) -> tuple[tuple[Tensor, ...], dict]:
    """Return the outputs and all gradients of one scan on the GPU."""
    *arguments, noise = (
        to_cuda(x, dtype)
        for x in make_inputs(dynamics, batch, length, 64, torch.float32)
    )
    arguments[1] = arguments[1].to(dtype).requires_grad_()
    noise = decisive_noise(noise)
    outputs = fast_observe(dynamics, *arguments, noise, implementation)
    loss = random_loss(tuple(x.float().cpu() for x in outputs))
    return outputs, gradients(dynamics, [arguments[1]], loss)


def relative_error(value: Tensor, expected: Tensor) -> float:
    value, expected = value.detach().double(), expected.detach().double()
    return float((value - expected).norm() / expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "length"), [(16, 64), (8, 3), (19, 1), (64, 5)])
def test_persistent_scan_is_as_close_to_float32_as_the_reference(batch, length):
    dynamics = make_dynamics(64, **SIZE12M).cuda()

    def run(implementation: ModuleType, dtype: torch.dtype):
        return outputs_and_gradients(implementation, dynamics, batch, length, dtype)

    exact, exact_grads = run(reference, torch.float32)
    plain, plain_grads = run(reference, torch.bfloat16)
    fast, fast_grads = run(persistent, torch.bfloat16)
    assert persistent.load_kernels(torch.device("cuda", 0)) is not None
    assert not persistent.fallback.enabled
    for left, right, goal in zip(fast, plain, exact, strict=True):
        assert relative_error(left, goal) < 1.3 * relative_error(right, goal) + 1e-3
    for name, goal in exact_grads.items():
        if goal is not None:
            error, usual = (
                relative_error(x[name], goal) for x in (fast_grads, plain_grads)
            )
            assert error < 1.5 * usual + 1e-3, (name, error, usual)


@pytest.mark.gpu
def test_persistent_scan_is_deterministic_also_in_a_cuda_graph():
    dynamics = make_dynamics(64, **SIZE12M).cuda()
    state, embed, action, is_first, noise = (
        to_cuda(x, torch.bfloat16)
        for x in make_inputs(dynamics, 16, 16, 64, torch.float32)
    )
    embed = embed.bfloat16()
    parameters = list(dynamics.parameters())

    def update() -> list[Tensor]:
        outputs = fast_observe(
            dynamics, state, embed, action, is_first, noise, persistent
        )
        loss = sum(x.float().square().mean() for x in outputs)
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        return [x.detach() for x in (*outputs, *grads) if x is not None]

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
