"""Heartbeats: detect ranks that hang or are lost, and end the run.

A thread of every process writes to the shared store every few seconds. If a process is
frozen or its machine is lost, its heartbeats stop, and the other processes end. If only
the main thread hangs, in an update or in an environment, the heartbeat thread of this
process ends the process. Heartbeats contain the progress of every rank in the update,
so that the error message can name the rank for which the others wait.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from reverie.distributed.launch import Launch

HEARTBEAT_SECONDS = 2.0
"""Interval between two heartbeats of a process."""
RANK_TIMEOUT = 25.0
"""Default of `run.rank_timeout`, in seconds."""
ALIVE, FAILURE = "alive", "failure"
"""Keys of the store: heartbeats by rank, and the reason why the run ends."""


class RankProgress:
    """What the main thread of this process is doing.

    `collectives` counts the collective operations that this process has started.
    `is_waiting` is True in a call that waits for another rank.
    """

    def __init__(self) -> None:
        self.collectives = 0
        self.is_waiting = False
        self.activity = ""
        self.limit = math.inf
        """Maximum duration of the current activity in seconds."""
        self.changes = 0
        """Number of starts and ends of activities so far."""

    @contextlib.contextmanager
    def during(self, activity: str, limit: float = math.inf) -> Iterator[None]:
        """Context of an activity, such as an update, of at most `limit` seconds."""
        self.activity, self.limit = activity, limit
        self.changes += 1
        try:
            yield
        finally:
            self.activity, self.limit = "", math.inf
            self.changes += 1

    def allow(self, seconds: float) -> None:
        """Increase the limit of the current activity to at least this duration."""
        self.limit = max(self.limit, seconds)

    @contextlib.contextmanager
    def waiting(self, collective: bool = False) -> Iterator[None]:
        """Context of a call that waits for another rank.

        With `collective`, the call is counted as a collective operation.
        """
        self.collectives += collective
        self.is_waiting = True
        try:
            yield
        finally:
            self.is_waiting = False


progress = RankProgress()
"""Progress of this process."""


class Beat(NamedTuple):
    """The value of a heartbeat in the store."""

    number: int  # increases with every heartbeat
    collectives: int  # see `RankProgress`
    is_waiting: int

    @classmethod
    def decode(cls, value: bytes) -> Beat:
        return cls(*map(int, value.split()))

    def encode(self) -> str:
        return " ".join(map(str, self))


class Heartbeat:
    """A thread that sends heartbeats and calls `fail` with a reason if a rank hangs.

    The reason is empty if another rank has already printed it.
    """

    def __init__(self, launch: Launch, store: Any, fail: Callable[[str], None]):
        self.launch, self.store, self.fail = launch, store, fail
        self.timeout = RANK_TIMEOUT
        self.keys = [f"{ALIVE}/{rank}" for rank in range(launch.world_size)]
        self._beats = [Beat(-1, 0, 0)] * launch.world_size
        self._silent = [0.0] * launch.world_size  # seconds since the last heartbeat
        self._changes = 0  # `progress.changes` at the last check
        self._unchanged_seconds = 0.0  # time since it changed
        self._reports_failure = False  # this rank prints why the run ends
        self._stop = threading.Event()
        # The counts of all ranks are compared, so do not include collectives of an
        # earlier group of this process: it may have had other ranks.
        progress.collectives = 0
        self._send(0)
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread, after all ranks have sent their first heartbeat."""
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * HEARTBEAT_SECONDS)

    def claim_message(self, reason: str) -> bool:
        """Write the reason of a failure to the store, if no rank has done so before.

        Returns True if this rank is the first and has to print the reason.
        """
        if self._reports_failure:
            return True
        own = f"{self.launch.rank}: {reason}"
        # Set before the store answers: otherwise, the heartbeat thread could read the
        # reason that this call writes, and end the process before it is printed.
        self._reports_failure = True
        try:
            first = self.store.compare_set(FAILURE, "", own)
        except RuntimeError:
            return True  # the process that hosts the store has ended
        self._reports_failure = bool(first == own.encode())
        return self._reports_failure

    def _run(self) -> None:
        """Send and check heartbeats until `stop` is called or a failure is found."""
        number, last = 0, time.monotonic()
        while not self._stop.wait(HEARTBEAT_SECONDS):
            number += 1
            try:
                self._send(number)
                beats = [Beat.decode(x) for x in self.store.multi_get(self.keys)]
                has_failed = self.store.check([FAILURE])
            except RuntimeError:
                # The main thread gets an error of its connection, too, and prints it.
                # End the process only if the main thread has not done so in time.
                if not self._stop.wait(self.timeout / 2):
                    self.fail(
                        "The process that hosts the store of the ranks has ended."
                    )
                return
            # Limit the elapsed time: if this process was suspended, the missing
            # heartbeats of the other ranks do not mean that they hang.
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * HEARTBEAT_SECONDS), now
            if self._reports_failure:
                return  # the main thread has found a failure and ends this process
            reason = "" if has_failed else self._find_failure(beats, elapsed)
            if has_failed or reason:
                is_first = not has_failed and self.claim_message(reason)
                self.fail(reason if is_first else "")
                return

    def _send(self, number: int) -> None:
        """Write the heartbeat of this rank to the store."""
        beat = Beat(number, progress.collectives, int(progress.is_waiting))
        self.store.set(self.keys[self.launch.rank], beat.encode())

    def _find_failure(self, beats: list[Beat], elapsed: float) -> str:
        """Return why a rank is lost, or an empty string if all make progress."""
        for rank, beat in enumerate(beats):
            is_new = beat.number != self._beats[rank].number
            self._silent[rank] = 0.0 if is_new else self._silent[rank] + elapsed
        self._beats = beats
        changes, activity, limit = progress.changes, progress.activity, progress.limit
        is_same = changes == self._changes
        self._changes = changes
        self._unchanged_seconds = self._unchanged_seconds + elapsed if is_same else 0.0
        longest = max(self._silent)
        if longest > self.timeout:
            rank = self._silent.index(longest)
            return f"Rank {rank} has not responded for {self.timeout:.0f} s."
        if activity and self._unchanged_seconds > limit:
            return (
                f"Rank {self._slowest()} did not complete {activity} in {limit:.0f} s."
            )
        return ""

    def _slowest(self) -> int:
        """Return the rank for which the others wait.

        It has started the fewest collective operations; of several such ranks, it is
        one that does not wait for another. This rank is checked first with its current
        state, because the states of the others are from their last heartbeats.
        """
        own = self.launch.rank
        if not progress.is_waiting and self._beats[own].collectives == min(
            beat.collectives for beat in self._beats
        ):
            return own
        ranks = range(self.launch.world_size)
        return min(
            ranks, key=lambda r: (self._beats[r].collectives, self._beats[r].is_waiting)
        )
