"""First-person views of a maze, with actions; reaching a junction is an event.

A map of 16 x 11 cells with colored walls is rendered by casting one ray per image
column. The policy moves 0.4 cells forward or turns by 0.3 rad per step, and chooses
uniformly among the permitted actions: forward in a corridor, a turn in front of a wall,
and any action at an opening. Episodes are NPZ files in `train/` and `test/` with
`video` (T h w 3, uint8) and `actions` (T; the action of a row leads to the next row).
Files written here also have `pose` and `junction` (true in cells with three or more
exits), which defines the events: a frame is an event if `junction` is true and was
false in the frame before.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from reverie.api import UserError
from reverie.datasets.readers.npz import load_arrays, save_arrays
from reverie.datasets.rng import make_rng
from reverie.datasets.sequences import Loss, SequenceConfig
from reverie.datasets.sequences.windows import StoredEpisodes, WindowedEpisodes
from reverie.rows import Window
from reverie.spaces import EVENT, Arrays, Space, Spaces
from reverie.storage.atomic import make_folder

SIDE = 32
"""Height and width of the images in pixels."""
LENGTH = 300
"""Default number of frames of an episode."""
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
"""Cells: 0 is free, other numbers are walls of that color in `COLORS`."""
COLORS = np.ones((10, 3))
COLORS[[1, 2, 3, 4, 5, 6, 9]] = [
    (0.8, 0.1, 0.1),
    (0.1, 0.8, 0.1),
    (0.1, 0.1, 0.8),
    (0.8, 0.8, 0.1),
    (0.1, 0.8, 0.8),
    (0.8, 0.1, 0.8),
    (0.5, 0.5, 0.5),
]
CEILING, FLOOR = 0.1, 0.2  # gray values
FORWARD, LEFT, RIGHT = 0, 1, 2  # actions
STEP_LENGTH, TURN = 0.4, 0.3
"""Distance of a step forward in cells, and angle of a turn in radians."""
POSITION_NOISE, ANGLE_NOISE, START_ANGLE_NOISE = 0.005, 0.01, 0.05
"""Standard deviations of the noise that is added to the pose at each step, and to the
angle at the start."""
PROBE = 0.6
"""Distance in cells at which the policy checks for walls."""
FIELD_OF_VIEW = np.pi / 3


class RandomSource(Protocol):
    """The random numbers of an episode; `np.random.RandomState` implements it."""

    def randint(self, low: int, high: int) -> int: ...

    def choice(self, options: list[float]) -> float: ...

    def normal(self, mean: float, std: float) -> float: ...


class MazeTrajectory(NamedTuple):
    """One episode before rendering; a pose precedes the action of its row."""

    pose: Float[np.ndarray, "T 3"]  # x, y (downward), angle in radians
    actions: Int[np.ndarray, " T"]
    permitted: Bool[np.ndarray, "T 3"]
    junction: Bool[np.ndarray, " T"]


def simulate(rng: RandomSource, length: int) -> MazeTrajectory:
    """Move through the maze from a random cell, with a random permitted action."""
    x, y, angle = _reset(rng)
    rows = []
    for _ in range(length):
        options = permitted_actions(x, y, angle)
        action = options[0] if len(options) == 1 else int(rng.choice(list(options)))
        is_permitted = [act in options for act in range(3)]
        rows.append(((x, y, angle), action, is_permitted, is_junction(x, y)))
        if action == FORWARD:
            target = x + STEP_LENGTH * np.cos(angle), y + STEP_LENGTH * np.sin(angle)
            x, y = (x, y) if is_wall(*target) else target
        else:
            angle += TURN if action == RIGHT else -TURN
        x += rng.normal(0, POSITION_NOISE)
        y += rng.normal(0, POSITION_NOISE)
        angle += rng.normal(0, ANGLE_NOISE)
    return MazeTrajectory(*(np.array(column) for column in zip(*rows, strict=True)))


def _reset(rng: RandomSource) -> tuple[float, float, float]:
    """Return x, y and angle at the center of a random free cell."""
    while True:
        column, row = rng.randint(1, MAP.shape[1] - 1), rng.randint(1, len(MAP) - 1)
        if not MAP[row, column]:
            break
    angle = rng.choice([0, np.pi / 2, np.pi, 3 * np.pi / 2])
    angle += rng.normal(0, START_ANGLE_NOISE)
    return column + 0.5, row + 0.5, angle


def permitted_actions(x: float, y: float, angle: float) -> tuple[int, ...]:
    """Return the actions that the policy may choose at a pose."""

    def blocked(towards: float) -> bool:
        return is_wall(x + PROBE * np.cos(towards), y + PROBE * np.sin(towards))

    if blocked(angle):
        return (LEFT, RIGHT)
    if blocked(angle - np.pi / 2) and blocked(angle + np.pi / 2):
        return (FORWARD,)
    return (FORWARD, LEFT, RIGHT)


def is_wall(x: float, y: float) -> bool:
    row, column = int(y), int(x)
    inside = 0 <= row < len(MAP) and 0 <= column < MAP.shape[1]
    return not inside or bool(MAP[row, column])


def is_junction(x: float, y: float) -> bool:
    """True if three or more neighbors of the cell are free."""
    row, column = int(y), int(x)
    near = ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1))
    return sum(not is_wall(c, r) for r, c in near) >= 3


def render_maze(
    pose: Float[np.ndarray, "T 3"], side: int = SIDE
) -> UInt8[np.ndarray, "T side side 3"]:
    """Render the views at these poses; one ray per column, all advanced together."""
    x, y = (np.repeat(pose[:, i], side) for i in range(2))
    spread = FIELD_OF_VIEW * np.arange(side) / side - FIELD_OF_VIEW / 2
    angle = (pose[:, 2, None] + spread).ravel()
    dx, dy = np.cos(angle), np.sin(angle)
    column, row = x.astype(int), y.astype(int)
    with np.errstate(divide="ignore"):
        # ray length between two vertical (x) or horizontal (y) grid lines
        length_x, length_y = np.abs(1 / dx), np.abs(1 / dy)
    step_x, step_y = np.where(dx < 0, -1, 1), np.where(dy < 0, -1, 1)
    # ray length from the start to the next grid line
    next_x = np.where(dx < 0, x - column, column + 1 - x) * length_x
    next_y = np.where(dy < 0, y - row, row + 1 - y) * length_y
    hit_horizontal = np.zeros(len(x), bool)  # last crossed a horizontal grid line
    active = np.ones(len(x), bool)
    while active.any():
        along_x = next_x < next_y
        move_x, move_y = active & along_x, active & ~along_x
        next_x = np.where(move_x, next_x + length_x, next_x)
        next_y = np.where(move_y, next_y + length_y, next_y)
        column = np.where(move_x, column + step_x, column)
        row = np.where(move_y, row + step_y, row)
        hit_horizontal = np.where(active, ~along_x, hit_horizontal)
        inside = (row >= 0) & (row < MAP.shape[0])
        inside &= (column >= 0) & (column < MAP.shape[1])
        wall = ~inside
        wall[inside] = MAP[row[inside], column[inside]] > 0
        active &= ~wall
    distance = np.where(hit_horizontal, next_y, next_x) - np.where(
        hit_horizontal, length_y, length_x
    )
    row, column = np.clip(row, 0, len(MAP) - 1), np.clip(column, 0, MAP.shape[1] - 1)
    # Walls along x are darker than walls along y, and distant ones than near ones.
    shade = np.where(hit_horizontal, 0.7, 1.0) / (1 + 0.1 * distance)
    color = COLORS[MAP[row, column]] * shade[:, None]

    height = (side / (distance + 1e-6)).astype(np.int64)
    top = np.maximum(0, (side - height) // 2)[:, None]
    bottom = np.minimum(side, (side + height) // 2)[:, None]
    pixel_row = np.arange(side)
    values = np.where((pixel_row < top)[..., None], CEILING, FLOOR)
    is_wall_pixel = ((pixel_row >= top) & (pixel_row < bottom))[..., None]
    values = np.where(is_wall_pixel, color[:, None], values)  # (T side, side, 3)
    pixels = (np.clip(values, 0, 1) * 255).astype(np.uint8)
    return pixels.reshape(len(pose), side, side, 3).transpose(0, 2, 1, 3).copy()


class NumpyRandomSource:
    """`RandomSource` from a NumPy generator."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def randint(self, low: int, high: int) -> int:
        return int(self.rng.integers(low, high))

    def choice(self, options: list[float]) -> float:
        return options[int(self.rng.integers(len(options)))]

    def normal(self, mean: float, std: float) -> float:
        return float(self.rng.normal(mean, std))


