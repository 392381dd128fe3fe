"""The step kernels of the posterior scan against its plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from reverie.kernels.launch import can_launch
from reverie.kernels.scan import loop as scan_loop
from reverie.kernels.scan import scan as fast
from reverie.kernels.scan import triton_steps as scan_steps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

needs_kernels = pytest.mark.skipif(
    not can_launch(DEVICE, torch.float32),
    reason="needs a CUDA device or TRITON_INTERPRET=1",
)


def make(
    batch: int,
    length: int,
    sizes: tuple[int, int, int, int, int],
    dtype: torch.dtype = torch.float32,
) -> tuple[fast.ScanWeights, fast.Inputs, fast.Settings]:
    deter, units, blocks, stoch, classes = sizes
    width, flat = deter // blocks, stoch * classes
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int, scale: float = 0.2) -> Tensor:
        x = scale * torch.randn(*shape, generator=draw)
        return x.to(DEVICE, dtype).requires_grad_()

    def gain(size: int) -> Tensor:
        x = 1 + 0.1 * torch.randn(size, generator=draw)
        return x.to(DEVICE).requires_grad_()

    rows = width + 3 * units
    weights = fast.ScanWeights(
        fast.Normed(normal(units, deter), normal(units), gain(units)),
        fast.Normed(normal(units, flat), normal(units), gain(units)),
        fast.Normed(normal(blocks, rows, width), normal(deter), gain(deter)),
        fast.Dense(normal(blocks, width, 3 * width), normal(3 * deter)),
        fast.Unbiased(normal(units, deter), gain(units)),
        fast.Dense(normal(flat, units, scale=1.0), normal(flat)),
    )
    clocks = torch.empty(batch, length, stoch, classes).exponential_(generator=draw)
    first = torch.nn.functional.one_hot(clocks.argmin(-1), classes).bool()
    clocks = torch.where(first, 1e-4, 1e4)  # rounding cannot change a choice
    inputs = fast.Inputs(
        normal(batch, deter, scale=0.5),
        normal(batch, flat),
        normal(batch, length, units, scale=1.0),
        normal(batch, length, units, scale=1.0),
        (torch.rand(batch, length, generator=draw) < 0.3).to(DEVICE),
        clocks.to(DEVICE),
    )
    return weights, inputs, fast.Settings(classes, 0.01, 1e-4)


def results(loop, weights, inputs, settings) -> dict[str, Tensor]:
    """Outputs and gradients by name."""
    outputs = fast.run(loop, weights, inputs, settings)
    draw = torch.Generator().manual_seed(1)
    ups = [torch.randn(x.shape, generator=draw).to(x) for x in outputs]
    leaves = {
        **dict(zip(("deter", "stoch", "actions", "tokens"), inputs, strict=False)),
        **{
            f"{name}.{part}": value
            for name, layer in zip(weights._fields, weights, strict=True)
            for part, value in layer._asdict().items()
        },
    }
    grads = torch.autograd.grad(outputs, list(leaves.values()), ups)
    named = dict(zip(("deters", "stochs", "logits"), outputs, strict=True))
    return {**named, **dict(zip(leaves, grads, strict=True))}


SIZES = {
    "small": (64, 16, 2, 2, 8),
    "blocks of another width": (96, 16, 2, 2, 24),
    "wide classes": (32, 32, 2, 2, 32),
}


@needs_kernels
@pytest.mark.parametrize(
    ("name", "batch", "length"),
    [("small", 2, 3), ("blocks of another width", 17, 2), ("wide classes", 1, 1)],
)
def test_step_kernels_equal_the_plain_loop(name: str, batch: int, length: int):
    sizes = SIZES[name]
    made = make(batch, length, sizes)
    plain, quick = results(scan_loop, *made), results(scan_steps, *made)
    for name, value in plain.items():
        torch.testing.assert_close(
            quick[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@needs_kernels
def test_step_kernels_take_half_precision():
    exact = results(scan_loop, *make(3, 2, SIZES["small"]))
    made = make(3, 2, SIZES["small"], torch.float16)  # the interpreter has no bfloat16
    plain, quick = results(scan_loop, *made), results(scan_steps, *made)
    for name, goal in exact.items():
        error, usual = (float((x[name] - goal).norm()) for x in (quick, plain))
        assert error < 1.5 * usual + 0.002 * float(goal.norm()), name


def test_odd_widths_are_left_to_the_plain_loop():
    weights, inputs, _ = make(2, 2, (30, 10, 3, 2, 4))
    assert not scan_steps.fits(weights, inputs)
