"""Messages between the main process and a worker, over a socket.

A message is one byte for its kind, the size of its payload, and the payload, which is
empty in most steps. Deadlines are values of `time.monotonic()`.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import sys
import time
from pathlib import Path

BUILD, ATTACH, RUN, GET_STATE, LOAD_STATE, QUIT = b"b", b"a", b"r", b"g", b"l", b"q"
"""Requests of the main process: build the environments, map the shared memory, run the
commands in it, return or load the states of the environments, exit."""
READY, DONE, ERRORS, USER_ERROR = b"R", b"D", b"E", b"U"
"""Answers of a worker: environments are built, request is done, done but some
environments failed and were restarted, a user error that stops the run."""
HEADER = struct.Struct("!cI")
"""Kind and size of the payload."""
MIN_TIMEOUT = 0.1
"""Socket timeout in seconds once a deadline has passed."""
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")
"""File with the CPU time that a container may use in each period, in microseconds."""

POLL_SECONDS = 0.005
"""Time for which a process polls for a message before it sleeps until one arrives."""


class Connection:
    """One end of the socket between the main process and a worker.

    With `polls`, the process busy-waits for the next message for `POLL_SECONDS` before
    it sleeps. This occupies a CPU core, but saves the time to wake up a process (0.04
    to 0.1 ms on a virtual machine), which is longer than many messages take.
    """

    def __init__(self, sock: socket.socket, polls: bool = False):
        self._socket = sock
        self._poll: select.poll | None = None
        if polls:
            self._poll = select.poll()
            self._poll.register(sock, select.POLLIN)

    def send(self, kind: bytes, payload: bytes = b"", deadline: float = 0.0) -> None:
        """Send a message; raise `TimeoutError` after the deadline (0 for none)."""
        self._set_deadline(deadline)
        self._socket.sendall(HEADER.pack(kind, len(payload)) + payload)

    def receive(self, deadline: float = 0.0) -> tuple[bytes, bytes]:
        """Return kind and payload of the next message; deadline as in `send`."""
        if self._poll is not None:
            end = time.perf_counter() + POLL_SECONDS
            while not self._poll.poll(0) and time.perf_counter() < end:
                pass
        self._set_deadline(deadline)
        kind, size = HEADER.unpack(self._receive_exactly(HEADER.size))
        return kind, self._receive_exactly(size) if size else b""

    def close(self) -> None:
        self._socket.close()

    def _set_deadline(self, deadline: float) -> None:
        """Set the socket timeout to reach the deadline; 0 waits forever.

        Differences below `MIN_TIMEOUT` are ignored, because setting the timeout is a
        system call and most messages are answered within milliseconds.
        """
        current = self._socket.gettimeout()
        if deadline:
            seconds = max(deadline - time.monotonic(), MIN_TIMEOUT)
            if current is None or abs(seconds - current) > MIN_TIMEOUT:
                self._socket.settimeout(seconds)
        elif current is not None:
            self._socket.settimeout(None)

    def _receive_exactly(self, size: int) -> bytes:
        data = self._socket.recv(size)
        while len(data) < size:
            chunk = self._socket.recv(size - len(data))
            if not chunk:
                raise ConnectionResetError
            data += chunk
        return data


def should_poll(workers: int) -> bool:
    """True if the machine has enough CPU cores to poll for messages (see `Connection`).

    The main process and each worker may then use a core all the time, and as many cores
    must be left for other threads and processes. The ranks of a data-parallel run share
    the cores. If `OMP_NUM_THREADS` limits the threads of this process, as in parallel
    runs on one machine, it also limits the number of cores that count.
    """
    if not hasattr(select, "poll"):
        return False
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    cores = min(cores, _container_cores())
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks):
        cores //= int(ranks)
    limit = os.environ.get("OMP_NUM_THREADS", "")
    if limit.isdecimal():
        cores = min(cores, int(limit))
    return cores >= 2 * (workers + 1)


def _container_cores() -> int:
    """Return the number of cores that a container may use (cgroup version 2)."""
    try:
        quota, period = CPU_LIMIT.read_text().split()
        return int(quota) // int(period)
    except (OSError, ValueError):  # no container, or "max": no limit
        return sys.maxsize
