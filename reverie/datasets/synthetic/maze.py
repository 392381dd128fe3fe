"""Corridors seen by someone who walks through them and chooses where they fork.

A map of 16 x 11 cells with coloured walls, drawn by casting one ray per column. The
walker goes 0.4 cells ahead or turns by 0.3 in a step, among what is sensible where it
stands: in a corridor there is only ahead, before a wall only turning, and at an opening
anything. Episodes are NPZ files in `train/` and `test/` with `video` (T h w 3, uint8)
and `actions` (T; the action of a row leads to the next). Ours also hold `pose` and
`junction`, from which events follow: a frame is one if the walker has just come to
cells with three or more ways out, from one with fewer.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from reverie.api import UserError
from reverie.datasets.readers import npz
from reverie.datasets.sequences import Arrays, Loss, SourceConfig
from reverie.datasets.synthetic.chunks import EVALUATION, TRAINING, generator
from reverie.rows import Window
from reverie.spaces import EVENT, Space, Spaces

SIDE = 32
LENGTH = 300
"""Frames of an episode that is made without saying how many."""
MAP = np.array(
    [
        [int(cell) for cell in row]
        for row in (
            "1111111111111111",
            "1000000012000002",
            "1011111012022202",
            "1013331000020002",
            "1013003066020444",
            "1000000060000404",
            "1111155560660404",
            "1000050000600004",
            "1022050555664444",
            "1020000000000004",
            "1111111111111114",
        )
    ]
)
COLOURS = np.ones((10, 3))
COLOURS[[1, 2, 3, 4, 5, 6, 9]] = [
    (0.8, 0.1, 0.1),
    (0.1, 0.8, 0.1),
    (0.1, 0.1, 0.8),
    (0.8, 0.8, 0.1),
    (0.1, 0.8, 0.8),
    (0.8, 0.1, 0.8),
    (0.5, 0.5, 0.5),
]
CEILING, FLOOR = 0.1, 0.2
AHEAD, LEFT, RIGHT = 0, 1, 2
STRIDE, TURN, PROBE = 0.4, 0.3, 0.6
FIELD = np.pi / 3
"""How wide the walker sees."""


class Random(Protocol):
    """The draws a walk is made of, as NumPy's legacy stream offers them."""

    def randint(self, low: int, high: int) -> int: ...

    def choice(self, options: list[float]) -> float: ...

    def normal(self, mean: float, std: float) -> float: ...


class Walk(NamedTuple):
    """One episode, before anybody drew it; poses are before the action of their row."""

    pose: Float[np.ndarray, "T 3"]  # x, y (downward), angle
    actions: Int[np.ndarray, " T"]
    permitted: Bool[np.ndarray, "T 3"]
    junction: Bool[np.ndarray, " T"]


def walk(rng: Random, length: int) -> Walk:
    """Wander about from a random cell, turning only where there is a reason to."""
    x, y, angle = _reset(rng)
    rows = []
    for _ in range(length):
        options = permitted(x, y, angle)
        action = options[0] if len(options) == 1 else int(rng.choice(list(options)))
        rows.append(((x, y, angle), action, options, is_junction(x, y)))
        if action == AHEAD:
            ahead = x + STRIDE * np.cos(angle), y + STRIDE * np.sin(angle)
            x, y = (x, y) if is_wall(*ahead) else ahead
        else:
            angle += TURN if action == RIGHT else -TURN
        x += rng.normal(0, 0.005)
        y += rng.normal(0, 0.005)
        angle += rng.normal(0, 0.01)
    poses, actions, options_, junctions = zip(*rows, strict=True)
    may = np.array([[act in options for act in range(3)] for options in options_])
    return Walk(np.array(poses), np.array(actions), may, np.array(junctions))


def _reset(rng: Random) -> tuple[float, float, float]:
    while True:
        column, row = rng.randint(1, MAP.shape[1] - 1), rng.randint(1, len(MAP) - 1)
        if not MAP[row, column]:
            break
    angle = rng.choice([0, np.pi / 2, np.pi, 3 * np.pi / 2]) + rng.normal(0, 0.05)
    return column + 0.5, row + 0.5, angle


def permitted(x: float, y: float, angle: float) -> tuple[int, ...]:
    """The actions that make sense at a pose."""

    def blocked(towards: float) -> bool:
        return is_wall(x + PROBE * np.cos(towards), y + PROBE * np.sin(towards))

    if blocked(angle):
        return (LEFT, RIGHT)
    if blocked(angle - np.pi / 2) and blocked(angle + np.pi / 2):
        return (AHEAD,)
    return (AHEAD, LEFT, RIGHT)


def is_wall(x: float, y: float) -> bool:
    row, column = int(y), int(x)
    inside = 0 <= row < len(MAP) and 0 <= column < MAP.shape[1]
    return not inside or bool(MAP[row, column])


