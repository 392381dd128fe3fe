"""Capture a function as a CUDA graph, and replay the graph in later calls.

A replay launches thousands of kernels at once. Small networks need this, because
launching one of their kernels takes longer than running it. The function must do the
same work on the same memory in every call: it takes and returns trees of tensors,
changes its state in place, and never syncs with the host.

In a data-parallel update, the graph contains the NCCL operations of the function. The
communicator exists before the capture, because the function has been called before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from reverie.distributed import collective
from reverie.distributed.heartbeat import progress
from reverie.nets.streams import GRAPH_PRIORITY
from reverie.nets.tree import tree_leaves, tree_map

WARM_UP = 2
"""Eager calls before the capture, in which cuDNN, cuBLAS and Triton select kernels."""
CAPTURE_SECONDS = 600.0
"""Time limit, in seconds, of a data-parallel update in which a graph is captured.

Other updates have their own time limit. A run fails if an update exceeds its limit.
"""


class CudaGraphRunner:
    """Calls a function, and captures it in the third call with inputs of equal shapes.

    A replay copies its inputs into the buffers of the graph. With `static_inputs`, the
    graph reads the tensors passed at capture in place: calls that pass the same tensors
    copy nothing, others overwrite them. No other code may use these tensors.

    Inputs may be in host memory; the function gets them on the device. The outputs of a
    replay are overwritten by the next one: use `clone_outputs` to keep them. A function
    that cannot be captured runs eagerly, with a message on stderr; in a data-parallel
    update, it then runs eagerly on all ranks.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        device: torch.device,
        generators: Iterable[torch.Generator] = (),
        priority: int = GRAPH_PRIORITY,
        static_inputs: bool = False,
    ):
        self.function, self.name, self.device = function, name, device
        self.generators = list(generators)
        self.priority, self.static_inputs = priority, static_inputs
        self.graphs: dict[Any, CapturedGraph | int] = {}  # int: number of warm-up calls
        self.can_capture = device.type == "cuda"

    def __call__(self, *inputs: Any) -> Any:
        if not (self.can_capture and collective.can_capture()):
            return self.function(*inputs)
        key = _key(inputs)
        graph = self.graphs.get(key, 0)
        if isinstance(graph, CapturedGraph):
            return graph.replay(inputs)
        if graph < WARM_UP:
            self.graphs[key] = graph + 1
            inputs = tree_map(lambda x: x.to(self.device), inputs)
            return _run_on_new_stream(self.function, inputs)
        captured = self._try_capture(inputs)
        if not collective.agree(captured is not None) or captured is None:
            self.can_capture = False
            return self.function(*inputs)
        self.graphs[key] = captured
        return captured.replay(inputs)

    def find_graph(self, *inputs: Any) -> CapturedGraph | None:
        """Return the graph for inputs of these shapes, if one was captured."""
        graph = self.graphs.get(_key(inputs))
        return graph if isinstance(graph, CapturedGraph) else None

    def _try_capture(self, inputs: Any) -> CapturedGraph | None:
        """Return the captured function, or None with a message."""
        if collective.is_synchronized():
            progress.allow(CAPTURE_SECONDS)  # it may take much longer than an update
        states = [generator.get_state() for generator in self.generators]
        try:
            return CapturedGraph(
                *(self.function, inputs, self.device, self.generators),
                *(self.priority, self.static_inputs),
            )
        except RuntimeError as error:
            for generator, state in zip(self.generators, states, strict=True):
                _end_capture(generator, state)
            reason = str(error).splitlines()[0]
            print(
                f"The {self.name} cannot be captured as a CUDA graph ({reason}); it "
                "runs without one: the same results, but slower.",
                file=sys.stderr,
            )
            return None


