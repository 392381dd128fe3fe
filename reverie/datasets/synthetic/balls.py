"""Bouncing balls: two balls that change color when they hit a wall.

The balls are diamonds of radius 3 on a black image of 32 x 32 pixels. They pass through
each other (the second is drawn over the first), and Gaussian noise is added to their
velocity at every step. A ball that reaches a wall is placed on it, reflected, and gets
one of the eight other colors. Frame t is an event if a ball hit a wall between t - 1
and t; its new color is visible in frame t. The first frame is never an event.

Many sequences are simulated at once. Random numbers come from a `BallSampler`, which
tests replace to use recorded random numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from reverie.api import UserError
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.readers.npz import load_arrays, save_arrays
from reverie.datasets.rng import make_rng
from reverie.datasets.sequences import Loss, SequenceConfig
from reverie.datasets.synthetic.chunks import ChunkedSequences
from reverie.rows import Window
from reverie.spaces import EVENT, Arrays, Space, Spaces
from reverie.storage.atomic import make_folder

SIDE, RADIUS, BALLS = 32, 3, 2
"""Side of the image and radius of a ball in pixels, and number of balls."""
SPEED, NOISE = 1.5, 0.1
"""Initial speed in pixels per unit of time, and standard deviation of the noise that is
added to each velocity per frame."""
PALETTE = np.array(
    [
        (255, 0, 0),
        (0, 255, 0),
        (0, 0, 255),
        (255, 255, 0),
        (255, 0, 255),
        (0, 255, 255),
        (255, 128, 0),
        (128, 0, 128),
        (0, 128, 128),
    ],
    np.uint8,
)

PIXEL = np.dtype("V3")
"""The three bytes of a pixel as one value, so that they are assigned together."""


class Trajectories(NamedTuple):
    """Simulated balls, before rendering."""

    pos: Float[np.ndarray, "N T 2 2"]  # ball, then x and y
    vel: Float[np.ndarray, "N T 2 2"]
    color: Int[np.ndarray, "N T 2"]
    hit: Bool[np.ndarray, "N T"]


class BallSampler:
    """Samples initial states, velocity noise and colors for N sequences at once."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def start(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return positions (N, 2, 2), velocities (N, 2, 2) and colors (N, 2)."""
        pos = self.rng.uniform(RADIUS, SIDE - RADIUS, (count, BALLS, 2))
        vel = self.rng.standard_normal((count, BALLS, 2))
        return pos, vel, self.rng.integers(len(PALETTE), size=(count, BALLS))

    def noise(self, count: int) -> Float[np.ndarray, "N 2 2"]:
        """Return standard normal noise of the velocities."""
        return self.rng.standard_normal((count, BALLS, 2))

    def new_color(self, hit: Bool[np.ndarray, "N 2"]) -> Int[np.ndarray, "N 2"]:
        """Return an index into the colors other than the current one."""
        return self.rng.integers(len(PALETTE) - 1, size=hit.shape)


def simulate(sampler: BallSampler, count: int, length: int, dt: float) -> Trajectories:
    """Simulate `count` sequences of `length` frames, with time `dt` between frames."""
    pos, vel, color = sampler.start(count)
    vel = vel / (np.linalg.norm(vel, axis=-1, keepdims=True) + 1e-8) * SPEED
    rows = [(pos, vel, color, np.zeros(count, bool))]
    low, high = RADIUS, SIDE - RADIUS
    for _ in range(length - 1):
        pos = pos + vel * dt
        vel = vel + sampler.noise(count) * NOISE
        outside = (pos <= low) | (pos >= high)
        pos = np.clip(pos, low, high)
        vel = np.where(outside, -vel, vel)
        hit = outside.any(-1)
        new_color = sampler.new_color(hit)
        new_color = new_color + (new_color >= color)  # skips the current color
        color = np.where(hit, new_color, color)
        rows.append((pos, vel, color, hit.any(-1)))
    return Trajectories(*(np.stack(parts, 1) for parts in zip(*rows, strict=True)))


def render_balls(
    pos: Float[np.ndarray, "N T 2 2"], color: Int[np.ndarray, "N T 2"]
) -> UInt8[np.ndarray, "N T 32 32 3"]:
    """Draw the frames: pixels at Manhattan distance up to 3 have the ball's color."""
    side = SIDE + 1  # a ball on the far wall extends one pixel beyond the image
    near = np.arange(-RADIUS, RADIUS + 1)
    dy, dx = (grid.ravel() for grid in np.meshgrid(near, near, indexing="ij"))
    offsets = (dy * side + dx)[np.abs(dx) + np.abs(dy) <= RADIUS]
    count = color[..., 0].size
    pixels = np.zeros(count * side * side, PIXEL)
    frame_start = np.arange(count) * side * side
    x, y = pos.astype(np.int64).reshape(count, BALLS, 2).transpose(2, 1, 0)
    values = PALETTE.view(PIXEL)[color.reshape(count, BALLS).T, 0]
    for ball in range(BALLS):
        center = frame_start + y[ball] * side + x[ball]
        for offset in offsets:
            pixels[center + offset] = values[ball]
    frames = pixels.view(np.uint8).reshape(*color.shape[:2], side, side, 3)
    return np.ascontiguousarray(frames[:, :, :SIDE, :SIDE])


