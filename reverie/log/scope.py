"""Scope, the metrics viewer the original DreamerV3 logs to."""

from __future__ import annotations

from pathlib import Path

from reverie.api import UserError
from reverie.log.record import Record


class Scope:
    """Columns in `<logdir>/scope`, for `python -m scope.viewer --basedir ...`."""

    name = "scope"

    def __init__(self, logdir: Path):
        try:
            import scope
        except ImportError as error:
            raise UserError(
                "Logging to scope needs the scope package, which is not installed.\n"
                "  Fix: pip install 'reverie[scope]'"
            ) from error
        # Without worker threads, so that an error is raised where it happens.
        self._writer = scope.Writer(logdir, workers=0)

    def write(self, record: Record) -> None:
        self._writer.add(record.step, record.scalars)
        self._writer.add(record.step, record.texts)
        self._writer.add(record.step, record.images)
        self._writer.add(record.step, record.videos)
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Scope has no way to forget; the steps lived again appear twice."""

    def close(self) -> None:
        self._writer.flush()
