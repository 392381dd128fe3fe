"""A copy of the replay on the device, so that batches are gathered there.

Large keys (images, latents) are stored in device memory, in the same ring buffer layout
as on the host. For each batch the host samples the steps and sends their row numbers
and small keys in one copy; the device gathers the large keys. Extras (values that the
agent stores with every step, such as latents) are written back on the device only, and
copied to the host before the replay is saved.

New steps are uploaded just before the next batch is sampled. Training never makes the
host wait for the device, and results do not depend on the order of GPU threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch, Extras
from reverie.replay.buffer import Replay
from reverie.replay.repeated_call import RepeatedCall
from reverie.replay.staging import PackedBatch, StagingPool, torch_dtype
from reverie.spaces import Arrays, Spaces

SMALL_BYTES = 256
"""Keys with fewer bytes per step are sent with each batch, unless they are extras."""

UPLOAD_BYTES = 1 << 25
"""Bytes per copy when many steps are uploaded."""

DOWNLOAD_STEPS = 8192
"""Steps per copy when extras are downloaded."""

EMPTY = -(1 << 62)
"""Step id of an unused row."""

ROWS = "#rows"  # key of the row numbers of a batch
WORD_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8)
"""Integer types as which rows are stored and copied, see `word_dtype`."""


class DeviceCopy:
    """Large keys and extras of a replay on a device."""

    def __init__(self, replay: Replay, device: torch.device) -> None:
        self.replay = replay
        self.device = device
        self.capacity = replay.capacity
        self.spaces = copied_spaces(replay.spaces, replay.extras)
        # Writes to evicted steps go to an additional last row, which is never read.
        count = self.capacity + 1
        self.columns = {
            key: torch.zeros(
                (count, space.nbytes // word_dtype(space.nbytes).itemsize),
                dtype=word_dtype(space.nbytes),
                device=device,
            )
            for key, space in self.spaces.items()
        }
        self.ids = torch.full((count,), EMPTY, dtype=torch.int64, device=device)
        self.changed = torch.zeros(count, dtype=torch.bool, device=device)
        # Writes of extras are numbered. If a step is written several times in one call,
        # the write with the largest number determines its value.
        # `_num_writes` is the number of writes since the last `pop_num_writes`.
        self._last_write = torch.zeros(count, dtype=torch.int64, device=device)
        self._total_writes = torch.zeros((), dtype=torch.int64, device=device)
        self._num_writes = torch.zeros((), dtype=torch.int64, device=device)
        self._next_id = 0  # steps before this id have been uploaded
        self._batch_pools = {
            name: StagingPool(self._host_keys(name), device) for name in replay.windows
        }
        self._graphed_write_back = RepeatedCall(self._write_back, device)
        # Steps per upload, enough for what is usually added between two batches.
        self._upload_steps = max(64, 2 * len(replay.index.env_stream))
        self._upload_pool = StagingPool(self._empty_rows(self._upload_steps), device)

    @property
    def nbytes(self) -> int:
        """Device memory in bytes."""
        return device_bytes(self.replay.spaces, self.replay.extras, self.capacity)

    def sample(self, name: str, out: Batch | None = None) -> Batch:
        """Return the next batch of this kind, copied into `out` if given."""
        if out is None or isinstance(out, PackedBatch):
            return self._sample(name, out)
        for key, value in self._sample(name, None).items():
            out[key].copy_(value)
        return out

    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        """Replace the extras of these steps; evicted steps are skipped.

        If a step occurs several times, its last values are stored, as on the host.
        """
        self._graphed_write_back(stepid, extras)

    def _write_back(self, stepid: Tensor, extras: Extras) -> None:
        """Write extras on the device; captured as a CUDA graph."""
        ids = stepid.reshape(-1)
        discard = self.capacity  # the additional row
        rows = ids % self.capacity
        rows = torch.where(self.ids[rows] == ids, rows, discard)
        self._num_writes += (rows != discard).sum()
        number = self._total_writes + torch.arange(1, len(ids) + 1, device=self.device)
        self._last_write.scatter_reduce_(0, rows, number, "amax")
        rows = torch.where(self._last_write[rows] == number, rows, discard)
        self._total_writes += len(ids)
        self.changed.index_fill_(0, rows, True)
        for key, value in extras.items():
            space = self.spaces[key]
            assert value.dtype == torch_dtype(space.dtype), (key, value.dtype)
            assert value.shape == (*stepid.shape, *space.shape), (key, value.shape)
            column = self.columns[key]
            flat = value.detach().reshape(len(ids), *space.shape)
            column.index_copy_(0, rows, as_words(flat, column))

    def upload_new_steps(self) -> None:
        """Copy the steps that were added since the last call to the device."""
        index = self.replay.index
        start, total = max(self._next_id, index.first), index.total
        pool, max_steps = self._upload_pool, self._upload_steps
        if total - start > max_steps:
            row_bytes = sum(space.nbytes for space in self.spaces.values())
            max_steps = max(max_steps, UPLOAD_BYTES // row_bytes)
            max_steps = min(max_steps, total - start)
            pool = StagingPool(self._empty_rows(max_steps), self.device, depth=2)
        while start < total:
            ring_end = start + self.capacity - start % self.capacity
            stop = min(total, start + max_steps, ring_end)
            self._upload(start, stop, pool)
            start = stop
        self._next_id = total

    def reload(self) -> None:
        """Discard all steps, because the replay loads other steps."""
        self.ids.fill_(EMPTY)
        self.changed.zero_()
        self._num_writes.zero_()
        self._next_id = 0

    def pop_num_writes(self) -> int:
        """Number of rows written since the last call. Waits for the device."""
        count = int(self._num_writes)
        self._num_writes.zero_()
        return count

    def pop_changes(self, first: int) -> Iterator[tuple[np.ndarray, Arrays]]:
        """Yield ids and extras changed since the last call, from the id `first` on.

        Waits for the device.
        """
        rows = self.changed[:-1].nonzero()[:, 0]
        rows = rows[self.ids[rows] >= first]
        self.changed.zero_()
        extras = {k: s for k, s in self.spaces.items() if k in self.replay.extras}
        for part in torch.split(rows, DOWNLOAD_STEPS):
            arrays = {}
            for key, space in extras.items():
                words = self.columns[key][part].cpu()
                typed = words.view(torch_dtype(space.dtype))
                arrays[key] = typed.reshape(len(part), *space.shape).numpy()
            yield self.ids[part].cpu().numpy(), arrays

    def _sample(self, name: str, out: PackedBatch | None) -> PackedBatch:
        """Sample steps on the host and gather their large keys on the device."""
        self.upload_new_steps()
        pool = self._batch_pools[name]
        buffer = pool.acquire()
        host = self.replay.sample(name, out=buffer.arrays)
        np.remainder(host["stepid"], self.capacity, out=host[ROWS])
        if out is None:
            out = buffer.send(self.device)
            shape = host["stepid"].shape
            for key, space in self.spaces.items():
                dtype = torch_dtype(space.dtype)
                full_shape = (*shape, *space.shape)
                out[key] = torch.empty(full_shape, dtype=dtype, device=self.device)
            words = {k: as_words(out[k], c) for k, c in self.columns.items()}
            out.gather_args = (out.pop(ROWS).view(-1), words)
        else:
            buffer.copy_to(out.memory)
        pool.release(buffer)
        assert out.gather_args is not None
        rows, words = out.gather_args
        for key, column in self.columns.items():
            torch.index_select(column, 0, rows, out=words[key])
        return out

    def _upload(self, start: int, stop: int, pool: StagingPool) -> None:
        """Copy the live steps in `[start, stop)`, whose rows are contiguous."""
        ids = np.arange(start, stop)
        live = self.replay.index.is_live(ids)
        if not live.all():  # upload each part without missing steps separately
            edges = np.flatnonzero(np.diff(live, prepend=False, append=False))
            for first, last in (edges + start).reshape(-1, 2).tolist():
                self._upload(first, last, pool)
            return
        buffer = pool.acquire()
        count = stop - start
        arrays = {key: buffer.arrays[key][:count] for key in self.spaces}
        if not self.replay.read(ids, arrays):
            # `read` has removed the unreadable steps from the replay: copy the others
            self._upload(start, stop, pool)
            return
        row = start % self.capacity
        rows = slice(row, row + count)
        for key, column in self.columns.items():
            words = as_words(buffer.tensors[key][:count], column)
            column[rows].copy_(words, non_blocking=buffer.pinned)
        torch.arange(start, stop, out=self.ids[rows])
        pool.release(buffer)

    def _host_keys(self, name: str) -> Arrays:
        """Return uninitialized arrays for the keys that the host sends per batch."""
        batch = self.replay.empty_batch(name)
        batch = {key: value for key, value in batch.items() if key not in self.spaces}
        return {**batch, ROWS: np.empty_like(batch["stepid"])}

    def _empty_rows(self, count: int) -> Arrays:
        """Return zeros for `count` steps of the keys that are copied to the device."""
        return {key: space.zeros(count) for key, space in self.spaces.items()}


def copied_spaces(spaces: Spaces, extras: Spaces) -> Spaces:
    """Keys that are copied to the device: extras and all large keys."""
    return {
        key: space
        for key, space in spaces.items()
        if key in extras or space.nbytes >= SMALL_BYTES
    }


def device_bytes(spaces: Spaces, extras: Spaces, capacity: int) -> int:
    """Device memory that a copy of the replay needs, in bytes."""
    copied = copied_spaces({**spaces, **extras}, extras)
    row = sum(space.nbytes for space in copied.values())
    return (capacity + 1) * (row + 8 + 8 + 1)  # `ids`, `_last_write`, `changed`


def fits_on_device(replay: Replay, device: torch.device) -> bool:
    """True if a CUDA device has enough free memory for a copy of the replay."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    needed = device_bytes(replay.spaces, replay.extras, replay.capacity)
    return needed <= free * replay.config.device_memory


def word_dtype(nbytes: int) -> torch.dtype:
    """Return the widest integer type whose size divides `nbytes`, the bytes of a row.

    Gathering wide integers is several times faster than gathering bytes.
    """
    return next(dtype for dtype in WORD_DTYPES if nbytes % dtype.itemsize == 0)


def as_words(values: Tensor, column: Tensor) -> Tensor:
    """Return rows of values as integers of the column's dtype: a view if aligned."""
    flat = values.reshape(-1, column.shape[1] * column.itemsize // values.itemsize)
    if flat.storage_offset() * flat.itemsize % column.itemsize:
        flat = flat.clone()
    return flat.view(column.dtype)
