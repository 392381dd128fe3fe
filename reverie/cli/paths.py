"""Paths that a command cannot use are answered with a sentence."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from reverie.api import UserError

REFUSED = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
"""What the system says of paths that cannot be read or written."""


@contextlib.contextmanager
def naming_paths() -> Iterator[None]:
    """What the system refuses about a path becomes a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSED or not error.filename:
            raise
        raise UserError(
            f"{error.filename} cannot be used: {error.strerror}.\n"
            "  Fix: name a file or folder that you may read, or write."
        ) from None
