"""Messages between the main process and a worker, over a socket.

A message is one byte for its kind, the size of its payload, and the payload, which is
empty in most steps. Deadlines are values of `time.monotonic()`.
"""

from __future__ import annotations

import socket
import struct
import time

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


def send(sock: socket.socket, kind: bytes, payload: bytes, deadline: float) -> None:
    """Send a message; raise `TimeoutError` after the deadline (0 for none)."""
    _set_deadline(sock, deadline)
    sock.sendall(HEADER.pack(kind, len(payload)) + payload)


def receive(sock: socket.socket, deadline: float = 0.0) -> tuple[bytes, bytes]:
    """Return kind and payload of the next message; deadline as in `send`."""
    _set_deadline(sock, deadline)
    kind, size = HEADER.unpack(_receive_exactly(sock, HEADER.size))
    return kind, _receive_exactly(sock, size) if size else b""


def _set_deadline(sock: socket.socket, deadline: float) -> None:
    """Set the socket timeout to reach the deadline; 0 waits forever.

    Differences below `MIN_TIMEOUT` are ignored, because setting the timeout is a system
    call and most messages are answered within milliseconds.
    """
    if deadline:
        seconds = max(deadline - time.monotonic(), MIN_TIMEOUT)
        current = sock.gettimeout()
        if current is None or abs(seconds - current) > MIN_TIMEOUT:
            sock.settimeout(seconds)
    elif sock.gettimeout() is not None:
        sock.settimeout(None)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size)
    while len(data) < size:
        chunk = sock.recv(size - len(data))
        if not chunk:
            raise ConnectionResetError
        data += chunk
    return data