def make_episode(rng: RandomSource, length: int) -> Arrays:
    """Return the arrays of the file of a new episode."""
    trajectory = simulate(rng, length)
    return {
        "video": render_maze(trajectory.pose),
        "actions": trajectory.actions.astype(np.int64),
        "pose": trajectory.pose.astype(np.float32),
        "junction": trajectory.junction,
    }


def write_maze(
    folder: Path,
    train: int = 1000,
    test: int = 100,
    length: int = LENGTH,
    seed: int = 0,
) -> int:
    """Write episodes for the task `sequences_maze`; return their number."""
    for number, (name, count) in enumerate((("train", train), ("test", test))):
        subfolder = folder / name
        make_folder(subfolder, parents=True)
        for index in range(count):
            rng = NumpyRandomSource(make_rng(seed, number, index))
            episode = make_episode(rng, length)
            save_arrays(subfolder / f"episode_{index:05d}.npz", episode)
    return train + test


def read_maze_episode(path: Path, window: int, actions: bool = True) -> Arrays:
    """Return image, actions and events of a file; raise `ValueError` if invalid."""
    data = load_arrays(path)
    for key in ("video", "actions") if actions else ("video",):
        if key not in data:
            raise ValueError(f"has no {key!r}, only {', '.join(data) or 'nothing'}")
    video = data["video"]
    if video.ndim != 4 or video.shape[-1] != 3 or 0 in video.shape[1:]:
        raise ValueError(f"'video' has shape {video.shape}, expected (T, h, w, 3)")
    if video.dtype.kind == "f" and not np.isfinite(video).all():
        raise ValueError("'video' has NaN or infinite entries")
    if video.dtype != np.uint8:
        raise ValueError(f"'video' is {video.dtype}, expected uint8 from 0 to 255")
    if len(video) < window:
        raise ValueError(f"has {len(video)} frames, fewer than the window of {window}")
    rows = {"image": _resize(video, SIDE)}
    if actions:
        rows["action"] = _check_actions(data["actions"], len(video))
    if "junction" in data:
        junction = data["junction"]
        if junction.shape != video.shape[:1] or junction.dtype.kind not in "biu":
            raise ValueError(
                f"'junction' is {junction.dtype} {junction.shape}, expected bool "
                f"({len(video)},)"
            )
        junction = junction.astype(bool)
        rows[EVENT] = junction & ~np.concatenate([junction[:1], junction[:-1]])
    return rows


