"""Batches of sequences sampled from recorded episodes, without loading a whole dataset.

Sequences are sampled as from a replay buffer: an episode with probability proportional
to its length, then a start row. If the episode ends before the sequence, another
episode is appended from its start, and its first row has `is_first`. Windows with
`select="episodes"` stay within one episode and have a `mask`.

Batch k depends only on the seed and on k, so a run resumes from a counter. A dataset
that does not fit in the cache is sampled through a shuffle buffer: batches are sampled
from slots, which hold one episode each. Slots are refilled one after another, so often
that about one row is decompressed per returned row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch, Extras, StateDict, UserError
from reverie.datasets.episode_cache import EpisodeCache, EpisodeCacheConfig
from reverie.datasets.readers import Reader
from reverie.datasets.rng import make_rng
from reverie.rows import MAX_PUT_BACK, Window
from reverie.spaces import Arrays, step_spaces
from reverie.storage.episode_windows import episode_probabilities, window_start

PREFETCH = 2
"""Number of batches per window that are prepared in advance."""

SAMPLE, REFILL, AUGMENT = 0, 1, 2
"""Purposes of random numbers. The purpose is part of the seed, so that random numbers
of different purposes are independent."""
_ROW_BITS = 32  # lower bits of a `stepid`; the upper bits are the episode index

Augment = Callable[[Arrays, np.random.Generator], Arrays]
"""Changes a sampled batch `(B, T, ...)`, for example with random crops."""


class EpisodeSlice(NamedTuple):
    """Row indices in one episode; indices outside of the episode are padding."""

    episode: int
    rows: np.ndarray


class EpisodeWindowSampler:
    """Chooses the rows of each batch of one window. `index` is the index of the window,
    which is part of the seed, so that windows are sampled independently."""

    def __init__(self, window: Window, cache: EpisodeCache, seed: int, index: int):
        self.window, self.cache = window, cache
        self.seed = (seed, index)
        # True: all episodes have the same probability, regardless of their length.
        self._uniform = window.select == "episodes"
        self._slots, self._refills_per_sample = self._plan_slots()

    def sample(self, step: int, counts: np.ndarray) -> list[list[EpisodeSlice]]:
        """Return the slices of each sequence of batch `step`.

        `counts` is how often each episode was used. Every `consec` steps, new sequences
        of `span` rows are sampled, which are returned in `consec` chunks.
        """
        sample_index, chunk = divmod(step, self.window.consec)
        rng = make_rng(*self.seed, SAMPLE, sample_index)
        if self._uniform:
            return self._sample_within_episodes(rng, sample_index, counts)
        return [
            self._sample_across_episodes(rng, sample_index, chunk)
            for _ in range(self.window.batch)
        ]

    def _sample_across_episodes(
        self, rng: np.random.Generator, sample_index: int, chunk: int
    ) -> list[EpisodeSlice]:
        """Sample a sequence across episodes; return one chunk of it."""
        window, slices, length = self.window, list[EpisodeSlice](), 0
        while length < window.span:
            if self._slots:
                slot = int(rng.integers(self._slots))
                episode = self._episode_in_slot(slot, sample_index)
            else:
                episode = self._sample_episode(rng)
            rows = int(self.cache.rows[episode])
            start = 0 if slices else int(rng.integers(rows - 1))
            stop = min(rows, start + window.span - length)
            slices.append(EpisodeSlice(episode, np.arange(start, stop)))
            length += stop - start
        return _select_rows(slices, chunk * window.length, (chunk + 1) * window.length)

    def _sample_within_episodes(
        self, rng: np.random.Generator, sample_index: int, counts: np.ndarray
    ) -> list[list[EpisodeSlice]]:
        """Sample sequences that do not continue in another episode."""
        window, sequences = self.window, []
        candidates = np.flatnonzero(self._is_usable())
        if self._slots:
            candidates = np.unique(
                [self._episode_in_slot(i, sample_index) for i in range(self._slots)]
            )
        cumulative = np.cumsum(episode_probabilities(counts[candidates], window.alpha))
        for _ in range(window.batch):
            draw = rng.random() * cumulative[-1]
            position = int(np.searchsorted(cumulative, draw, "right"))
            episode = int(candidates[min(position, len(candidates) - 1)])
            # sample a transition, and its offset in the window (arrays of length 1)
            transitions = self.cache.rows[episode : episode + 1] - 1
            transition = rng.integers(0, transitions)
            length = window.length - 1
            offset = rng.integers(0, length, 1)
            start = window_start(transition, offset, transitions, length, window.pad)
            row_indices = int(start[0]) + np.arange(window.length)
            sequences.append([EpisodeSlice(episode, row_indices)])
        return sequences

    def _episode_in_slot(self, slot: int, sample_index: int) -> int:
        """Return the episode that a slot holds when a sample is taken.

        Refill r replaces the episode in slot `r % slots`, so the episode is that of the
        last refill of the slot.
        """
        refills = self._slots + int(sample_index * self._refills_per_sample)
        refill = (refills - 1 - slot) // self._slots * self._slots + slot
        return self._sample_episode(make_rng(*self.seed, REFILL, refill))

    def _sample_episode(self, rng: np.random.Generator) -> int:
        """Sample a valid episode, in proportion to its length or uniformly."""
        rows = self.cache.rows
        # With `_uniform`, all episodes of two or more rows have the same weight.
        weight = np.minimum(rows, 2) if self._uniform else rows
        cumulative = np.cumsum(np.where(rows > 1, weight, 0))
        if not self._is_usable().any():
            raise UserError(
                f"{self.cache.reader.origin} has no usable episode.\n"
                "  Fix: `reverie data inspect` lists what is wrong."
            )
        while True:
            draw = rng.integers(cumulative[-1])
            episode = int(np.searchsorted(cumulative, draw, "right"))
            if episode not in self.cache.bad:
                return episode

    def _is_usable(self) -> np.ndarray:
        """True for each episode that is valid and has at least one transition."""
        usable = self.cache.rows > 1
        usable[list(self.cache.bad)] = False
        return np.asarray(usable)

    def _plan_slots(self) -> tuple[int, float]:
        """Return the number of slots and the refills per sample; both are 0 if the
        dataset fits in the cache."""
        reader, rows = self.cache.reader, self.cache.rows
        spaces = {**reader.obs_space, **reader.act_space, **step_spaces()}
        row_bytes = sum(space.nbytes for space in spaces.values())
        if int(rows.sum()) * row_bytes <= self.cache.capacity:
            return 0, 0.0
        # the mean length of sampled episodes, which are longer if sampled by length
        mean = float(rows.mean() if self._uniform else (rows**2).sum() / rows.sum())
        # 0.8 leaves memory for slots with episodes longer than the mean
        slots = max(1, int(0.8 * self.cache.capacity / (mean * row_bytes)))
        return slots, self.window.batch * self.window.span / mean


class SampledBatch(NamedTuple):
    """A batch, and how often each episode was used, including in this batch."""

    batch: Batch
    counts: np.ndarray


class _WindowState:
    """Number of batches returned for one window, and prefetched batches."""

    def __init__(self, sampler: EpisodeWindowSampler):
        self.sampler = sampler
        self.step = 0
        self.is_counting = False
        self.counts = np.zeros(len(sampler.cache.names), np.int64)
        self.prefetched: deque[Future[SampledBatch]] = deque()
        # `counts` before each of the last batches, for `put_back`
        self.previous_counts: deque[np.ndarray] = deque(maxlen=MAX_PUT_BACK)


class RecordedFeed:
    """Base class of feeds of recorded data.

    Has the methods of `api.Feed` that have no effect on recorded data.
    """

    def ready(self, name: str) -> bool:
        return True

    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        """No effect: recordings have no extras."""

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        """No effect: recordings are not sampled by priority."""

    def count_uses(self, name: str, on: bool) -> None:
        """No effect: uses are not counted."""


class EpisodeFeed(RecordedFeed):
    """Batches of the agent's windows from recorded episodes; implements `api.Feed`.

    The window `report` and the method `episodes` read from `held_out`, if given. With
    `prefetch`, a thread prepares the next batches, which does not change them.
    """

    def __init__(
        self,
        reader: Reader,
        windows: dict[str, Window],
        device: torch.device | str = "cpu",
        *,
        held_out: Reader | None = None,
        config: EpisodeCacheConfig | None = None,
        seed: int = 0,
        augment: Augment | None = None,
        prefetch: bool = False,
    ):
        config = config or EpisodeCacheConfig()
        if names := [name for name, window in windows.items() if window.context]:
            raise UserError(
                f"The agent needs stored latents in its windows {', '.join(names)}, "
                "which recorded episodes do not have.\n"
                "  Fix: set replay_context of the agent to 0."
            )
        self.reader, self.held_out = reader, held_out or reader
        self.obs_space = {**reader.obs_space, **step_spaces()}
        self.act_space = reader.act_space
        self.device = torch.device(device)
        self.windows, self.seed, self.augment = windows, seed, augment
        self.served = 0  # rows returned so far
        train_share = 0.9 if held_out else 1.0  # fraction of the cache memory
        memory = config.memory * 2**30
        options = (config.bad, config.workers)
        self._train = EpisodeCache(reader, int(memory * train_share), *options)
        self._held_out = self._train
        if held_out is not None:
            capacity = int(memory * (1 - train_share))
            self._held_out = EpisodeCache(held_out, capacity, *options)
        self._states = {
            name: _WindowState(
                EpisodeWindowSampler(
                    window,
                    self._held_out if name == "report" else self._train,
                    seed,
                    number,
                )
            )
            for number, (name, window) in enumerate(windows.items())
        }
        self._thread = ThreadPoolExecutor(1, "recordings") if prefetch else None

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        state = self._states[name]
        batch, counts = self._next(name)
        state.step += 1
        state.previous_counts.append(state.counts)
        state.counts = counts
        self.served += self.windows[name].batch * self.windows[name].length
        return batch if out is None else copy_batch(batch, out)

    def count_uses(self, name: str, on: bool) -> None:
        state = self._states[name]
        self._discard_prefetched(state)
        state.is_counting = on

    def put_back(self, name: str) -> None:
        """Make the next call return the last batch again, because it was not used."""
        state = self._states[name]
        self._discard_prefetched(state)
        state.step -= 1
        state.counts = state.previous_counts.pop()
        self.served -= self.windows[name].batch * self.windows[name].length

    def episodes(
        self, batch: int = 1, length: int | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Yield the first `limit` held-out episodes in order, for evaluation.

        Episodes are truncated to `length` rows, and padded to the longest of their
        batch by repeating the last row; `mask` is False for padding. The key `episode`
        is the index in `held_out.names()`.
        """
        pending: list[tuple[int, Arrays]] = []
        for index in range(len(self._held_out.names))[:limit]:
            episode = self._held_out.read(index)
            if episode is not None:
                rows = {key: value[:length] for key, value in episode.items()}
                pending.append((index, rows))
            if len(pending) == batch:
                yield to_device(pad_episodes(pending), self.device)
                pending = []
        if pending:
            yield to_device(pad_episodes(pending), self.device)

    def close(self) -> None:
        for state in self._states.values():
            self._discard_prefetched(state)
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        for cache in (self._train, self._held_out):
            cache.close()

    def state_dict(self) -> StateDict:
        """Return the number of batches and the uses of each episode, per window."""
        return {
            name: {
                "step": state.step,
                "is_counting": state.is_counting,
                "counts": state.counts.copy(),
            }
            for name, state in self._states.items()
        }

    def load_state_dict(self, state: StateDict) -> None:
        for name, window_state in self._states.items():
            self._discard_prefetched(window_state)
            saved = state[name]
            counts = np.asarray(saved["counts"], np.int64)
            if len(counts) != len(window_state.counts):
                raise UserError(
                    f"The run was trained on {len(counts)} episodes, and there are "
                    f"{len(window_state.counts)} now.\n  Fix: use the recordings that "
                    "the run was started with, or another --logdir."
                )
            window_state.step = int(saved["step"])
            window_state.is_counting = bool(saved["is_counting"])
            window_state.counts = counts.copy()

    def _next(self, name: str) -> SampledBatch:
        """Return the next batch, and keep `PREFETCH` more in preparation."""
        state = self._states[name]
        if self._thread is None:
            return self._sample(state, state.step, state.counts)
        prefetched = state.prefetched
        while len(prefetched) < PREFETCH + 1:
            counts = prefetched[-1] if prefetched else state.counts
            step = state.step + len(prefetched)
            prefetched.append(self._thread.submit(self._sample, state, step, counts))
        return prefetched.popleft().result()

    def _discard_prefetched(self, state: _WindowState) -> None:
        """Cancel the prefetched batches, and wait for those that cannot be canceled."""
        while state.prefetched:
            future = state.prefetched.pop()
            if not future.cancel():
                future.exception()

    def _sample(
        self, state: _WindowState, step: int, counts: np.ndarray | Future[SampledBatch]
    ) -> SampledBatch:
        """Sample a batch; `counts` may be the future of the previous batch."""
        if isinstance(counts, Future):
            counts = counts.result().counts
        sampler, window = state.sampler, state.sampler.window
        while True:  # sample again if an episode turns out to be invalid
            sequences = sampler.sample(step, counts)
            used = (part.episode for slices in sequences for part in slices)
            episodes = sampler.cache.get(used)
            if episodes is not None:
                break
        arrays = _gather(sequences, episodes, window)
        chunk = step % window.consec
        arrays["consec"] = np.full_like(arrays["stepid"], chunk)
        if window.select != "episodes" and chunk == 0:
            arrays["is_first"][:, 0] = True
        if self.augment is not None:
            arrays = self.augment(arrays, make_rng(*sampler.seed, AUGMENT, step))
        if state.is_counting:
            counts = counts.copy()
            np.add.at(counts, [slices[0].episode for slices in sequences], 1)
        return SampledBatch(to_device(arrays, self.device), counts)


