"""Scope, the metrics viewer the original DreamerV3 logs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reverie.log.packages import need
from reverie.log.record import Record


class Scope:
    """Columns in `<logdir>/scope`, for `python -m scope.viewer --basedir ...`."""

    name = "scope"

    def __init__(self, logdir: Path):
        self._logdir = logdir
        self._scope = need("scope", "scope")
        self._writer = self._open()

    def write(self, record: Record) -> None:
        try:
            self._writer.add(record.step, record.scalars)
            self._writer.add(record.step, record.texts)
            self._writer.add(record.step, record.images)
            self._writer.add(record.step, record.videos)
            self._writer.flush()
        except Exception:
            self._writer = self._open()  # or it would write the same again next time
            raise

    def truncate_after(self, step: int) -> None:
        """Scope has no way to forget; the steps lived again appear twice."""

    def close(self) -> None:
        self._writer.flush()

    def _open(self) -> Any:
        # Without worker threads, so that an error is raised where it happens.
        return self._scope.Writer(self._logdir, workers=0)