class CapturedGraph:
    """One CUDA graph with the tensors it reads and writes."""

    def __init__(
        self,
        function: Callable[..., Any],
        inputs: Any,
        device: torch.device,
        generators: Iterable[torch.Generator],
        priority: int = GRAPH_PRIORITY,
        static_inputs: bool = False,
    ):
        self.inputs = inputs if static_inputs else tree_map(_make_buffer, inputs)
        # The graph reads host inputs from pinned memory, which may be overwritten only
        # after the last replay has read it.
        self.inputs_read: Any = None
        if any(not x.is_cuda for x in tree_leaves(inputs)):
            self.inputs_read = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.graph = torch.cuda.CUDAGraph()
        for generator in generators:
            self.graph.register_generator_state(generator)
        torch.cuda.synchronize()
        # cuBLAS keeps a workspace per stream: graphs captured on the same stream would
        # share it and could not be replayed in parallel. `thread_local` lets other
        # threads (a prefetching feed) allocate and copy during the capture.
        stream = torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(device)
        capture = torch.cuda.graph(
            self.graph, stream=stream, capture_error_mode="thread_local"
        )
        try:
            with capture:
                on_device = tree_map(
                    lambda x: x.to(device, non_blocking=True), self.inputs
                )
                self.outputs = pack_scalars(function(*on_device))
        finally:
            torch.cuda.set_stream(current)  # a failed capture does not always do this
        if collective.is_synchronized():
            collective.captured_graphs.add(self)

    def replay(self, inputs: Any) -> Any:
        """Copy the inputs to the graph's buffers, launch it, and return its outputs."""
        if self.inputs_read is not None:
            self.inputs_read.synchronize()
        tree_map(_copy_input, self.inputs, inputs)
        self.graph.replay()
        if self.inputs_read is not None:
            self.inputs_read.record()
        return self.outputs

    def reset(self) -> None:
        """Destroy the graph, which must not be replayed any more."""
        torch.cuda.synchronize()
        self.graph.reset()


def pack_scalars(outputs: Any) -> Any:
    """Return outputs whose scalars are elements of one vector per device and dtype.

    The logger adds such a vector to its sums with one kernel.
    """
    scalars: dict[Any, list[Tensor]] = {}
    for x in filter(_is_scalar, tree_leaves(outputs)):
        scalars.setdefault((x.device, x.dtype), []).append(x.detach())
    packed = {group: iter(torch.stack(x).unbind()) for group, x in scalars.items()}
    return tree_map(
        lambda x: next(packed[x.device, x.dtype]) if _is_scalar(x) else x, outputs
    )


def _is_scalar(x: Any) -> bool:
    """True for tensors without dimensions, except in pinned memory, which the graph
    must write."""
    return isinstance(x, Tensor) and x.ndim == 0 and not x.is_pinned()


def clone_outputs(outputs: Any) -> Any:
    """Return copies of the outputs, which later replays do not overwrite."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, outputs)


def _key(inputs: Any) -> tuple[Any, ...]:
    """Return the key of a graph: shapes and dtypes of the inputs, and the share of the
    global batch that this rank has in a data-parallel update."""
    shapes = tuple((x.shape, x.dtype) for x in tree_leaves(inputs))
    return collective.is_synchronized(), collective.local_sequences(), shapes


def _make_buffer(x: Tensor) -> Tensor:
    """Return memory for an input of a graph: on the device, or pinned on the host."""
    if x.is_cuda:
        return torch.empty_like(x)
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)


def _copy_input(buffer: Tensor, value: Tensor) -> None:
    if buffer is not value:
        buffer.copy_(value, non_blocking=True)


def _end_capture(generator: torch.Generator, state: Tensor) -> None:
    """Restore the state that a generator had before a capture that failed.

    PyTorch leaves it in the capture mode, in which it cannot be used without a graph.
    """
    restored = torch.Generator(generator.device)
    restored.set_state(state)
    generator.graphsafe_set_state(restored.graphsafe_get_state())


def _run_on_new_stream(function: Callable[..., Any], inputs: Any) -> Any:
    """Run a warm-up call on a side stream, as PyTorch requires before a capture."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        outputs = function(*inputs)
    current.wait_stream(stream)
    for tensor in tree_leaves(outputs):
        if tensor.is_cuda:  # outputs may also be in pinned memory
            tensor.record_stream(current)
    return outputs
