"""Crafter: equal to the original, and deterministic across processes."""

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
offset = [object() for _ in range({offset})]  # changes memory addresses
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


def test_games_are_equal_in_two_processes() -> None:
    outputs = []
    for offset in (0, 12345):
        done = subprocess.run(
            [sys.executable, "-c", PLAY.format(offset=offset)],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": str(offset)},
        )
        assert not done.returncode, done.stderr
        outputs.append(done.stdout)
    assert outputs[0] == outputs[1]


@pytest.mark.extended_except("0")
@pytest.mark.parametrize("seed", [0, 3, 11])
def test_worlds_equal_the_original_generator(seed: int) -> None:
    from crafter import constants, engine, objects, worldgen

    from reverie.envs.suites.crafter.terrain import generate_world

    results = []
    for generate in (worldgen.generate_world, generate_world):
        world = engine.World((64, 64), constants.materials, (12, 12))
        world.reset(seed)
        player = objects.Player(world, (32, 32))
        world.add(player)
        generate(world, player)
        kinds = [type(each).__name__ for each in world._objects]
        results.append((world._mat_map, world._obj_map, kinds, world.random.uniform()))
    original, fast = results
    assert np.array_equal(original[0], fast[0])
    assert np.array_equal(original[1], fast[1])
    assert original[2:] == fast[2:]


def test_the_first_steps_equal_the_original() -> None:
    import crafter

    original = crafter.Env(seed=5)
    fast = Crafter(seed=0)
    assert np.array_equal(original.reset(), fast.reset(seed=5)["image"])
    assert np.array_equal(original.step(0)[0], fast.step({"action": 0})["image"])


@pytest.mark.parametrize(
    ("size", "area", "start"),
    [((64, 64), (64, 64), 290), ((96, 80), (40, 64), 0), ((50, 70), (8, 6), 0)],
)
def test_images_equal_the_original(
    size: tuple[int, int], area: tuple[int, int], start: int
) -> None:
    """By day and night, awake and asleep, at the border, with inventory items."""
    config = CrafterConfig(size=size, area=area)
    original, fast = make_game(config, True, seed=1), Crafter("reward", config, seed=1)
    assert type(original._local_view).__module__ == "crafter.engine"
    assert np.array_equal(original.reset(), fast.reset()["image"])
    rng, slept = np.random.default_rng(0), 0
    for game in (original, fast._game):
        game._step = start  # at dusk
        game._player.inventory |= {"wood": 9, "iron_sword": 1, "energy": 3}
    for step in range(120):
        action = int(rng.integers(17)) if step % 40 else 6  # sometimes sleep
        image, reward, done, _ = original.step(action)
        row = fast.step({"action": action})
        assert np.array_equal(image, row["image"]), step
        assert (np.float32(reward), done) == (row["reward"], row["is_last"])
        slept += original._player.sleeping
        if done:
            assert np.array_equal(original.reset(), fast.reset()["image"])
    assert original._player.inventory == fast._game._player.inventory
    assert slept or start == 0


def test_noise_equals_the_library() -> None:
    from opensimplex import OpenSimplex

    from reverie.envs.suites.crafter.terrain import Simplex

    library, simplex = OpenSimplex(seed=9), Simplex(9)
    x, y = np.random.default_rng(0).uniform(-50, 130, (2, 1000))
    for z in (0, 3, 8):
        expected = [library.noise3(a, b, z) for a, b in zip(x, y, strict=True)]
        np.testing.assert_allclose(simplex(x, y, z), expected, rtol=0, atol=1e-14)


def test_all_22_achievements_are_logged() -> None:
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
    total = 0.0
    for _ in range(150):
        action = {"action": rng.integers(17)}
        obs, obs_without = with_reward.step(action), without.step(action)
        assert obs_without["reward"] == 0
        assert obs["reward"] == obs["log/reward"] == obs_without["log/reward"]
        total += abs(float(obs["reward"]))
        if obs["is_last"]:
            break
    assert total > 0


def test_only_death_is_terminal() -> None:
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


def test_the_crafter_score() -> None:
    assert crafter_score(np.zeros(22)) == 0
    assert crafter_score(np.ones(22)) == pytest.approx(100)
    half = np.array([1.0] * 11 + [0.0] * 11)
    assert crafter_score(half) == pytest.approx(np.sqrt(101) - 1)
    # geometric mean of 1 + 50 and 21 times 1 + 2, minus 1
    rates = np.array([0.5] + [0.02] * 21)
    assert crafter_score(rates) == pytest.approx(51 ** (1 / 22) * 3 ** (21 / 22) - 1)


def test_the_score_counts_successful_episodes() -> None:
    env = Crafter(config=CrafterConfig(length=3))
    scores = []
    for achieved in ({"collect_wood": 4}, {}, {"collect_wood": 1, "wake_up": 1}):
        env.reset(seed=0)
        env._game._player.achievements |= {**achieved}
        rows = [env.step({"action": 0}) for _ in range(3)]
        assert [float(row["log/crafter_score"]) for row in rows[:2]] == [0, 0]
        scores.append(float(rows[-1]["log/crafter_score"]))
    wood, sleep = ACHIEVEMENTS.index("collect_wood"), ACHIEVEMENTS.index("wake_up")
    expected = []
    for rates in ({wood: 1}, {wood: 1 / 2}, {wood: 2 / 3, sleep: 1 / 3}):
        array = np.zeros(22)
        array[list(rates)] = list(rates.values())
        expected.append(crafter_score(array))
    assert scores == pytest.approx(expected, rel=1e-5)


def test_the_defaults_are_the_published_ones() -> None:
    config = resolve(["crafter"])
    env = envs.make(config.task, config.env)
    assert config.task == "crafter_reward"
    assert env.obs_space["image"].shape == (64, 64, 3)
    assert config.env.crafter.length == 10_000
    assert (config.run.envs, config.run.train_ratio) == (1, 512)
    logged = [key for key in env.obs_space if key.startswith("log/achievement_")]
    assert len(logged) == 22


def test_world_generation_is_vectorized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from opensimplex import OpenSimplex

    calls = []
    noise3 = OpenSimplex.noise3
    monkeypatch.setattr(OpenSimplex, "noise3", lambda *a: calls.append(1) or noise3(*a))
    Crafter(seed=0).reset(seed=0)
    assert len(calls) < 64 * 64 * 5 / 10  # the original: more than five per cell
