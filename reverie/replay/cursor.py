"""Where the batches of one window of the windows stand, and what is served next.

Windows that begin at fresh steps wait in a queue and come first, each once; the rest is
drawn by a selector. A window cut by episode has a `Cutter` that chooses instead.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Callable

import numpy as np

from reverie.api import StateDict
from reverie.replay.episodes import Cutter, Episodes
from reverie.replay.sampling import Selector
from reverie.replay.timeline import Timeline
from reverie.rows import Window


class Cursor:
    """Chooses the windows of each batch; knows nothing of what they hold."""

    def __init__(
        self,
        name: str,
        window: Window,
        timeline: Timeline,
        make_selector: Callable[[], Selector],
        episodes: Episodes | None,
        seed: int,
    ) -> None:
        self.window = window
        self.timeline = timeline
        self.selector = make_selector()
        self.rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self.starts = np.zeros(window.batch, np.int64)
        # which of the `consec` pieces each row serves next
        self.piece = np.full(window.batch, window.consec, np.int64)
        self.queue: deque[int] = deque()  # online windows not yet served
        self.pending: dict[int, int] = {}  # stream -> start of its next online window
        self._make_selector = make_selector
        self._episodes = episodes if window.select == "episodes" else None
        self.cutter = self._new_cutter()
        # ids and mask the cutter gave last, and those that were put back
        self._served: tuple[np.ndarray, np.ndarray] | None = None
        self._waiting: tuple[np.ndarray, np.ndarray] | None = None

    def enqueue(self, ids: np.ndarray) -> None:
        """Note which online windows begin or are completed by these fresh steps."""
        timeline, span = self.timeline, self.window.span
        rows = ids % timeline.capacity
        phase = timeline.position[rows] % span
        streams = timeline.stream[rows]
        for i in np.flatnonzero((phase == 0) | (phase == span - 1)):
            stream = int(streams[i])
            if phase[i] == 0:
                self.pending[stream] = int(ids[i])
            if phase[i] == span - 1:
                start = self.pending.pop(stream, -1)
                if start >= timeline.first:
                    self.queue.append(start)
        while self.queue and self.queue[0] < timeline.first:
            self.queue.popleft()

    def cut(self) -> tuple[np.ndarray, np.ndarray]:
        """Steps of the next batch and which of them count, chosen by episode."""
        assert self.cutter is not None
        waiting, self._waiting = self._waiting, None
        if waiting is None or not self.timeline.live(waiting[0]).all():
            waiting = self.cutter.cut(self.rng)
        self._served = waiting
        return waiting

    def walk(self) -> np.ndarray:
        """Steps of the windows that the next batch is a piece of."""
        fresh = self.piece >= self.window.consec
        fresh |= ~self.timeline.live(self.starts)
        if fresh.any():
            self.starts[fresh] = self._choose(int(fresh.sum()))
            self.piece[fresh] = 0
        return self.timeline.walk(self.starts, self.window.span)

    def put_back(self) -> None:
        """The last batch was never used: let it be the next again."""
        if self.cutter is not None:
            self._waiting = self._served
        else:
            self.piece -= 1

    def state_dict(self) -> StateDict:
        return {
            "rng": json.dumps(self.rng.bit_generator.state),
            "starts": self.starts.copy(),
            "piece": self.piece.copy(),
            "queue": np.array(self.queue, np.int64),
            "pending": np.array(list(self.pending.values()), np.int64),
            "pending_streams": np.array(list(self.pending), np.int64),
            "selector": self.selector.state_dict(),
            "waiting": list(self._waiting or ()),
            **({"cutter": self.cutter.state_dict()} if self.cutter else {}),
        }

    def load_state_dict(self, state: StateDict, episodes: StateDict | None) -> None:
        """Go on from there, as far as the steps it speaks of are still stored.

        `episodes` is the list of episodes that was saved with it, if one was.
        """
        timeline, span = self.timeline, self.window.span
        self.rng.bit_generator.state = json.loads(state["rng"])
        if np.shape(state["starts"]) == self.starts.shape:
            self.starts = np.array(state["starts"], np.int64)
            self.piece = np.array(state["piece"], np.int64)
            self.piece[~timeline.whole(self.starts, span)] = self.window.consec
        queue = np.array(state["queue"], np.int64)
        self.queue = deque(queue[timeline.whole(queue, span)].tolist())
        starts = np.array(state["pending"], np.int64)
        streams = np.array(state["pending_streams"], np.int64)
        same = timeline.live(starts) & (
            timeline.stream[starts % timeline.capacity] == streams
        )
        self.pending = dict(
            zip(streams[same].tolist(), starts[same].tolist(), strict=True)
        )
        self._served = self._waiting = None
        if len(state.get("waiting", ())):
            self._waiting = (state["waiting"][0], state["waiting"][1])
        try:
            self.selector.load_state_dict(state["selector"])
        except KeyError:  # saved under other fractions: begin as if all were new
            self.selector = self._make_selector()
        if self.cutter is not None and "cutter" in state and episodes is not None:
            self.cutter.load_state_dict(state["cutter"], episodes)
        else:
            self.cutter = self._new_cutter()

    def _new_cutter(self) -> Cutter | None:
        if self._episodes is None:
            return None
        return Cutter(self._episodes, self.window)

    def _choose(self, count: int) -> np.ndarray:
        starts: list[int] = []
        while self.queue and len(starts) < count:
            start = self.queue.popleft()
            if start >= self.timeline.first:
                starts.append(start)
        rest = count - len(starts)
        drawn = np.array(starts, np.int64)
        if rest:
            drawn = np.append(drawn, self.selector.draw(rest, self.rng))
        return drawn
