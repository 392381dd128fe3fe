"""Record the work of a function once as a CUDA graph, and replay it after that.

A replay launches thousands of kernels as one, which is what small networks need: their
kernels are shorter than the time it takes to launch them one by one. In exchange, the
function must do the same work on the same memory every time. It takes and returns nests
of tensors, changes what it keeps in place, and never asks the device for a value.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from reverie.nets.streams import FIRST
from reverie.nets.tree import leaves, map1, map2

WARM_UP = 2
"""Calls that run plainly first: libraries choose their algorithms in them."""


class Replayed:
    """The function, replayed from the third call on with inputs of one shape.

    Inputs may be in host memory; the function finds them on the device. What a replay
    returns is overwritten by the next one: `fresh` copies it first. A function that
    cannot be recorded goes on running plainly, and says so once.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        device: torch.device,
        generators: Iterable[torch.Generator] = (),
    ):
        self.function, self.name, self.device = function, name, device
        self.generators = list(generators)
        self.recordings: dict[Any, Recording | int] = {}
        self.works = device.type == "cuda"

    def __call__(self, *inputs: Any) -> Any:
        if not self.works:
            return self.function(*inputs)
        key = tuple((x.shape, x.dtype) for x in leaves(inputs))
        known = self.recordings.get(key, 0)
        if isinstance(known, Recording):
            return known.replay(inputs)
        if known < WARM_UP:
            self.recordings[key] = known + 1
            return _aside(self.function, map1(lambda x: x.to(self.device), inputs))
        try:
            recording = Recording(self.function, inputs, self.device, self.generators)
        except RuntimeError as error:
            self.works = False
            reason = str(error).splitlines()[0]
            print(
                f"The {self.name} cannot be recorded as a CUDA graph ({reason}), so it "
                "runs kernel by kernel: the same results, but slower.",
                file=sys.stderr,
            )
            return self.function(*inputs)
        self.recordings[key] = recording
        return recording.replay(inputs)


class Recording:
    """One recorded graph with the memory it reads and writes."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Any,
        device: torch.device,
        generators: Iterable[torch.Generator],
    ):
        self.inputs = map1(lambda x: x.to(device, copy=True), inputs)
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        torch.cuda.synchronize()
        # Products keep scratch memory for every stream: graphs recorded on the same one
        # would share it, and could not be replayed side by side. Other threads (a
        # prefetching feed) may allocate and copy meanwhile.
        own = torch.cuda.Stream(priority=FIRST)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(
            self.graph, stream=own, capture_error_mode="thread_local"
        ):
            self.outputs = function(*self.inputs)

    def replay(self, inputs: Any) -> Any:
        map2(_fill, self.inputs, inputs)
        self.graph.replay()
        return self.outputs


def fresh(outputs: Any) -> Any:
    """Copies that later replays leave alone."""
    return map1(lambda x: x.clone() if isinstance(x, Tensor) else x, outputs)


def _fill(buffer: Tensor, value: Tensor) -> None:
    if buffer is not value:
        buffer.copy_(value, non_blocking=True)


def _aside(function: Callable[..., Any], inputs: Any) -> Any:
    """Run on a stream of its own, as recording will."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        outputs = function(*inputs)
    current.wait_stream(stream)
    for tensor in leaves(outputs):
        tensor.record_stream(current)
    return outputs
