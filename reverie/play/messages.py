"""Messages between server and page.

A view is one binary message: the length of its header (4 bytes, little-endian), the
header as JSON (`View.data` and a list of the images), and the encoded images. Images of
at most 64 x 64 pixels are PNG, which is lossless; larger ones are WebP, which needs
fewer bytes.

Commands of the page are JSON objects with a `type`.
"""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Iterable
from typing import Any

import numpy as np

from reverie.play.session import View

MAX_LOSSLESS_SIZE = 64
"""Largest height and width of images that are compressed without loss."""
WEBP_QUALITY = 90
MAX_MESSAGE_BYTES = 16_384
"""Maximum length of a message of the page; longer ones are ignored."""
MAX_KEY_CODE = 32
"""Maximum length of the code of a keyboard key."""
MAX_NUMBER = 2**53
"""Largest integer that JavaScript represents exactly."""

COMMANDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "keys": {"held": list, "timestamp": (int, float)},
    "slider": {"number": int, "value": (int, float), "timestamp": (int, float)},
    "mode": {"mode": str},
    "restart": {"seed": int},
    "pause": {"on": bool},
    "step": {},
    "speed": {"speed": (int, float)},
    "fork": {"step": int},
    "rollouts": {"count": int},
    "fork_every": {"steps": int},
    "seek": {"step": int},
    "human": {"on": bool},
    "ask_to_save": {"on": bool},
    "save_episode": {"on": bool},
    "open": {"source": str, "number": int},
}
"""Fields of the commands to a session, with their types.

`fork` starts imagined rollouts at a step, `fork_every` sets after how many steps they
start again, and `rollouts` sets their number. `seek` shows an earlier step, `open` a
recorded episode. `human` gives control to the human or back to the policy. With
`ask_to_save`, the page asks at the end of each episode whether to save it;
`save_episode` is the answer.

Views contain the `timestamp` of the newest input, so that a client can measure its
latency.
"""
REQUIRED = {
    "keys": ("held",),
    "slider": ("number", "value"),
    "mode": ("mode",),
    "speed": ("speed",),
    "rollouts": ("count",),
    "fork_every": ("steps",),
    "seek": ("step",),
    "human": ("on",),
    "ask_to_save": ("on",),
    "save_episode": ("on",),
    "open": ("source", "number"),
}
"""Fields that a command must have; the others are optional."""


def encode_view(view: View) -> bytes:
    """Return the message of a view."""
    images, contents = [], []
    for pane, image in view.images:
        kind, content = encode_image(image)
        height, width = image.shape[:2]
        size = {"width": width, "height": height, "bytes": len(content)}
        images.append({"pane": pane, "type": kind, **size})
        contents.append(content)
    header = json.dumps({**view.data, "images": images}, allow_nan=False).encode()
    return b"".join([struct.pack("<I", len(header)), header, *contents])


def encode_image(image: np.ndarray) -> tuple[str, bytes]:
    """Return the media type and the content of an image."""
    from PIL import Image

    picture, buffer = Image.fromarray(np.ascontiguousarray(image)), io.BytesIO()
    if max(image.shape[:2]) <= MAX_LOSSLESS_SIZE:
        picture.save(buffer, "PNG", compress_level=1)
        return "image/png", buffer.getvalue()
    picture.save(buffer, "WEBP", quality=WEBP_QUALITY, method=0)
    return "image/webp", buffer.getvalue()


def parse_message(text: str) -> dict[str, Any] | None:
    """Parse a message of the page; None if it is not an object with a `type`."""
    if len(text) > MAX_MESSAGE_BYTES:
        return None
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        return None
    return message


def parse_command(message: dict[str, Any]) -> dict[str, Any] | None:
    """Return a command to a session; None if it is invalid."""
    name = message["type"]
    fields = COMMANDS.get(name)
    if fields is None:
        return None
    command = {"type": name}
    for field, kind in fields.items():
        value = message.get(field)
        if value is None:
            if field in REQUIRED.get(name, ()):
                return None
        elif not _is_valid(value, kind):
            return None
        else:
            command[field] = value
    if name == "keys" and not _are_key_codes(command["held"]):
        return None
    return command


def _is_valid(value: Any, kind: type | tuple[type, ...]) -> bool:
    """True if a value has this type; numbers must be finite and not too large.

    In Python a bool is also an int, so it is checked first.
    """
    if isinstance(value, bool):
        return kind is bool
    if not isinstance(value, kind):
        return False
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) <= MAX_NUMBER
    return True


def _are_key_codes(values: Iterable[Any]) -> bool:
    return all(
        isinstance(value, str) and len(value) <= MAX_KEY_CODE for value in values
    )
