"""`RayTransport`: actors as Ray actors, on this machine or on a cluster.

Ray starts the processes, moves arguments and results, and reports processes and
machines that have ended. `ActorPool` restarts actors, so restarts by Ray are disabled.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from reverie.api import UserError
from reverie.plugins import import_optional
from reverie.run.actors.chunks import ActorSpec
from reverie.run.actors.config import ActorsConfig
from reverie.run.actors.pool import CallFailed, CallResult
from reverie.run.actors.worker import ActorProcess

STORE_BYTES = 500_000_000
"""Size of Ray's object store, if this run starts Ray."""
CLOSE_SECONDS = 3.0
"""Time that actors have to close their environments at the end of a run."""

CONNECT_SECONDS = 10.0
"""Time to connect to the head node of a Ray cluster."""


class RayTransport:
    """Implements `pool.Transport` with Ray actors."""

    def __init__(self, config: ActorsConfig):
        self.ray = import_optional("ray", "ray", "--actors.count")
        self.config = config
        self._owns_ray = not self.ray.is_initialized()
        if self._owns_ray:
            connect(self.ray, config)
        # the actor reserves `num_cpus` cores; its method calls reserve no more
        remote: Any = self.ray.remote(ActorProcess)
        self._make_actor = remote.options(
            num_cpus=config.cpus, max_restarts=0, scheduling_strategy="SPREAD"
        ).remote
        self._actors: dict[int, Any] = {}
        self._incarnations: dict[int, int] = {}
        # (actor, incarnation, method) of each pending call, by future
        self._calls: dict[Any, tuple[int, int, str]] = {}

    def start(self, spec: ActorSpec) -> None:
        self._actors[spec.actor] = self._make_actor(spec)
        self._incarnations[spec.actor] = spec.incarnation

    def call(self, actor: int, method: str, *arguments: Any) -> None:
        future = getattr(self._actors[actor], method).remote(*arguments)
        self._calls[future] = (actor, self._incarnations[actor], method)

    def share(self, value: Any) -> Any:
        return self.ray.put(value)

    def poll(self, seconds: float) -> list[CallResult]:
        if not self._calls:
            time.sleep(seconds)
            return []
        futures = list(self._calls)
        ready, _ = self.ray.wait(futures, num_returns=1, timeout=seconds)
        if ready and len(futures) > 1:
            # get all results that have arrived, not only the first
            ready, _ = self.ray.wait(futures, num_returns=len(futures), timeout=0)
        return [
            CallResult(*self._calls.pop(future), self._get(future)) for future in ready
        ]

    def stop(self, actor: int) -> None:
        handle = self._actors.pop(actor, None)
        self._calls = {k: v for k, v in self._calls.items() if v[0] != actor}
        if handle is not None:
            with suppress(self.ray.exceptions.RayError):
                self.ray.kill(handle)

    def close(self) -> None:
        if not self.ray.is_initialized():
            return
        with suppress(self.ray.exceptions.RayError, ConnectionError):
            closed = [handle.close.remote() for handle in self._actors.values()]
            if closed:
                self.ray.wait(closed, num_returns=len(closed), timeout=CLOSE_SECONDS)
        for actor in list(self._actors):
            self.stop(actor)
        if self._owns_ray:
            self.ray.shutdown()

    def _get(self, future: Any) -> Any:
        try:
            return self.ray.get(future)
        except self.ray.exceptions.RayError as error:
            return CallFailed(first_line(error))


def connect(ray: Any, config: ActorsConfig) -> None:
    """Connect to a Ray cluster, or start Ray on this machine."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {"address": config.address}
    if not config.address:
        cores = max(os.cpu_count() or 1, math.ceil(config.count * config.cpus))
        options = {
            "address": "local",
            "num_cpus": cores,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        }
    try:
        check_reachable(config.address)
        with keep_signal_handlers():
            ray.init(**options, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        where = config.address or "localhost"
        raise UserError(
            f"Could not connect to Ray at {where}: {first_line(error)}\n"
            "  Fix: `ray start --head` on the first machine, `ray start "
            "--address=HOST:6379` on the others; without --actors.address, Ray is "
            "started on this machine."
        ) from error


def check_reachable(address: str) -> None:
    """Raise `OSError` or `ValueError` if no process listens at `HOST:PORT`.

    Ray itself would try to connect for several minutes. Other addresses, such as
    `auto`, are not checked.
    """
    host, colon, port = address.rpartition(":")
    if colon and "://" not in address:
        target = host.strip("[]"), int(port)  # an IPv6 address has brackets
        socket.create_connection(target, CONNECT_SECONDS).close()


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Context that restores the handlers of SIGINT and SIGTERM, which Ray replaces."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    with suppress(ValueError):  # not in the main thread
        for number, handler in handlers.items():
            signal.signal(number, handler)
