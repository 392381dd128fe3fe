"""Load the kernels of the first update while the run collects its first steps.

On a GPU, the first update takes seconds, because kernels are loaded and cuDNN measures
which of its convolution algorithms are fastest. Before this update, the training loop
has to collect the steps of a batch, or to load the replay buffer of a resumed run.
During this time, a thread runs the kernels on a batch of zeros.

cuDNN's choices are cached per thread. The run benefits from those of backward passes,
which PyTorch always computes in its own thread; those of forward passes are made again.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from reverie.api import Agent
from reverie.capabilities import CanWarmUp
from reverie.replay.buffer import Replay

SWITCH_SECONDS = 2e-4
"""Python's thread switch interval during the warm-up. With the default of 5 ms, the
main thread would wait that long after each call that releases the GIL."""
MIN_FREE_BYTES = 24 << 30
"""With less free GPU memory, there is no warm-up, because it needs as much memory as an
update. `precompile.py` has the same limit."""


class WarmUp:
    """Thread that calls `agent.warm_up` with a batch of zeros."""

    def __init__(self, agent: CanWarmUp, replay: Replay, device: torch.device):
        self._agent, self._replay, self._device = agent, replay, device
        self._stream: Any = None
        if device.type == "cuda":
            # The weights were written on the current stream.
            current = torch.cuda.current_stream(device)
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(current)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self, should_stop: Callable[[], object] = lambda: False) -> None:
        """Wait until the thread has ended, or `should_stop` returns a true value.

        Later work on the GPU then waits for that of the thread, which restores what it
        has changed.
        """
        while self._thread.is_alive() and not should_stop():
            self._thread.join(0.1)
        if self._stream is not None and not self._thread.is_alive():
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _run(self) -> None:
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            # errors, such as too little memory, are raised again by the first update
            with contextlib.suppress(Exception), torch.cuda.stream(self._stream):
                arrays = self._replay.empty_batch("train")
                batch = {
                    key: torch.zeros_like(torch.from_numpy(array), device=self._device)
                    for key, array in arrays.items()
                }
                self._agent.warm_up(batch)
        finally:
            sys.setswitchinterval(before)


def start_warm_up(
    agent: Agent, replay: Replay, device: torch.device, deterministic: bool
) -> WarmUp | None:
    """Start the warm-up of an agent; None if it has none or would not benefit.

    Deterministic runs have none, because the choices of cuDNN would depend on when the
    thread runs.
    """
    if device.type != "cuda" or deterministic or "train" not in agent.windows:
        return None
    if not isinstance(agent, CanWarmUp):
        return None
    if torch.cuda.mem_get_info(device)[0] < MIN_FREE_BYTES:
        return None
    return WarmUp(agent, replay, device)
