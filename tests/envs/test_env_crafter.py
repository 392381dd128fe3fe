"""Crafter: the stock worlds, faster, and the same game for the same seed anywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from reverie.envs import CrafterConfig
from reverie.envs.crafter import ACHIEVEMENTS, Crafter

pytest.importorskip("crafter")

PLAY = """
import hashlib
import numpy as np
from reverie.envs.crafter import Crafter
litter = [object() for _ in range({litter})]  # other addresses, other set orders
env, rng, digest = Crafter(seed=0), np.random.default_rng(0), hashlib.sha256()
env.reset(seed=3)
for _ in range(400):
    row = env.step({{"action": rng.integers(17)}})
    digest.update(row["image"].tobytes())
    digest.update(str(row["reward"]).encode())
    if row["is_last"]:
        env.reset()
print(digest.hexdigest())
"""


def test_two_processes_play_the_same_game() -> None:
    outputs = []
    for litter in (0, 12345):
        done = subprocess.run(
            [sys.executable, "-c", PLAY.format(litter=litter)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(litter)},
        )
        assert not done.returncode, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("seed", [0, 3, 11])
def test_worlds_are_those_of_the_stock_generator(seed: int) -> None:
    from crafter import constants, engine, objects, worldgen

    from reverie.envs.terrain import generate_world

    found = []
    for generate in (worldgen.generate_world, generate_world):
        world = engine.World((64, 64), constants.materials, (12, 12))
        world.reset(seed)
        player = objects.Player(world, (32, 32))
        world.add(player)
        generate(world, player)
        kinds = [type(each).__name__ for each in world._objects]
        found.append((world._mat_map, world._obj_map, kinds, world.random.uniform()))
    stock, ours = found
    assert np.array_equal(stock[0], ours[0])
    assert np.array_equal(stock[1], ours[1])
    assert stock[2:] == ours[2:]


def test_an_episode_begins_where_the_stock_game_does() -> None:
    import crafter

    stock = crafter.Env(seed=5)
    ours = Crafter(seed=0)
    assert np.array_equal(stock.reset(), ours.reset(seed=5)["image"])
    assert np.array_equal(stock.step(0)[0], ours.step({"action": 0})["image"])


def test_noise_is_that_of_the_library() -> None:
    from opensimplex import OpenSimplex

    from reverie.envs.terrain import Simplex

    library, simplex = OpenSimplex(seed=9), Simplex(9)
    x, y = np.random.default_rng(0).uniform(-50, 130, (2, 1000))
    for z in (0, 3, 8):
        wanted = [library.noise3(a, b, z) for a, b in zip(x, y, strict=True)]
        np.testing.assert_allclose(simplex(x, y, z), wanted, rtol=0, atol=1e-14)


def test_all_22_achievements_are_told_to_people_only() -> None:
    from crafter import constants

    env = Crafter()
    assert len(ACHIEVEMENTS) == 22
    assert set(ACHIEVEMENTS) == set(constants.achievements)
    row = env.reset()
    assert {f"log/achievement_{name}" for name in ACHIEVEMENTS} < row.keys()
    assert env.act_space["action"].classes == 17


def test_noreward_hides_the_reward_and_logs_it() -> None:
    with_reward, without = Crafter("reward"), Crafter("noreward")
    with_reward.reset(seed=1)
    without.reset(seed=1)
    rng = np.random.default_rng(0)
    seen = 0.0
    for _ in range(150):
        action = {"action": rng.integers(17)}
        one, two = with_reward.step(action), without.step(action)
        assert two["reward"] == 0
        assert one["reward"] == one["log/reward"] == two["log/reward"]
        seen += abs(float(one["reward"]))
        if one["is_last"]:
            break
    assert seen > 0


def test_the_time_limit_is_not_terminal_and_death_is() -> None:
    env = Crafter(config=CrafterConfig(length=3))
    env.reset(seed=0)
    rows = [env.step({"action": 0}) for _ in range(3)]
    assert [bool(row["is_last"]) for row in rows] == [False, False, True]
    assert not rows[-1]["is_terminal"]
    env = Crafter()
    env.reset(seed=0)
    env._game._player.health = 0
    row = env.step({"action": 0})
    assert row["is_last"]
    assert row["is_terminal"]


def test_image_size_is_height_by_width() -> None:
    env = Crafter(config=CrafterConfig(size=(72, 90)))
    assert env.obs_space["image"].shape == (72, 90, 3)
    assert env.reset(seed=0)["image"].shape == (72, 90, 3)
