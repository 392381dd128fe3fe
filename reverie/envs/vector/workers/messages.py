"""Short messages between the pool and a worker, over a socket.

A message is one letter, the size of what follows, and what follows (mostly nothing).
The pool sends `h`ello, `a`ttach, `s`tep, `g`et state, `l`oad state, `q`uit; a worker
answers `r`eady, o`k`, `e`rrors it has survived, or one for the `u`ser to mend.
"""

from __future__ import annotations

import socket
import struct
import time

HEAD = struct.Struct("!cI")
GRACE = 0.1
"""Seconds a worker that is late already gets when its answer is looked for."""


def send(sock: socket.socket, kind: bytes, payload: bytes, deadline: float) -> None:
    _be_patient(sock, deadline)
    sock.sendall(HEAD.pack(kind, len(payload)) + payload)


def receive(sock: socket.socket, deadline: float = 0.0) -> tuple[bytes, bytes]:
    _be_patient(sock, deadline)
    kind, size = HEAD.unpack(_receive_exactly(sock, HEAD.size))
    return kind, _receive_exactly(sock, size) if size else b""


def _be_patient(sock: socket.socket, deadline: float) -> None:
    """Let a socket wait until a deadline, or for ever.

    To change its patience is a call to the kernel, which a tenth of a second is not
    worth: most messages are answered in milliseconds.
    """
    if deadline:
        seconds, now = max(deadline - time.monotonic(), GRACE), sock.gettimeout()
        if now is None or abs(seconds - now) > GRACE:
            sock.settimeout(seconds)
    elif sock.gettimeout() is not None:
        sock.settimeout(None)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = sock.recv(size)
    while len(data) < size:
        more = sock.recv(size - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data
