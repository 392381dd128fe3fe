"""Marks of strips and films stand at their own frames."""

from __future__ import annotations

import numpy as np
import pytest

from reverie.render.boundaries import (
    BAR,
    BORDER,
    EVENT,
    FOUND,
    GAP,
    PAPER,
    QUIET,
    dream_strip,
    sequence_strip,
    sequence_video,
)

SIDE, STEPS = 8, 5
TILE = SIDE + 2 * BORDER + GAP
FRAME = slice(BORDER, BORDER + SIDE)


def frames(shift: int = 0) -> np.ndarray:
    """Frame t is grey of shade 10 t, so that each is known by its colour."""
    shades = (10 * np.arange(STEPS) + shift).astype(np.uint8)
    return np.broadcast_to(shades[None, :, None, None, None], (1, STEPS, SIDE, SIDE, 3))


def at(*steps: int) -> np.ndarray:
    return np.isin(np.arange(STEPS), steps)[None]


def tile(picture: np.ndarray, row: int, step: int) -> np.ndarray:
    top, left = row * TILE, step * TILE
    return picture[top : top + TILE, left : left + TILE]


@pytest.mark.parametrize("step", range(STEPS))
def test_an_event_and_a_boundary_frame_the_very_frame_they_are_about(step):
    other = (step + 1) % STEPS
    chance = np.where(at(other), 1.0, 0.25)
    strip = sequence_strip(frames(), frames(100), at(other), chance, at(step))
    for t in range(STEPS):
        truth, drawn = tile(strip, 0, t), tile(strip, 1, t)
        assert (truth[FRAME, FRAME] == 10 * t).all()
        assert (drawn[FRAME, FRAME] == 10 * t + 100).all()
        assert tuple(truth[0, 0]) == (EVENT if t == step else PAPER)
        assert tuple(drawn[0, 0]) == (FOUND if t == other else PAPER)
    # Below are two rows of bars, of events and of chances.
    middle = TILE // 2
    events = strip[2 * TILE]
    low = strip[2 * TILE + BAR // 3 + GAP + BAR - 1]
    high = strip[2 * TILE + BAR // 3 + GAP]
    for t in range(STEPS):
        column = t * TILE + middle
        assert tuple(events[column]) == (EVENT if t == step else PAPER)
        assert tuple(low[column]) == (FOUND if t == other else QUIET)
        assert tuple(high[column]) == (FOUND if t == other else PAPER)


def test_without_events_there_is_no_bar_for_them():
    chance = np.zeros((1, STEPS))
    known = sequence_strip(frames(), frames(), at(0), chance, at(2))
    plain = sequence_strip(frames(), frames(), at(0), chance)
    assert len(known) - len(plain) == BAR // 3 + GAP


def test_a_film_frames_its_marks_when_they_happen():
    film = sequence_video(frames(), frames(100), at(3), at(1))
    assert film.shape == (STEPS, 2 * TILE, TILE, 3)
    for t in range(STEPS):
        assert tuple(film[t, 0, 0]) == (EVENT if t == 1 else PAPER)
        assert tuple(film[t, TILE, 0]) == (FOUND if t == 3 else PAPER)
        assert (film[t, FRAME, FRAME] == 10 * t).all()


def test_dreams_show_where_their_segments_begin():
    strip = dream_strip(frames(), at(0, 3))
    framed = [tuple(tile(strip, 0, t)[0, 0]) == FOUND for t in range(STEPS)]
    assert framed == [True, False, False, True, False]


def test_sequences_are_below_each_other_in_strips_and_side_by_side_in_films():
    two, marks, chance = np.concatenate([frames(), frames(50)]), at(0), np.zeros((2, 5))
    marks = np.concatenate([marks, marks])
    film = sequence_video(two, two, marks)
    assert film.shape == (STEPS, 2 * TILE, 2 * TILE, 3)
    assert (film[2, FRAME, FRAME] == 20).all()
    assert (film[2, TILE:, TILE:][FRAME, FRAME] == 70).all()
    alone = sequence_strip(two[:1], two[:1], marks[:1], chance[:1])
    both = sequence_strip(two, two, marks, chance)
    second = both[len(alone) + 3 * GAP :]
    assert np.array_equal(both[: len(alone)], alone)
    assert second.shape == alone.shape
    assert (tile(second, 0, 2)[FRAME, FRAME] == 70).all()
    grey = sequence_strip(two[..., :1], two[..., :1], marks, chance)
    assert np.array_equal(grey, both)
