"""Collect metrics where they are made, and write them now and then.

Between two writes scalars are averaged: tensors on their own device, without waiting
for it, numbers on the host. NaNs are left out of the average. Of images, videos and
texts the last one counts. The logger tells them apart by rank: 0 is a scalar, 1 several
values of one scalar, 3 an image (h w c) and 4 a video (t h w c).
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reverie.api import Metrics, StateDict, UserError
from reverie.capabilities import Stateful
from reverie.log.record import Record, Score, Sink

OUTPUTS = ("terminal", "jsonl", "media", "tensorboard", "wandb", "scope")

SCORE = "episode/score"
"""Every value under this name also becomes a line of its own in `scores.jsonl`."""


@dataclass(frozen=True)
class LoggerConfig:
    outputs: tuple[str, ...] = ("terminal", "jsonl", "media")
    """Where metrics go: any of terminal, jsonl, media, tensorboard, wandb, scope."""

    filter: str = "score|length|fps|ratio|train/loss/|train/rand/"
    """Regular expression for the metrics the terminal shows; files get them all."""

    line: tuple[str, ...] = ()
    """Metrics that the progress line shows besides loss and score."""

    timer: bool = True
    """Log how long the parts of the loop take."""

    clocked: bool = True
    """Write fps, timers and usage to the files; off, equal runs leave equal files."""

    fps: int = 15
    """Frames per second of written videos."""

    keep_media: int = 10
    """How many of the newest pictures of each name stay in the media folder."""


class Logger:
    """Averages metrics between writes and hands them to every sink.

    A sink that fails (a full disk, a server that is down) is named once, and the run
    goes on; it is tried again at every write.
    """

    def __init__(self, sinks: Sequence[Sink]):
        self.sinks = list(sinks)
        self.step = -1  # of the last write
        self._pools: dict[tuple[str, ...], _Pool] = {}
        self._sums: dict[str, tuple[float, int]] = {}
        self._texts: dict[str, str] = {}
        self._pictures: dict[str, Tensor | np.ndarray] = {}
        self._scores: list[tuple[int | None, str, float]] = []
        self._failing: set[str] = set()

    def add(self, metrics: Metrics, prefix: str = "", step: int | None = None) -> None:
        """Take metrics in. `step` dates scores; without it they get the next write's.

        Tensors are read before this returns, so their memory may be used again, but
        nothing waits for the device.
        """
        on_device: dict[torch.device, dict[str, Tensor]] = {}
        for key, value in metrics.items():
            name = f"{prefix}/{key}" if prefix else key
            if isinstance(value, str):
                self._texts[name] = value
            elif isinstance(value, Tensor) and value.ndim == 0 and not _is_score(name):
                on_device.setdefault(value.device, {})[name] = value.detach()
            else:
                self._add_array(name, value, step)
        for device, scalars in on_device.items():
            pool = self._pools.setdefault((str(device), *scalars), _Pool())
            pool.add(list(scalars.values()))

    def write(self, step: int) -> Record:
        """Give every sink what came in since the last write."""
        scores = tuple(
            Score(step if at is None else at, name, value)
            for at, name, value in self._scores
        )
        pictures = {name: _to_uint8(value) for name, value in self._pictures.items()}
        record = Record(
            step=step,
            scalars=self._averages(),
            texts=dict(self._texts),
            images={k: v for k, v in pictures.items() if v.ndim == 3},
            videos={k: v for k, v in pictures.items() if v.ndim == 4},
            scores=scores,
        )
        self._forget()
        self.step = step
        for sink in self.sinks:
            self._try(sink, "write", record)
        return record

    def progress(self, step: int) -> None:
        """Say how far the run is, on sinks that show it. Cheap: call it every step."""
        for sink in self.sinks:
            show = getattr(sink, "progress", None)
            if show is not None:
                show(step)

    def truncate_after(self, step: int) -> None:
        """Forget what was written beyond `step`; -1 forgets everything.

        For a run that begins anew in a folder where an earlier one left no checkpoint.
        """
        self._forget()
        self.step = min(self.step, step)
        for sink in self.sinks:
            self._try(sink, "truncate_after", step)

    def state_dict(self) -> StateDict:
        """What was added and not yet written, and where the files end."""
        pools = []
        for (device, *names), pool in self._pools.items():
            total, count = pool.read()
            pools.append(_packed(names, total, count) | {"device": device})
        steps = [-1 if at is None else at for at, _, _ in self._scores]
        return {
            "step": self.step,
            "host": _packed(list(self._sums), *_columns(self._sums.values())),
            "pools": pools,
            "texts": dict(self._texts),
            "score_steps": np.array(steps, np.int64),
            "score_names": [name for _, name, _ in self._scores],
            "score_values": np.array([value for *_, value in self._scores], np.float64),
            "sinks": {
                sink.name: sink.state_dict()
                for sink in self.sinks
                if isinstance(sink, Stateful)
            },
        }

    def load_state_dict(self, state: StateDict) -> None:
        """Go back to where the state was taken. Pending pictures are not kept."""
        self._forget()
        self.step = int(state["step"])
        host = state["host"]
        columns = zip(host["sum"].tolist(), host["count"].tolist(), strict=True)
        self._sums = dict(zip(host["names"], columns, strict=True))
        for saved in state["pools"]:
            # Sums go on in the order they began in, so that they end in the same bits.
            pool = self._pools[(saved["device"], *saved["names"])] = _Pool()
            pool.sum = torch.as_tensor(saved["sum"])
            pool.count = torch.as_tensor(saved["count"])
        self._texts = dict(state["texts"])
        steps = [None if at < 0 else int(at) for at in state["score_steps"]]
        values = [float(value) for value in state["score_values"]]
        self._scores = list(zip(steps, state["score_names"], values, strict=True))
        for sink in self.sinks:
            if isinstance(sink, Stateful) and sink.name in state["sinks"]:
                self._try(sink, "load_state_dict", state["sinks"][sink.name])
            else:
                self._try(sink, "truncate_after", self.step)

    def close(self) -> None:
        for sink in self.sinks:
            self._try(sink, "close")

    def _add_array(self, name: str, value: Any, step: int | None) -> None:
        rank = value.ndim if isinstance(value, Tensor | np.ndarray) else np.ndim(value)
        if rank in (3, 4):
            # A copy: the next step may write into the same memory.
            copy = value.detach().clone() if isinstance(value, Tensor) else value.copy()
            self._pictures[name] = copy
        elif rank < 2:
            values = _to_numpy(value).astype(np.float64).reshape(-1)
            if _is_score(name):
                self._scores += [(step, name, float(score)) for score in values]
            total, count = self._sums.get(name, (0.0, 0))
            for number in values[~np.isnan(values)].tolist():
                total, count = total + number, count + 1
            self._sums[name] = (total, count)
        else:
            raise ValueError(
                f"Metric {name!r} has shape {tuple(value.shape)}; the logger takes "
                "scalars, texts, images (h w c) and videos (t h w c)."
            )

    def _totals(self) -> dict[str, tuple[float, int]]:
        """Sum and count of everything pending: the one place that waits for devices."""
        totals = dict(self._sums)
        for (_, *names), pool in self._pools.items():
            for name, total, count in zip(names, *pool.read(), strict=True):
                before, counted = totals.get(name, (0.0, 0))
                totals[name] = (before + total, counted + count)
        return totals

    def _averages(self) -> dict[str, float]:
        return {
            name: total / count if count else math.nan
            for name, (total, count) in self._totals().items()
        }

    def _forget(self) -> None:
        for pending in (self._pools, self._sums, self._texts, self._pictures):
            pending.clear()
        self._scores.clear()

    def _try(self, sink: Sink, verb: str, *args: Any) -> None:
        """A run of days must not die of its log, whatever a sink's library raises."""
        try:
            getattr(sink, verb)(*args)
        except Exception as error:
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                reason = error.strerror if isinstance(error, OSError) else str(error)
                reason = (reason or "").partition("\n")[0]
                warn(f"The {sink.name} log fails, the run goes on: {reason}")
        else:
            if sink.name in self._failing and verb == "write":
                self._failing.discard(sink.name)
                warn(f"The {sink.name} log works again.")


