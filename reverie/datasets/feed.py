"""Batches cut from recorded episodes where they lie: nothing is loaded as a whole.

Sequences are cut as from a replay: an episode is chosen in proportion to its length,
then a row to begin with; where it ends before the sequence does, another episode
follows from its beginning, with `is_first` at the joint. Windows that choose by episode
(`Window.select`) never leave theirs and come with a `mask`.

What batch number k holds depends on the seed and on k alone, so a run resumes with a
number. Recordings that do not fit in memory are drawn through a set of slots: each
holds one episode for a while and is then refilled, in turn, so that as many rows are
unpacked as are served. Refills are chosen in proportion to length and slots evenly,
which gives every episode its share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from reverie.api import Batch, Extras, StateDict, UserError
from reverie.datasets.episode_cache import Bad, Shelf
from reverie.datasets.episode_format import with_flags
from reverie.datasets.readers import Reader
from reverie.rows import Window
from reverie.storage.array_file import Arrays
from reverie.storage.episode_windows import episode_probabilities, window_start

AHEAD = 2
"""Batches of a kind that are made ready beforehand."""

CUT, FILL, PREPARE = 0, 1, 2
_BITS = 32  # of a `stepid`, for the row; the others number the episode

Prepare = Callable[[Arrays, np.random.Generator], Arrays]
"""What is done to a batch `(B, T, ...)` before it leaves, such as random crops."""


@dataclass(frozen=True)
class RecordingsConfig:
    """How recorded episodes are kept at hand while learning from them."""

    memory: float = 2.0
    """Gigabytes of unpacked episodes to keep."""
    workers: int = 2
    """Threads that unpack episodes."""
    bad: Bad = "skip"
    """Pass over episodes with NaN, wrong lengths or missing keys, or stop."""

    def __post_init__(self) -> None:
        if self.memory <= 0 or self.workers < 1:
            raise ValueError("memory must be above 0, and workers at least 1")


class Piece(NamedTuple):
    """Rows of an episode; `rows` may lie outside of it, where they are masked."""

    episode: int
    rows: np.ndarray


class Drawer:
    """Says which rows make up the batches of one window."""

    def __init__(self, window: Window, shelf: Shelf, seed: int, purpose: int):
        self.window, self.shelf = window, shelf
        self.seed = (seed, purpose)
        self._alike = window.select == "episodes"  # however long they are
        self._slots, self._rate = self._working_set()

    def draw(self, step: int, counts: np.ndarray) -> list[list[Piece]]:
        """The pieces of each row of batch `step`."""
        turn, piece = divmod(step, self.window.consec)
        rng = generator(*self.seed, CUT, turn)
        if self._alike:
            return self._by_episode(rng, turn, counts)
        return [self._sequence(rng, turn, piece) for _ in range(self.window.batch)]

    def _sequence(self, rng: np.random.Generator, turn: int, piece: int) -> list[Piece]:
        """A sequence with joints, or the part of it that is served now."""
        window, found, have = self.window, list[Piece](), 0
        while have < window.span:
            episode = self._choose(rng, turn)
            rows = int(self.shelf.rows[episode])
            start = 0 if found else int(rng.integers(rows - 1))
            stop = min(rows, start + window.span - have)
            found.append(Piece(episode, np.arange(start, stop)))
            have += stop - start
        return _between(found, piece * window.length, (piece + 1) * window.length)

    def _by_episode(
        self, rng: np.random.Generator, turn: int, counts: np.ndarray
    ) -> list[list[Piece]]:
        window, found = self.window, []
        numbers = self._candidates(turn)
        chance = np.cumsum(episode_probabilities(counts[numbers], window.alpha))
        for _ in range(window.batch):
            at = int(np.searchsorted(chance, rng.random() * chance[-1], "right"))
            episode = int(numbers[min(at, len(numbers) - 1)])
            rows = self.shelf.rows[episode : episode + 1]
            step = rng.integers(0, rows - 1)
            offset = rng.integers(0, window.length - 1, 1)
            start = window_start(step, offset, rows - 1, window.length - 1, window.pad)
            found.append([Piece(episode, int(start[0]) + np.arange(window.length))])
        return found

    def _choose(self, rng: np.random.Generator, turn: int) -> int:
        if not self._slots:
            return self._draw(rng)
        return self._fill(int(rng.integers(self._slots)), turn)

    def _candidates(self, turn: int) -> np.ndarray:
        if not self._slots:
            return np.flatnonzero(self._usable())
        numbers = [self._fill(slot, turn) for slot in range(self._slots)]
        return np.unique(np.array(numbers, np.int64))

    def _fill(self, slot: int, turn: int) -> int:
        """The episode in a slot: that of the last refill whose turn it was."""
        fills = self._slots + int(turn * self._rate)
        number = (fills - 1 - slot) // self._slots * self._slots + slot
        return self._draw(generator(*self.seed, FILL, number))

    def _draw(self, rng: np.random.Generator) -> int:
        """In proportion to length, or all alike; those that are bad in vain."""
        chance = np.minimum(self.shelf.rows, 2) if self._alike else self.shelf.rows
        weights = np.cumsum(np.where(self.shelf.rows > 1, chance, 0))
        if not self._usable().any():
            raise UserError(
                f"{self.shelf.reader.origin} has no episode that can be used.\n"
                "  Fix: see what is wrong with `reverie data inspect`."
            )
        while True:
            found = int(np.searchsorted(weights, rng.integers(weights[-1]), "right"))
            if found not in self.shelf.bad:
                return found

    def _usable(self) -> np.ndarray:
        usable = self.shelf.rows > 1
        usable[list(self.shelf.bad)] = False
        return np.asarray(usable)

    def _working_set(self) -> tuple[int, float]:
        """Slots, and how many are refilled per turn; none where all fits."""
        reader, rows = self.shelf.reader, self.shelf.rows
        spaces = with_flags({**reader.obs_space, **reader.act_space})
        width = sum(space.nbytes for space in spaces.values())
        if int(rows.sum()) * width <= self.shelf.capacity:
            return 0, 0.0
        # drawn by length, long episodes come up more often
        typical = float(rows.mean() if self._alike else (rows**2).sum() / rows.sum())
        slots = max(1, int(0.8 * self.shelf.capacity / (typical * width)))
        return slots, self.window.batch * self.window.span / typical


class Cut(NamedTuple):
    """A finished batch, and the counts that include it."""

    batch: Batch
    counts: np.ndarray


class Cursor:
    """How far one kind of batch has been served, and what is ready beyond that."""

    def __init__(self, drawer: Drawer):
        self.drawer = drawer
        self.step = 0
        self.counting = False
        self.counts = np.zeros(len(drawer.shelf.names), np.int64)
        self.ahead: deque[Future[Cut]] = deque()


class RecordingFeed:
    """Serves the windows of a windows from recordings; implements `api.Feed`.

    `report` windows, and whole `episodes`, come from those held out, if any are.
    With `prefetch` the next batches are cut by a thread meanwhile; they are the same.
    """

    def __init__(
        self,
        reader: Reader,
        windows: dict[str, Window],
        device: torch.device | str = "cpu",
        *,
        held_out: Reader | None = None,
        config: RecordingsConfig | None = None,
        seed: int = 0,
        prepare: Prepare | None = None,
        prefetch: bool = False,
    ):
        config = config or RecordingsConfig()
        if wanting := [name for name, window in windows.items() if window.context]:
            raise UserError(
                f"The agent wants stored latents with {', '.join(wanting)}, and "
                "recordings have none.\n  Fix: --dreamer.replay_context 0"
            )
        self.reader, self.held_out = reader, held_out or reader
        self.obs_space = with_flags(reader.obs_space)
        self.act_space = reader.act_space
        self.device = torch.device(device)
        self.windows, self.seed, self.prepare = windows, seed, prepare
        self.served = 0  # rows handed out so far
        share = 0.9 if held_out else 1.0
        memory = config.memory * 2**30
        self._train = Shelf(reader, int(memory * share), config.bad, config.workers)
        self._held = self._train
        if held_out is not None:
            rest = int(memory * (1 - share))
            self._held = Shelf(held_out, rest, config.bad, config.workers)
        self._cursors = {
            name: Cursor(Drawer(window, self._shelf(name), seed, number))
            for number, (name, window) in enumerate(windows.items())
        }
        self._thread = ThreadPoolExecutor(1, "recordings") if prefetch else None

    def __call__(self, name: str, out: Batch | None = None) -> Batch:
        cursor = self._cursors[name]
        cut = self._next(name)
        cursor.step += 1
        cursor.counts = cut.counts
        self.served += self.windows[name].batch * self.windows[name].length
        if out is None:
            return cut.batch
        for key, value in out.items():
            value.copy_(cut.batch[key], non_blocking=True)
        return out

    def ready(self, name: str) -> bool:
        return True

    def write_back(self, stepid: Tensor, extras: Extras) -> None:
        """Recordings keep no extras."""

    def prioritize(self, stepid: Tensor, priority: Tensor) -> None:
        """Recordings are not chosen by priority."""

    def count_uses(self, name: str, on: bool) -> None:
        cursor = self._cursors[name]
        self._forget(cursor)
        cursor.counting = on

    def episodes(
        self, batch: int = 1, length: int | None = None, limit: int | None = None
    ) -> Iterator[Batch]:
        """Whole episodes held out, in order, each once, for evaluation.

        Those of a batch are made as long as the longest by repeating their last row,
        and cut after `length` rows; `mask` is False where a row was repeated. The key
        `episode` numbers them as in `held_out.names()`.
        """
        waiting: list[tuple[int, Arrays]] = []
        numbers = range(len(self._held.names))[:limit]
        for number in numbers:
            episode = self._held.read(number)
            if episode is not None:
                rows = {key: value[:length] for key, value in episode.items()}
                waiting.append((number, rows))
            if len(waiting) == batch:
                yield self._move(padded(waiting))
                waiting = []
        if waiting:
            yield self._move(padded(waiting))

    def close(self) -> None:
        for cursor in self._cursors.values():
            self._forget(cursor)
        if self._thread:
            self._thread.shutdown(wait=True, cancel_futures=True)
        for shelf in (self._train, self._held):
            shelf.close()

    def state_dict(self) -> StateDict:
        """How many batches of each kind were served; enough to go on from there."""
        return {
            name: {
                "step": cursor.step,
                "counting": cursor.counting,
                "counts": cursor.counts.copy(),
            }
            for name, cursor in self._cursors.items()
        }

    def load_state_dict(self, state: StateDict) -> None:
        for name, cursor in self._cursors.items():
            self._forget(cursor)
            saved = state[name]
            counts = np.asarray(saved["counts"], np.int64)
            if len(counts) != len(cursor.counts):
                raise UserError(
                    f"The run was learning from {len(counts)} episodes, and there are "
                    f"{len(cursor.counts)} now.\n  Fix: give the recordings it began "
                    "with, or another --logdir."
                )
            cursor.step, cursor.counting = int(saved["step"]), bool(saved["counting"])
            cursor.counts = counts.copy()

    def _shelf(self, name: str) -> Shelf:
        return self._held if name == "report" else self._train

    def _next(self, name: str) -> Cut:
        cursor = self._cursors[name]
        if self._thread is None:
            return self._cut(name, cursor.step, cursor.counts, cursor.counting)
        while len(cursor.ahead) < AHEAD + 1:
            before = cursor.ahead[-1] if cursor.ahead else None
            args = (name, cursor.step + len(cursor.ahead), before, cursor.counts)
            future = self._thread.submit(self._after, *args, cursor.counting)
            cursor.ahead.append(future)
        return cursor.ahead.popleft().result()

    def _after(
        self,
        name: str,
        step: int,
        before: Future[Cut] | None,
        counts: np.ndarray,
        counting: bool,
    ) -> Cut:
        return self._cut(
            name, step, before.result().counts if before else counts, counting
        )

    def _forget(self, cursor: Cursor) -> None:
        while cursor.ahead:
            waiting = cursor.ahead.pop()
            if not waiting.cancel():
                waiting.exception()

    def _cut(self, name: str, step: int, counts: np.ndarray, counting: bool) -> Cut:
        cursor, window = self._cursors[name], self.windows[name]
        shelf = self._shelf(name)
        while True:  # again, if an episode turns out to be bad
            plan = cursor.drawer.draw(step, counts)
            used = shelf.take(piece.episode for row in plan for piece in row)
            if used is not None:
                break
        arrays = _gather(plan, used, window)
        piece = step % window.consec
        arrays["consec"] = np.full_like(arrays["stepid"], piece)
        if window.select != "episodes" and piece == 0:
            arrays["is_first"][:, 0] = True
        if self.prepare is not None:
            rng = generator(*cursor.drawer.seed, PREPARE, step)
            arrays = self.prepare(arrays, rng)
        if counting:
            counts = counts.copy()
            np.add.at(counts, [row[0].episode for row in plan], 1)
        return Cut(self._move(arrays), counts)

    def _move(self, arrays: Arrays) -> Batch:
        batch: Batch = {}
        for key, value in arrays.items():
            tensor = torch.from_numpy(value)
            if self.device.type == "cuda":
                tensor = tensor.pin_memory()
            batch[key] = tensor.to(self.device, non_blocking=True)
        return batch


def padded(episodes: list[tuple[int, Arrays]]) -> Arrays:
    """Episodes side by side, as long as the longest, with the `mask` of real rows."""
    longest = max(len(rows["reward"]) for _, rows in episodes)
    batch: Arrays = {}
    for key in episodes[0][1]:
        parts = []
        for _, rows in episodes:
            more = longest - len(rows[key])
            parts.append(np.concatenate([rows[key], rows[key][-1:].repeat(more, 0)]))
        batch[key] = np.stack(parts)
    lengths = np.array([len(rows["reward"]) for _, rows in episodes])
    batch["mask"] = np.arange(longest) < lengths[:, None]
    batch["is_first"] = np.zeros_like(batch["mask"])
    batch["is_first"][:, 0] = True
    batch["episode"] = np.array([number for number, _ in episodes], np.int64)
    return batch


def generator(*seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed)))


def _gather(
    plan: list[list[Piece]], episodes: dict[int, Arrays], window: Window
) -> Arrays:
    """Copy the rows of a plan side by side."""
    like: Arrays = next(iter(episodes.values()))
    shape = (window.batch, window.length)
    batch = {k: np.empty((*shape, *v.shape[1:]), v.dtype) for k, v in like.items()}
    batch["stepid"] = np.empty(shape, np.int64)
    by_episode = window.select == "episodes"
    if by_episode:
        batch["mask"] = np.empty(shape, bool)
    for i, pieces in enumerate(plan):
        to = 0
        for number, rows in pieces:
            episode, span = episodes[number], slice(to, to + len(rows))
            last = len(episode["reward"]) - 1
            inside = np.clip(rows, 0, last)
            straight = inside[-1] - inside[0] == len(rows) - 1
            at = slice(inside[0], inside[-1] + 1) if straight else inside
            for key, value in episode.items():
                batch[key][i, span] = value[at]
            batch["stepid"][i, span] = (number << _BITS) + inside
            if by_episode:
                batch["mask"][i, span] = (rows >= 0) & (rows <= last)
            to += len(rows)
    return batch


def _between(pieces: list[Piece], start: int, stop: int) -> list[Piece]:
    """The part of a sequence from one row to another."""
    found, at = [], 0
    for episode, rows in pieces:
        cut = rows[max(0, start - at) : max(0, stop - at)]
        if len(cut):
            found.append(Piece(episode, cut))
        at += len(rows)
    return found
