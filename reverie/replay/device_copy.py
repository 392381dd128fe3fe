"""The replay once more, on the device, so that batches are cut where they are used.

The wide columns (images, latents) live in device memory in the same ring of rows as on
the host. A batch then costs one small copy: the host chooses the steps and sends their
rows with the narrow keys, and the device gathers the rest. Extras are written back on
the device alone; the host gets them before the replay is saved.

New steps are brought over just before the next batch is cut. Nothing here waits for
the device, and no result depends on the order of its threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch, Extras
from reverie.replay.buffer import Replay
from reverie.replay.staging import Arrays, Packed, Staging, torch_dtype
from reverie.spaces import Spaces

NARROW = 256
"""Bytes below which a key comes from the host with each batch, unless it is a note."""

BULK = 1 << 25
"""Bytes brought over at once when a whole replay is."""

EMPTY = -(1 << 62)
"""The step of a row that holds none."""

ROWS = "#rows"
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class Ring:
    """Columns of a replay on a device: cuts batches, takes extras back."""

    def __init__(self, replay: Replay, device: torch.device) -> None:
        self.replay = replay
        self.device = device
        self.capacity = replay.capacity
        self.spaces = held(replay.spaces, replay.extras)
        # One row more than the replay has, where writes for evicted steps end up.
        count = self.capacity + 1
        self.columns = {
            key: torch.zeros(
                (count, space.nbytes // word(space.nbytes).itemsize),
                dtype=word(space.nbytes),
                device=device,
            )
            for key, space in self.spaces.items()
        }
        self.ids = torch.full((count,), EMPTY, dtype=torch.int64, device=device)
        self.changed = torch.zeros(count, dtype=torch.bool, device=device)
        self._turn = torch.zeros(count, dtype=torch.int64, device=device)
        self._now = torch.zeros((), dtype=torch.int64, device=device)
        self._written = torch.zeros((), dtype=torch.int64, device=device)
        self._seen = 0  # steps before this id have been brought over
        self._batches = {
            name: Staging(self._small(name), device) for name in replay.windows
        }
        self._few = max(64, 2 * len(replay.timeline.slots))
        self._uploads = Staging(self._rows(self._few), device)

    @property
    def nbytes(self) -> int:
        return ring_bytes(self.replay.spaces, self.replay.extras, self.capacity)

    def cut(self, name: str, out: Batch | None = None) -> Batch:
        """The next batch of this kind, in the tensors of an earlier one if given."""
        if out is None or isinstance(out, Packed):
            return self._cut(name, out)
        for key, value in self._cut(name, None).items():
            out[key].copy_(value)
        return out

    def write(self, stepid: Tensor, extras: Extras) -> None:
        """Store fresher extras for these steps; evicted ones are passed over.

        Of several rows for one step the last counts, as on the host. Only kernels are
        queued, so this can be part of a CUDA graph.
        """
        ids = stepid.reshape(-1)
        nowhere = self.capacity
        rows = ids % self.capacity
        rows = torch.where(self.ids[rows] == ids, rows, nowhere)
        self._written += (rows != nowhere).sum()
        order = self._now + torch.arange(1, len(ids) + 1, device=self.device)
        self._turn.scatter_reduce_(0, rows, order, "amax")
        rows = torch.where(self._turn[rows] == order, rows, nowhere)
        self._now += len(ids)
        self.changed.index_fill_(0, rows, True)
        for key, value in extras.items():
            space = self.spaces[key]
            assert value.dtype == torch_dtype(space.dtype), (key, value.dtype)
            assert value.shape == (*stepid.shape, *space.shape), (key, value.shape)
            column = self.columns[key]
            flat = value.detach().reshape(len(ids), *space.shape)
            column.index_copy_(0, rows, as_words(flat, column))

    def catch_up(self) -> None:
        """Bring over the steps that were added since the last time."""
        timeline = self.replay.timeline
        at, total = max(self._seen, timeline.first), timeline.total
        staging, most = self._uploads, self._few
        if total - at > most:
            row = sum(space.nbytes for space in self.spaces.values())
            most = min(max(most, BULK // row), total - at)
            staging = Staging(self._rows(most), self.device, depth=2)
        while at < total:
            stop = min(total, at + most, at + self.capacity - at % self.capacity)
            self._bring(at, stop, staging)
            at = stop
        self._seen = total

    def reload(self) -> None:
        """The replay holds other steps than it did."""
        self.ids.fill_(EMPTY)
        self.changed.zero_()
        self._written.zero_()
        self._seen = 0

    def take_count(self) -> int:
        """How many rows have been written since the last call. Waits for the device."""
        count = int(self._written)
        self._written.zero_()
        return count

    def changes(self, since: int) -> Iterator[tuple[np.ndarray, Arrays]]:
        """Extras written since the last call, of steps from the id `since` on.

        Waits for the device.
        """
        rows = self.changed[:-1].nonzero()[:, 0]
        rows = rows[self.ids[rows] >= since]
        self.changed.zero_()
        extras = {k: s for k, s in self.spaces.items() if k in self.replay.extras}
        for part in torch.split(rows, 8192):
            arrays = {}
            for key, space in extras.items():
                words = self.columns[key][part].cpu()
                typed = words.view(torch_dtype(space.dtype))
                arrays[key] = typed.reshape(len(part), *space.shape).numpy()
            yield self.ids[part].cpu().numpy(), arrays

    def _cut(self, name: str, out: Packed | None) -> Packed:
        self.catch_up()
        staging = self._batches[name]
        parcel = staging.take()
        small = self.replay.sample(name, out=parcel.arrays)
        np.remainder(small["stepid"], self.capacity, out=small[ROWS])
        if out is None:
            out = parcel.send(self.device)
            shape = small["stepid"].shape
            for key, space in self.spaces.items():
                dtype = torch_dtype(space.dtype)
                size = (*shape, *space.shape)
                out[key] = torch.empty(size, dtype=dtype, device=self.device)
            words = {k: as_words(out[k], c) for k, c in self.columns.items()}
            out.ring = (out.pop(ROWS).view(-1), words)
        else:
            parcel.copy_to(out.memory)
        staging.done(parcel)
        assert out.ring is not None
        rows, words = out.ring
        for key, column in self.columns.items():
            torch.index_select(column, 0, rows, out=words[key])
        return out

    def _bring(self, start: int, stop: int, staging: Staging) -> None:
        """Bring over steps whose rows lie side by side, without those that are lost."""
        ids = np.arange(start, stop)
        live = self.replay.timeline.live(ids)
        if not live.all():
            edges = np.flatnonzero(np.diff(live, prepend=False, append=False))
            for first, last in (edges + start).reshape(-1, 2).tolist():
                self._bring(first, last, staging)
            return
        parcel = staging.take()
        count = stop - start
        read = {key: parcel.arrays[key][:count] for key in self.spaces}
        if not self.replay.read(ids, read):
            self._bring(start, stop, staging)
            return
        row = start % self.capacity
        here = slice(row, row + count)
        for key, column in self.columns.items():
            part = as_words(parcel.tensors[key][:count], column)
            column[here].copy_(part, non_blocking=parcel.pinned)
        torch.arange(start, stop, out=self.ids[here])
        staging.done(parcel)

    def _small(self, name: str) -> Arrays:
        """What the host sends with each batch."""
        like = self.replay.buffers(name)
        like = {key: value for key, value in like.items() if key not in self.spaces}
        return {**like, ROWS: np.empty_like(like["stepid"])}

    def _rows(self, count: int) -> Arrays:
        return {key: space.zeros(count) for key, space in self.spaces.items()}


def held(spaces: Spaces, extras: Spaces) -> Spaces:
    """The keys a ring holds: extras, which change, and all that is wide."""
    return {
        key: space
        for key, space in spaces.items()
        if key in extras or space.nbytes >= NARROW
    }


def ring_bytes(spaces: Spaces, extras: Spaces, capacity: int) -> int:
    """What a ring takes on the device."""
    row = sum(space.nbytes for space in held({**spaces, **extras}, extras).values())
    return (capacity + 1) * (row + 8 + 8 + 1)


def fits(replay: Replay, device: torch.device) -> bool:
    """Whether the device has room for a ring, by what the replay's config allows."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    needed = ring_bytes(replay.spaces, replay.extras, replay.capacity)
    return needed <= free * replay.config.device_memory


def word(nbytes: int) -> torch.dtype:
    """The widest integers that rows of this many bytes consist of.

    Gathering wide words is several times as fast as gathering bytes.
    """
    return next(dtype for dtype in WORDS if nbytes % dtype.itemsize == 0)


def as_words(values: Tensor, column: Tensor) -> Tensor:
    """Rows of values, reshaped and read as the words of a column."""
    flat = values.reshape(-1, column.shape[1] * column.itemsize // values.itemsize)
    if flat.storage_offset() * flat.itemsize % column.itemsize:
        flat = flat.clone()
    return flat.view(column.dtype)
