"""Sink for TensorBoard that needs only the tensorboard package.

Videos are written as image summaries that contain a GIF, which TensorBoard plays.
Records are appended by this process instead of a writer thread, so that a full disk is
reported and no event file ends with an incomplete record.
"""

from __future__ import annotations

import io
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from reverie.log.append_file import AppendFile
from reverie.log.record import Record, Sink
from reverie.plugins import import_optional
from reverie.render.video import FPS, encode_gif, encode_png


class TensorboardSink(Sink):
    """Writes event files to the logdir, for `tensorboard --logdir LOGDIR`."""

    name = "tensorboard"

    def __init__(self, logdir: Path, fps: float = FPS):
        import_optional("tensorboard", "tensorboard", "The tensorboard log")
        from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
        from tensorboard.plugins.text import metadata
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.fps = fps
        self._event, self._summary, self._tensor = event_pb2, summary_pb2, tensor_pb2
        self._text_metadata = metadata.create_summary_metadata("", "")
        self._record_writer = RecordWriter
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}"
        self._file = AppendFile(logdir / name)
        self._has_header = False

    def write(self, record: Record) -> None:
        Value, Summary = self._summary.Summary.Value, self._summary.Summary
        values = []
        for name, number in record.scalars.items():
            values.append(Value(tag=name, simple_value=number))
        for name, text in record.texts.items():
            tensor = self._tensor.TensorProto(dtype="DT_STRING")
            tensor.string_val.append(text.encode())
            values.append(Value(tag=name, tensor=tensor, metadata=self._text_metadata))
        for name, image in record.images.items():
            values.append(Value(tag=name, image=self._image(image, encode_png(image))))
        for name, video in record.videos.items():
            gif = encode_gif(video, self.fps)
            values.append(Value(tag=name, image=self._image(video[0], gif)))
        if values:
            self._append(step=record.step, summary=Summary(value=values))

    def truncate_after(self, step: int) -> None:
        """Write an event that makes TensorBoard ignore earlier data after `step`."""
        log = self._event.SessionLog
        self._append(step=step + 1, session_log=log(status=log.START))

    def close(self) -> None:
        self._file.close()

    def _image(self, frame: np.ndarray, encoded: bytes) -> Any:
        """Return an image summary of encoded bytes, with the size of a frame."""
        height, width, channels = frame.shape
        return self._summary.Summary.Image(
            height=height,
            width=width,
            colorspace=channels,
            encoded_image_string=encoded,
        )

    def _append(self, **fields: Any) -> None:
        """Append an event with these fields to the file."""
        events = [self._event.Event(wall_time=time.time(), **fields)]
        if not self._has_header:
            # the first record of an event file has the version of its format
            header = self._event.Event(
                wall_time=time.time(), file_version="brain.Event:2"
            )
            events.insert(0, header)
        buffer = io.BytesIO()
        writer = self._record_writer(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        self._file.write(buffer.getvalue())
        self._has_header = True