def make_sequences(
    rng: np.random.Generator, count: int, length: int, dt: float
) -> Arrays:
    """Generate frames and events, 256 sequences at a time so that other threads can
    run in between."""
    image = np.empty((count, length, SIDE, SIDE, 3), np.uint8)
    event = np.empty((count, length), bool)
    sampler = BallSampler(rng)
    for start in range(0, count, 256):
        rows = slice(start, min(start + 256, count))
        balls = simulate(sampler, rows.stop - rows.start, length, dt)
        image[rows], event[rows] = render_balls(balls.pos, balls.color), balls.hit
    return {"image": image, EVENT: event}


def downscale(sequences: Arrays, side: int) -> Arrays:
    """Return the sequences with smaller images, each pixel the mean of a square."""
    image = sequences["image"]
    if side == SIDE:
        return sequences
    squares = image.reshape(*image.shape[:2], side, SIDE // side, side, SIDE // side, 3)
    return {**sequences, "image": squares.mean((3, 5)).round().astype(np.uint8)}


def write_balls(
    folder: Path,
    train: int = 2000,
    test: int = 500,
    length: int = 30,
    seed: int = 0,
    dt: float = 2.0,
) -> int:
    """Write `train.npz` and `test.npz`; return the number of sequences."""
    make_folder(folder, parents=True)
    for number, (name, count) in enumerate((("train", train), ("test", test))):
        sequences = make_sequences(make_rng(seed, number), count, length, dt)
        arrays = {"image": sequences["image"], "event": sequences[EVENT]}
        save_arrays(folder / f"{name}.npz", arrays)
    return train + test


def read_balls(path: Path, length: int, minimum: int = 1) -> Arrays:
    """Return the first `length` frames of all sequences in a file of `write_balls`."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist.\n"
            f"  Fix: write it with `reverie data balls --out {path.parent}`"
        )
    other = path.parent / "balls"  # do not suggest to overwrite existing files

    def error(problem: str, options: str = "", alternative: str = "") -> UserError:
        return UserError(
            f"{path} {problem}.\n  Fix: write new files with `reverie data balls --out "
            f"{other}{options}`, and use --sequences.folder {other}{alternative}"
        )

    try:
        data = load_arrays(path)
    except BadEpisode as reason:
        raise error(str(reason)) from None
    if missing := [key for key in ("image", "event") if key not in data]:
        raise error(f"has no {missing[0]!r}, only {', '.join(data) or 'nothing'}")
    image, event = data["image"], data["event"]
    if image.dtype != np.uint8 or image.shape[2:] != (SIDE, SIDE, 3):
        kind = f"{image.dtype} {image.shape}"
        raise error(f"has an 'image' of {kind}, expected uint8 (N, T, 32, 32, 3)")
    if event.dtype.kind not in "biu" and not np.isin(event, (0, 1)).all():
        raise error(f"has an 'event' of {event.dtype}, expected bool")
    if event.shape != image.shape[:2] or image.shape[1] < length:
        raise error(
            f"has sequences of {image.shape[1]} frames and events of shape "
            f"{event.shape}, the window needs {length} frames",
            f" --length {length}",
        )
    if len(image) < minimum:
        raise error(
            f"has {len(image)} sequences, at least {minimum} are needed",
            f" --{path.stem} {minimum}",
            ", or a smaller batch size of the agent",
        )
    return {"image": image[:, :length], EVENT: event[:, :length].astype(bool)}


class BouncingBalls:
    """A `SequenceDataset` without actions, generated or read from a folder."""

    loss: Loss = "bernoulli"

    def __init__(self, config: SequenceConfig, window: Window, seed: int):
        side = config.side
        self.obs_space: Spaces = {"image": Space(np.uint8, (side, side, 3), 0, 256)}
        self.act_space: Spaces = {}
        self.config, length = config, window.context + window.length
        self._test: Arrays | None = None

        def generate(rng: np.random.Generator, count: int) -> Arrays:
            return downscale(make_sequences(rng, count, length, config.dt), side)

        if config.folder:
            folder = Path(config.folder).expanduser()
            train = read_balls(folder / "train.npz", length, window.batch)
            sequences = downscale(train, side)
            self._test = downscale(read_balls(folder / "test.npz", length), side)
            self._chunks = ChunkedSequences(
                lambda *_: sequences, len(sequences["image"]), 0, window.batch, seed
            )
        else:
            size, refresh = config.chunk, config.refresh
            self._chunks = ChunkedSequences(generate, size, refresh, window.batch, seed)

    @staticmethod
    def unused_settings(config: SequenceConfig) -> dict[str, str]:
        unused = {
            "actions": "bouncing balls have no actions",
            "memory": "all sequences of a file or chunk are in memory",
        }
        if config.folder:
            reason = "the sequences are read from files"
            unused |= dict.fromkeys(("chunk", "refresh", "dt"), reason)
        return unused

    def batch(self, step: int) -> Arrays:
        return self._chunks.batch(step)

    def evaluation(self) -> Arrays:
        if self._test is not None:
            return {k: v[: self.config.evaluation] for k, v in self._test.items()}
        return self._chunks.evaluation(self.config.evaluation)

    def close(self) -> None:
        self._chunks.close()
