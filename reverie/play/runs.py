"""Find the runs in a folder for `reverie view`: status, curves, media and configs.

The id of a run is a hash of its path, and media files are numbered, so that requests
contain no paths. Runs can be read while they train: an incomplete last line of a file
is ignored. Runs of a campaign are listed with their state in its queue, also before
they start.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reverie import config as configs
from reverie.api import UserError
from reverie.campaign.queue import QUEUE, Queue, RunStatus
from reverie.envs import action_repeat
from reverie.log.jsonl import METRICS, SCORES
from reverie.play.recorded_episodes import RecordedEpisodes
from reverie.run.config import Config
from reverie.run.folder import (
    LOCK,
    SUBFOLDERS,
    is_locked,
    read_config,
    read_exit_record,
)

MAX_DEPTH = 4
"""Maximum depth at which run folders are searched."""
MAX_RUNS = 500
MAX_POINTS = 1500
"""Maximum number of points of a curve; longer curves are subsampled."""
MAX_MEDIA = 60
"""Maximum number of images and videos of a run."""
MAX_EPISODES = 200
"""Maximum number of recorded episodes of a run that are listed."""
MAX_LINE = 1_000_000
"""Longer lines of metrics (in bytes) are skipped."""
SCORE = "score"
"""Name of the curve with the scores of all episodes."""
RECENT_EPISODES = 50
"""Number of last episodes whose mean score is listed."""
MEDIA_KINDS = ("mp4", "gif", "png")


Point = tuple[int, float, float]
"""Simulator frames and seconds since the start of the run, and the value."""


@dataclass
class MetricsFile:
    """Metrics of a JSONL file, whose `step` is in frames; `update` reads new lines."""

    path: Path
    offset: int = 0
    """Number of bytes that have been read."""
    columns: dict[str, list[Point]] = field(default_factory=dict)
    """Points by metric."""
    last_frame: int = 0

    def update(self) -> None:
        """Read new lines; read the whole file again if it was shortened."""
        try:
            size = self.path.stat().st_size
        except OSError:
            return
        if size < self.offset:
            self.offset, self.columns, self.last_frame = 0, {}, 0
        if size == self.offset:
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(size - self.offset)
        end = data.rfind(b"\n") + 1  # the last line may be incomplete
        self.offset += end
        for line in data[:end].splitlines():
            if len(line) <= MAX_LINE:
                self._add(line)

    def _add(self, line: bytes) -> None:
        """Append the numbers of a line to their columns; ignore an invalid line."""
        try:
            entry = json.loads(line)
            frame, seconds = int(entry["step"]), float(entry.get("seconds") or 0.0)
            numbers = {k: float(v) for k, v in entry.items() if type(v) in (int, float)}
        except (ArithmeticError, ValueError, KeyError, TypeError, RecursionError):
            return
        self.last_frame = max(self.last_frame, frame)
        for name, value in numbers.items():
            if name not in ("step", "seconds"):
                self.columns.setdefault(name, []).append((frame, seconds, value))


@dataclass
class ListedRun:
    """A run in the list: its folder, files and config."""

    id: str
    name: str
    path: Path
    metrics: MetricsFile
    scores: MetricsFile
    config: Config | None = None
    problem: str = ""
    """Why the config cannot be read."""
    queued: RunStatus | None = None
    """State in the queue of its campaign, if it belongs to one."""


class RunIndex:
    """Finds the runs below a folder and reads their files."""

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder.\n"
                "  Fix: pass the folder of a run, or a folder that contains runs."
            )
        self.folder = folder.resolve()
        self._runs: dict[str, ListedRun] = {}
        self._queues: dict[Path, Queue] = {}  # of campaigns, by their folder

    def summaries(self) -> list[dict[str, Any]]:
        """Return a summary of every run, the newest first."""
        self._find()
        runs = sorted(self._runs.values(), key=_last_change, reverse=True)
        return [self._summary(run) for run in runs]

    def folder_of(self, run_id: str) -> Path:
        return self._get(run_id).path

    def details(self, run_id: str) -> dict[str, Any]:
        """Return config and media of a run."""
        run = self._get(run_id)
        media = [
            {"name": path.stem, "kind": path.suffix[1:]} for path in _list_media(run)
        ]
        return {"config": _flat_config(run), "media": media, "error": _error_of(run)}

    def episodes(self, run_id: str) -> list[dict[str, Any]]:
        """Return source, number, name and length of the recorded episodes of a run."""
        run = self._get(run_id)
        if run.config is None:
            return []
        return RecordedEpisodes(run.path, run.config).table()[:MAX_EPISODES]

    def series(self, run_id: str, key: str) -> dict[str, list[float]]:
        """Return values of one metric, and steps, frames and hours for the x axis."""
        run = self._get(run_id)
        run.metrics.update()
        run.scores.update()
        points = _mean_by_frame(_columns(run).get(key, []))
        stride = max(1, -(-len(points) // MAX_POINTS))
        points = points[::stride]
        repeat = _frames_per_step(run)
        return {
            "step": [frames // repeat for frames, _, _ in points],
            "frames": [frames for frames, _, _ in points],
            "hours": [seconds / 3600 for _, seconds, _ in points],
            "value": [value for _, _, value in points],
        }

    def config_diff(self, first: str, second: str) -> dict[str, list[str]]:
        """Return the settings that differ between two runs."""
        left, right = (_flat_config(self._get(run)) for run in (first, second))
        names = [*left, *(name for name in right if name not in left)]
        return {
            name: [left.get(name, ""), right.get(name, "")]
            for name in names
            if left.get(name) != right.get(name)
        }

    def media(self, run_id: str, number: int) -> Path:
        """Return the path of an image or video."""
        paths = _list_media(self._get(run_id))
        if not 0 <= number < len(paths):
            raise LookupError(f"Run {run_id!r} has no file {number}.")
        return paths[number]

    def _get(self, run_id: str) -> ListedRun:
        if run_id not in self._runs:
            self._find()
        if run_id not in self._runs:
            raise LookupError(f"There is no run {run_id!r}.")
        return self._runs[run_id]

    def _find(self) -> None:
        """Search the folder again; runs that were already found keep what was read."""
        found = {}
        paths, campaigns = _find_folders(self.folder)
        queued = self._read_queues(campaigns)
        for path in dict.fromkeys([*paths, *queued]):
            relative = path.relative_to(self.folder)
            name = path.name if path == self.folder else relative.as_posix()
            run_id = hashlib.sha256(str(path).encode()).hexdigest()[:12]
            run = self._runs.get(run_id)
            # a queued run has no config until it starts
            if run is None or (run.config is None and path in paths):
                run = _open(run_id, name, path)
            run.queued = queued.get(path)
            found[run_id] = run
        self._runs = found

    def _read_queues(self, campaigns: list[Path]) -> dict[Path, RunStatus]:
        """Return the state of the runs of campaigns, by their run folder."""
        result = {}
        for folder in campaigns:
            queue = self._queues.setdefault(folder, Queue(folder))
            for status in queue.statuses():
                result[queue.run_folder(status.run.name)] = status
        return result

    def _summary(self, run: ListedRun) -> dict[str, Any]:
        run.metrics.update()
        run.scores.update()
        columns = _columns(run)
        scores = [value for _, _, value in columns.get(SCORE, [])]
        recent = scores[-RECENT_EPISODES:]
        config = run.config
        task = run.queued.run.task if run.queued else ""
        return {
            "id": run.id,
            "name": run.name,
            "task": config.task if config else task,
            "agent": config.agent if config else "",
            "status": _status(run),
            "steps": _steps_of(run),
            "score": sum(recent) / len(recent) if recent else None,
            "metrics": sorted(columns, key=lambda name: (name != SCORE, name)),
        }


def _open(run_id: str, name: str, path: Path) -> ListedRun:
    run = ListedRun(
        run_id, name, path, MetricsFile(path / METRICS), MetricsFile(path / SCORES)
    )
    try:
        run.config = read_config(path) if path.exists() else None
    except UserError as error:
        run.problem = str(error)
    return run


def _find_folders(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders of runs and of campaigns; follow no symbolic links."""
    found: list[Path] = []
    campaigns: list[Path] = []
    for path, names, files in os.walk(folder):
        if "config.yaml" in files:
            found.append(Path(path))
        elif QUEUE in names and "campaign.yaml" in files:
            campaigns.append(Path(path))
        depth = len(Path(path).relative_to(folder).parts)
        if depth >= MAX_DEPTH or len(found) >= MAX_RUNS:
            names.clear()
        names[:] = sorted(n for n in names if n not in SUBFOLDERS and n[0] != ".")
    return found, campaigns


