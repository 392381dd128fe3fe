"""Find runs, read their scores, and group them by method.

A run is a run folder, or an entry of a file `runs.json`, which lists score files that
were copied without their run folder. Settings are read as plain data; modules that they
name are not imported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np

from reverie import config as configs
from reverie.api import UserError
from reverie.envs import EnvConfig, action_repeat
from reverie.envs.suites.crafter import crafter_score
from reverie.log.jsonl import parse_lines
from reverie.log.messages import print_message
from reverie.run.first_command import find_first_command
from reverie.storage.limits import InvalidFile, open_regular, read_json

SCORE, SUCCESS = "episode/score", "episode/success"
CRAFTER_SCORE = "crafter_score"
"""Score of the benchmark Crafter, computed from the achievements of all episodes."""
ACHIEVEMENT = "episode/achievement_"
"""Start of the names of the achievements of an episode: 1 if unlocked, otherwise 0."""
MAX_NUMBER = 1e100
"""Larger numbers in the logs are ignored."""
MAX_FOLDER_DEPTH = 32
"""Runs in folders that are nested deeper are not found."""
INDEX = "runs.json"
"""File that maps names of score files to their settings, command and commit."""
CONFIG, SCORES, METRICS, ABOUT = (
    "config.yaml",
    "scores.jsonl",
    "metrics.jsonl",
    "about.json",
)
NOT_METHOD_SETTINGS = (
    "seed",
    "logdir",
    "task",
    "device",
    "deterministic",
    "logger.",
    "run.steps",
    "run.log_every",
    "run.save_every",
    "run.report_every",
    "run.keep_",
    "run.clock",
    "run.eval_",
)
"""Prefixes of the settings that may differ between runs of the same method."""


@dataclass(frozen=True)
class Run:
    """One run of one task."""

    path: Path
    task: str
    agent: str
    seed: int
    settings: Mapping[str, Any]
    """All settings, with dotted names."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of the last start of the run: `commit`, `gpu` and others; `command` is
    the command of the first start."""
    repeat: int = 1
    """Simulator frames per agent step."""

    def points(self, key: str, x: str) -> np.ndarray:
        """Return `(x, value)` of each line that has the key, as an array `(n, 2)`.

        `x` is `frames` (of the simulator), `step` (of the agent) or `hours`. The field
        `step` of the files counts frames, so for `step` it is divided by `repeat`. The
        lines are those of `scores.jsonl` if they have the key, otherwise those of
        `metrics.jsonl`.
        """
        rows: list[tuple[float, float]] = []
        for name in (SCORES, METRICS):
            entries = _read_lines(self.path / name if self.path.is_dir() else self.path)
            if key == CRAFTER_SCORE:
                entries = _with_crafter_scores(entries)
            for entry in entries:
                value = entry.get(key)
                position = entry.get("seconds" if x == "hours" else "step")
                if _is_number(value) and _is_number(position):
                    rows.append((float(position), float(value)))
            if rows or key == CRAFTER_SCORE:
                break
        scale = {"frames": 1.0, "step": 1 / self.repeat, "hours": 1 / 3600}[x]
        points = np.array(rows, float).reshape(-1, 2) * (scale, 1.0)
        return points[np.isfinite(points).all(1)]

    def metric_names(self) -> set[str]:
        """Return the names of the logged metrics."""
        entries = _read_lines(self.path / METRICS if self.path.is_dir() else self.path)
        entries += _read_lines(self.path / SCORES) if self.path.is_dir() else []
        names = {key for entry in entries for key in entry}
        if any(name.startswith(ACHIEVEMENT) for name in names):
            names.add(CRAFTER_SCORE)
        return names - {"step", "seconds"}

    @property
    def seconds(self) -> float | None:
        """Duration of the training: the one in the index, or the largest time in the
        logs."""
        is_folder = self.path.is_dir()
        if not is_folder and _is_number(seconds := self.about.get("seconds")):
            return float(seconds)
        times = [
            entry["seconds"]
            for name in (METRICS, SCORES)
            for entry in _read_lines(self.path / name if is_folder else self.path)
            if _is_number(entry.get("seconds"))
        ]
        return float(max(times)) if times else None


def find_runs(paths: Iterable[Path | str]) -> list[Run]:
    """Return the runs at these paths: run folders, folders with runs, or both.

    Folders are searched at all depths. Paths without runs are reported, so that
    `logdir/*` can be given if there are other files in this folder.
    """
    runs: dict[Path, Run] = {}
    empty: list[Path] = []
    for path in map(Path, paths):
        path = path.expanduser()
        if not path.exists():
            raise UserError(
                f"{path} does not exist.\n"
                "  Fix: give run folders, or folders with runs."
            )
        found = _find(path)
        runs |= {run.path.resolve(): run for run in found}
        empty += [] if found else [path]
    names = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
    problem = f"{names} contain{'s' * (len(empty) == 1)} no run"
    if not runs:
        raise UserError(
            f"{problem}: no {CONFIG} and no {INDEX}.\n"
            "  Fix: give the --logdir of one or several runs."
        )
    if empty:
        print_message(f"warning: {problem}.")
    return list(runs.values())


def _find(path: Path, depth: int = 0) -> list[Run]:
    """Return the run of a run folder, or all runs in the folders below a path."""
    if path.name == INDEX:
        return _read_index(path)
    if not path.is_dir():
        return []
    if (path / CONFIG).is_file():
        return [_read_run(path)]
    found = _read_index(path / INDEX) if (path / INDEX).is_file() else []
    for child in sorted(path.iterdir()):
        is_skipped = child.name[:1] == "." or depth >= MAX_FOLDER_DEPTH
        if child.is_dir() and not child.is_symlink() and not is_skipped:
            found += _find(child, depth + 1)
    return found


def _read_run(path: Path) -> Run:
    settings = configs.read_config_file(path / CONFIG)
    about: Any = []
    if (path / ABOUT).is_file():
        about = _read_json(path / ABOUT)
    # one entry for each start of the run
    entries = about if isinstance(about, list) else []
    starts = [entry for entry in entries if isinstance(entry, dict)]
    last = starts[-1] if starts else {}
    if command := find_first_command(starts):
        last = {**last, "command": command}
    return _make_run(path, settings, last)


def _read_index(path: Path) -> list[Run]:
    """Return the runs that a `runs.json` lists."""
    entries = _read_json(path)
    if not isinstance(entries, dict):
        raise UserError(
            f"{path} must be a JSON object that maps file names to settings.\n"
            '  Fix: write {"scores.jsonl": {"settings": {"task": "catch", "seed": 0}}}'
        )
    runs = []
    for name, entry in entries.items():
        file = path.parent / Path(name).name
        if not isinstance(entry, dict) or not file.is_file():
            raise UserError(
                f"{path} lists {name!r}, which does not exist next to it.\n"
                "  Fix: remove the entry, or restore the file."
            )
        settings = entry.get("settings", {})
        runs.append(
            _make_run(file, settings if isinstance(settings, dict) else {}, entry)
        )
    return runs


def _make_run(path: Path, settings: Mapping[str, Any], about: Mapping[str, Any]) -> Run:
    flat = {k: _plain(v) for k, v in configs.flatten(dict(settings)).items()}
    return Run(
        path,
        str(flat.get("task", "")),
        str(flat.get("agent", "dreamer")),
        _to_int(flat.get("seed"), 0),
        flat,
        about,
        _to_int(about.get("repeat"), 0) or _action_repeat(settings),
    )


def _action_repeat(settings: Mapping[str, Any]) -> int:
    """Return the action repeat of the task; 1 if the settings do not determine it."""
    try:
        env = configs.resolve(EnvConfig, [("config.yaml", dict(settings["env"]))])
        return action_repeat(str(settings["task"]), env)
    except (UserError, KeyError, TypeError, ValueError):
        return 1


Groups = dict[str, dict[str, list[Run]]]
"""Runs by method and task."""


def group_runs(runs: Sequence[Run], by: Sequence[str] = ()) -> Groups:
    """Group runs by method, then by task; the runs of a group differ in their seeds.

    The name of a method consists of the agent and of the settings that vary among runs
    of the same task and agent, except `NOT_METHOD_SETTINGS`. With `by`, it consists of
    the settings in `by` only, or of the agent if a run has none of them. Runs with the
    same name belong to the same method.
    """
    if by:
        known = {key for run in runs for key in run.settings}
        for key in by:
            if key not in known:
                raise UserError(
                    f"No run has the setting {key!r}.{configs.suggest(key, known)}\n"
                    "  Fix: give names of settings to --by, for example --by size."
                )
    keys = list(by) or _varied_settings(runs)
    groups: Groups = {}
    for run in sorted(runs, key=lambda run: (run.task, str(run.path))):
        values = [f"{key} {run.settings[key]}" for key in keys if key in run.settings]
        names = [run.agent, *values] if not by else values or [run.agent]
        label = ", ".join(names)
        groups.setdefault(label, {}).setdefault(run.task, []).append(run)
    return groups


def _varied_settings(runs: Sequence[Run]) -> list[str]:
    """Return the settings that differ between runs of the same task and agent."""
    keys = _varied_within(runs, lambda run: (run.task, run.agent))
    if "size" not in keys or len(keys) <= 3:
        return keys
    # A size preset sets many network settings, so its name is used instead of them.
    # Settings that also differ between runs of the same size are kept.
    others = _varied_within(
        runs, lambda run: (run.task, run.agent, str(run.settings.get("size")))
    )
    return ["size", *others]


def _varied_within(runs: Sequence[Run], group: Callable[[Run], Any]) -> list[str]:
    """Return the settings that differ between runs of the same group."""
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        groups.setdefault(group(run), []).append(run)
    keys: dict[str, None] = {}
    for members in groups.values():
        for key in {key: None for run in members for key in run.settings}:
            values = {json.dumps(run.settings.get(key)) for run in members}
            if len(values) > 1 and not key.startswith(NOT_METHOD_SETTINGS):
                keys[key] = None
    return [*keys]


def _with_crafter_scores(entries: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the episodes, each with the Crafter score of all episodes up to it."""
    episodes = [x for x in entries if any(k.startswith(ACHIEVEMENT) for k in x)]
    names = sorted({k for x in episodes for k in x if k.startswith(ACHIEVEMENT)})
    unlocked = [[bool(episode.get(name)) for name in names] for episode in episodes]
    count = np.arange(1, len(episodes) + 1)[:, None]
    rates = np.cumsum(np.array(unlocked, float), 0) / count if episodes else ()
    return [
        {**entry, CRAFTER_SCORE: crafter_score(rate)}
        for entry, rate in zip(episodes, rates, strict=True)
    ]


def _plain(value: Any) -> Any:
    """Convert lists and other objects to text, to compare and print them."""
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _is_number(value: Any) -> TypeGuard[float]:
    """True for a number that can be plotted: its absolute value is below `MAX_NUMBER`.

    This limit is much larger than the scores of runs.
    """
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    return is_numeric and abs(value) < MAX_NUMBER


def _to_int(value: Any, default: int) -> int:
    """Convert a value of a file to an integer; return the default if it is none."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return default


def _read_json(path: Path) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read: {error}\n  Fix: restore the file, or remove it."
        ) from None


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a JSONL file without those that are incomplete."""
    try:
        with open_regular(path) as file:
            text = file.read().decode(errors="replace")
    except (OSError, InvalidFile):
        return []
    return parse_lines(text.splitlines())