def _check_actions(actions: np.ndarray, frames: int) -> np.ndarray:
    if actions.shape != (frames,):
        raise ValueError(f"'actions' has shape {actions.shape}, expected ({frames},)")
    if actions.dtype.kind not in "iu" or not ((actions >= 0) & (actions < 3)).all():
        raise ValueError("'actions' must be integers from 0 to 2")
    return actions.astype(np.int64)


def _resize(video: UInt8[np.ndarray, "T h w 3"], side: int) -> np.ndarray:
    """Resize frames to squares by bilinear interpolation."""
    if video.shape[1:3] == (side, side):
        return video
    import torch
    from torch.nn.functional import interpolate

    frames = torch.from_numpy(np.array(video)).movedim(-1, 1).float()
    small = interpolate(frames, (side, side), mode="bilinear", align_corners=False)
    return small.round().clamp(0, 255).to(torch.uint8).movedim(1, -1).numpy()


def add_maze(
    episodes: StoredEpisodes, folder: Path, window: int, actions: bool = True
) -> list[int]:
    """Add all valid episodes of a folder and return their indices; warn about others.

    Raises `UserError` if no episode is valid.
    """
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise UserError(
            f"{folder} has no episodes (*.npz).\n  Fix: {_advice(folder, window)}, "
            "or use another --sequences.folder"
        )
    indices, errors = [], []
    for path in paths:
        read = functools.partial(read_maze_episode, path, window, actions)
        try:
            indices.append(episodes.add(str(path), read))
        except ValueError as error:
            errors.append(f"{path} {error}")
            warnings.warn(f"{errors[-1]}; skipped", RuntimeWarning, stacklevel=2)
    if not indices:
        fix = _advice(folder, window)
        if "no 'actions'" in errors[0]:
            fix = f"--sequences.actions False trains without actions; or {fix}"
        raise UserError(
            f"None of the {len(paths)} episodes in {folder} can be used: {errors[0]}.\n"
            f"  Fix: {fix}"
        )
    return indices


def _advice(folder: Path, window: int) -> str:
    """Return how to generate episodes without overwriting existing files."""
    parent = folder.parent
    length = f" --length {window}" if window > LENGTH else ""
    if next(parent.glob("*/*.npz"), None) is None:
        return f"generate some with `reverie data maze --out {parent}{length}`"
    other = parent / "maze"
    command = f"reverie data maze --out {other}{length}"
    return f"generate new ones with `{command}`, and use --sequences.folder {other}"


class Maze(WindowedEpisodes):
    """A `SequenceDataset` of maze episodes, with their actions unless disabled."""

    loss: Loss = "gaussian"

    def __init__(self, config: SequenceConfig, window: Window, seed: int):
        self.obs_space: Spaces = {"image": Space(np.uint8, (SIDE, SIDE, 3), 0, 256)}
        self.act_space: Spaces = {}
        if config.actions:
            self.act_space["action"] = Space(np.int64, (), 0, 3)
        length = window.context + window.length
        self.folder = Path(config.folder or "data/maze").expanduser()
        episodes = StoredEpisodes(config.memory)
        train, test = (
            add_maze(episodes, self.folder / part, length, config.actions)
            for part in ("train", "test")
        )
        super().__init__(episodes, train, test, config, window, seed)
