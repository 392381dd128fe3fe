"""CUDA graph of a function that is called repeatedly with the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP = 2
"""Calls with tensors at the same addresses before the graph is captured."""


class RepeatedCall:
    """Calls a function, as a CUDA graph if its arguments are always the same tensors.

    An agent whose updates are CUDA graphs passes tensors at the same addresses in every
    update. The third such call captures the function as a CUDA graph; replaying it
    launches all kernels at once. The function must return nothing and only launch
    kernels, and all other tensors that it uses must stay at their addresses.
    """

    def __init__(self, function: Callable[..., None], device: torch.device):
        self.function = function
        self.can_capture = device.type == "cuda"
        self._key: Any = None  # addresses and shapes of the tensors of the last call
        self._calls = 0  # consecutive calls with this key
        self._graph: Any = None

    def __call__(self, *inputs: Tensor | dict[str, Tensor]) -> None:
        if not self.can_capture or torch.cuda.is_current_stream_capturing():
            self.function(*inputs)
            return
        key = []
        for value in inputs:
            for x in value.values() if isinstance(value, dict) else (value,):
                key.append((x.data_ptr(), x.shape, x.stride(), x.dtype))
        if key != self._key:
            self._key, self._calls, self._graph = key, 0, None
        self._calls += 1
        if self._graph is None and self._calls > WARM_UP:
            self._graph = _capture(self.function, inputs)
            self.can_capture = self._graph is not None
        if self._graph is None:
            self.function(*inputs)
        else:
            self._graph.replay()


def _capture(function: Callable[..., None], inputs: Any) -> Any:
    """Return the graph of a call, or None if it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    try:
        # "thread_local": other threads may use CUDA during the capture.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            function(*inputs)
    except RuntimeError:
        return None
    return graph
