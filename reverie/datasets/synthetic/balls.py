"""Two balls that change colour when they hit a wall: where they do, a segment ends.

The balls are diamonds of radius 3 on 32 x 32 black pixels. They pass through each other
(the second is painted over the first), their velocity is disturbed at every step, and a
ball that reaches a wall is put on it, turned around, and given one of the eight other
colours. Frame t of a sequence is an event if any ball hit a wall on the way to it; the
new colour is already visible there. The first frame never is one.

Many sequences are simulated at once. The draws are an argument, so that the same
physics also replays recorded streams (`LegacyDraws`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from reverie.api import UserError
from reverie.datasets.readers import npz
from reverie.datasets.sequences import Arrays, Loss, SourceConfig
from reverie.datasets.synthetic.chunks import Chunks, generator
from reverie.rows import Window
from reverie.spaces import EVENT, Space, Spaces

SIDE, RADIUS, BALLS = 32, 3, 2
SPEED, NOISE = 1.5, 0.1
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
"""Three bytes as one value, which is moved at once."""


class Draws(Protocol):
    """Where positions, disturbances and colours come from, for N sequences."""

    def start(
        self, count: int
    ) -> tuple[
        Float[np.ndarray, "N 2 2"], Float[np.ndarray, "N 2 2"], Int[np.ndarray, "N 2"]
    ]: ...

    def noise(self, count: int) -> Float[np.ndarray, "N 2 2"]: ...

    def recolour(self, hit: Bool[np.ndarray, "N 2"]) -> Int[np.ndarray, "N 2"]: ...


class Track(NamedTuple):
    """What happened, before anybody drew it."""

    pos: Float[np.ndarray, "N T 2 2"]  # ball, then x and y
    vel: Float[np.ndarray, "N T 2 2"]
    colour: Int[np.ndarray, "N T 2"]
    hit: Bool[np.ndarray, "N T"]


class FreshDraws:
    """From a generator, for all sequences at once."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng

    def start(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        pos = self.rng.uniform(RADIUS, SIDE - RADIUS, (count, BALLS, 2))
        vel = self.rng.standard_normal((count, BALLS, 2))
        return pos, vel, self.rng.integers(len(PALETTE), size=(count, BALLS))

    def noise(self, count: int) -> Float[np.ndarray, "N 2 2"]:
        return self.rng.standard_normal((count, BALLS, 2))

    def recolour(self, hit: Bool[np.ndarray, "N 2"]) -> Int[np.ndarray, "N 2"]:
        return self.rng.integers(len(PALETTE) - 1, size=hit.shape)


class LegacyDraws:
    """One sequence at a time from the stream of `np.random.seed`.

    That stream depends on what happens: a colour is drawn only for a ball that hit.
    """

    def __init__(self, seed: int):
        self.rng = np.random.RandomState(seed)
        self.start(1)  # the recorded program resets once before it begins

    def start(self, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert count == 1
        pos = self.rng.uniform(RADIUS, SIDE - RADIUS, (BALLS, 2))
        vel = self.rng.randn(BALLS, 2)
        colour = np.array([self.rng.randint(len(PALETTE)) for _ in range(BALLS)])
        return pos[None], vel[None], colour[None]

    def noise(self, count: int) -> Float[np.ndarray, "N 2 2"]:
        return self.rng.randn(BALLS, 2)[None]

    def recolour(self, hit: Bool[np.ndarray, "N 2"]) -> Int[np.ndarray, "N 2"]:
        draws = [self.rng.randint(len(PALETTE) - 1) if h else 0 for h in hit[0]]
        return np.array([draws])


def simulate(draws: Draws, count: int, length: int, dt: float) -> Track:
    """Follow the balls of `count` sequences for `length` frames."""
    pos, vel, colour = draws.start(count)
    vel = vel / (np.linalg.norm(vel, axis=-1, keepdims=True) + 1e-8) * SPEED
    rows = [(pos, vel, colour, np.zeros(count, bool))]
    low, high = RADIUS, SIDE - RADIUS
    for _ in range(length - 1):
        pos = pos + vel * dt
        vel = vel + draws.noise(count) * NOISE
        outside = (pos <= low) | (pos >= high)
        pos = np.clip(pos, low, high)
        vel = np.where(outside, -vel, vel)
        hit = outside.any(-1)
        other = draws.recolour(hit)
        other = other + (other >= colour)  # the palette without the present colour
        colour = np.where(hit, other, colour)
        rows.append((pos, vel, colour, hit.any(-1)))
    return Track(*(np.stack(parts, 1) for parts in zip(*rows, strict=True)))


def draw(
    pos: Float[np.ndarray, "N T 2 2"], colour: Int[np.ndarray, "N T 2"]
) -> UInt8[np.ndarray, "N T 32 32 3"]:
    """The frames: every pixel within three steps of a ball's has its colour."""
    side = SIDE + 1  # a ball on the far wall reaches one pixel beyond the picture
    reach = np.arange(-RADIUS, RADIUS + 1)
    dy, dx = (near.ravel() for near in np.meshgrid(reach, reach, indexing="ij"))
    stamp = (dy * side + dx)[np.abs(dx) + np.abs(dy) <= RADIUS]
    count = colour[..., 0].size
    pixels = np.zeros(count * side * side, PIXEL)
    first = np.arange(count) * side * side
    x, y = pos.astype(np.int64).reshape(count, BALLS, 2).transpose(2, 1, 0)
    paint = PALETTE.view(PIXEL)[colour.reshape(count, BALLS).T, 0]
    for ball in range(BALLS):
        centre = first + y[ball] * side + x[ball]
        for offset in stamp:
            pixels[centre + offset] = paint[ball]
    frames = pixels.view(np.uint8).reshape(*colour.shape[:2], side, side, 3)
    return np.ascontiguousarray(frames[:, :, :SIDE, :SIDE])


def make_sequences(
    rng: np.random.Generator, count: int, length: int, dt: float
) -> Arrays:
    """Frames and events; a few hundred sequences at a time, so that others may run."""
    image = np.empty((count, length, SIDE, SIDE, 3), np.uint8)
    event = np.empty((count, length), bool)
    draws = FreshDraws(rng)
    for start in range(0, count, 256):
        rows = slice(start, min(start + 256, count))
        track = simulate(draws, rows.stop - rows.start, length, dt)
        image[rows], event[rows] = draw(track.pos, track.colour), track.hit
    return {"image": image, EVENT: event}


def shrink(made: Arrays, side: int) -> Arrays:
    """The same sequences in pictures of fewer pixels, each the mean of a square."""
    image = made["image"]
    if side == SIDE:
        return made
    squares = image.reshape(*image.shape[:2], side, SIDE // side, side, SIDE // side, 3)
    return {**made, "image": squares.mean((3, 5)).round().astype(np.uint8)}


def write_balls(
    folder: Path,
    train: int = 2000,
    test: int = 500,
    length: int = 30,
    seed: int = 0,
    dt: float = 2.0,
) -> int:
    """Write `train.npz` and `test.npz` for `--source.folder`; returns how many."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (name, count) in enumerate((("train", train), ("test", test))):
        made = make_sequences(generator(seed, number), count, length, dt)
        arrays = {"image": made["image"], "event": made[EVENT]}
        npz.save(folder / f"{name}.npz", arrays)
    return train + test


def read_balls(path: Path, length: int, least: int = 1) -> Arrays:
    """The first `length` frames of all sequences of such a file, `least` or more."""
    if not path.is_file():
        raise UserError(
            f"There is no file {path}.\n"
            f"  Fix: write it with `reverie data balls --out {path.parent}`"
        )
    other = path.parent / "balls"  # a file may be all that somebody has
    command = f"reverie data balls --out {other}"
    fix = f"write others with `{command}`, and give --source.folder {other}"
    try:
        data = npz.load(path)
    except ValueError as error:
        raise UserError(f"{path} {error}.\n  Fix: {fix}") from None
    if missing := [key for key in ("image", "event") if key not in data]:
        found = ", ".join(data) or "nothing"
        raise UserError(f"{path} has no {missing[0]!r}, only {found}.\n  Fix: {fix}")
    image, event = data["image"], data["event"]
    shape = (SIDE, SIDE, 3)
    if image.dtype != np.uint8 or image.shape[2:] != shape:
        raise UserError(
            f"{path}: 'image' is {image.dtype} {image.shape}, wanted uint8 "
            f"(N, T, 32, 32, 3).\n  Fix: {fix}"
        )
    if event.dtype.kind not in "biu" and not np.isin(event, (0, 1)).all():
        raise UserError(f"{path}: 'event' is {event.dtype}, wanted bool.\n  Fix: {fix}")
    if event.shape != image.shape[:2] or image.shape[1] < length:
        raise UserError(
            f"{path} has sequences of {image.shape[1]} frames and events "
            f"{event.shape}, a window has {length} frames.\n"
            f"  Fix: write others with `{command} --length {length}`, and give "
            f"--source.folder {other}"
        )
    if len(image) < least:
        raise UserError(
            f"{path} holds {len(image)} sequences, at least {least} are needed.\n"
            f"  Fix: write others with `{command} --{path.stem} {least}`, and "
            f"give --source.folder {other}, or a smaller --vta.batch_size"
        )
    return {"image": image[:, :length], EVENT: event[:, :length].astype(bool)}


class Balls:
    """Sequences without actions, made up as they are needed, or read from a folder."""

    loss: Loss = "bernoulli"

    def __init__(self, config: SourceConfig, window: Window, seed: int):
        side = config.side
        self.obs_space: Spaces = {"image": Space(np.uint8, (side, side, 3), 0, 256)}
        self.act_space: Spaces = {}
        self.config, length = config, window.context + window.length
        self._held: Arrays | None = None

        def make(rng: np.random.Generator, count: int) -> Arrays:
            return shrink(make_sequences(rng, count, length, config.dt), side)

        if config.folder:
            folder = Path(config.folder).expanduser()
            train = read_balls(folder / "train.npz", length, window.batch)
            known = shrink(train, side)
            self._held = shrink(read_balls(folder / "test.npz", length), side)
            size = len(known["image"])
            self._chunks = Chunks(lambda *_: known, size, 0, window.batch, seed)
        else:
            size, refresh = config.chunk, config.refresh
            self._chunks = Chunks(make, size, refresh, window.batch, seed)

    def batch(self, step: int) -> Arrays:
        return self._chunks.batch(step)

    def evaluation(self) -> Arrays:
        if self._held is not None:
            return {k: v[: self.config.evaluation] for k, v in self._held.items()}
        return self._chunks.evaluation(self.config.evaluation)

    def close(self) -> None:
        self._chunks.close()
