"""Crafter: the stock worlds, faster, and the same game for the same seed anywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from reverie import envs
from reverie.envs.suites.crafter import (
    ACHIEVEMENTS,
    Crafter,
    CrafterConfig,
    crafter_score,
    make_game,
)
from reverie.run.config import resolve

pytest.importorskip("crafter")

PLAY = """
import hashlib
import numpy as np
from reverie.envs.suites.crafter import Crafter
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

    from reverie.envs.suites.crafter.terrain import generate_world

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


@pytest.mark.parametrize(
    ("size", "area", "start"),
    [((64, 64), (64, 64), 290), ((96, 80), (40, 64), 0), ((50, 70), (8, 6), 0)],
)
def test_pictures_are_those_of_the_stock_game(
    size: tuple[int, int], area: tuple[int, int], start: int
) -> None:
    """By day and night, awake and asleep, at the edge of the world, with tools."""
    config = CrafterConfig(size=size, area=area)
    stock, ours = make_game(config, True, seed=1), Crafter("reward", config, seed=1)
    assert type(stock._local_view).__module__ == "crafter.engine"
    assert np.array_equal(stock.reset(), ours.reset()["image"])
    rng, slept = np.random.default_rng(0), 0
    for game in (stock, ours._game):
        game._step = start  # the night begins
        game._player.inventory |= {"wood": 9, "iron_sword": 1, "energy": 3}
    for turn in range(120):
        action = int(rng.integers(17)) if turn % 40 else 6  # now and then to sleep
        image, reward, done, _ = stock.step(action)
        row = ours.step({"action": action})
        assert np.array_equal(image, row["image"]), turn
        assert (np.float32(reward), done) == (row["reward"], row["is_last"])
        slept += stock._player.sleeping
        if done:
            assert np.array_equal(stock.reset(), ours.reset()["image"])
    assert stock._player.inventory == ours._game._player.inventory
    assert slept or start == 0


def test_noise_is_that_of_the_library() -> None:
    from opensimplex import OpenSimplex

    from reverie.envs.suites.crafter.terrain import Simplex

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


def test_the_score_is_the_geometric_mean_of_success_rates_plus_one_percent() -> None:
    assert crafter_score(np.zeros(22)) == 0
    assert crafter_score(np.ones(22)) == pytest.approx(100)
    half = np.array([1.0] * 11 + [0.0] * 11)
    assert crafter_score(half) == pytest.approx(np.sqrt(101) - 1)
    # exp of the mean of ln(1 + 50) and 21 times ln(1 + 2), less one
    rates = np.array([0.5] + [0.02] * 21)
    assert crafter_score(rates) == pytest.approx(51 ** (1 / 22) * 3 ** (21 / 22) - 1)


def test_the_score_counts_episodes_in_which_something_was_achieved() -> None:
    env = Crafter(config=CrafterConfig(length=3))
    scores = []
    for achieved in ({"collect_wood": 4}, {}, {"collect_wood": 1, "wake_up": 1}):
        env.reset(seed=0)
        env._game._player.achievements |= {**achieved}
        rows = [env.step({"action": 0}) for _ in range(3)]
        assert [float(row["log/crafter_score"]) for row in rows[:2]] == [0, 0]
        scores.append(float(rows[-1]["log/crafter_score"]))
    wood, sleep = ACHIEVEMENTS.index("collect_wood"), ACHIEVEMENTS.index("wake_up")
    wanted = []
    for rates in ({wood: 1}, {wood: 1 / 2}, {wood: 2 / 3, sleep: 1 / 3}):
        array = np.zeros(22)
        array[list(rates)] = list(rates.values())
        wanted.append(crafter_score(array))
    assert scores == pytest.approx(wanted, rel=1e-5)


def test_the_defaults_are_the_published_ones() -> None:
    config = resolve(["crafter"])
    env = envs.make(config.task, config.env)
    assert config.task == "crafter_reward"
    assert env.obs_space["image"].shape == (64, 64, 3)
    assert config.env.crafter.length == 10_000
    assert (config.run.envs, config.run.train_ratio) == (1, 512)
    logged = [key for key in env.obs_space if key.startswith("log/achievement_")]
    assert len(logged) == 22


def test_a_world_takes_a_tenth_of_the_work_of_the_stock_generator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Noise is computed for whole maps: a handful of calls, not one per cell."""
    from opensimplex import OpenSimplex

    calls = []
    point = OpenSimplex.noise3
    monkeypatch.setattr(OpenSimplex, "noise3", lambda *a: calls.append(1) or point(*a))
    Crafter(seed=0).reset(seed=0)
    assert len(calls) < 64 * 64 * 5 / 10  # stock: more than five per cell
