"""How annotations of `reverie` are checked while tests run; see `conftest.py`."""

from __future__ import annotations

import io
from typing import Any, Protocol, TextIO

from beartype import BeartypeConf, BeartypeHintOverrides, beartype

check = beartype(
    conf=BeartypeConf(
        # An int will do where a float is asked for, as everywhere else in Python.
        is_pep484_tower=True,
        # A captured stdout is a text stream too.
        hint_overrides=BeartypeHintOverrides({TextIO: io.TextIOBase}),
    )
)


def let_plain_protocols_pass() -> None:
    """Take any object for a protocol of ours that was not made for `isinstance`.

    Such a protocol (`Agent`, `Feed`, ...) is checked by mypy; at run time Python
    refuses to, and beartype would refuse every function that names one.
    """
    meta: Any = type(Protocol)
    ask_python = meta.__instancecheck__

    def ask(cls: Any, instance: object) -> bool:
        ours = cls.__module__.split(".")[0] == "reverie"
        plain = ours and getattr(cls, "_is_protocol", False)
        if plain and not getattr(cls, "_is_runtime_protocol", False):
            return True
        return ask_python(cls, instance)

    meta.__instancecheck__ = ask
