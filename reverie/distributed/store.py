"""The `TCPStore` through which the processes of a data-parallel run find each other.

It is a server at MASTER_ADDR and MASTER_PORT, in rank 0 or in the launcher. PyTorch
waits for it, and for the other ranks, inside of C++ functions, which signals do not
interrupt. So a rank first waits here, until the store and all ranks have started.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from reverie.api import UserError
from reverie.distributed.launch import Launch, master_address

START_TIMEOUT = 300.0
"""Time in which all ranks must start, in seconds."""
MESSAGE_SECONDS = 10.0
"""Time after which a message names the ranks that have not started."""
POLL_SECONDS = 0.1
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable that torchrun sets to `True` if it hosts the store. Otherwise,
rank 0 hosts it."""
STARTED = "started"
"""Prefix of the keys `started/RANK`, which each rank sets when it has started."""


def open_store(launch: Launch, timeout: timedelta, show: Callable[[str], None]) -> Any:
    """Connect to the store, or host it, and wait until all ranks have started.

    `timeout` is that of later operations; `show` prints which ranks are missing.
    """
    deadline = _Deadline(show)
    is_host = launch.rank == 0 and os.environ.get(AGENT_STORE) != "True"
    if not is_host:
        _wait_for_server(launch.rank, deadline)
    store = connect_store(timeout, is_host)
    store.set(f"{STARTED}/{launch.rank}", "1")
    _wait_for_ranks(store, launch.world_size, deadline)
    return store


def connect_store(timeout: timedelta, is_host: bool = False) -> Any:
    """Connect to the store; with `is_host`, start it.

    Keys are prefixed with the number of restarts: after torchrun has restarted the
    processes, its store may still have the addresses of those that ended.
    """
    address, port = master_address()
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address, port, is_master=is_host, wait_for_workers=False, timeout=timeout
        )
    except dist.DistNetworkError as error:
        if is_host:
            raise UserError(
                f"Rank 0 cannot open port {port}, through which the ranks connect: it "
                "is in use, or this user may not open it.\n"
                "  Fix: set MASTER_PORT to a free port, the same on all ranks."
            ) from error
        raise
    return with_prefix(store)


def with_prefix(store: Any) -> Any:
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"reverie/{attempt}", store)  # type: ignore[attr-defined]


def host_store() -> Any:
    """Start a server for processes on this machine, on a free port (`store.port`)."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )


def store_variables(port: int) -> dict[str, str]:
    """Return the environment variables of processes that use the store at a port."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        AGENT_STORE: "True",
    }


class _Deadline:
    """A timeout of `START_TIMEOUT`; prints one message after `MESSAGE_SECONDS`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self.show = show
        self.start = time.monotonic()
        self.has_printed = False

    def wait(self, reason: str) -> bool:
        """Sleep; return False after the timeout. `reason` is printed once."""
        elapsed = time.monotonic() - self.start
        if elapsed > MESSAGE_SECONDS and not self.has_printed:
            self.has_printed = True
            self.show(f"{reason} The timeout is {START_TIMEOUT:.0f} seconds.")
        time.sleep(POLL_SECONDS)
        return elapsed < START_TIMEOUT


def _wait_for_server(rank: int, deadline: _Deadline) -> None:
    """Wait until a process listens at the address of the store."""
    address, port = master_address()
    while True:
        try:
            socket.create_connection((address, port), 5.0).close()
            return
        except OSError as error:
            problem = f"Rank {rank} cannot connect to rank 0 at {address}:{port}"
            reason = f"{problem} ({error.strerror or error})."
            if not deadline.wait(reason):
                raise UserError(
                    f"{reason}\n  Fix: start all ranks at the same time, with the same "
                    "MASTER_PORT and with the address of rank 0 in MASTER_ADDR."
                ) from None


def _wait_for_ranks(store: Any, count: int, deadline: _Deadline) -> None:
    """Wait until every rank has set its key `started/RANK`."""
    while missing := _missing_ranks(store, range(count)):
        names = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        address, port = master_address()
        if not deadline.wait(f"Waiting for {names} to connect to {address}:{port}."):
            raise UserError(
                f"The run needs {count} ranks, but {names} did not connect to "
                f"{address}:{port} within {START_TIMEOUT:.0f} seconds.\n"
                "  Fix: start all ranks at the same time, with the same MASTER_ADDR, "
                "MASTER_PORT and WORLD_SIZE."
            )


def _missing_ranks(store: Any, ranks: Sequence[int]) -> list[int]:
    if store.check([f"{STARTED}/{rank}" for rank in ranks]):
        return []
    return [rank for rank in ranks if not store.check([f"{STARTED}/{rank}"])]