def _last_change(run: ListedRun) -> float:
    files = (run.path / METRICS, run.path / "config.yaml")
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _columns(run: ListedRun) -> dict[str, list[Point]]:
    """Return the points of all metrics, and those of the episode score as `score`."""
    scores = dict(run.scores.columns)
    columns = {**run.metrics.columns, **scores}
    score = next((k for k in scores if k.endswith("score")), "")
    score = score or next((k for k in columns if k.endswith("score")), "")
    return {SCORE: columns[score], **columns} if score else columns


def _mean_by_frame(points: list[Point]) -> list[Point]:
    """Average the points of the same frame, at which several episodes may end."""
    result = []
    for frame, group in itertools.groupby(points, key=lambda point: point[0]):
        _, seconds, values = zip(*group, strict=True)
        result.append((frame, seconds[-1], sum(values) / len(values)))
    return result


def _frames_per_step(run: ListedRun) -> int:
    """Return the simulator frames per agent step (the action repeat)."""
    if run.config is None:
        return 1
    try:
        return action_repeat(run.config.task, run.config.env)
    except UserError:
        return 1


def _steps_of(run: ListedRun) -> int:
    """Return the number of agent steps so far."""
    frames = max(run.metrics.last_frame, run.scores.last_frame)
    return frames // _frames_per_step(run)


def _status(run: ListedRun) -> str:
    """Return `running`, `finished`, `failed` or `stopped`, or the state in a queue."""
    if run.queued is not None:
        # includes runs on other machines, whose locks may not be visible here
        return run.queued.state
    if is_locked(run.path / LOCK):
        return "running"
    if _error_of(run):
        return "failed"
    return "finished" if read_exit_record(run.path).finished else "stopped"


def _error_of(run: ListedRun) -> str:
    """Return why a run failed, or why its config cannot be read."""
    queued = run.queued.error if run.queued and run.queued.state == "failed" else ""
    return queued or read_exit_record(run.path).error or run.problem


def _list_media(run: ListedRun) -> list[Path]:
    """Return videos and images, the newest first and open-loop videos before others."""
    patterns = [f"{a}/{b}" for a in ("media", "eval") for b in ("*", "*/*", "*/*/*")]
    root = run.path.resolve()
    paths = [
        path
        for pattern in (*patterns, "*.png")
        for path in sorted(run.path.glob(pattern))
        if path.suffix[1:] in MEDIA_KINDS
        and path.is_file()
        and path.resolve() == root / path.relative_to(run.path)  # no symbolic link
    ]
    newest = sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)
    return sorted(newest, key=lambda path: "openloop" not in path.name)[:MAX_MEDIA]


def _flat_config(run: ListedRun) -> dict[str, str]:
    if run.config is None:
        return {}
    return {k: str(v) for k, v in configs.flatten(run.config).items()}
