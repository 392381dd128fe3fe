"""Prepare the first update of an agent while the run collects its first steps.

On a GPU, the first update takes seconds, because kernels are loaded and cuDNN measures
which of its convolution algorithms are fastest. Meanwhile, the loop would wait. Before
the first update, it also has to collect as many steps as a batch has, or to load the
replay buffer of the run that it resumes. So a thread runs the kernels on a batch of
zeros at the same time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

import torch

from reverie.api import Agent
from reverie.capabilities import CanWarmUp
from reverie.replay.buffer import Replay

SWITCH_SECONDS = 2e-4
"""Switch interval of Python's threads during the warm-up. With the default of 5 ms, the
main thread would wait that long after each call that releases the lock of Python."""


class WarmUp:
    """Thread that calls `agent.warm_up` with a batch of zeros."""

    def __init__(self, agent: CanWarmUp, replay: Replay, device: torch.device):
        self._agent, self._replay, self._device = agent, replay, device
        self._switch_seconds = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has ended, and release its GPU memory."""
        self._thread.join()
        sys.setswitchinterval(self._switch_seconds)
        torch.cuda.empty_cache()

    def _run(self) -> None:
        # errors, such as too little memory, are raised again by the first update
        with contextlib.suppress(Exception), _new_stream(self._device):
            arrays = self._replay.empty_batch("train")
            batch = {
                key: torch.zeros_like(torch.from_numpy(array), device=self._device)
                for key, array in arrays.items()
            }
            self._agent.warm_up(batch)


def _new_stream(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for a new CUDA stream; on a CPU, it does nothing."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    context: contextlib.AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context


def start_warm_up(
    agent: Agent, replay: Replay, device: torch.device, deterministic: bool
) -> WarmUp | None:
    """Start the warm-up of an agent; None if it has none or would not benefit.

    Deterministic runs have no other threads.
    """
    can_warm_up = isinstance(agent, CanWarmUp) and "train" in agent.windows
    if device.type != "cuda" or deterministic or not can_warm_up:
        return None
    assert isinstance(agent, CanWarmUp)
    return WarmUp(agent, replay, device)
