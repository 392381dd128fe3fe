"""Check a dataset: summarize its episodes and find problems.

In addition to invalid episodes, it detects actions that are shifted by one row: the
action of row t should predict the change from row t to t + 1 better than the actions of
rows t - 1 and t + 1.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field, replace

import numpy as np

from reverie.datasets.action_units import TOLERANCE, format_bounds
from reverie.datasets.episode_format import BadEpisode, Episode
from reverie.datasets.readers import Reader, evenly_spaced
from reverie.spaces import Space, Spaces

MAX_PRINTED = 8
"""Number of invalid episodes that are printed."""


@dataclass
class InspectionReport:
    """Summary of the inspected episodes, and the problems that were found."""

    origin: str
    episodes: int
    obs_space: Spaces
    act_space: Spaces
    masks: dict[str, list[str]]
    metadata: dict[str, str] = field(default_factory=dict)
    inspected: int = 0
    """Number of inspected episodes; `episodes` is the number of all episodes."""
    lengths: list[int] = field(default_factory=list)
    """Number of rows of each valid episode."""
    returns: list[float] = field(default_factory=list)
    terminal: int = 0
    """Number of episodes that ended in a terminal state."""
    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Smallest and largest value of each key."""
    outside: dict[str, int] = field(default_factory=dict)
    """Number of rows in which an action is outside of its bounds."""
    bad: dict[str, str] = field(default_factory=dict)
    """Invalid episodes with the reason."""
    first_valid: str = ""
    """Name of the first valid episode, if any."""
    warnings: list[str] = field(default_factory=list)
    """Suspicious properties of the dataset."""

    @property
    def is_ok(self) -> bool:
        return not self.bad and not self.warnings

    def describe(self) -> str:
        lines = [f"{self.origin}: {self.episodes} episodes"]
        if self.inspected < self.episodes:
            lines[0] += f", {self.inspected} inspected"
        if self.lengths:
            lines.append(
                f"  rows     {_summary(self.lengths)}, total {sum(self.lengths)}"
            )
            lines.append(f"  returns  {_summary(self.returns)}")
            lines.append(f"  {self.terminal} ended in a terminal state")
        for title, spaces in (("obs   ", self.obs_space), ("action", self.act_space)):
            for key, space in spaces.items():
                low, high = self.ranges.get(key, (np.nan, np.nan))
                shape = "x".join(map(str, space.shape)) or "scalar"
                kind = f"{space.dtype} {shape}"
                line = f"  {title} {key:<28} {kind:<18} [{low:.4g}, {high:.4g}]"
                if space.native is not None and np.isfinite(space.native).any():
                    line += f", scaled from {format_bounds(space)}"
                lines.append(line)
        for mask, members in self.masks.items():
            lines.append(f"  mask {mask}: {len(members)} episodes")
        for key, text in self.metadata.items():
            lines.append(f"  {key}: {textwrap.shorten(text, 200)}")
        if self.is_ok:
            lines.append("No problems found.")
        for number, (name, why) in enumerate(self.bad.items()):
            if number == MAX_PRINTED:
                lines.append(f"  ... and {len(self.bad) - MAX_PRINTED} more")
                break
            lines.append(f"  invalid: {name} {why}")
        lines += [f"  warning: {warning}" for warning in self.warnings]
        return "\n".join(lines)


def inspect_episodes(reader: Reader, limit: int = 0) -> InspectionReport:
    """Inspect every episode, or `limit` episodes evenly spaced."""
    names = reader.names()
    spaces = (reader.obs_space, reader.act_space)
    report = InspectionReport(
        reader.origin, len(names), *spaces, reader.masks, reader.metadata
    )
    alignment = ActionAlignment()
    for name in evenly_spaced(names, limit or len(names)):
        report.inspected += 1
        try:
            episode = reader.read_valid(name)
        except BadEpisode as error:
            report.bad[name] = str(error)
            continue
        report.first_valid = report.first_valid or name
        report.lengths.append(len(episode["reward"]))
        report.returns.append(float(episode["reward"].sum()))
        report.terminal += int(episode["is_terminal"][-1])
        for key in (*reader.obs_space, *reader.act_space):
            low, high = report.ranges.get(key, (np.inf, -np.inf))
            value = episode[key]
            low, high = min(low, float(value.min())), max(high, float(value.max()))
            report.ranges[key] = low, high
        for key, space in reader.act_space.items():
            rows = _count_outside(episode[key][:-1], space)  # the last has no action
            report.outside[key] = report.outside.get(key, 0) + rows
        alignment.add(episode, *spaces)
    report.warnings = [
        *_find_suspicious(report),
        *_find_missing_members(report.masks, names),
        *alignment.warnings(reader.options.get("alignment", "")),
    ]
    return report


