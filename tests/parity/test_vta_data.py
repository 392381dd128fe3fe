"""Bouncing balls and the maze against recordings of the original generators."""

from __future__ import annotations

import numpy as np
import pytest
from vta_recording import groups, load, under

from reverie.datasets.synthetic import balls, maze

BALLS, MAZE = load("bouncing_balls"), load("maze")


class LegacyBallSampler(balls.BallSampler):
    """Samples one sequence at a time from the stream of `np.random.seed`.

    The stream depends on the simulation: a color is sampled only for a ball that hit.
    """

    def __init__(self, seed: int):
        self.rng = np.random.RandomState(seed)
        self.start(1)  # the recorded program resets once before it begins

    def start(self, count):
        assert count == 1
        pos = self.rng.uniform(balls.RADIUS, balls.SIDE - balls.RADIUS, (2, 2))
        vel = self.rng.randn(2, 2)
        color = np.array([self.rng.randint(len(balls.PALETTE)) for _ in range(2)])
        return pos[None], vel[None], color[None]

    def noise(self, count):
        return self.rng.randn(2, 2)[None]

    def new_color(self, hit):
        others = len(balls.PALETTE) - 1
        return np.array([[self.rng.randint(others) if h else 0 for h in hit[0]]])


@pytest.mark.parametrize("case", groups(BALLS, "dt"))
def test_simulated_and_rendered_balls_match_the_recording(case):
    data = under(BALLS, f"{case}/")
    dt, seed = case.removeprefix("dt").split("_seed")
    sampler = LegacyBallSampler(int(seed))
    count, length = data["hits"].shape
    for i in range(count):
        track = balls.simulate(sampler, 1, length, float(dt))
        np.testing.assert_allclose(track.pos[0], data["pos"][i], atol=1e-9)
        np.testing.assert_allclose(track.vel[0], data["vel"][i], atol=1e-9)
        np.testing.assert_array_equal(track.color[0], data["color_idx"][i])
        np.testing.assert_array_equal(track.hit[0], data["hits"][i] > 0)
        frames = balls.render_balls(track.pos, track.color)[0]
        np.testing.assert_array_equal(frames, data["frames"][i])


def test_the_palette_is_the_recorded_one():
    np.testing.assert_array_equal(balls.PALETTE, BALLS["palette"])


@pytest.mark.parametrize("case", groups(MAZE, "seed"))
def test_maze_trajectories_match_the_recording(case):
    data = under(MAZE, f"{case}/")
    rng = np.random.RandomState(int(case.removeprefix("seed")))
    trajectory = maze.simulate(rng, len(data["actions"]))
    np.testing.assert_allclose(trajectory.pose, data["pose"], atol=1e-9)
    np.testing.assert_array_equal(trajectory.actions, data["actions"])
    np.testing.assert_array_equal(trajectory.permitted, data["permissible"])
    np.testing.assert_array_equal(trajectory.junction, data["is_intersection"])


@pytest.mark.parametrize("case", groups(MAZE, "seed"))
def test_rendered_maze_frames_match_the_recording(case):
    data = under(MAZE, f"{case}/")
    frames = maze.render_maze(data["pose"], data["frames"].shape[1])
    gap = np.abs(frames.astype(int) - data["frames"])
    assert gap.max() <= 1


def test_the_map_is_the_recorded_one():
    np.testing.assert_array_equal(maze.MAP, MAZE["map"])
