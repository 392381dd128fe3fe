"""Time the posterior scan alone, in each of its forms (needs a CUDA GPU).

    python benchmarks/scan.py --sizes 50m 200m --batches 16 32

Forward and backward of 64 steps in bfloat16, recorded as a CUDA graph; the median of
twenty replays.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reverie.kernels.scan import loop as scan_loop
from reverie.kernels.scan import scan
from reverie.kernels.scan import triton_steps as scan_steps
from reverie.kernels.scan.loop import (
    Dense,
    Inputs,
    Normed,
    ScanWeights,
    Settings,
    Unbiased,
)
from reverie.kernels.scan.persistent import scan as persistent
from reverie.kernels.scan.streamed import scan as streamed

FORMS: dict[str, ModuleType] = {
    "persistent": persistent,
    "streamed": streamed,
    "steps": scan_steps,
    "loop": scan_loop,
}
CHOICES, BLOCKS = 32, 8
SIZES = {
    "12m": (2048, 256, 16),
    "25m": (3072, 384, 24),
    "50m": (4096, 512, 32),
    "100m": (6144, 768, 48),
    "200m": (8192, 1024, 64),
    "400m": (12288, 1536, 96),
}
"""Deter, units, classes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES))
    parser.add_argument("--batches", nargs="+", type=int, default=[16])
    parser.add_argument("--forms", nargs="+", default=list(FORMS)[:3])
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()
    for size in args.sizes:
        for batch in args.batches:
            weights, inputs, settings = make(size, batch, args.length)
            chosen = scan.choose(weights, inputs)
            for name in args.forms:
                loop = FORMS[name]
                if not getattr(loop, "fits", lambda *_: True)(weights, inputs):
                    continue
                mark = " (chosen)" if loop is chosen else ""
                ms = timed(loop, weights, inputs, settings)
                print(f"{size} batch {batch} {name}: {ms:.3f} ms{mark}", flush=True)


def make(size: str, batch: int, length: int) -> tuple[ScanWeights, Inputs, Settings]:
    deter, units, classes = SIZES[size]
    width, logits = deter // BLOCKS, CHOICES * classes

    def half(*shape: int, scale: float = 0.03) -> Tensor:
        values = torch.randn(shape, device="cuda") * scale
        return values.bfloat16().requires_grad_()

    def ones(count: int) -> Tensor:
        return torch.ones(count, device="cuda").requires_grad_()

    weights = ScanWeights(
        Normed(half(units, deter), half(units), ones(units)),
        Normed(half(units, logits), half(units), ones(units)),
        Normed(half(BLOCKS, width + 3 * units, width), half(deter), ones(deter)),
        Dense(half(BLOCKS, width, 3 * width), half(3 * deter)),
        Unbiased(half(units, deter), ones(units)),
        Dense(half(logits, units), half(logits)),
    )
    inputs = Inputs(
        half(batch, deter).detach(),
        torch.zeros(batch, logits, device="cuda", dtype=torch.bfloat16),
        half(batch, length, units, scale=1),
        half(batch, length, units, scale=1),
        torch.rand(batch, length, device="cuda") < 0.02,
        torch.empty(batch, length, CHOICES, classes, device="cuda").exponential_(),
    )
    return weights, inputs, Settings(classes, 0.01, 1e-4)


def timed(
    loop: ModuleType, weights: ScanWeights, inputs: Inputs, settings: Settings
) -> float:
    leaves = [x for layer in weights for x in layer] + [inputs.actions, inputs.tokens]
    outs = scan.run(loop, weights, inputs, settings)
    above = [torch.randn_like(out) for out in outs]

    def both() -> None:
        outs = scan.run(loop, weights, inputs, settings)
        torch.autograd.grad(outs, leaves, above)

    graph = record(both)
    for _ in range(3):
        graph()
    return statistics.median(milliseconds(graph) for _ in range(20))


def record(call: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def milliseconds(call: Callable[[], None]) -> float:
    make: Any = torch.cuda.Event
    start, stop = (make(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


if __name__ == "__main__":
    main()
