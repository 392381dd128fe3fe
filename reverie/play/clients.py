"""Clients: browser pages that are connected to a session.

One client controls the session; the others are view-only. A client gets a `View` for
every step, unless it is slow: while two views are not acknowledged, no others are sent,
and only the newest one is kept for it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, Protocol

from reverie.play.messages import encode_view, parse_command, parse_message
from reverie.play.session import Session, View

MAX_CLIENTS = 16
MAX_UNACKNOWLEDGED = 2
"""Maximum number of views that were sent to a client and not acknowledged."""
MESSAGE_RATE, MESSAGE_BURST = 200.0, 400.0
"""Rate limit of one client (token bucket): messages per second, and its capacity."""
MAX_EPISODES = 600
"""Maximum number of episodes in one `episodes` message."""


class Connection(Protocol):
    """The part of a WebSocket that clients use."""

    async def send_bytes(self, data: bytes) -> None: ...
    async def send_json(self, data: Any) -> None: ...


class TooManyMessages(Exception):
    """A client exceeded its rate limit."""


class Client:
    """One connected page."""

    def __init__(self, number: int, connection: Connection):
        self.number, self.connection = number, connection
        self.next_view: View | None = None  # to send; a newer view replaces it
        self.wake_sender = asyncio.Event()
        self.unacknowledged: list[int] = []  # numbers of views
        # state of the token bucket: its tokens, and when they were last added
        self._tokens, self._refill_time = MESSAGE_BURST, time.monotonic()

    def check_rate(self) -> None:
        """Count a message; raise if the client exceeds its rate limit."""
        now = time.monotonic()
        self._tokens = min(
            MESSAGE_BURST, self._tokens + MESSAGE_RATE * (now - self._refill_time)
        )
        self._refill_time = now
        self._tokens -= 1
        if self._tokens < 0:
            raise TooManyMessages

    def acknowledge(self, number: int) -> None:
        """Remove this view and all earlier ones from `unacknowledged`.

        The first acknowledgement of a view does not count towards the rate limit, so
        that a client can receive views at any rate.
        """
        if number in self.unacknowledged:
            self._tokens += 1
        self.unacknowledged = [sent for sent in self.unacknowledged if sent > number]
        self.wake_sender.set()

    async def send_views(self, encode: Callable[[View], bytes]) -> None:
        """Send the newest view when enough earlier ones are acknowledged."""
        while True:
            await self.wake_sender.wait()
            self.wake_sender.clear()
            view = self.next_view
            if view is None or len(self.unacknowledged) >= MAX_UNACKNOWLEDGED:
                continue
            self.next_view = None
            self.unacknowledged.append(view.number)
            await self.connection.send_bytes(encode(view))
            if self.next_view is not None:
                self.wake_sender.set()


class ClientGroup:
    """The connected pages of a session. Used in the event loop only."""

    def __init__(self, session: Session):
        self.session = session
        self.clients: dict[int, Client] = {}
        self.controller: int | None = None
        self._numbers = itertools.count(1)
        self._loop = asyncio.get_running_loop()
        # the newest encoded view: its number and its message
        self._encoded: tuple[int, bytes] = (0, b"")
        session.listeners.append(self._on_view)
        session.send({"type": "idle", "on": True})  # until a page is connected

    def _on_view(self, view: View) -> None:
        """Publish a view in the event loop; called in the thread of the session."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.publish, view)

    def publish(self, view: View) -> None:
        """Make this view the next one that is sent to every client."""
        for client in self.clients.values():
            client.next_view = view
            client.wake_sender.set()

    def encode(self, view: View) -> bytes:
        """Return the message of a view, encoded once for all clients."""
        if self._encoded[0] != view.number:
            self._encoded = view.number, encode_view(view)
        return self._encoded[1]

    async def join(self, connection: Connection) -> Client | None:
        """Add a client and return it; return None if there are too many."""
        if len(self.clients) >= MAX_CLIENTS:
            return None
        client = Client(next(self._numbers), connection)
        hello = {**self.session.describe(), "client": client.number}
        await connection.send_json(hello)
        self.clients[client.number] = client
        if self.controller is None:
            self.controller = client.number
        self.session.send({"type": "idle", "on": False})
        if self.session.view is not None:
            client.next_view = self.session.view
            client.wake_sender.set()
        await self.announce()
        return client

    async def leave(self, client: Client) -> None:
        """Remove a client; the oldest other client gets its controls."""
        self.clients.pop(client.number, None)
        if self.controller == client.number:
            self.session.send({"type": "keys", "held": []})  # release its keys
            self.controller = next(iter(self.clients), None)
        if not self.clients:
            self.session.send({"type": "idle", "on": True})
        await self.announce()

    async def announce(self) -> None:
        """Send every client the number of clients, and whether it has the controls."""
        for client in list(self.clients.values()):
            state = {
                "type": "clients",
                "count": len(self.clients),
                "has_controls": client.number == self.controller,
            }
            try:
                await client.connection.send_json(state)
            except Exception:
                continue  # disconnected; the task that receives calls `leave`

    async def handle(self, client: Client, text: str) -> None:
        """Handle a message of a client; invalid ones are ignored."""
        client.check_rate()
        message = parse_message(text)
        if message is None:
            return
        kind = message["type"]
        if kind == "ack" and isinstance(message.get("number"), int):
            client.acknowledge(message["number"])
        elif kind == "control":
            if self.controller != client.number:  # release the keys of the previous one
                self.session.send({"type": "keys", "held": []})
            self.controller = client.number
            await self.announce()
        elif kind == "episodes":
            table = await asyncio.to_thread(self.session.loaded.episodes.table)
            episodes = table[:MAX_EPISODES]
            await client.connection.send_json({"type": "episodes", "list": episodes})
        elif client.number == self.controller:
            command = parse_command(message)
            if command is not None:
                self.session.send(command)