def is_junction(x: float, y: float) -> bool:
    """Whether three or more neighbours of the cell are free."""
    row, column = int(y), int(x)
    near = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    return sum(not is_wall(c, r) for r, c in near) >= 3


def draw(
    pose: Float[np.ndarray, "T 3"], side: int = SIDE
) -> UInt8[np.ndarray, "T side side 3"]:
    """What the walker sees, one ray per column; all rays advance together."""
    x, y = (np.repeat(pose[:, i], side) for i in range(2))
    spread = FIELD * np.arange(side) / side - FIELD / 2
    angle = (pose[:, 2, None] + spread).ravel()
    dx, dy = np.cos(angle), np.sin(angle)
    column, row = x.astype(int), y.astype(int)
    with np.errstate(divide="ignore"):
        across, down = np.abs(1 / dx), np.abs(1 / dy)  # from one grid line to the next
    step_x, step_y = np.where(dx < 0, -1, 1), np.where(dy < 0, -1, 1)
    next_x = np.where(dx < 0, x - column, column + 1 - x) * across
    next_y = np.where(dy < 0, y - row, row + 1 - y) * down
    sideways = np.zeros(len(x), bool)  # whether a line of y was met
    going = np.ones(len(x), bool)
    while going.any():
        along_x = next_x < next_y
        move_x, move_y = going & along_x, going & ~along_x
        next_x = np.where(move_x, next_x + across, next_x)
        next_y = np.where(move_y, next_y + down, next_y)
        column = np.where(move_x, column + step_x, column)
        row = np.where(move_y, row + step_y, row)
        sideways = np.where(going, ~along_x, sideways)
        inside = (row >= 0) & (row < MAP.shape[0])
        inside &= (column >= 0) & (column < MAP.shape[1])
        wall = ~inside
        wall[inside] = MAP[row[inside], column[inside]] > 0
        going &= ~wall
    distance = np.where(sideways, next_y, next_x) - np.where(sideways, down, across)
    row, column = np.clip(row, 0, len(MAP) - 1), np.clip(column, 0, MAP.shape[1] - 1)
    shade = np.where(sideways, 0.7, 1.0) / (1 + 0.1 * distance)
    colour = COLOURS[MAP[row, column]] * shade[:, None]

    height = (side / (distance + 1e-6)).astype(np.int64)
    top = np.maximum(0, (side - height) // 2)[:, None]
    bottom = np.minimum(side, (side + height) // 2)[:, None]
    line = np.arange(side)
    values = np.where((line < top)[..., None], CEILING, FLOOR)
    is_wall_ = ((line >= top) & (line < bottom))[..., None]
    values = np.where(is_wall_, colour[:, None], values)  # (T side, line, 3)
    pixels = (np.clip(values, 0, 1) * 255).astype(np.uint8)
    return pixels.reshape(len(pose), side, side, 3).transpose(0, 2, 1, 3).copy()


class Draws:
    """The same draws from a generator of today."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def randint(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def choice(self, options: list[float]) -> float:
        return options[int(self.rng.integers(len(options)))]

    def normal(self, mean: float, std: float) -> float:
        return float(self.rng.normal(mean, std))


def make_episode(rng: Random, length: int) -> Arrays:
    """One episode as its file holds it."""
    found = walk(rng, length)
    return {
        "video": draw(found.pose),
        "actions": found.actions.astype(np.int64),
        "pose": found.pose.astype(np.float32),
        "junction": found.junction,
    }


def write_maze(
    folder: Path,
    train: int = 1000,
    test: int = 100,
    length: int = LENGTH,
    seed: int = 0,
) -> int:
    """Write episodes that `sequences_maze` reads; returns how many."""
    for number, (name, count) in enumerate((("train", train), ("test", test))):
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for index in range(count):
            rng = Draws(generator(seed, number, index))
            episode = make_episode(rng, length)
            npz.save(place / f"episode_{index:05d}.npz", episode)
    return train + test


def read_episode(path: Path, window: int, actions: bool = True) -> Arrays:
    """One file as rows of ours; ValueError says what is wrong with it."""
    data = npz.load(path)
    for key in ("video", "actions") if actions else ("video",):
        if key not in data:
            raise ValueError(f"has no {key!r}, only {', '.join(data) or 'nothing'}")
    video = data["video"]
    if video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape[1:]:
        raise ValueError(f"'video' has shape {video.shape}, wanted (T, h, w, 3)")
    if video.dtype.kind == "f" and not np.isfinite(video).all():
        raise ValueError("'video' has frames that are not finite")
    if video.dtype != np.uint8:
        raise ValueError(f"'video' is {video.dtype}, wanted uint8 from 0 to 255")
    taken = _checked(data["actions"], len(video)) if actions else None
    if len(video) < window:
        raise ValueError(f"has {len(video)} frames, a window has {window}")
    rows = {"image": resized(video, SIDE)}
    if taken is not None:
        rows["action"] = taken
    if "junction" in data:
        junction = data["junction"]
        if junction.shape != video.shape[:1] or junction.dtype.kind not in "biu":
            raise ValueError(
                f"'junction' is {junction.dtype} {junction.shape}, wanted bool "
                f"({len(video)},)"
            )
        junction = junction.astype(bool)
        entered = junction & ~np.concatenate([junction[:1], junction[:-1]])
        rows[EVENT] = entered
    return rows


def _checked(actions: np.ndarray, frames: int) -> np.ndarray:
    if actions.shape != (frames,):
        raise ValueError(f"'actions' has shape {actions.shape}, wanted {frames}")
    if actions.dtype.kind not in "iu" or not ((actions >= 0) & (actions < 3)).all():
        raise ValueError("'actions' must be whole numbers from 0 to 2")
    return actions.astype(np.int64)


def resized(video: UInt8[np.ndarray, "T h w 3"], side: int) -> np.ndarray:
    """Square frames of that side, by bilinear interpolation."""
    if video.shape[1:3] == (side, side):
        return video
    import torch
    from torch.nn.functional import interpolate

    frames = torch.from_numpy(np.array(video)).movedim(-1, 1).float()
    small = interpolate(frames, (side, side), mode="bilinear", align_corners=False)
    return small.round().clamp(0, 255).to(torch.uint8).movedim(1, -1).numpy()


def read_episodes(folder: Path, window: int, actions: bool = True) -> list[Arrays]:
    """All usable episodes of a folder; the others are named and skipped."""
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise UserError(
            f"{folder} holds no episodes (*.npz).\n  Fix: {_advice(folder, window)}, "
            "or give the folder of some as --source.folder"
        )
    found, wrong = [], []
    for path in paths:
        try:
            found.append(read_episode(path, window, actions))
        except ValueError as error:
            wrong.append(f"{path} {error}")
            warnings.warn(f"{wrong[-1]}; skipped", RuntimeWarning, stacklevel=2)
    if not found:
        fix = _advice(folder, window)
        if "no 'actions'" in wrong[0]:
            fix = f"--source.actions False does without actions; or {fix}"
        raise UserError(
            f"None of the {len(paths)} episodes in {folder} can be used: {wrong[0]}.\n"
            f"  Fix: {fix}"
        )
    return with_same_events(found)


def _advice(folder: Path, window: int) -> str:
    """How to make episodes, not over any that are there."""
    home = folder.parent
    there = next(home.glob("*/*.npz"), None)
    length = f" --length {window}" if window > LENGTH else ""
    if there is None:
        return f"make some with `reverie data maze --out {home}{length}`"
    other = home / "maze"
    make = f"reverie data maze --out {other}{length}"
    return f"make others with `{make}`, and give --source.folder {other}"


def with_same_events(episodes: list[Arrays]) -> list[Arrays]:
    """Events in all episodes or in none: those of some would pass for those of all."""
    if all(EVENT in episode for episode in episodes):
        return episodes
    return [{k: v for k, v in episode.items() if k != EVENT} for episode in episodes]


class Crops:
    """Windows cut at random from recorded episodes; a step always gets the same."""

    def __init__(self, episodes: list[Arrays], window: Window, seed: int):
        self.episodes, self.seed = episodes, seed
        self.count, self.length = window.batch, window.context + window.length
        starts = [len(next(iter(e.values()))) - self.length + 1 for e in episodes]
        self._last = np.cumsum(starts)  # every start of every episode is as likely

    def batch(self, step: int) -> Arrays:
        return self._cut(generator(self.seed, TRAINING, step), self.count)

    def evaluation(self, count: int) -> Arrays:
        return self._cut(generator(self.seed, EVALUATION), count)

    def _cut(self, rng: np.random.Generator, count: int) -> Arrays:
        picks = rng.integers(self._last[-1], size=count)
        which = np.searchsorted(self._last, picks, "right")
        starts = picks - np.concatenate([[0], self._last])[which]
        rows = [
            {k: v[start : start + self.length] for k, v in self.episodes[i].items()}
            for i, start in zip(which, starts, strict=True)
        ]
        return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


class Maze:
    """Recorded walks, with the actions that were taken (unless not wanted)."""

    loss: Loss = "gaussian"

    def __init__(self, config: SourceConfig, window: Window, seed: int):
        self.obs_space: Spaces = {"image": Space(np.uint8, (SIDE, SIDE, 3), 0, 256)}
        self.act_space: Spaces = {}
        if config.actions:
            self.act_space["action"] = Space(np.int64, (), 0, 3)
        self.config, length = config, window.context + window.length
        self.folder = Path(config.folder or "data/maze").expanduser()
        train, test = (
            read_episodes(self.folder / part, length, config.actions)
            for part in ("train", "test")
        )
        self._train, self._test = (Crops(e, window, seed) for e in (train, test))

    def batch(self, step: int) -> Arrays:
        return self._train.batch(step)

    def evaluation(self) -> Arrays:
        return self._test.evaluation(self.config.evaluation)

    def close(self) -> None:
        pass
