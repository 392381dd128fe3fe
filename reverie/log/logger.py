"""The logger: collects metrics at every step and writes them at intervals.

Scalars are averaged between two writes, ignoring NaN. Tensors are summed on their
device, so that the host does not wait for it; numbers are summed on the host. For
images, videos and texts, the last value is written. The number of dimensions determines
the type: 0 is a scalar, 1 several values of a scalar, 3 an image (h w c) and 4 a video
(t h w c).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.api import Metrics, StateDict, UserError
from reverie.log.device_sums import DeviceSums, RepeatedScalars, find_vector
from reverie.log.jsonl import JsonlSink, length_of
from reverie.log.media import MediaSink
from reverie.log.messages import print_message
from reverie.log.record import Record, ResumableSink, Score, Sink
from reverie.log.scope import ScopeSink
from reverie.log.tensorboard import TensorboardSink
from reverie.log.terminal import Epochs, TerminalSink
from reverie.log.timer import Timer, timed
from reverie.log.wandb import WandbSink
from reverie.render.video import FPS

SCORE = "episode/score"
"""Every value of this metric is also written as a line of `scores.jsonl`."""

AUTO = "auto"
AUTO_OUTPUTS = ("tensorboard",)
"""Outputs that `auto` stands for; each has the name of the package it needs."""


@dataclass(frozen=True)
class LoggerConfig:
    """Which metrics are written, and where."""

    outputs: tuple[str, ...] = ("terminal", "jsonl", "media", "auto")
    """Where metrics are written: any of terminal, jsonl, media (images and videos),
    tensorboard, wandb, scope, and auto (tensorboard, if it is installed).
    `--logger.outputs+ wandb` adds an output to these."""

    filter: str = "score|success|length|fps|ratio|train/loss/|train/rand/"
    """Regular expression of the metrics printed to the terminal; files have all."""

    progress_metrics: tuple[str, ...] = ()
    """Metrics in the progress line, in addition to loss and score."""

    timer: bool = True
    """Log the time spent in each section of the training loop."""

    timing_metrics: bool = True
    """Write fps, timer and usage metrics and the seconds since the start of the run to
    the JSON files. Without them, equal runs write equal files."""

    fps: int = 0
    """Frames per second of videos; 0 for the speed of the environment, or 15 if it does
    not declare one."""

    keep_media: int = 10
    """Number of images and videos per metric to keep in the media folder."""


class Logger:
    """Averages metrics between writes and passes them to all sinks.

    If a sink fails (full disk, server not reachable), one warning is printed and the
    run continues; the sink is tried again at every write. With `log_seconds`, records
    have the duration of the run, without the time between stopping and resuming it.
    """

    def __init__(self, sinks: Sequence[Sink], log_seconds: bool = False):
        self.sinks = list(sinks)
        self.timer = Timer(enabled=False)
        self._start = time.monotonic() if log_seconds else None
        self.step = -1  # step of the last write
        self.has_final_write = False  # see `load_state_dict`
        # By device and names of scalars. The scalars of one call of `add` that have the
        # same dtype are added to the sums as one vector.
        self._device_sums: dict[tuple[str, ...], DeviceSums] = {}
        self._repeated: dict[str, RepeatedScalars] = {}  # by prefix
        self._host_sums: dict[str, tuple[float, int]] = {}  # sum and count by name
        self._texts: dict[str, str] = {}
        self._images: dict[str, Tensor | np.ndarray] = {}  # and videos
        self._scores: list[Score] = []  # step -1: use the step of the next write
        self._failing: set[str] = set()  # names of sinks whose last write failed

    @property
    def seconds(self) -> float | None:
        """Duration of the run so far; None if it is not measured."""
        return None if self._start is None else time.monotonic() - self._start

    @seconds.setter
    def seconds(self, value: float) -> None:
        if self._start is not None:
            self._start = time.monotonic() - value

    @timed("log")
    def add(self, metrics: Metrics, prefix: str = "", step: int = -1) -> None:
        """Add metrics. Scores are logged at `step`; -1 is the step of the next write.

        Tensors are copied or added on their device, so the caller may overwrite them.
        This does not wait for the device.
        """
        repeated = self._repeated.get(prefix)
        if repeated and repeated.matches(metrics):
            for sums, vector in repeated.vectors:
                sums.add(vector)
            for name, number in repeated.numbers.items():
                self._add_array(name, number)
            return
        on_device: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        numbers: dict[str, float] = {}
        for key, value in metrics.items():
            name = f"{prefix}/{key}" if prefix else key
            if isinstance(value, str):
                self._texts[name] = value
            elif isinstance(value, Tensor) and value.ndim == 0 and not _is_score(name):
                group = value.device, value.dtype
                on_device.setdefault(group, {})[name] = value
            elif _is_score(name):
                self._add_scores(name, metrics, key, step)
            else:
                self._add_array(name, value)
                if isinstance(value, int | float):
                    numbers[name] = value
        vectors = []
        for (device, _), scalars in on_device.items():
            names = (str(device), *scalars)
            sums = self._device_sums.setdefault(names, DeviceSums())
            values = list(scalars.values())
            sums.add(torch.stack(values).detach())
            joined = find_vector(values)
            if joined is not None:
                vectors.append((sums, joined))
        count = len(numbers) + sum(len(x) for _, x in vectors)
        if vectors and count == len(metrics):
            self._repeated[prefix] = RepeatedScalars(dict(metrics), vectors, numbers)

    @timed("log")
    def write(self, step: int) -> Record:
        """Pass the metrics since the last write to all sinks."""
        images = {name: _to_uint8(value) for name, value in self._images.items()}
        record = Record(
            step=step,
            scalars=self._averages(),
            texts=dict(self._texts),
            images={k: v for k, v in images.items() if v.ndim == 3},
            videos={k: v for k, v in images.items() if v.ndim == 4},
            scores=tuple(
                s if s.step >= 0 else s._replace(step=step) for s in self._scores
            ),
            seconds=self.seconds,
        )
        self._clear()
        self.step = step
        for sink in self.sinks:
            self._call(sink, "write", record)
        return record

    @timed("log")
    def progress(self, step: int) -> None:
        """Update the progress line of the terminal; fast enough for every step."""
        for sink in self.sinks:
            try:
                sink.progress(step)
            except (Exception, SystemExit) as error:
                # the terminal was closed, or user code has replaced the stream
                self._warn_failed(sink, error)

    def clear_line(self) -> None:
        """Erase the progress line, before other text is printed."""
        for sink in self.sinks:
            with contextlib.suppress(Exception, SystemExit):
                sink.clear_line()

    def truncate_after(self, step: int) -> None:
        """Remove what was written after `step`; -1 removes everything.

        For a run that starts in the folder of a run that has not saved a checkpoint.
        """
        self._clear()
        self.step = min(self.step, step)
        for sink in self.sinks:
            self._call(sink, "truncate_after", step)

    def state_dict(self) -> StateDict:
        """Return the metrics that are not written yet, and the state of the sinks."""
        device_sums = []
        for (device, *names), sums in self._device_sums.items():
            total, count = sums.read()
            device_sums.append(_pack_sums(names, total, count) | {"device": device})
        host_sums = self._host_sums.values()
        return {
            "step": self.step,
            "seconds": self.seconds,
            "host_sums": _pack_sums(
                list(self._host_sums),
                [total for total, _ in host_sums],
                [count for _, count in host_sums],
            ),
            "device_sums": device_sums,
            "texts": dict(self._texts),
            "score_steps": np.array([score.step for score in self._scores], np.int64),
            "score_names": [score.name for score in self._scores],
            "score_values": np.array([s.value for s in self._scores], np.float64),
            "score_lengths": [score.length for score in self._scores],
            "score_seconds": [score.seconds for score in self._scores],
            "score_others": [dict(score.others) for score in self._scores],
            "sinks": {
                sink.name: sink.state_dict()
                for sink in self.sinks
                if isinstance(sink, ResumableSink)
            },
        }

    def load_state_dict(
        self, state: StateDict, final: Mapping[str, Any] | None = None
    ) -> None:
        """Restore a state, and remove what was written to the files after it.

        Images that were not written yet are lost.

        A run that finishes saves its state, and then writes its metrics once more.
        `final` describes this final write: its `step`, and whether a write was `due` at
        this step. If the files have the final write, it is not removed, and
        `has_final_write` is True; it is False if the run was killed before. If the
        write was not due, its metrics are kept and also averaged into the next write,
        as in a run that continues without stopping.
        """
        self._clear()
        self.step = int(state["step"])
        self.seconds = state["seconds"] or 0.0
        host = state["host_sums"]
        pairs = zip(host["sum"].tolist(), host["count"].tolist(), strict=True)
        self._host_sums = dict(zip(host["names"], pairs, strict=True))
        for saved in state["device_sums"]:
            # Separate sums per group, so that results stay bit-identical.
            sums = DeviceSums()
            sums.sum = torch.tensor(saved["sum"])  # a copy, which `add` changes
            sums.count = torch.tensor(saved["count"])
            self._device_sums[(saved["device"], *saved["names"])] = sums
        self._texts = dict(state["texts"])
        steps, values = state["score_steps"].tolist(), state["score_values"].tolist()
        columns = (values, state["score_lengths"], state["score_seconds"])
        others = state.get("score_others") or [{}] * len(steps)
        self._scores = list(map(Score, steps, state["score_names"], *columns, others))
        self.has_final_write = self._restore_sinks(state["sinks"], final)

    def _restore_sinks(
        self, states: StateDict, final: Mapping[str, Any] | None
    ) -> bool:
        """Restore the files of the sinks; return True if there was a final write."""
        others, was_written = [], final is not None
        for sink in self.sinks:
            if isinstance(sink, ResumableSink) and sink.name in states:
                final_step = final["step"] if final else None
                self._call(sink, "load_state_dict", states[sink.name], final_step)
                was_written &= sink.has_final_line
            else:
                others.append(sink)
        if final and was_written:  # else the run was killed before its last write
            self.step = int(final["step"])
            self._scores.clear()
            if final["due"]:
                self._clear()
        for sink in others:
            self._call(sink, "truncate_after", self.step)
        return was_written

    def close(self) -> None:
        for sink in self.sinks:
            self._call(sink, "close")

    def _add_scores(self, name: str, metrics: Metrics, key: str, step: int) -> None:
        """Add the scores of episodes, with their lengths and other values."""
        scores, seconds = _to_host(metrics[key]), self.seconds
        length = metrics.get(length_of(key))
        lengths = [None] * len(scores) if length is None else _to_host(length).tolist()
        others = _other_values(name.removesuffix(key), metrics, key, len(scores))
        rows = zip(scores.tolist(), lengths, others, strict=True)
        for score, episode_length, values in rows:
            self._scores.append(
                Score(step, name, score, episode_length, seconds, values)
            )
        self._add_array(name, scores)

    def _add_array(self, name: str, value: Any) -> None:
        """Store an image or video, or add numbers to the sums of a scalar."""
        ndim = value.ndim if isinstance(value, Tensor | np.ndarray) else np.ndim(value)
        if ndim in (3, 4):
            # A copy, because the caller may overwrite the memory.
            copy = value.detach().clone() if isinstance(value, Tensor) else value.copy()
            self._images[name] = copy
        elif ndim < 2:
            values = _to_host(value)
            total, count = self._host_sums.get(name, (0.0, 0))
            for number in values[~np.isnan(values)].tolist():
                total, count = total + number, count + 1
            self._host_sums[name] = (total, count)
        else:
            raise ValueError(
                f"Metric {name!r} has shape {tuple(value.shape)}, expected a scalar, "
                "vector, text, image (h w c) or video (t h w c)."
            )

    def _averages(self) -> dict[str, float]:
        """Return the average of each scalar; waits for the devices."""
        sums = dict(self._host_sums)
        for (_, *names), device_sums in self._device_sums.items():
            for name, total, count in zip(names, *device_sums.read(), strict=True):
                host_total, host_count = sums.get(name, (0.0, 0))
                sums[name] = (host_total + total, host_count + count)
        return {k: total / n if n else math.nan for k, (total, n) in sums.items()}

    def _clear(self) -> None:
        """Delete the metrics that are not written yet."""
        for pending in (self._device_sums, self._host_sums, self._texts, self._images):
            pending.clear()
        self._scores.clear()
        self._repeated.clear()

    def _call(self, sink: Sink, method: str, *args: Any) -> None:
        """Call a method of a sink; print a warning if it raises."""
        try:
            getattr(sink, method)(*args)
        except (Exception, SystemExit) as error:
            self._warn_failed(sink, error)
        else:
            if sink.name in self._failing and method == "write":
                self._failing.discard(sink.name)
                print_message(f"warning: The {sink.name} log works again.")

    def _warn_failed(self, sink: Sink, error: BaseException) -> None:
        """Print one warning until the sink works again."""
        if sink.name not in self._failing:
            self._failing.add(sink.name)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            reason = (reason or "").partition("\n")[0]
            problem = f"Writing the {sink.name} log failed, the run continues"
            print_message(f"warning: {problem}. Reason: {reason}")


def make_logger(
    config: LoggerConfig,
    logdir: Path,
    total: int | None = None,
    settings: dict[str, Any] | None = None,
    render_fps: float = 0,
    name: str = "",
    epochs: Callable[[], Epochs] | None = None,
) -> Logger:
    """Build the logger with the sinks in the config.

    `total` is the last step of the run, for the progress line; `settings` is the
    resolved config, and `name` the name of the run (default: that of the folder), for
    sinks that display them. `render_fps` is the speed of videos, unless the config sets
    one. `epochs` returns the progress of a run that counts epochs.
    """
    fps = config.fps or render_fps or FPS
    makers: dict[str, Callable[[], Sink]] = {
        "terminal": lambda: TerminalSink(
            config.filter,
            total,
            progress_metrics=config.progress_metrics,
            epochs=epochs,
        ),
        "jsonl": lambda: JsonlSink(logdir, config.timing_metrics),
        "media": lambda: MediaSink(logdir, fps, config.keep_media),
        "tensorboard": lambda: TensorboardSink(logdir, fps),
        "wandb": lambda: WandbSink(logdir, fps, settings, name),
        "scope": lambda: ScopeSink(logdir),
    }
    sinks = []
    installed = filter(find_spec, AUTO_OUTPUTS) if AUTO in config.outputs else ()
    for output in dict.fromkeys((*config.outputs, *installed)):
        if output == AUTO:
            continue
        if output not in makers:
            raise UserError(
                f"logger.outputs has {output!r}, which is not a known output.\n"
                f"  Fix: choose from {', '.join([*makers, AUTO])}"
            )
        try:
            sinks.append(makers[output]())
        except Exception as error:
            if isinstance(error, UserError) and output in config.outputs:
                raise
            # For example a server that is not reachable, or missing permissions.
            problem = f"The {output} log cannot start, the run continues without it"
            print_message(f"warning: {problem}. Reason: {error}")
    return Logger(sinks, log_seconds=config.timing_metrics)


def _pack_sums(names: list[str], total: list[float], count: list[int]) -> StateDict:
    """Return sums as arrays, which are saved exactly, including infinities."""
    return {
        "names": list(names),
        "sum": np.array(total, np.float64),
        "count": np.array(count, np.int64),
    }


def _is_score(name: str) -> bool:
    return name == SCORE or name.endswith("/" + SCORE)


def _other_values(
    prefix: str, metrics: Metrics, score: str, count: int
) -> list[dict[str, float]]:
    """Return the other metrics of each episode, such as `episode/success`.

    `score` is the key of the score in `metrics`, such as `episode/score`. The other
    metrics have the same group (`episode/`). `prefix` is added to the names in the
    result. NaN is left out.
    """
    group, excluded = score.removesuffix("score"), (score, length_of(score))
    rows: list[dict[str, float]] = [{} for _ in range(count)]
    for name, value in metrics.items():
        if not group or not name.startswith(group) or name in excluded:
            continue
        values = [] if isinstance(value, str) else _to_host(value).tolist()
        for row, number in zip(rows, values, strict=False):
            if len(values) == count and not math.isnan(number):
                row[prefix + name] = number
    return rows


def _to_host(value: Any) -> np.ndarray:
    """Convert a scalar or vector to a vector of float64."""
    if isinstance(value, Tensor):
        value = value.detach().float().cpu().numpy()
    return np.asarray(value, np.float64).reshape(-1)


def _to_uint8(value: Tensor | np.ndarray) -> np.ndarray:
    """Convert images to uint8; floats are expected in [0, 1]."""
    array: np.ndarray = value.cpu().numpy() if isinstance(value, Tensor) else value
    if array.dtype == np.uint8:
        return array
    unit = np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1)
    return np.rint(unit * 255).astype(np.uint8)
