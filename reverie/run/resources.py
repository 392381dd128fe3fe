"""`Resources`: base class of context managers that open several resources."""

from __future__ import annotations

import contextlib
from typing import Any, TypeVar

R = TypeVar("R", bound="Resources")


class Resources:
    """Closes resources in reverse order, also if opening one of them fails.

    Subclasses open resources in `_open` and register each of them with `_cleanup`.
    """

    def __init__(self) -> None:
        self._cleanup = contextlib.ExitStack()
        self._error: BaseException | None = None
        """The error that ended the context, which cleanup functions may read."""

    def __enter__(self: R) -> R:
        try:
            self._open()
        except BaseException as error:
            self._error = error
            self.close()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._error = error
        self.close()

    def _open(self) -> None:
        """Open all resources; called when the context is entered."""
        raise NotImplementedError

    def close(self) -> None:
        self._cleanup.close()