def to_device(arrays: Arrays, device: torch.device) -> Batch:
    """Copy arrays to the device, from pinned memory if it is a GPU."""
    batch: Batch = {}
    for key, value in arrays.items():
        tensor = torch.from_numpy(value if value.flags.writeable else value.copy())
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        batch[key] = tensor.to(device, non_blocking=True)
    return batch


def copy_batch(batch: Batch, out: Batch) -> Batch:
    """Copy the keys of `out` from a batch; return `out`."""
    for key, value in out.items():
        value.copy_(batch[key], non_blocking=True)
    return out


def pad_episodes(episodes: list[tuple[int, Arrays]]) -> Arrays:
    """Stack episodes, padded to the longest; `mask` is True for rows that exist."""
    longest = max(len(rows["reward"]) for _, rows in episodes)
    batch: Arrays = {}
    for key in episodes[0][1]:
        parts = []
        for _, rows in episodes:
            missing = longest - len(rows[key])
            parts.append(np.concatenate([rows[key], rows[key][-1:].repeat(missing, 0)]))
        batch[key] = np.stack(parts)
    lengths = np.array([len(rows["reward"]) for _, rows in episodes])
    batch["mask"] = np.arange(longest) < lengths[:, None]
    batch["is_first"] = np.zeros_like(batch["mask"])
    batch["is_first"][:, 0] = True
    batch["episode"] = np.array([index for index, _ in episodes], np.int64)
    return batch


