"""Measure the time of the posterior scan of the RSSM, for each implementation.

    python benchmarks/scan.py --sizes 50m 200m --batches 16 32

Prints the median time of twenty forward and backward passes over 64 steps in bfloat16,
which are captured as a CUDA graph. Needs a CUDA GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from reverie.kernels.scan import posterior
from reverie.kernels.scan.persistent import launch as persistent
from reverie.kernels.scan.streamed import launch as streamed
from reverie.kernels.scan.tensors import (
    ForwardPass,
    ScanInputs,
    ScanSettings,
    ScanWeights,
)
from reverie.kernels.scan.triton import launch as triton
from reverie.run.config import resolve

IMPLEMENTATIONS: dict[str, ModuleType] = {
    "persistent": persistent,
    "streamed": streamed,
    "triton": triton,
}
SIZES = ("12m", "25m", "50m", "100m", "200m", "400m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--batches", nargs="+", type=int, default=[16])
    parser.add_argument("--implementations", nargs="+", default=list(IMPLEMENTATIONS))
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()
    for size in args.sizes:
        for batch in args.batches:
            scan = make_scan(size, batch, args.length)
            selected = posterior.select_implementation(scan)
            for name in args.implementations:
                module = IMPLEMENTATIONS[name]
                if not module.is_supported(scan):
                    continue
                mark = " (selected)" if module is selected else ""
                ms = measure(module, scan)
                print(f"{size} batch {batch} {name}: {ms:.3f} ms{mark}", flush=True)


def make_scan(size: str, batch: int, length: int) -> ForwardPass:
    """Return random weights and inputs."""
    config = resolve([f"size{size}"], flags={"task": "dummy_disc"}).dreamer.rssm
    deter, units, blocks = config.deter, config.hidden, config.blocks
    stoch, classes = config.stoch, config.classes
    width, logits = deter // blocks, stoch * classes

    def normal(*shape: int, scale: float = 0.03) -> Tensor:
        values = torch.randn(shape, device="cuda") * scale
        return values.bfloat16().requires_grad_()

    def ones(count: int) -> Tensor:
        return torch.ones(count, device="cuda").requires_grad_()

    weights = ScanWeights(
        *(normal(units, deter), normal(units), ones(units)),
        *(normal(units, logits), normal(units), ones(units)),
        *(normal(blocks, width + 3 * units, width), normal(deter), ones(deter)),
        *(normal(blocks, width, 3 * width), normal(3 * deter)),
        *(normal(units, deter), ones(units)),
        *(normal(logits, units), normal(logits)),
    )
    inputs = ScanInputs(
        normal(batch, deter).detach(),
        torch.zeros(batch, logits, device="cuda", dtype=torch.bfloat16),
        normal(batch, length, units, scale=1),
        normal(batch, length, units, scale=1),
        torch.rand(batch, length, device="cuda") < 0.02,
        torch.empty(batch, length, stoch, classes, device="cuda").exponential_(),
    )
    return ForwardPass(weights, inputs, ScanSettings(classes, 0.01, 1e-4))


def measure(implementation: ModuleType, scan: ForwardPass) -> float:
    """Return the median milliseconds of one forward and backward pass."""
    inputs = [*scan.weights, scan.inputs.actions, scan.inputs.tokens]
    outputs = posterior.posterior_scan(implementation, scan)
    output_grads = [torch.randn_like(x) for x in outputs]

    def forward_backward() -> None:
        outputs = posterior.posterior_scan(implementation, scan)
        torch.autograd.grad(outputs, inputs, output_grads)

    replay = capture(forward_backward)
    for _ in range(3):
        replay()
    return statistics.median(milliseconds(replay) for _ in range(20))


def capture(call: Callable[[], None]) -> Callable[[], None]:
    """Capture a call as a CUDA graph; return the function that replays it."""
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
    """Return the time of a call on the GPU."""
    event: Any = torch.cuda.Event
    start, stop = (event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


if __name__ == "__main__":
    main()