class ActionAlignment:
    """Predicts the change of vector observations from the actions of nearby rows."""

    SHIFTS = (0, 1, -1)
    """Row of the action minus row of the observation; 0 is the correct alignment."""
    MIN_ROWS, MAX_ROWS = 20, 50_000
    """Rows that a warning needs, and rows after which further episodes are ignored."""
    MIN_EXPLAINED, MIN_DIFFERENCE = 0.3, 0.1
    """Minimum R^2 of another shift for a warning, and minimum difference between it and
    the R^2 of the correct alignment."""

    def __init__(self) -> None:
        # by shift; the columns are the action, a constant 1 and the change
        self._tables: dict[int, list[np.ndarray]] = {}
        self._rows = 0

    def add(self, episode: Episode, obs_space: Spaces, act_space: Spaces) -> None:
        """Add the vector observations and continuous actions of an episode."""
        vectors = [k for k, s in obs_space.items() if len(s.shape) == 1]
        actions = [k for k, s in act_space.items() if s.dtype.kind == "f"]
        rows = len(episode["reward"])
        if rows < 4 or not vectors or not actions or self._rows > self.MAX_ROWS:
            return
        state = np.concatenate([episode[key] for key in vectors], 1).astype(np.float64)
        change = np.diff(state, axis=0)[1:-1]  # rows 1 .. rows - 3
        action = np.concatenate(
            [episode[key].reshape(rows, -1) for key in actions], 1
        ).astype(np.float64)
        self._rows += len(change)
        for shift in self.SHIFTS:
            shifted = action[1 + shift : 1 + shift + len(change)]
            ones = np.ones((len(shifted), 1))
            table = np.hstack([shifted, ones, change])
            self._tables.setdefault(shift, []).append(table)
        self._num_inputs = action.shape[1] + 1

    def explained_variance(self) -> dict[int, float]:
        """Return R^2 of a linear fit by shift: the maximum over observation entries."""
        return {
            shift: self._fit(np.concatenate(tables))
            for shift, tables in self._tables.items()
        }

    def _fit(self, table: np.ndarray) -> float:
        """Fit the change linearly to the action; return the largest R^2."""
        inputs, change = np.split(table, [self._num_inputs], axis=1)
        residual = change - inputs @ np.linalg.lstsq(inputs, change, rcond=None)[0]
        total = ((change - change.mean(0)) ** 2).sum(0)
        explained = 1 - (residual**2).sum(0) / np.where(total > 1e-12, total, np.inf)
        return float(np.where(total > 1e-12, explained, 0).max(initial=0))

    def warnings(self, option: str = "") -> list[str]:
        """Return a warning if actions seem to be shifted by one row.

        `option` is the alignment in the key map; empty if there is no key map.
        """
        if self._rows < self.MIN_ROWS:
            return []
        explained = self.explained_variance()
        best = max(self.SHIFTS, key=lambda shift: explained[shift])
        threshold = max(self.MIN_EXPLAINED, explained[0] + self.MIN_DIFFERENCE)
        if best == 0 or explained[best] < threshold:
            return []
        is_late = best > 0
        fix = f"store each action one row {'earlier' if is_late else 'later'}"
        other = "before_obs" if is_late else "after_obs"
        if option and option != other:
            fix = f"read them with --map.alignment {other}"
        return [
            f"actions are one row too {'late' if is_late else 'early'}: the action of "
            f"the {'next' if is_late else 'previous'} row explains "
            f"{explained[best]:.0%} of the variance of changes of vectors, the action "
            f"of the same row {explained[0]:.0%}. Fix: {fix}"
        ]


def _find_suspicious(report: InspectionReport) -> list[str]:
    """Return warnings about spaces, ranges and masks that are probably mistakes."""
    warnings = []
    for key, space in report.obs_space.items():
        shape = space.shape
        if space.is_image and shape[0] in (1, 3) and shape[2] > 4 and shape[2] % 3:
            warnings.append(f"{key!r} {shape} seems to be an image with channels first")
        if space.dtype.kind == "f" and len(shape) == 3:
            warnings.append(f"{key!r} {shape} seems to be an image stored as floats")
    for key, (low, high) in report.ranges.items():
        if low == high and key in report.act_space:
            warnings.append(f"{key!r} is {low:.4g} in every row")
    for key, rows in report.outside.items():
        if rows:
            space, total = report.act_space[key], sum(report.lengths)
            warnings.append(
                f"{key!r} is outside of its {_describe_bounds(space)} in {rows} of "
                f"{total - len(report.lengths)} rows"
            )
    for mask, members in report.masks.items():
        if not members:
            warnings.append(f"mask {mask!r} contains no episode")
    return warnings


def _find_missing_members(masks: dict[str, list[str]], names: list[str]) -> list[str]:
    """Return a warning for every mask that contains names without an episode."""
    known, warnings = set(names), []
    for mask, members in masks.items():
        if missing := [name for name in members if name not in known]:
            more = ", ..." if len(missing) > MAX_PRINTED else ""
            word = "name" if len(missing) == 1 else "names"
            warnings.append(
                f"mask {mask!r} contains {len(missing)} {word} without an episode: "
                f"{', '.join(missing[:MAX_PRINTED])}{more}"
            )
    return warnings


def _count_outside(actions: np.ndarray, space: Space) -> int:
    """Return the number of rows with an entry outside of the bounds of the space."""
    if space.dtype.kind != "f":
        return 0
    width = space.high.astype(np.float64) - space.low
    margin = TOLERANCE * np.where(np.isfinite(width) & (width > 0), width, 1)
    outside = (actions < space.low - margin) | (actions > space.high + margin)
    return int(outside.reshape(len(actions), -1).any(1).sum())


def _describe_bounds(space: Space) -> str:
    """Return the bounds in the environment's own units, or [-1, 1] if not recorded."""
    low, high = space.native_bounds
    is_known = np.isfinite(low).any() or np.isfinite(high).any()
    return format_bounds(space if is_known else replace(space, native=None))


def _summary(values: list[int] | list[float]) -> str:
    return f"{min(values):.4g} to {max(values):.4g}, mean {np.mean(values):.4g}"
