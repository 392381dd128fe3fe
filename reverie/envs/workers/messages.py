"""Short messages between the pool and a worker, over a socket.

A message is one letter, the size of what follows, and what follows (mostly nothing).
The pool sends `h`ello, `a`ttach, `s`tep, `g`et state, `l`oad state, `q`uit; a worker
answers `r`eady, o`k`, `e`rrors it has survived, or one for the `u`ser to mend.
"""

from __future__ import annotations

import socket
import struct
import time

GRACE = 0.1
"""Seconds a worker that is late already gets when its answer is looked for."""


def send(sock: socket.socket, kind: bytes, payload: bytes, deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), GRACE) if deadline else None)
    sock.sendall(struct.pack("!cI", kind, len(payload)) + payload)


def receive(sock: socket.socket, deadline: float = 0.0) -> tuple[bytes, bytes]:
    sock.settimeout(max(deadline - time.monotonic(), GRACE) if deadline else None)
    kind, size = struct.unpack("!cI", _receive_exactly(sock, 5))
    return kind, _receive_exactly(sock, size) if size else b""


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size)
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data
