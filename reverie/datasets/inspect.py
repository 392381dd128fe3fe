"""Look through recordings: what is in them, and what is wrong with them.

Besides broken episodes it finds actions that stand in the wrong row: how things move
from row t to t + 1 should be explained by the action of row t, better than by that of
the row before or after.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

import numpy as np

from reverie.datasets.episode_format import BadEpisode, Episode, problems
from reverie.datasets.readers import Reader, some
from reverie.datasets.readers.hdf5 import Hdf5Reader
from reverie.spaces import Spaces

SHOWN = 8
"""Problems of one kind that are printed."""


@dataclass
class Survey:
    """What was found in the episodes that were looked at."""

    origin: str
    episodes: int
    obs_space: Spaces
    act_space: Spaces
    masks: dict[str, list[str]]
    remarks: dict[str, str] = field(default_factory=dict)
    looked: int = 0
    lengths: list[int] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    terminal: int = 0
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    bad: dict[str, str] = field(default_factory=dict)
    sound: str = ""
    """The first episode with nothing wrong, if any."""
    doubts: list[str] = field(default_factory=list)
    """What is suspicious about all of them together."""

    @property
    def is_fine(self) -> bool:
        return not self.bad and not self.doubts

    def describe(self) -> str:
        lines = [f"{self.origin}: {self.episodes} episodes"]
        if self.looked < self.episodes:
            lines[0] += f", of which {self.looked} were looked at"
        if self.lengths:
            lines.append(
                f"  rows     {_spread(self.lengths)}, {sum(self.lengths)} in all"
            )
            lines.append(f"  returns  {_spread(self.returns)}")
            lines.append(f"  {self.terminal} ended because the task did")
        for title, spaces in (("seen", self.obs_space), ("done", self.act_space)):
            for key, space in spaces.items():
                low, high = self.ranges.get(key, (np.nan, np.nan))
                shape = "x".join(map(str, space.shape)) or "scalar"
                kind = f"{space.dtype} {shape}"
                lines.append(f"  {title} {key:<28} {kind:<18} [{low:.4g}, {high:.4g}]")
        for mask, members in self.masks.items():
            lines.append(f"  mask {mask}: {len(members)} episodes")
        for key, text in self.remarks.items():
            lines.append(f"  {key}: {textwrap.shorten(text, 200)}")
        if self.is_fine:
            lines.append("Nothing wrong was found.")
        for number, (name, why) in enumerate(self.bad.items()):
            if number == SHOWN:
                lines.append(f"  ... and {len(self.bad) - SHOWN} more")
                break
            lines.append(f"  wrong: {name} {why}")
        lines += [f"  doubtful: {doubt}" for doubt in self.doubts]
        return "\n".join(lines)


def survey(reader: Reader, limit: int = 0) -> Survey:
    """Look at every episode, or at `limit` of them, spread from first to last."""
    names = reader.names()
    spaces = (reader.obs_space, reader.act_space)
    found = Survey(reader.origin, len(names), *spaces, reader.masks, reader.remarks)
    motion = Motion()
    for name in some(names, limit or len(names)):
        found.looked += 1
        try:
            episode = reader.read(name)
            if wrong := problems(episode, reader.obs_space, reader.act_space):
                raise BadEpisode("; ".join(wrong))
        except BadEpisode as error:
            found.bad[name] = str(error)
            continue
        found.sound = found.sound or name
        found.lengths.append(len(episode["reward"]))
        found.returns.append(float(episode["reward"].sum()))
        found.terminal += int(episode["is_terminal"][-1])
        for key in (*reader.obs_space, *reader.act_space):
            low, high = found.ranges.get(key, (np.inf, -np.inf))
            value = episode[key]
            low, high = min(low, float(value.min())), max(high, float(value.max()))
            found.ranges[key] = low, high
        motion.add(episode, reader.obs_space, reader.act_space)
    found.doubts = [*_strange(found), *motion.doubts(isinstance(reader, Hdf5Reader))]
    return found


class Motion:
    """How well actions explain the motion of vectors: in their row, and beside it."""

    SHIFTS = (0, 1, -1)

    def __init__(self) -> None:
        self._seen: dict[int, list[np.ndarray]] = {}
        self._rows = 0

    def add(self, episode: Episode, obs_space: Spaces, act_space: Spaces) -> None:
        keys = [k for k, s in obs_space.items() if len(s.shape) == 1]
        acts = [k for k, s in act_space.items() if s.dtype.kind == "f"]
        rows = len(episode["reward"])
        if rows < 4 or not keys or not acts or self._rows > 50_000:
            return
        state = np.concatenate([episode[key] for key in keys], 1).astype(np.float64)
        moved = np.diff(state, axis=0)[1:-1]  # rows 1 .. rows - 3
        action = np.concatenate(
            [episode[key].reshape(rows, -1) for key in acts], 1
        ).astype(np.float64)
        self._rows += len(moved)
        for shift in self.SHIFTS:
            done = action[1 + shift : 1 + shift + len(moved)]
            ones = np.ones((len(done), 1))
            self._seen.setdefault(shift, []).append(np.hstack([done, ones, moved]))
        self._width = action.shape[1] + 1

    def explained(self) -> dict[int, float]:
        """The share of the motion that each shift explains, at best over entries."""
        return {shift: self._fit(np.concatenate(p)) for shift, p in self._seen.items()}

    def _fit(self, table: np.ndarray) -> float:
        done, moved = table[:, : self._width], table[:, self._width :]
        left = moved - done @ np.linalg.lstsq(done, moved, rcond=None)[0]
        whole = ((moved - moved.mean(0)) ** 2).sum(0)
        share = 1 - (left**2).sum(0) / np.where(whole > 1e-12, whole, np.inf)
        return float(np.where(whole > 1e-12, share, 0).max(initial=0))

    def doubts(self, mapped: bool = True) -> list[str]:
        """`mapped` recordings can be read with another key map."""
        if self._rows < 20:
            return []
        shares = self.explained()
        best = max(self.SHIFTS, key=lambda shift: shares[shift])
        if best == 0 or shares[best] < max(0.3, shares[0] + 0.1):
            return []
        late = best > 0
        return [
            f"actions stand one row too {'late' if late else 'early'}: that of the "
            f"{'next' if late else 'previous'} row explains {shares[best]:.0%} of the "
            f"motion, that of the row itself {shares[0]:.0%}. Fix: "
            + (
                "read them with --map.alignment led"
                if late and mapped
                else "record each action in the row where it was chosen"
                if late
                else "record the action of a row together with what was seen before it"
            )
        ]


def _strange(found: Survey) -> list[str]:
    doubts = []
    for key, space in found.obs_space.items():
        shape = space.shape
        if space.is_image and shape[0] in (1, 3) and shape[2] > 4 and shape[2] % 3:
            doubts.append(f"{key!r} {shape} looks like an image with channels first")
        if space.dtype.kind == "f" and len(shape) == 3:
            doubts.append(f"{key!r} {shape} looks like an image stored as floats")
    for key, (low, high) in found.ranges.items():
        if low == high and key in found.act_space:
            doubts.append(f"{key!r} is {low:.4g} in every row")
    for mask, members in found.masks.items():
        if not members:
            doubts.append(f"mask {mask!r} names no episode")
    return doubts


def _spread(values: list[int] | list[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, mean {np.mean(values):.4g}"