def _gather(
    sequences: list[list[EpisodeSlice]], episodes: dict[int, Arrays], window: Window
) -> Arrays:
    """Copy the rows of all slices into arrays `(B, T, ...)`."""
    example: Arrays = next(iter(episodes.values()))
    shape = (window.batch, window.length)
    batch = {k: np.empty((*shape, *v.shape[1:]), v.dtype) for k, v in example.items()}
    batch["stepid"] = np.empty(shape, np.int64)
    has_mask = window.select == "episodes"
    if has_mask:
        batch["mask"] = np.empty(shape, bool)
    for i, slices in enumerate(sequences):
        start = 0
        for index, rows in slices:
            episode, target = episodes[index], slice(start, start + len(rows))
            last = len(episode["reward"]) - 1
            clipped = np.clip(rows, 0, last)
            is_contiguous = clipped[-1] - clipped[0] == len(rows) - 1
            source = slice(clipped[0], clipped[-1] + 1) if is_contiguous else clipped
            for key, value in episode.items():
                batch[key][i, target] = value[source]
            batch["stepid"][i, target] = (index << _ROW_BITS) + clipped
            if has_mask:
                batch["mask"][i, target] = (rows >= 0) & (rows <= last)
            start += len(rows)
    return batch


def _select_rows(
    slices: list[EpisodeSlice], start: int, stop: int
) -> list[EpisodeSlice]:
    """Return rows `start` to `stop` of a sequence."""
    selected, offset = [], 0
    for episode, rows in slices:
        part = rows[max(0, start - offset) : max(0, stop - offset)]
        if len(part):
            selected.append(EpisodeSlice(episode, part))
        offset += len(rows)
    return selected
