"""The server: access checks, messages, and connections of pages to sessions."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from PIL import Image
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from reverie.api import UserError
from reverie.play import clients
from reverie.play.clients import (
    MAX_UNACKNOWLEDGED,
    MESSAGE_BURST,
    Client,
    TooManyMessages,
)
from reverie.play.load import HUMAN_MODEL
from reverie.play.messages import (
    encode_image,
    encode_view,
    parse_command,
    parse_message,
)
from reverie.play.pane_images import PaneImage
from reverie.play.server import (
    AccessCheck,
    Sessions,
    bind,
    is_loopback,
    make_app,
    num_model_threads,
    page_files,
)
from reverie.play.session import Session, View

TOKEN = "secret-token"
HOST = {"host": "127.0.0.1:8642"}
SOCKET = "ws://127.0.0.1:8642/ws"


def decode_view(message: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """Return the header and the encoded images of a message."""
    (length,) = struct.unpack_from("<I", message)
    header = json.loads(message[4 : 4 + length])
    images, start = [], 4 + length
    for image in header["images"]:
        images.append(message[start : start + image["bytes"]])
        start += image["bytes"]
    return header, images


@pytest.fixture
def client(loaded):
    session = Session(loaded, HUMAN_MODEL)
    session.fps = 100.0

    class OneSession(Sessions):
        def __init__(self):
            super().__init__()
            self.add("", session)

    app = make_app(AccessCheck(TOKEN, "127.0.0.1"), OneSession())
    with TestClient(app, base_url="http://127.0.0.1:8642") as test_client:
        yield test_client


def receive(socket, condition=lambda header: True):
    """Return header and images of the next view that meets a condition."""
    for _ in range(500):
        message = socket.receive()
        if message.get("bytes") is None:
            continue
        header, images = decode_view(message["bytes"])
        socket.send_text(json.dumps({"type": "ack", "number": header["number"]}))
        if condition(header):
            return header, images
    raise AssertionError("no such view")


def send(socket, **message):
    socket.send_text(json.dumps(message))


def test_the_page_needs_the_token(client):
    assert client.get("/").status_code == 403
    assert client.get("/?token=wrong").status_code == 403
    answer = client.get(f"/?token={TOKEN}")
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert TOKEN not in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:1"}, 200),  # the local end of an SSH tunnel
        ({"host": "localhost:8642"}, 200),
        ({"host": "[::1]:8642"}, 200),
        ({"host": "evil.example:8642"}, 403),
        ({"host": "127.0.0.1.evil.example"}, 403),
        ({"host": ""}, 403),
        ({**HOST, "origin": "http://127.0.0.1:8642"}, 200),
        ({**HOST, "origin": "http://127.0.0.1:9999"}, 403),
        ({**HOST, "origin": "https://evil.example"}, 403),
        ({**HOST, "origin": "null"}, 403),
    ],
)
def test_host_and_origin_are_checked(client, headers, status):
    assert client.get(f"/?token={TOKEN}", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("bound", "host", "accepted"),
    [
        ("0.0.0.0", "192.0.2.7:8642", True),
        ("0.0.0.0", "evil.example:8642", False),
        ("gpu-box", "gpu-box:8642", True),
        ("127.0.0.1", "192.0.2.7:8642", False),
    ],
)
def test_other_hosts_are_accepted_only_if_the_server_listens_there(
    bound, host, accepted
):
    assert AccessCheck(TOKEN, bound)._is_own_host(host) == accepted


@pytest.mark.parametrize(
    "name", ["../pyproject.toml", "..%2fserver.py", "%2e%2e/x", "server.py", "x.js"]
)
def test_a_request_cannot_read_other_files(client, name):
    assert client.get(f"/{name}?token={TOKEN}").status_code == 404


def test_files_of_the_page_load_only_from_this_server(client):
    files = page_files()
    assert {"index.html", "style.css", "main.js", "play.js", "view.js"} <= set(files)
    for name, content in files.items():
        assert client.get(f"/{name}").status_code == 200
        assert b"http://" not in content.replace(b"http://www.w3.org", b"")
        assert b"https://" not in content


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ("", {}),
        ("?token=wrong", {}),
        (f"?token={TOKEN}", {"origin": "https://evil.example"}),
        (f"?token={TOKEN}", {"host": "evil.example"}),
    ],
)
def test_a_socket_needs_token_origin_and_host(client, query, headers):
    with (
        pytest.raises(WebSocketDisconnect) as error,
        client.websocket_connect(f"{SOCKET}{query}", headers=headers),
    ):
        pass
    assert error.value.code == 1008


def test_an_unknown_session_is_an_error(client):
    with client.websocket_connect(f"{SOCKET}?token={TOKEN}&session=other") as socket:
        assert "no such session" in socket.receive_json()["message"]


def test_a_page_plays_and_keys_select_actions_in_the_world_model(client):
    with client.websocket_connect(f"{SOCKET}?token={TOKEN}") as socket:
        hello = socket.receive_json()
        assert hello["type"] == "hello"
        assert hello["controls"][0]["value_names"] == ["left", "stay", "right"]
        assert all(not mode["reason"] for mode in hello["modes"])
        send(socket, type="keys", held=["ArrowLeft"])
        header, images = receive(socket, lambda header: header.get("action") == "left")
        assert header["mode"] == HUMAN_MODEL
        frame = np.asarray(Image.open(io.BytesIO(images[0])))
        assert frame.shape == (12, 12, 3)
        send(socket, type="episodes")
        for _ in range(500):
            message = socket.receive()
            text = message.get("text")
            if text and json.loads(text)["type"] == "episodes":
                break
            if message.get("bytes"):
                number = decode_view(message["bytes"])[0]["number"]
                send(socket, type="ack", number=number)
        assert json.loads(text)["list"][0]["source"] == "replay"


def test_one_of_several_pages_has_the_controls(client):
    path = f"{SOCKET}?token={TOKEN}"
    with client.websocket_connect(path) as first, client.websocket_connect(path) as two:
        receive(first)
        receive(two)
        send(two, type="speed", speed=4)  # ignored
        send(first, type="speed", speed=2)
        assert receive(two, lambda header: header["speed"] != 1)[0]["speed"] == 2
        send(two, type="control")
        send(two, type="speed", speed=4)
        receive(first, lambda header: header["speed"] == 4)


def test_invalid_messages_are_ignored(client):
    with client.websocket_connect(f"{SOCKET}?token={TOKEN}") as socket:
        for text in ("{", "[]", '{"type": 3}', '{"type": "exec"}', '"x"', "{}" * 9000):
            socket.send_text(text)
        send(socket, type="speed", speed=0.5)
        receive(socket, lambda header: header["speed"] == 0.5)


@pytest.mark.parametrize(
    ("message", "is_valid"),
    [
        ({"type": "mode", "mode": "agent-env"}, True),
        ({"type": "mode"}, False),
        ({"type": "mode", "mode": 3}, False),
        ({"type": "seek", "step": 3}, True),
        ({"type": "seek", "step": True}, False),
        ({"type": "seek", "step": 2**60}, False),
        ({"type": "speed", "speed": float("inf")}, False),
        ({"type": "keys", "held": ["KeyA"]}, True),
        ({"type": "keys", "held": [1]}, False),
        ({"type": "keys", "held": ["x" * 40]}, False),
        ({"type": "restart", "seed": 1, "path": "/etc"}, True),
        ({"type": "close"}, False),
    ],
)
def test_commands_are_checked(message, is_valid):
    command = parse_command(message)
    assert (command is not None) == is_valid
    assert "path" not in (command or {})


def test_messages_have_a_limited_size():
    assert parse_message(json.dumps({"type": "keys", "held": ["x"] * 9000})) is None
    assert parse_message("[" * 10_000) is None


def test_clients_that_send_too_much_are_refused():
    client = Client(1, None)
    for _ in range(int(MESSAGE_BURST)):
        client.check_rate()
    client._tokens = 0.5
    with pytest.raises(TooManyMessages):
        client.check_rate()


def test_acknowledgements_of_views_do_not_count_towards_the_rate_limit(monkeypatch):
    monkeypatch.setattr(clients, "MESSAGE_RATE", 0.0)  # no tokens are added over time
    client = Client(1, None)
    for number in range(2 * int(MESSAGE_BURST)):
        client.unacknowledged.append(number)
        client.check_rate()
        client.acknowledge(number)
    assert client.unacknowledged == []
    for _ in range(int(MESSAGE_BURST)):  # the same view again
        client.check_rate()
        client.acknowledge(number)
    with pytest.raises(TooManyMessages):
        client.check_rate()


def test_acknowledgements_do_not_raise_the_rate_limit(monkeypatch):
    monkeypatch.setattr(clients, "MESSAGE_RATE", 0.0)
    client = Client(1, None)
    for number in range(10):
        client.unacknowledged.append(number)
        client.acknowledge(number)
    for _ in range(int(MESSAGE_BURST)):
        client.check_rate()
    with pytest.raises(TooManyMessages):
        client.check_rate()


def test_small_images_are_lossless_and_large_ones_compressed():
    rng = np.random.default_rng(0)
    small = rng.integers(0, 256, (64, 64, 3), np.uint8)
    kind, content = encode_image(small)
    assert kind == "image/png"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), small)
    kind, content = encode_image(np.zeros((256, 256, 3), np.uint8))
    assert kind == "image/webp"
    assert len(content) < 2000


def test_views_are_decoded_as_they_were_encoded():
    images = [PaneImage("real", np.zeros((4, 5, 3), np.uint8))] * 2
    header, images = decode_view(encode_view(View(3, {"number": 3}, images)))
    assert header["number"] == 3
    assert [image["width"] for image in header["images"]] == [5, 5]
    assert all(image[:4] == b"\x89PNG" for image in images)


def test_slow_clients_get_the_newest_view():
    import asyncio

    sent = []

    class Slow:
        async def send_bytes(self, data):
            sent.extend(data)

    def encode(view):
        return bytes([view.number])

    async def run():
        client = Client(1, Slow())
        task = asyncio.create_task(client.send_views(encode))
        for number in range(1, 9):
            client.next_view = View(number, {}, [])
            client.wake_sender.set()
            await asyncio.sleep(0.005)
        assert sent == [*range(1, MAX_UNACKNOWLEDGED + 1)]
        client.acknowledge(1)
        await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
    assert sent == [1, 2, 8]


def test_a_used_port_is_an_error_with_a_fix():
    with (
        bind("127.0.0.1", 0) as listener,
        pytest.raises(UserError, match="Fix: use another --port"),
    ):
        bind("127.0.0.1", listener.getsockname()[1])
    assert is_loopback("127.0.0.1")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")


def test_half_of_the_threads_step_the_world_model():
    assert [num_model_threads(n) for n in (1, 2, 4, 16)] == [1, 1, 2, 4]