class _Pool:
    """Sum and count of a fixed list of device scalars, in a handful of kernels."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.count: Tensor | None = None

    def add(self, scalars: list[Tensor]) -> None:
        device = scalars[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        with torch.no_grad():
            # Stacked as they come where they are float32, as nearly all are; counters
            # may need more digits, and stacking promotes the rest to theirs.
            usual = torch.float32
            values = torch.stack(
                [s if s.dtype == usual else s.to(wide) for s in scalars]
            )
            counted = ~values.isnan()
            values = values.to(wide).nan_to_num(0.0, posinf=math.inf, neginf=-math.inf)
            if self.sum is None or self.count is None:
                self.sum, self.count = values, counted.to(torch.int64)
            else:
                self.sum = self.sum.to(device, wide) + values
                self.count = self.count.to(device) + counted

    def read(self) -> tuple[list[float], list[int]]:
        assert self.sum is not None
        assert self.count is not None
        return self.sum.tolist(), self.count.tolist()


def make_logger(
    config: LoggerConfig,
    logdir: Path,
    total: int | None = None,
    settings: dict[str, Any] | None = None,
) -> Logger:
    """The logger with the outputs its config names.

    `total` is the step at which the run ends, for the progress line; `settings` the
    resolved config, for sinks that show it.
    """
    sinks = []
    for name in dict.fromkeys(config.outputs):
        try:
            sinks.append(_make_sink(name, config, logdir, total, settings))
        except UserError:
            raise
        except Exception as error:
            # A server that cannot be reached, an account without access, ...
            warn(f"The {name} log cannot start, the run goes on without it: {error}")
    return Logger(sinks)


def _make_sink(
    name: str,
    config: LoggerConfig,
    logdir: Path,
    total: int | None,
    settings: dict[str, Any] | None,
) -> Sink:
    """Sinks are imported here, so that a run loads only those it writes to."""
    if name == "terminal":
        from reverie.log.terminal import Terminal

        return Terminal(config.filter, total, line=config.line)
    if name == "jsonl":
        from reverie.log.jsonl import Jsonl

        return Jsonl(logdir, config.clocked)
    if name == "media":
        from reverie.log.media import Media

        return Media(logdir, config.fps, config.keep_media)
    if name == "tensorboard":
        from reverie.log.tensorboard import Tensorboard

        return Tensorboard(logdir, config.fps)
    if name == "wandb":
        from reverie.log.wandb import Wandb

        return Wandb(logdir, config.fps, settings)
    if name == "scope":
        from reverie.log.scope import Scope

        return Scope(logdir)
    raise UserError(
        f"logger.outputs names {name!r}, which is not an output.\n"
        f"  Fix: choose from {', '.join(OUTPUTS)}"
    )


def warn(message: str) -> None:
    """One line for the person who runs this, not a traceback."""
    with contextlib.suppress(OSError, ValueError):  # it may be what cannot be written
        print(f"warning: {message}", file=sys.stderr, flush=True)


def _packed(names: list[str], total: list[float], count: list[int]) -> StateDict:
    """Sums as arrays, which hold infinities and every last bit."""
    return {
        "names": list(names),
        "sum": np.array(total, np.float64),
        "count": np.array(count, np.int64),
    }


def _columns(rows: Iterable[tuple[float, int]]) -> tuple[list[float], list[int]]:
    rows = list(rows)
    return [total for total, _ in rows], [count for _, count in rows]


def _is_score(name: str) -> bool:
    return name == SCORE or name.endswith("/" + SCORE)


def _to_numpy(value: Any) -> np.ndarray:
    if isinstance(value, Tensor):
        return value.detach().float().cpu().numpy()
    return np.asarray(value)


def _to_uint8(value: Tensor | np.ndarray) -> np.ndarray:
    """Pictures as bytes; floats are taken to lie in [0, 1]."""
    array: np.ndarray = value.cpu().numpy() if isinstance(value, Tensor) else value
    if array.dtype == np.uint8:
        return array
    unit = np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1)
    return np.rint(unit * 255).astype(np.uint8)
