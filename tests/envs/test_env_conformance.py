"""Every suite of the table, held to the one contract.

A suite is tried with its first task, or those of `TASKS`; it is passed over where its
package is missing, except for Minecraft and DMLab, which then have their stand-ins. A
new row of the table is covered without a change here. `make test-envs` runs the same
for suites that need an environment of packages of their own.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepmind_lab_stand_in
import minerl_stand_in
import numpy as np
import pytest
import torch

from reverie import envs
from reverie.agents.random import RandomAgent, RandomConfig
from reverie.api import Env, Obs
from reverie.envs.checker import check_env
from reverie.envs.suites.atari import AtariConfig
from reverie.envs.suites.crafter import CrafterConfig
from reverie.envs.suites.dmc import DMCConfig
from reverie.envs.suites.loconav import LocoNavConfig
from reverie.envs.suites.metaworld import MetaWorldConfig
from reverie.envs.suites.minecraft import MinecraftConfig
from reverie.envs.suites.mujoco import MuJoCoConfig
from reverie.envs.suites.pinpad import PinPad, PinPadConfig
from reverie.envs.suites.robosuite import RobosuiteConfig
from reverie.envs.vector.env_slot import is_resumable
from reverie.envs.wrappers import Wrapper
from reverie.evaluation.episodes import play_episodes
from reverie.spaces import FLAGS, agent_obs_space

BUILT_IN = [
    "catch",
    "memory",
    "reach",
    "dummy_disc",
    "dummy_cont",
    "pinpad_three",
    "pinpad_four",
    "pinpad_five",
    "pinpad_six",
]
TASKS = {
    "dummy": ["dummy_disc", "dummy_cont"],
    "pinpad": ["pinpad_three", "pinpad_six"],
    "gym": ["gym_CartPole-v1", "gym_Pendulum-v1"],
    "atari": ["atari_pong"],
    "atari100k": ["atari100k_breakout"],
    "crafter": ["crafter_reward"],
    "dmc": ["dmc_walker_walk"],
    "dmlab": ["dmlab_rooms_watermaze", "dmlab_language_execute_random_task"],
    "minecraft": ["minecraft_diamond", "minecraft_climb"],
    "bsuite": ["bsuite_catch/0", "bsuite_cartpole_noise/3", "bsuite_umbrella_length/2"],
    "minigrid": ["minigrid_Empty-5x5", "minigrid_Fetch-5x5-N2"],
    "craftax": ["craftax_classic_symbolic"],
}
"""What to try of a suite besides, or instead of, its first task."""

RESUMABLE = {*BUILT_IN, "atari_pong", "atari100k_breakout", "procgen_bigfish"}
ALWAYS_THE_SAME = {"minigrid_Empty-5x5"}
"""Tasks without chance, whatever the seed."""

HEAVY = ("loconav", "memorymaze", "metaworld", "robosuite", "craftax")
"""Suites that take a minute or more; `make test-envs` runs them."""

DRAW = os.environ.get("REVERIE_TEST_IMAGES") == "1"
"""Whether suites on MuJoCo show images as well; `make test-envs` sees to it."""

STEPS = 20 if DRAW else 70
"""To play; the processor may take a second to draw an image."""

CUT = envs.EnvConfig(length=STEPS - 10)


def moving() -> dict[str, envs.EnvConfig]:
    """MuJoCo; where it draws, actions are held long, so that an episode is short."""
    seen: dict[str, Any] = {"image": DRAW, "repeat": 20 if DRAW else 1}
    cameras = ("agentview", "robot0_eye_in_hand") if DRAW else ()
    robosuite = RobosuiteConfig(cameras=cameras, object=True, horizon=10)
    return {
        "dmc": replace(CUT, dmc=DMCConfig(**seen)),
        "mujoco": replace(CUT, mujoco=MuJoCoConfig(**seen)),
        "metaworld": replace(CUT, metaworld=MetaWorldConfig(**seen)),
        "robosuite": replace(CUT, robosuite=robosuite),
        "loconav": replace(CUT, loconav=LocoNavConfig(repeat=8)),
    }


CONFIGS = {
    "pinpad": envs.EnvConfig(pinpad=PinPadConfig(length=60)),
    "crafter": envs.EnvConfig(crafter=CrafterConfig(length=60)),
    "atari": envs.EnvConfig(atari=AtariConfig(length=240)),
    **moving(),
    "minecraft": envs.EnvConfig(minecraft=MinecraftConfig(length=60)),
    **dict.fromkeys(("catch", "memory", "reach", "dummy", "dmlab"), envs.EnvConfig()),
}
"""Settings that end episodes soon; the suites that are not here are cut short."""


def examples() -> list[Any]:
    found = []
    for name, suite in envs.SUITES.items():
        first = suite.tasks[0] if suite.tasks else ""
        named = re.search(rf"such as ({name}_\S+)", suite.name_format)
        alone = f"{name}_{first}" if first else named[1] if named else name
        for task in TASKS.get(name, [alone]):
            absent = not suite.is_installed and name not in ("minecraft", "dmlab")
            marks = [pytest.mark.skipif(absent, reason=f"needs {suite.package}")]
            marks += [pytest.mark.slow] * (name in HEAVY)
            found.append(pytest.param(task, marks=marks, id=task))
    return found


every_suite = pytest.mark.parametrize("task", examples())


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    if not envs.SUITES["minecraft"].is_installed:
        minerl_stand_in.install(monkeypatch)
    if not envs.SUITES["dmlab"].is_installed:
        deepmind_lab_stand_in.install(monkeypatch)


def make(task: str, seed: int = 0) -> Env:
    suite = task.partition("_")[0]
    return envs.make(task, CONFIGS.get(suite, CUT), seed)


@pytest.fixture
def env(task: str) -> Iterator[Env]:
    made = make(task)
    yield made
    made.close()


def play(env: Env, steps: int, seed: int = 0, obs: Obs | None = None) -> list[Obs]:
    rng = np.random.default_rng(seed)
    rows = [env.reset() if obs is None else obs]
    for _ in range(steps):
        if rows[-1]["is_last"]:
            rows.append(env.reset())
        else:
            action = {key: s.sample(rng) for key, s in env.act_space.items()}
            rows.append(env.step(action))
    return [{key: np.array(value) for key, value in row.items()} for row in rows]


def played(task: str, seed: int) -> list[Obs]:
    env = make(task, seed)
    rows = play(env, STEPS)
    env.close()
    return rows


def same(one: list[Obs], two: list[Obs]) -> bool:
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
        for a, b in zip(one, two, strict=True)
    )


@every_suite
def test_conformance_rows_keep_what_spaces_and_flags_promise(env: Env) -> None:
    assert agent_obs_space(env.obs_space)
    rows = play(env, 2 * STEPS - 10)
    for row in rows:
        assert row.keys() == env.obs_space.keys()
        for key, space in env.obs_space.items():
            assert space.problem(row[key]) is None, key
        assert np.isfinite(row["reward"])
        assert row["is_last"] or not row["is_terminal"]
        assert not (row["is_first"] and (row["is_last"] or row["reward"]))
    assert rows[0]["is_first"]
    for before, after in itertools.pairwise(rows):
        assert after["is_first"] == before["is_last"]
    assert any(row["is_last"] for row in rows), "play on until an episode ends"


@every_suite
def test_conformance_floats_are_f32_and_integers_i32(env: Env) -> None:
    kinds = {np.dtype(name) for name in ("float32", "int32", "uint8", "bool")}
    for space in (*env.obs_space.values(), *env.act_space.values()):
        assert space.dtype in kinds
    for space in env.act_space.values():
        if space.dtype.kind == "f":
            assert (space.low == -1).all()
            assert (space.high == 1).all()


@every_suite
def test_conformance_check_env_finds_nothing(env: Env) -> None:
    excused = ("a step takes", *["no episode ended"] * DRAW)  # it takes too long
    found = check_env(env, steps=STEPS)
    assert [each for each in found if not each.message.startswith(excused)] == []


@every_suite
def test_conformance_a_seed_decides_the_episodes(task: str) -> None:
    first = played(task, seed=3)
    assert same(first, played(task, seed=3))
    if task not in ALWAYS_THE_SAME:
        assert not same(first, played(task, seed=4))


@every_suite
def test_conformance_resuming_continues_exactly(task: str, env: Env) -> None:
    assert is_resumable(env) == (task in RESUMABLE)
    if not is_resumable(env):
        return
    last = play(env, 33)[-1]
    state = env.state_dict()
    whole = play(env, 100, seed=1, obs=last)
    other = make(task, seed=9)
    other.load_state_dict(state)  # type: ignore[attr-defined]
    assert same(whole, play(other, 100, seed=1, obs=last))
    other.close()


class Spy(RandomAgent):
    """Acts at random, and remembers what it was shown."""

    seen: frozenset[str] = frozenset()

    def policy(self, carry: Any, obs: Obs, mode: Any = "train") -> Any:
        self.seen |= obs.keys()
        return super().policy(carry, obs, mode)


@every_suite
def test_conformance_what_is_for_people_never_reaches_an_agent(task: str) -> None:
    suite = task.partition("_")[0]
    config = replace(CONFIGS.get(suite, CUT), length=5)
    pool = envs.make_vec_env(envs.TaskFactory(task, config, seed=0), 1)
    spy = Spy(
        pool.obs_space,
        pool.act_space,
        RandomConfig(),
        device=torch.device("cpu"),
        precision="float32",
        seed=0,
    )
    assert len(play_episodes(spy, pool, 1)) == 1
    pool.close()
    public = {key for key in pool.obs_space if not key.startswith("log/")}
    assert spy.seen == public


def held() -> dict[str, int]:
    """Open files, threads and processes of ours."""
    gc.collect()
    children = "".join(
        p.read_text() for p in Path("/proc/self/task").glob("*/children")
    )
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(children.split()),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@every_suite
def test_conformance_closing_frees_everything(task: str) -> None:
    def live_once() -> weakref.ref[Any]:
        env: Any = make(task)
        play(env, 5)
        env.close()
        while isinstance(env, Wrapper):
            env = env.env
        return weakref.ref(env)

    live_once()  # what a package sets up for good comes with its first environment
    gc.collect()
    gc.freeze()  # only what comes from here on is looked at again, which is quick
    before = held()
    ghosts = [live_once() for _ in range(2)]
    after = held()
    gc.unfreeze()
    assert all(after[kind] <= before[kind] for kind in before), (before, after)
    assert not any(ghost() for ghost in ghosts)


def test_conformance_covers_every_suite_of_the_table() -> None:
    tried = {example.values[0].partition("_")[0] for example in examples()}
    assert tried == set(envs.SUITES)
    for name in TASKS.keys() | CONFIGS.keys():
        assert name in envs.SUITES
    for task in itertools.chain(*TASKS.values()):
        envs.split_task(task)


@pytest.mark.parametrize("task", BUILT_IN)
def test_states_are_plain_data(task: str) -> None:
    def plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(isinstance(k, str) and plain(v) for k, v in value.items())
        if isinstance(value, list):
            return all(map(plain, value))
        return isinstance(value, int | float | str | bool | np.ndarray | None)

    env = make(task)
    env.reset()
    assert plain(env.state_dict())  # type: ignore[attr-defined]


def test_dummies_show_every_kind_of_space() -> None:
    disc, cont = make("dummy_disc"), make("dummy_cont")
    spaces = agent_obs_space(disc.obs_space)
    assert {len(space.shape) for space in spaces.values()} == {0, 1, 2, 3}
    assert spaces["image"].is_image
    assert spaces["token"].classes == 256
    assert spaces["int2d"].is_discrete
    assert "log/episode" not in spaces
    assert len(disc.act_space) == len(cont.act_space) == 2
    assert disc.act_space["action"].is_discrete
    assert not cont.act_space["action"].is_discrete
    assert set(FLAGS) <= disc.obs_space.keys()


def test_catch_pays_for_catching_and_a_random_player_mostly_misses() -> None:
    def score(policy: str) -> float:
        env, rng = make("catch"), np.random.default_rng(0)
        scores = []
        for _ in range(200):
            obs = env.reset()
            while not obs["is_last"]:
                ball = np.argwhere((obs["image"] == [255, 220, 60]).all(-1))[0][1]
                paddle = np.argwhere((obs["image"] == [80, 160, 255]).all(-1))
                move = int(np.sign(ball - paddle[0][1])) + 1 if len(paddle) else 1
                action = move if policy == "good" else rng.integers(3)
                obs = env.step({"action": np.int32(action)})
            scores.append(float(obs["reward"]))
        return float(np.mean(scores))

    assert score("good") == 1.0
    assert -0.9 < score("random") < -0.4


def test_memory_hides_the_cue_when_it_is_asked_for() -> None:
    env = make("memory")
    for _ in range(20):
        obs = env.reset()
        cue = int(obs["vector"][:-1].argmax())
        while not obs["vector"][-1]:
            obs = env.step({"action": np.int32(0)})
            assert not obs["vector"][:-1].any()
        obs = env.step({"action": np.int32(cue)})
        assert obs["reward"] == 1
        assert obs["is_terminal"]


def test_pinpad_pays_for_the_sequence_then_counts_down_and_respawns() -> None:
    env = PinPad("three")
    first = env.reset(seed=0)
    places = [np.argwhere(env.pads == pad)[0] for pad in (1, 2, 3)]
    rewards = []
    for row, col in places:  # put the player beside each pad and step on the spot
        env._player = (int(row), int(col))
        rewards.append(float(env.step({"action": 0})["reward"]))
    assert rewards == [0.0, 0.0, 10.0]
    later = [env.step({"action": 0}) for _ in range(10)]
    assert not any(row["reward"] for row in later)
    assert env.pads[env._player] == 0
    assert env._history == []
    assert first["image"].shape == (64, 64, 3)


def test_pinpad_pays_nothing_for_another_order() -> None:
    env = PinPad("three")
    env.reset(seed=0)
    for pad in (2, 1, 3, 2, 3, 1):
        row, col = np.argwhere(env.pads == pad)[0]
        env._player = (int(row), int(col))
        assert env.step({"action": 0})["reward"] == 0


def test_pinpad_has_the_published_settings() -> None:
    env = envs.make("pinpad_six")
    assert PinPadConfig().length == 10_000
    assert env.obs_space["image"].shape == (64, 64, 3)
    assert env.act_space["action"].classes == 5
    room = PinPad("six")
    assert room.pads.shape == (14, 16)
    assert set(np.unique(room.pads)) == {-1, 0, 1, 2, 3, 4, 5, 6}
