"""Sink for Scope, the metrics viewer of the original DreamerV3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reverie.log.record import Record, Sink
from reverie.plugins import import_optional


class ScopeSink(Sink):
    """Writes `<logdir>/scope`, for `python -m scope.viewer --basedir ...`.

    Scope cannot remove data, so steps that a resumed run repeats appear twice.
    """

    name = "scope"

    def __init__(self, logdir: Path):
        self._logdir = logdir
        self._scope = import_optional("scope", "scope", "The scope log")
        self._writer = self._open()

    def write(self, record: Record) -> None:
        try:
            for metrics in (record.scalars, record.texts, record.images, record.videos):
                self._writer.add(record.step, metrics)
            self._writer.flush()
        except Exception:
            self._writer = self._open()  # the old one would write the same data again
            raise

    def close(self) -> None:
        self._writer.flush()

    def _open(self) -> Any:
        # Without worker threads, so that errors are raised here.
        return self._scope.Writer(self._logdir, workers=0)
