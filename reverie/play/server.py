"""The web server of `reverie play` and `reverie view`.

It listens on the loopback address by default. Every page, request and WebSocket needs
the token that is part of the printed address. `Host` and `Origin` are checked, so that
pages of other sites cannot reach the server through the browser. Files are requested by
number or fixed name, so a request cannot read other files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import secrets
import socket
import threading
import webbrowser
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from reverie.api import UserError
from reverie.log.messages import print_message
from reverie.play.clients import ClientGroup, TooManyMessages
from reverie.play.messages import MAX_MESSAGE_BYTES
from reverie.play.session import Session

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection

    from reverie.play.runs import RunIndex

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self' ws: "
    "wss:; img-src 'self' data: blob:; media-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
FIRST_PORT, NUM_PORTS = 8642, 20
"""Ports that are tried if none is given: the first one, and how many."""
POLICY_VIOLATION, SERVER_ERROR, TRY_LATER = 1008, 1011, 1013
"""Close codes of WebSockets, on which the page depends (`socket.js`)."""
MAX_THREADS = 4
"""Maximum number of CPU threads of PyTorch."""
MAX_SESSIONS = 4
"""Maximum number of runs that can be played at the same time."""


def page_files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    folder = resources.files("reverie.play").joinpath("page")
    return {
        item.name: item.read_bytes()
        for item in folder.iterdir()
        if item.name.endswith(tuple(MEDIA_TYPES))
    }


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class AccessCheck:
    """Checks host, origin and token of requests."""

    def __init__(self, token: str, host: str):
        self.token, self.host = token, host

    def problem(self, connection: HTTPConnection, needs_token: bool = True) -> str:
        """Return why a request is refused; empty if it is allowed."""
        host = connection.headers.get("host", "")
        if not self._is_own_host(host):
            return (
                f"The host {host[:100]!r} is not that of this server. Open the address "
                "that was printed."
            )
        origin = connection.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return f"Requests from {origin[:100]!r} are not allowed."
        given = connection.query_params.get("token", "")
        if needs_token and not hmac.compare_digest(given.encode(), self.token.encode()):
            return "The token is missing or wrong. Open the address that was printed."
        return ""

    def _is_own_host(self, host: str) -> bool:
        """True if the `Host` of a request can be an address of this server."""
        name = urlsplit(f"//{host}").hostname or ""
        if is_loopback(name):  # on any port, for SSH port forwarding
            return True
        if is_loopback(self.host):
            return False
        if name in (self.host, socket.gethostname(), socket.getfqdn()):
            return True
        try:  # only IP addresses, because a host name allows DNS rebinding
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


class Sessions:
    """The sessions of a server, by the id of their run.

    `reverie play` has one session, with the empty string as id.
    """

    def __init__(self, open_run: Callable[[str], Session] | None = None):
        self._open = open_run
        self._groups: dict[str, ClientGroup] = {}
        self._added: dict[str, Session] = {}  # by `add`, before the server started
        self._lock = asyncio.Lock()

    def add(self, name: str, session: Session) -> None:
        self._added[name] = session

    async def get(self, name: str) -> ClientGroup:
        """Return the clients of a session; the first call loads the run."""
        async with self._lock:
            if name in self._groups:
                return self._groups[name]
            session = self._added.get(name)
            if session is None:
                if self._open is None:
                    raise UserError(
                        "There is no such session.\n"
                        "  Fix: open the address that `reverie play` printed."
                    )
                if len(self._groups) >= MAX_SESSIONS:
                    await self._close_unused()
                session = await asyncio.to_thread(self._open, name)
            group = self._groups[name] = ClientGroup(session)
            session.start()
            return group

    async def _close_unused(self) -> None:
        """Close one session without clients; raise if there is none."""
        for name, group in list(self._groups.items()):
            if not group.clients:
                del self._groups[name]
                await asyncio.to_thread(group.session.close)
                return
        raise UserError(
            f"{MAX_SESSIONS} runs are already being played.\n"
            "  Fix: close the page of one of them."
        )

    def close(self) -> None:
        for group in self._groups.values():
            group.session.close()
        for name, session in self._added.items():
            if name not in self._groups:
                session.close()


def make_app(
    access: AccessCheck, sessions: Sessions, runs: RunIndex | None = None
) -> Starlette:
    """Return the application; with `runs`, also the pages of `reverie view`."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket, WebSocketDisconnect

    files = page_files()

    def refuse(reason: str) -> Response:
        return PlainTextResponse(reason, 403, headers=HEADERS)

    async def index(request: Request) -> Response:
        if reason := access.problem(request):
            return refuse(reason)
        return Response(files["index.html"], media_type="text/html", headers=HEADERS)

    async def asset(request: Request) -> Response:
        if reason := access.problem(request, needs_token=False):
            return refuse(reason)
        name = request.path_params["name"]
        if name not in files:
            return PlainTextResponse("Not found", 404, headers=HEADERS)
        kind = MEDIA_TYPES["." + name.rpartition(".")[2]]
        return Response(files[name], media_type=kind, headers=HEADERS)

    async def info(request: Request) -> Response:
        if reason := access.problem(request):
            return refuse(reason)
        return JSONResponse({"view": runs is not None}, headers=HEADERS)

    async def play(socket: WebSocket) -> None:
        if access.problem(socket):
            await socket.close(POLICY_VIOLATION)
            return
        await socket.accept()
        try:
            group = await sessions.get(socket.query_params.get("session", ""))
        except UserError as error:
            await socket.send_json({"type": "error", "message": str(error)})
            await socket.close(SERVER_ERROR)
            return
        client = await group.join(socket)
        if client is None:
            message = "Too many pages are connected to this session."
            await socket.send_json({"type": "error", "message": message})
            await socket.close(TRY_LATER)
            return
        sender = asyncio.create_task(client.send_views(group.encode))
        try:
            while True:
                text = await socket.receive_text()
                await group.handle(client, text)
        except TooManyMessages:
            await socket.close(POLICY_VIOLATION)
        except (WebSocketDisconnect, KeyError, RuntimeError):
            pass  # KeyError: a binary message
        finally:
            sender.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await sender
            await group.leave(client)

    def checked(handler: Callable[[Request], Any]) -> Callable[[Request], Any]:
        """Check a request, then call its handler in a thread: it reads files."""

        async def respond(request: Request) -> Response:
            if reason := access.problem(request):
                return refuse(reason)
            try:
                result = await asyncio.to_thread(handler, request)
            except (UserError, LookupError, ValueError, OSError) as error:
                return JSONResponse({"error": str(error)}, 404, headers=HEADERS)
            if isinstance(result, Response):
                return result
            return JSONResponse(result, headers=HEADERS)

        return respond

    routes: list[Any] = [
        Route("/", index),
        Route("/api/info", info),
        WebSocketRoute("/ws", play),
    ]
    if runs is not None:

        def media(request: Request) -> Response:
            path = runs.media(request.path_params["run"], request.path_params["number"])
            kinds = {".gif": "image/gif", ".mp4": "video/mp4", ".png": "image/png"}
            kind = kinds[path.suffix]
            return Response(path.read_bytes(), media_type=kind, headers=HEADERS)

        def series(request: Request) -> Any:
            key = request.query_params.get("key", "")
            return runs.series(request.path_params["run"], key)

        def config_diff(request: Request) -> Any:
            names = (request.query_params.get(name, "") for name in ("a", "b"))
            return runs.config_diff(*names)

        routes += [
            Route("/api/runs", checked(lambda request: runs.summaries())),
            Route(
                "/api/runs/{run}",
                checked(lambda request: runs.details(request.path_params["run"])),
            ),
            Route(
                "/api/runs/{run}/episodes",
                checked(lambda request: runs.episodes(request.path_params["run"])),
            ),
            Route("/api/runs/{run}/series", checked(series)),
            Route("/api/runs/{run}/media/{number:int}", checked(media)),
            Route("/api/difference", checked(config_diff)),
        ]
    routes.append(Route("/{name}", asset))

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(sessions.close)

    return Starlette(routes=routes, lifespan=lifespan)


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 chooses a free one from `FIRST_PORT`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ports = [port] if port else [*range(FIRST_PORT, FIRST_PORT + NUM_PORTS), 0]
    for number in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(64)
            return listener
        except OSError as error:
            listener.close()
            reason = error.strerror
    raise UserError(
        f"The server cannot listen on {host}:{port}: {reason}.\n"
        "  Fix: use another --port, or leave out --port and --host."
    )


