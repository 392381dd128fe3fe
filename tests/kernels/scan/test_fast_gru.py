"""The GRU scan as one kernel per pass, against the plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reverie.nets.gru import GRU, SegmentHold, StateUpdate

pytest.importorskip("triton")

from reverie.kernels.scan.gru import FastGRU, FastSegmentHold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUTES = {
    "plain": StateUpdate(),
    "reset": StateUpdate(torch.ones(())),
    "held": StateUpdate(None, torch.ones(()), torch.ones(())),
    "restarted": StateUpdate(None, torch.ones(()), None, torch.ones(())),
    "all": StateUpdate(*torch.ones(4)),
}


def make_units(
    kind: type[GRU], count: int, width: int, device: str, dtype=torch.float32
) -> GRU:
    units = GRU(5, width, count, dtype)
    units.initialize(torch.Generator().manual_seed(0))
    units.__class__ = kind
    return units.to(device)


def make_inputs(
    name: str, count: int, rows: int, steps: int, width: int, device: str
) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    x, start = normal(rows, steps, 5), normal(count, rows, width)
    input_scale, output_scale, state_scale = (
        None if part is None else (normal(count, rows, steps) > 0).float()
        for part in ROUTES[name][:3]
    )
    if name == "held":  # as VTA uses it; with both flags set, states would grow
        state_scale = 1 - output_scale
    scales = [input_scale, output_scale, state_scale]
    offset = None
    if ROUTES[name].offset is not None:
        offset = normal(count, rows, steps, width)
    return [x, start, *scales, offset]


def states_and_gradients(units: GRU, inputs: list[Tensor | None], backwards: set[int]):
    """Return the states, and the gradients of all inputs and parameters."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    x, start, *state_update = leaves
    states = units.scan(units.gates(x), start, StateUpdate(*state_update), backwards)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(states.shape, generator=generator).to(states)
    targets = [leaf for leaf in leaves if leaf is not None] + list(units.parameters())
    grads = torch.autograd.grad((states * weight).sum(), targets)
    return [states.detach(), *grads]


@pytest.mark.parametrize("name", ROUTES)
def test_states_and_gradients_equal_the_plain_loop(name):
    count, rows, steps, width, backwards = 2, 17, 3, 16, {1}
    inputs = make_inputs(name, count, rows, steps, width, DEVICE)
    fast = states_and_gradients(
        make_units(FastGRU, count, width, DEVICE), inputs, backwards
    )
    plain = make_units(GRU, count, width, "cpu").double()
    inputs64 = [None if x is None else x.cpu().double() for x in inputs]
    for value, expected in zip(
        fast, states_and_gradients(plain, inputs64, backwards), strict=True
    ):
        torch.testing.assert_close(value.cpu().double(), expected, rtol=1e-4, atol=2e-5)


def test_half_precision_products_are_accurate():
    """In float16, because the interpreter does not multiply bfloat16 correctly."""
    inputs = make_inputs("held", 1, 5, 4, 32, DEVICE)
    half = make_units(FastGRU, 1, 32, DEVICE, torch.float16)
    fast = states_and_gradients(half, inputs, set())
    plain = states_and_gradients(make_units(GRU, 1, 32, DEVICE), inputs, set())
    for value, expected in zip(fast, plain, strict=True):
        assert value.dtype == expected.dtype
        error = torch.linalg.vector_norm(value - expected)
        assert error < 2e-3 * torch.linalg.vector_norm(expected)


def test_hold_equals_the_plain_loop():
    generator, results = torch.Generator().manual_seed(0), []
    fresh = torch.randn(19, 6, 5, generator=generator)
    read = (torch.rand(19, 6, generator=generator) > 0.6).float()
    weight = torch.randn(19, 6, 5, generator=generator).to(DEVICE)
    for hold in (SegmentHold(), FastSegmentHold()):
        parts = (fresh, read, 1 - read)
        leaves = [x.clone().to(DEVICE).requires_grad_() for x in parts]
        held = hold(*leaves)
        results.append([held, *torch.autograd.grad((held * weight).sum(), leaves)])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected)


def test_unsupported_widths_use_the_plain_loop():
    inputs = make_inputs("all", 2, 3, 4, 20, DEVICE)
    fast = states_and_gradients(make_units(FastGRU, 2, 20, DEVICE), inputs, {0})
    plain = states_and_gradients(make_units(GRU, 2, 20, DEVICE), inputs, {0})
    for value, expected in zip(fast, plain, strict=True):
        assert torch.equal(value, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_and_gradients_at_full_size(name, dtype):
    inputs = make_inputs(name, 3, 128, 30, 128, "cuda")
    units = make_units(FastGRU, 3, 128, "cuda", dtype)
    fast = states_and_gradients(units, inputs, {2})
    plain = make_units(GRU, 3, 128, "cpu").double()
    inputs64 = [None if x is None else x.cpu().double() for x in inputs]
    tolerance = 3e-3 if dtype == torch.float16 else 2e-2
    for value, expected in zip(
        fast, states_and_gradients(plain, inputs64, {2}), strict=True
    ):
        error = torch.linalg.vector_norm(value.cpu() - expected)
        assert error < tolerance * torch.linalg.vector_norm(expected)
