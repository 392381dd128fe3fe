"""The loop of gated units in one kernel, against the plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from reverie.nets.gru import GRU, Hold, Route

pytest.importorskip("triton")

from reverie.kernels.scan.gru import FastGRU, FastHold

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUTES = {
    "plain": Route(),
    "forgets": Route(torch.ones(())),
    "held": Route(None, torch.ones(()), torch.ones(())),
    "begun": Route(None, torch.ones(()), None, torch.ones(())),
    "all": Route(*torch.ones(4)),
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
    keep, move, stay = (
        None if part is None else (normal(count, rows, steps) > 0).float()
        for part in ROUTES[name][:3]
    )
    if name == "held":  # as worlds use it: a state that may do both grows without end
        stay = 1 - move
    flags = [keep, move, stay]
    fresh = None if ROUTES[name].fresh is None else normal(count, rows, steps, width)
    return [x, start, *flags, fresh]


def results(units: GRU, inputs: list[Tensor | None], backwards: set[int]):
    """The states, and the gradients of everything they depend on."""
    leaves = [None if x is None else x.clone().requires_grad_() for x in inputs]
    x, start, *route = leaves
    states = units.scan(units.gates(x), start, Route(*route), backwards)
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(states.shape, generator=generator).to(states)
    wanted = [leaf for leaf in leaves if leaf is not None] + list(units.parameters())
    grads = torch.autograd.grad((states * weight).sum(), wanted)
    return [states.detach(), *grads]


@pytest.mark.parametrize("name", ROUTES)
def test_states_and_gradients_are_those_of_the_plain_loop(name):
    count, rows, steps, width, backwards = 2, 17, 3, 16, {1}
    inputs = make_inputs(name, count, rows, steps, width, DEVICE)
    ours = results(make_units(FastGRU, count, width, DEVICE), inputs, backwards)
    plain = make_units(GRU, count, width, "cpu").double()
    exact = [None if x is None else x.cpu().double() for x in inputs]
    for mine, theirs in zip(ours, results(plain, exact, backwards), strict=True):
        torch.testing.assert_close(mine.cpu().double(), theirs, rtol=1e-4, atol=2e-5)


def test_products_in_half_precision_stay_close():
    """In float16, the half precision that the interpreter multiplies correctly."""
    inputs = make_inputs("held", 1, 5, 4, 32, DEVICE)
    half = make_units(FastGRU, 1, 32, DEVICE, torch.float16)
    ours = results(half, inputs, set())
    plain = results(make_units(GRU, 1, 32, DEVICE), inputs, set())
    for mine, theirs in zip(ours, plain, strict=True):
        assert mine.dtype == theirs.dtype
        error = torch.linalg.vector_norm(mine - theirs)
        assert error < 2e-3 * torch.linalg.vector_norm(theirs)


def test_values_are_held_as_by_the_plain_loop():
    generator, found = torch.Generator().manual_seed(0), []
    fresh = torch.randn(19, 6, 5, generator=generator)
    read = (torch.rand(19, 6, generator=generator) > 0.6).float()
    weight = torch.randn(19, 6, 5, generator=generator).to(DEVICE)
    for hold in (Hold(), FastHold()):
        parts = (fresh, read, 1 - read)
        leaves = [x.clone().to(DEVICE).requires_grad_() for x in parts]
        held = hold(*leaves)
        found.append([held, *torch.autograd.grad((held * weight).sum(), leaves)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_units_that_do_not_fit_take_the_plain_way():
    inputs = make_inputs("all", 2, 3, 4, 20, DEVICE)
    ours = results(make_units(FastGRU, 2, 20, DEVICE), inputs, {0})
    plain = results(make_units(GRU, 2, 20, DEVICE), inputs, {0})
    for mine, theirs in zip(ours, plain, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_states_and_gradients_at_the_size_of_a_window(name, dtype):
    inputs = make_inputs(name, 3, 128, 30, 128, "cuda")
    units = make_units(FastGRU, 3, 128, "cuda", dtype)
    ours = results(units, inputs, {2})
    plain = make_units(GRU, 3, 128, "cpu").double()
    exact = [None if x is None else x.cpu().double() for x in inputs]
    allowed = 3e-3 if dtype == torch.float16 else 2e-2
    for mine, theirs in zip(ours, results(plain, exact, {2}), strict=True):
        error = torch.linalg.vector_norm(mine.cpu() - theirs)
        assert error < allowed * torch.linalg.vector_norm(theirs)
