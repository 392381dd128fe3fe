"""Bouncing balls and the maze against recordings of the programs that made them."""

from __future__ import annotations

import numpy as np
import pytest
from vta_recording import groups, load, under

from reverie.datasets.synthetic import balls, maze

BALLS, MAZE = load("bouncing_balls"), load("maze")


@pytest.mark.parametrize("case", groups(BALLS, "dt"))
def test_balls_move_bounce_and_are_drawn_as_recorded(case):
    data = under(BALLS, f"{case}/")
    dt, seed = case.removeprefix("dt").split("_seed")
    draws = balls.LegacyDraws(int(seed))
    count, length = data["hits"].shape
    for i in range(count):
        track = balls.simulate(draws, 1, length, float(dt))
        np.testing.assert_allclose(track.pos[0], data["pos"][i], atol=1e-9)
        np.testing.assert_allclose(track.vel[0], data["vel"][i], atol=1e-9)
        np.testing.assert_array_equal(track.colour[0], data["color_idx"][i])
        np.testing.assert_array_equal(track.hit[0], data["hits"][i] > 0)
        frames = balls.draw(track.pos, track.colour)[0]
        np.testing.assert_array_equal(frames, data["frames"][i])


def test_the_palette_is_the_recorded_one():
    np.testing.assert_array_equal(balls.PALETTE, BALLS["palette"])


@pytest.mark.parametrize("case", groups(MAZE, "seed"))
def test_walks_through_the_maze_are_the_recorded_ones(case):
    data = under(MAZE, f"{case}/")
    rng = np.random.RandomState(int(case.removeprefix("seed")))
    walk = maze.walk(rng, len(data["actions"]))
    np.testing.assert_allclose(walk.pose, data["pose"], atol=1e-9)
    np.testing.assert_array_equal(walk.actions, data["actions"])
    np.testing.assert_array_equal(walk.permitted, data["permissible"])
    np.testing.assert_array_equal(walk.junction, data["is_intersection"])


@pytest.mark.parametrize("case", groups(MAZE, "seed"))
def test_the_maze_looks_as_recorded(case):
    data = under(MAZE, f"{case}/")
    frames = maze.draw(data["pose"], data["frames"].shape[1])
    gap = np.abs(frames.astype(int) - data["frames"])
    assert gap.max() <= 1


def test_the_map_is_the_recorded_one():
    np.testing.assert_array_equal(maze.MAP, MAZE["map"])
