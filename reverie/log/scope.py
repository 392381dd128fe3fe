"""Sink for Scope, the metrics viewer of the original DreamerV3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reverie.log.record import Record
from reverie.plugins import import_optional


class ScopeSink:
    """Writes `<logdir>/scope`, for `python -m scope.viewer --basedir ...`."""

    name = "scope"

    def __init__(self, logdir: Path):
        self._logdir = logdir
        self._scope = import_optional("scope", "scope", "The scope log")
        self._writer = self._open()

    def write(self, record: Record) -> None:
        try:
            self._writer.add(record.step, record.scalars)
            self._writer.add(record.step, record.texts)
            self._writer.add(record.step, record.images)
            self._writer.add(record.step, record.videos)
            self._writer.flush()
        except Exception:
            self._writer = self._open()  # the old one would write the same data again
            raise

    def truncate_after(self, step: int) -> None:
        """Do nothing: Scope cannot remove data, so repeated steps appear twice."""

    def close(self) -> None:
        self._writer.flush()

    def _open(self) -> Any:
        # Without worker threads, so that errors are raised here.
        return self._scope.Writer(self._logdir, workers=0)
