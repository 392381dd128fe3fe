"""Copies sampled steps from the store into the arrays of a batch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int

from reverie.replay.column_store import ColumnStore
from reverie.rows import Window
from reverie.spaces import Arrays, Spaces


def empty_batch(spaces: Spaces, window: Window) -> Arrays:
    """Return uninitialized arrays (B, context + length, ...) for a batch."""
    shape = (window.batch, window.context + window.length)
    batch = {k: np.empty((*shape, *s.shape), s.dtype) for k, s in spaces.items()}
    batch["stepid"] = np.empty(shape, np.int64)
    batch["consec"] = np.empty(shape, np.int64)
    if window.select == "episodes":
        batch["mask"] = np.empty(shape, bool)
    return batch


def gather_steps(
    store: ColumnStore, spaces: Spaces, ids: Int[np.ndarray, "B T"], batch: Arrays
) -> None:
    """Fill the keys of a batch that the replay stores, and `stepid`."""
    shapes = {k: s.shape for k, s in spaces.items() if k in batch}
    flat = {k: batch[k].reshape(-1, *shape) for k, shape in shapes.items()}
    store.gather(ids.reshape(-1), flat)
    batch["stepid"][:] = ids


def gather_chunks(
    store: ColumnStore,
    spaces: Spaces,
    window: Window,
    ids: Int[np.ndarray, "B span"],
    chunk: Int[np.ndarray, " B"],
    batch: Arrays,
) -> None:
    """Fill a batch with one chunk of each sampled sequence, and correct its flags.

    `is_first` is set where a sequence starts, and `is_last` before every `is_first`,
    because an environment may be reset before its episode is over.
    """
    width = window.context + window.length
    if window.consec == 1:
        chunk_ids, next_ids = ids, None
    else:
        columns = chunk[:, None] * window.length + np.arange(width)
        chunk_ids = np.take_along_axis(ids, columns, 1)
        after = np.minimum(columns[:, -1:] + 1, window.span - 1)
        next_ids = np.take_along_axis(ids, after, 1)
    gather_steps(store, spaces, chunk_ids, batch)
    batch["consec"][:] = chunk[:, None]
    first, last = batch["is_first"], batch["is_last"]
    last[:, :-1] |= first[:, 1:]
    if next_ids is not None:
        next_first = np.empty((window.batch,), first.dtype)
        store.gather(next_ids.reshape(-1), {"is_first": next_first})
        last[:, -1] |= next_first & (chunk < window.consec - 1)
    first[chunk == 0, 0] = True