def num_model_threads(available: int) -> int:
    """Return the number of threads with which PyTorch steps a world model on a CPU.

    Half of the cores are left to the server and the browser: the threads of an
    operation wait for each other, so a step takes several times as long if one of them
    waits for a core. With a batch size of one, more threads help little.
    """
    return min(max(available // 2, 1), MAX_THREADS)


def serve(
    make_sessions: Callable[[], Sessions],
    host: str = "127.0.0.1",
    port: int = 0,
    open_page: bool = True,
    runs: RunIndex | None = None,
    on_start: Callable[[str], None] = print_message,
) -> None:
    """Serve until Ctrl-C; `on_start` is called with the address of the page."""
    import torch
    import uvicorn

    torch.set_num_threads(num_model_threads(torch.get_num_threads()))
    listener = bind(host, port)
    token = secrets.token_urlsafe(24)
    name = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    name = f"[{name}]" if ":" in name else name  # an IPv6 address
    address = f"http://{name}:{listener.getsockname()[1]}/?token={token}"
    if not is_loopback(host):
        print_message(
            f"warning: the server listens on {host}. Everyone in this network who gets "
            "the address below can use it, and the connection is not encrypted."
        )

    async def run() -> None:
        app = make_app(AccessCheck(token, host), make_sessions(), runs)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            ws_max_size=4 * MAX_MESSAGE_BYTES,
            timeout_graceful_shutdown=1,
        )
        on_start(address)
        if open_page:
            threading.Thread(
                target=webbrowser.open, args=(address,), daemon=True
            ).start()
        await uvicorn.Server(config).serve(sockets=[listener])

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(run())
