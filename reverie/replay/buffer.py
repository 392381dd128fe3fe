"""The replay buffer: a ring buffer of steps from which sequences are sampled.

A step is one row of an episode as defined in `api.py`; in this package, a row is a
position in the ring buffer or in a file. `add` stores one step per environment;
`sample` returns a batch of one kind (a `Window` of the agent). Each step has an id (see
`step_index.py`), with which its extras and priority are updated later.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Protocol

import numpy as np

from reverie.api import Metrics, StateDict, UserError
from reverie.replay.batch import empty_batch, gather_chunks, gather_steps
from reverie.replay.column_store import ColumnStore, DiskStore, RamStore, SegmentLost
from reverie.replay.config import ReplayConfig
from reverie.replay.episode_sampler import EpisodeIndex
from reverie.replay.memory_plan import make_memory_plan, required_capacity
from reverie.replay.segment_files import MAX_PENDING, Manifest, SegmentFiles
from reverie.replay.step_index import StepIndex
from reverie.replay.window_sampler import WindowSampler
from reverie.rows import Window
from reverie.spaces import Arrays, Spaces

PRIORITY_BYTES = 38
"""Bytes per step of a `PrioritizedSelector` that counts visits: 20 for its arrays, and
about 18 for its two sum trees."""


class ReplayListener(Protocol):
    """A feed that caches data of the replay, such as a copy on the GPU."""

    def flush(self) -> None:
        """Write all pending changes to the replay; called before a save."""

    def reload(self) -> None:
        """Discard all cached data; called before a saved replay is loaded."""

    def pop_num_writes(self) -> int:
        """Return how many extras were written to the cache since the last call."""


class Replay:
    """Stores steps, samples batches, and updates extras and priorities.

    Extras are the values that the agent stores with each step. With `exact_extras`, a
    checkpoint contains their current values; otherwise a save does not update extras in
    files that were written before, so that it is fast. `smaller_extras` names a setting
    that makes extras smaller, for error messages. `memory_fraction` is the fraction of
    the free memory and disk space that this process of the run may use.
    """

    def __init__(
        self,
        spaces: Spaces,
        extras: Spaces,
        config: ReplayConfig,
        *,
        capacity: int,
        num_envs: int,
        windows: dict[str, Window],
        directory: Path | None,
        seed: int,
        exact_extras: bool = False,
        smaller_extras: str = "",
        memory_fraction: float = 1.0,
    ) -> None:
        self.config = config
        self.windows = windows
        spaces = {k: v for k, v in spaces.items() if not k.startswith("log/")}
        self.spaces = {**spaces, **extras}
        self.extras = extras
        self.exact_extras = exact_extras
        min_capacity = required_capacity(config.capacity, num_envs, windows)
        capacity = max(capacity, min_capacity)
        segment = min(config.segment, max(1, capacity // 4))  # steps per file
        # Number of the newest steps that a disk store keeps in memory, because they are
        # not in files yet.
        tail = (1 + MAX_PENDING) * max(segment, num_envs)
        num_selectors = sum(w.select == "mixture" for w in windows.values())
        selector_bytes = PRIORITY_BYTES * num_selectors if config.fracs.priority else 0
        self.memory_plan = make_memory_plan(
            spaces,
            extras,
            capacity=capacity,
            storage=config.storage,
            tail=tail,
            save=config.save,
            directory=directory,
            selector_bytes=selector_bytes,
            min_capacity=min_capacity,
            fit=config.fit,
            smaller_extras=smaller_extras,
            memory_fraction=memory_fraction,
        )
        self.capacity = capacity = self.memory_plan.capacity
        segment = min(segment, max(1, capacity // 4))
        self._max_add = max(segment, num_envs)  # most steps that are added at once
        tail = (1 + MAX_PENDING) * self._max_add
        self.index = StepIndex(capacity, num_envs)
        self.store: ColumnStore
        if self.memory_plan.storage == "ram":
            self.store = RamStore(self.spaces, capacity)
        else:
            assert directory is not None
            self.store = DiskStore(self.spaces, extras, capacity, tail, directory)
        self.files: SegmentFiles | None = None
        is_on_disk = self.memory_plan.storage == "disk"
        if directory is not None and (config.save or is_on_disk):
            self.files = SegmentFiles(
                directory,
                self.index,
                self.store,
                self.spaces,
                extras,
                segment=segment,
                max_add=self._max_add,
                tail=tail,
                exact_extras=exact_extras,
            )
        self.episodes: EpisodeIndex | None = None
        if any(window.select == "episodes" for window in windows.values()):
            self.episodes = EpisodeIndex(self.index)
        self._recorded_stream: int | None = None  # stream that `add_episode` adds to
        self._samplers = {
            name: WindowSampler(name, window, self.index, config, self.episodes, seed)
            for name, window in windows.items()
        }
        self._online_samplers = [
            sampler
            for sampler in self._samplers.values()
            if config.online and sampler.window.online and not sampler.episode_sampler
        ]
        # Counts since the last call of `metrics`: added steps, sampled sequences,
        # steps with replaced extras, and sampled steps.
        self._counts = dict.fromkeys(("inserts", "samples", "updates", "replayed"), 0)
        self._lock = threading.RLock()
        self.listeners: list[ReplayListener] = []

    def __len__(self) -> int:
        return len(self.index)

    def add(self, rows: Arrays, envs: np.ndarray | None = None) -> np.ndarray:
        """Store one row of each environment, or of those in `envs`; return step ids."""
        count = len(self.index.env_stream) if envs is None else len(envs)
        for key, space in self.spaces.items():
            value = rows[key]
            fits = value.dtype == space.dtype and value.shape[1:] == space.shape
            assert fits and len(value) == count, (  # noqa: PT018
                f"replay key {key!r} is {value.dtype} {value.shape}, "
                f"expected {space.dtype} {(count, *space.shape)}"
            )
        with self._lock:
            self._prepare_add(count)
            ids = self.index.add(envs)
            self._write(ids, rows)
        return ids

    def add_episode(self, episode: Arrays) -> np.ndarray:
        """Store a recorded episode and return its step ids.

        Missing extras are zero. All recorded episodes are in one stream, which belongs
        to no environment.
        """
        count = len(episode["is_first"])
        if count > self.capacity:
            raise UserError(
                f"A recorded episode has {count} steps, but the replay has a capacity "
                f"of {self.capacity}.\n"
                f"  Fix: --replay.capacity {count}, and --run.steps {count} or more."
            )
        with self._lock:
            if self._recorded_stream is None:
                self._recorded_stream = self.index.create_stream()
            id_parts = []
            for start in range(0, count, self._max_add):
                stop = min(count, start + self._max_add)
                rows = {}
                for key, space in self.spaces.items():
                    if key in self.extras and key not in episode:
                        rows[key] = space.zeros(stop - start)
                    else:
                        rows[key] = np.asarray(episode[key][start:stop], space.dtype)
                self._prepare_add(stop - start)
                ids = self.index.add_sequence(self._recorded_stream, stop - start)
                self._write(ids, rows)
                id_parts.append(ids)
        return np.concatenate(id_parts)

    def new_stream(self, environment: int | None = None) -> None:
        """Start a new stream for this environment, or for all of them.

        Call this when an environment is reset without restoring its saved state, so
        that no sequence contains steps from before and after the reset.
        """
        with self._lock:
            self.index.new_stream(environment)

    def num_windows(self, name: str) -> int:
        """Number of stored sequences for batches of this kind."""
        return self.index.num_windows(self.windows[name].span)

    def ready(self, name: str) -> bool:
        """True if enough steps are stored to sample batches of this kind.

        As in DreamerV3, this takes `batch * length` steps, or a full replay if its
        capacity is lower.
        """
        window = self.windows[name]
        with self._lock:
            episode_sampler = self._samplers[name].episode_sampler
            if episode_sampler is not None:
                return episode_sampler.can_sample
            # the last `span - 1` steps of each stream do not start a full sequence
            incomplete = (window.span - 1) * len(self.index.env_stream)
            min_steps = min(window.batch * window.length, self.capacity)
            min_windows = min(window.batch, self.capacity - incomplete)
            return len(self) >= min_steps and self.num_windows(name) >= min_windows

    def sample(self, name: str, out: Arrays | None = None) -> Arrays:
        """Sample the next batch of this kind: (B, context + length, ...) per key.

        Fills and returns `out` if given: arrays as in `empty_batch`, where
        observations, actions and extras may be missing.
        """
        batch = self.empty_batch(name) if out is None else out
        with self._lock:
            while True:
                try:
                    self._sample(self._samplers[name], batch)
                    return batch
                except SegmentLost as error:
                    self._remove_lost(error)

    def empty_batch(self, name: str) -> Arrays:
        """Return uninitialized arrays for a batch of this kind."""
        return empty_batch(self.spaces, self.windows[name])

    def read(self, ids: np.ndarray, out: Arrays) -> bool:
        """Copy stored steps into `out`; return False if their files cannot be read.

        The unreadable steps are then removed from the replay.
        """
        with self._lock:
            try:
                self.store.gather(ids, out)
            except SegmentLost as error:
                self._remove_lost(error)
                return False
        return True

    def put_back(self, name: str) -> None:
        """Make the next `sample` return the last batch again; it was not used."""
        with self._lock:
            sampler = self._samplers[name]
            sampler.put_back()
            self._counts["samples"] -= sampler.window.batch
            self._counts["replayed"] -= sampler.window.batch * sampler.window.length

    def write_back(self, stepid: np.ndarray, extras: Arrays) -> None:
        """Replace the extras of these steps; evicted steps are skipped."""
        with self._lock:
            self._counts["updates"] += self.write_extras(stepid, extras)

    def write_extras(self, stepid: np.ndarray, extras: Arrays) -> int:
        """Replace extras without counting them in the metrics; return the step count.

        Evicted steps are skipped.
        """
        with self._lock:
            ids = stepid.reshape(-1)
            live = self.index.is_live(ids)
            ids = ids[live]
            values = {}
            for key, value in extras.items():
                space = self.extras[key]
                flat = value.reshape(-1, *space.shape)
                assert flat.dtype == space.dtype and len(flat) == len(live), (  # noqa: PT018
                    f"extra {key!r} is {value.dtype} {value.shape}, "
                    f"expected {space.dtype} {(*stepid.shape, *space.shape)}"
                )
                values[key] = flat if live.all() else flat[live]
            try:
                self.store.scatter(ids, values)
            except SegmentLost as error:
                self._remove_lost(error)
            if self.files is not None:
                self.files.mark_extras_changed(ids)
            return len(ids)

    def prioritize(self, stepid: np.ndarray, priority: np.ndarray) -> None:
        """Set the priorities of these steps, for all kinds of batches."""
        with self._lock:
            flat = np.asarray(priority, np.float64).reshape(-1)
            for sampler in self._samplers.values():
                sampler.selector.prioritize(stepid.reshape(-1), flat)

    def count_uses(self, name: str, on: bool) -> None:
        """Start or stop counting how often this kind of batch samples each episode."""
        episode_sampler = self._samplers[name].episode_sampler
        assert episode_sampler is not None, f"{name!r} does not select episodes"
        with self._lock:
            episode_sampler.is_counting = on

    def save(self) -> StateDict:
        """Write the steps that are not in files yet; return the state to checkpoint.

        Files of earlier saves are kept until `delete_unused_files`.
        """
        if self.files is not None:
            with self._lock:
                self.files.wait()
        for listener in self.listeners:  # without the lock: their threads may need it
            listener.flush()
        with self._lock:
            self._count_listener_writes()
            files = self._save_files()
            state: StateDict = {
                "spaces": _signature(self.spaces),
                "index": self.index.state_dict(),
                "samplers": {k: s.state_dict() for k, s in self._samplers.items()},
                "counts": dict(self._counts),
                "files": files,
            }
            if self.episodes is not None:
                state["episodes"] = self.episodes.state_dict()
            return state

    def load(self, state: StateDict) -> None:
        """Restore a saved replay: steps, ids, queues and random generators.

        Warns about missing and damaged files and continues without their steps.
        """
        for listener in self.listeners:
            listener.reload()
        with self._lock:
            _check_signature(state["spaces"], self.spaces)
            index = state["index"]
            total = int(index["total"])
            oldest = max(int(index["first"]), total - self.capacity)
            self.store.clear()
            ids = stream = position = np.zeros(0, np.int64)
            if self.files is not None and state["files"] is not None:
                ids, stream, position = self.files.load(state["files"], oldest, total)
            elif total > oldest:
                index = {**index, "first": total}  # no step was saved: all are evicted
            self.index.restore(index, ids, stream, position)
            self._rebuild_episodes(state)
            for name, sampler in self._samplers.items():
                if name in state["samplers"]:
                    saved = state["samplers"][name]
                    sampler.load_state_dict(saved, state.get("episodes"))
            self._counts = {k: int(count) for k, count in state["counts"].items()}

    def delete_unused_files(self, kept: list[StateDict]) -> None:
        """Delete files that neither this replay nor one of these saved states needs."""
        if self.files is not None:
            with self._lock:
                manifests = [state["files"] for state in kept if state["files"]]
                self.files.delete_unused(manifests)

    def close(self) -> None:
        """Release files and threads."""
        if self.files is not None:
            self.files.close()
        self.store.close()

    def metrics(self) -> Metrics:
        """Return counts since the last call, and the current size."""
        with self._lock:
            self._count_listener_writes()
            replayed = self._counts.pop("replayed")
            metrics: Metrics = {
                **self._counts,
                "items": max(map(self.num_windows, self.windows), default=0),
                "steps": len(self),
                "streams": self.index.num_streams,
                "ram_gb": self.store.ram_bytes / 1e9,
                "disk_gb": self.files.disk_bytes / 1e9 if self.files else 0.0,
                "online": sum(len(sampler.queue) for sampler in self._online_samplers),
            }
            if self._counts["inserts"]:
                metrics["replay_ratio"] = replayed / self._counts["inserts"]
            self._counts = dict.fromkeys((*self._counts, "replayed"), 0)
            return metrics

    def _save_files(self) -> Manifest | None:
        """Write the files and return the manifest.

        Steps whose files were deleted by another program are removed from the replay.
        """
        if self.files is None or not self.config.save:
            return None
        while True:
            try:
                return self.files.save()
            except SegmentLost as error:
                self._remove_lost(error)

    def _prepare_add(self, count: int) -> None:
        """Make room for new steps in the memory of a disk store."""
        if self.memory_plan.storage == "disk":
            assert self.files is not None
            self.files.prepare_add(count)

    def _write(self, ids: np.ndarray, rows: Arrays) -> None:
        """Store the values of steps that were just added to the index."""
        self.store.write(int(ids[0]), rows)
        if self.episodes is not None:
            self.episodes.add(ids, rows["is_first"])
        self._counts["inserts"] += len(ids)
        for sampler in self._online_samplers:
            sampler.enqueue(ids)

    def _sample(self, sampler: WindowSampler, batch: Arrays) -> None:
        """Fill the arrays of a batch; raise `SegmentLost` if a file is unreadable."""
        window = sampler.window
        if sampler.episode_sampler is not None:
            ids, batch["mask"][:] = sampler.sample_episodes()
            gather_steps(self.store, self.spaces, ids, batch)
            batch["consec"][:] = 0
        else:
            ids = sampler.sample_windows()
            gather_chunks(self.store, self.spaces, window, ids, sampler.chunk, batch)
            sampler.chunk += 1
        self._counts["samples"] += window.batch
        self._counts["replayed"] += window.batch * window.length

    def _count_listener_writes(self) -> None:
        self._counts["updates"] += sum(
            listener.pop_num_writes() for listener in self.listeners
        )

    def _remove_lost(self, error: SegmentLost) -> None:
        """Remove the steps of files that can no longer be read.

        The index, episodes and samplers are rebuilt from the remaining steps.
        """
        assert self.files is not None
        index = self.index
        self.files.remove_lost(error)
        ids = np.arange(index.first, index.total)
        ids = ids[index.is_live(ids)]
        for lost in error.segments:
            ids = ids[(ids < lost.first) | (ids >= lost.stop)]
        rows = ids % self.capacity
        samplers = {name: s.state_dict() for name, s in self._samplers.items()}
        state: StateDict = {}
        if self.episodes is not None:
            state["episodes"] = self.episodes.state_dict()
        stream, position = index.stream[rows], index.position[rows]
        index.restore(index.state_dict(), ids, stream.astype(np.int64), position)
        self._rebuild_episodes(state)
        for name, saved in samplers.items():
            self._samplers[name].load_state_dict(saved, state.get("episodes"))

    def _rebuild_episodes(self, state: StateDict) -> None:
        """List the episodes of all live steps, in the order of a saved state."""
        if self.episodes is None:
            return
        ids = np.arange(self.index.first, self.index.total)
        ids = ids[self.index.is_live(ids)]
        is_first = np.zeros(len(ids), bool)
        self.store.gather(ids, {"is_first": is_first})
        self.episodes.rebuild(ids, is_first, state.get("episodes", {"begin": ()}))


def _signature(spaces: Spaces) -> dict[str, str]:
    """Return dtype and shape of every key as text."""
    return {k: f"{s.dtype.name} {list(s.shape)}" for k, s in sorted(spaces.items())}


def _check_signature(saved: dict[str, str], spaces: Spaces) -> None:
    current = _signature(spaces)
    differences = [
        f"{key}: {saved.get(key, 'missing')}, now {current.get(key, 'missing')}"
        for key in sorted({*saved, *current})
        if saved.get(key) != current.get(key)
    ]
    if differences:
        raise UserError(
            "The saved replay has other keys or shapes than this run "
            f"({'; '.join(differences[:4])}).\n"
            "  Fix: use the settings of the saved run, or a new --logdir."
        )
