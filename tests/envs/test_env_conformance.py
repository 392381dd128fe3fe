"""Conformance tests of all suites.

A suite is tested with its first task, or those of `TASKS`. It is skipped if its package
is not installed, except for Minecraft and DMLab, which then use fake simulators. A new
suite is tested without a change here. `make test-envs` runs these tests for suites that
need separate virtual environments.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_deepmind_lab
import fake_minerl
import numpy as np
import pytest
import torch

from reverie import envs
from reverie.agents.options import BuildOptions
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
from reverie.spaces import STEP_KEYS, agent_obs_space

BUILT_IN = [
    "catch",
    "noisycatch",
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
"""Tasks to test instead of the first one."""

RESUMABLE = {*BUILT_IN, "atari_pong", "atari100k_breakout", "procgen_bigfish"}
WITHOUT_RANDOMNESS = {"minigrid_Empty-5x5"}
"""Tasks that do not depend on the seed."""

SLOW_SUITES = ("loconav", "memorymaze", "metaworld", "robosuite", "craftax")
"""Suites that take a minute or more; `make test-envs` tests them."""

RENDER = os.environ.get("REVERIE_TEST_IMAGES") == "1"
"""Render images in suites based on MuJoCo, as `make test-envs` does."""

STEPS = 20 if RENDER else 70
"""Steps to run; rendering an image on the CPU can take a second."""

SHORT_EPISODES = envs.EnvConfig(length=STEPS - 10)


def mujoco_configs() -> dict[str, envs.EnvConfig]:
    """Configs of suites based on MuJoCo; with images, episodes are short."""
    options: dict[str, Any] = {"image": RENDER, "repeat": 20 if RENDER else 1}
    cameras = ("agentview", "robot0_eye_in_hand") if RENDER else ()
    robosuite = RobosuiteConfig(cameras=cameras, object=True, horizon=10)
    return {
        "dmc": replace(SHORT_EPISODES, dmc=DMCConfig(**options)),
        "dmc_subtle": replace(SHORT_EPISODES, dmc=DMCConfig(**options)),
        "mujoco": replace(SHORT_EPISODES, mujoco=MuJoCoConfig(**options)),
        "metaworld": replace(SHORT_EPISODES, metaworld=MetaWorldConfig(**options)),
        "robosuite": replace(SHORT_EPISODES, robosuite=robosuite),
        "loconav": replace(SHORT_EPISODES, loconav=LocoNavConfig(repeat=8)),
    }


CONFIGS = {
    "pinpad": envs.EnvConfig(pinpad=PinPadConfig(length=60)),
    "crafter": envs.EnvConfig(crafter=CrafterConfig(length=60)),
    "atari": envs.EnvConfig(atari=AtariConfig(length=240)),
    **mujoco_configs(),
    "minecraft": envs.EnvConfig(minecraft=MinecraftConfig(length=60)),
    **dict.fromkeys(("catch", "memory", "reach", "dummy", "dmlab"), envs.EnvConfig()),
}
"""Settings with short episodes; other suites use `SHORT_EPISODES`."""


def example_tasks() -> list[Any]:
    examples = []
    for name, suite in envs.SUITES.items():
        for task in TASKS.get(name, [suite.example]):
            is_missing = not suite.is_installed and name not in ("minecraft", "dmlab")
            reason = f"needs {suite.install_command}"
            marks = [pytest.mark.skipif(is_missing, reason=reason)]
            marks += [pytest.mark.slow] * (name in SLOW_SUITES)
            examples.append(pytest.param(task, marks=marks, id=task))
    return examples


every_suite = pytest.mark.parametrize("task", example_tasks())


@pytest.fixture(autouse=True)
def fake_simulators(monkeypatch: pytest.MonkeyPatch) -> None:
    if not envs.SUITES["minecraft"].is_installed:
        fake_minerl.install(monkeypatch)
    if not envs.SUITES["dmlab"].is_installed:
        fake_deepmind_lab.install(monkeypatch)


def make(task: str, seed: int = 0) -> Env:
    suite = envs.split_task(task)[0]
    return envs.make(task, CONFIGS.get(suite, SHORT_EPISODES), seed)


@pytest.fixture
def env(task: str) -> Iterator[Env]:
    env = make(task)
    yield env
    env.close()


def run_steps(env: Env, steps: int, seed: int = 0, obs: Obs | None = None) -> list[Obs]:
    rng = np.random.default_rng(seed)
    rows = [env.reset() if obs is None else obs]
    for _ in range(steps):
        if rows[-1]["is_last"]:
            rows.append(env.reset())
        else:
            action = {key: s.sample(rng) for key, s in env.act_space.items()}
            rows.append(env.step(action))
    return [{key: np.array(value) for key, value in row.items()} for row in rows]


def run(task: str, seed: int) -> list[Obs]:
    env = make(task, seed)
    rows = run_steps(env, STEPS)
    env.close()
    return rows


def equal(rows: list[Obs], others: list[Obs]) -> bool:
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
        for a, b in zip(rows, others, strict=True)
    )


@every_suite
def test_conformance_observations_match_spaces_and_flags(env: Env) -> None:
    assert agent_obs_space(env.obs_space)
    rows = run_steps(env, 2 * STEPS - 10)
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
    assert any(row["is_last"] for row in rows), "no episode ended"


@every_suite
def test_conformance_dtypes_are_uniform(env: Env) -> None:
    kinds = {np.dtype(name) for name in ("float32", "int32", "uint8", "bool")}
    for space in (*env.obs_space.values(), *env.act_space.values()):
        assert space.dtype in kinds
    for space in env.act_space.values():
        if space.dtype.kind == "f":
            assert (space.low == -1).all()
            assert (space.high == 1).all()


@every_suite
def test_conformance_check_env_reports_no_problem(env: Env) -> None:
    ignored = ("a step takes", *["no episode ended"] * RENDER)  # with images
    findings = check_env(env, steps=STEPS)
    assert [each for each in findings if not each.message.startswith(ignored)] == []


@every_suite
def test_conformance_seeds_reproduce_episodes(task: str) -> None:
    first = run(task, seed=3)
    assert equal(first, run(task, seed=3))
    if task not in WITHOUT_RANDOMNESS:
        assert not equal(first, run(task, seed=4))


@every_suite
def test_conformance_resuming_is_exact(task: str, env: Env) -> None:
    assert is_resumable(env) == (task in RESUMABLE)
    if not is_resumable(env):
        return
    last = run_steps(env, 33)[-1]
    state = env.state_dict()
    expected = run_steps(env, 100, seed=1, obs=last)
    other = make(task, seed=9)
    other.load_state_dict(state)  # type: ignore[attr-defined]
    assert equal(expected, run_steps(other, 100, seed=1, obs=last))
    other.close()


class RecordingAgent(RandomAgent):
    """Acts randomly and records the keys of its observations."""

    keys: frozenset[str] = frozenset()

    def policy(self, carry: Any, obs: Obs, mode: Any = "train") -> Any:
        self.keys |= obs.keys()
        return super().policy(carry, obs, mode)


@every_suite
def test_conformance_log_keys_are_not_observed(task: str) -> None:
    suite = envs.split_task(task)[0]
    config = replace(CONFIGS.get(suite, SHORT_EPISODES), length=5)
    vec_env = envs.make_vec_env(envs.TaskFactory(task, config, seed=0), 1)
    agent = RecordingAgent(
        vec_env.obs_space,
        vec_env.act_space,
        RandomConfig(),
        BuildOptions(torch.device("cpu")),
    )
    assert len(play_episodes(agent, vec_env, 1)) == 1
    vec_env.close()
    public = {key for key in vec_env.obs_space if not key.startswith("log/")}
    assert agent.keys == public


def open_resources() -> dict[str, int]:
    """Count open files, threads and child processes."""
    gc.collect()
    children = "".join(
        p.read_text() for p in Path("/proc/self/task").glob("*/children")
    )
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(children.split()),
    }


@pytest.mark.extended_except("catch", "gym_CartPole-v1", "atari_pong", "crafter_reward")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@every_suite
def test_conformance_closing_frees_resources(task: str) -> None:
    def use_once() -> weakref.ref[Any]:
        env: Any = make(task)
        run_steps(env, 5)
        env.close()
        while isinstance(env, Wrapper):
            env = env.env
        return weakref.ref(env)

    use_once()  # packages allocate permanent resources for their first environment
    gc.collect()
    gc.freeze()  # later collections are faster
    before = open_resources()
    references = [use_once() for _ in range(2)]
    after = open_resources()
    gc.unfreeze()
    assert all(after[kind] <= before[kind] for kind in before), (before, after)
    assert not any(reference() for reference in references)


def test_conformance_covers_every_suite() -> None:
    tested = {envs.split_task(example.values[0])[0] for example in example_tasks()}
    assert tested == set(envs.SUITES)
    for name in TASKS.keys() | CONFIGS.keys():
        assert name in envs.SUITES
    for task in itertools.chain(*TASKS.values()):
        envs.split_task(task)


@pytest.mark.parametrize("task", BUILT_IN)
def test_states_contain_plain_data_only(task: str) -> None:
    def is_plain(value: object) -> bool:
        if isinstance(value, dict):
            return all(isinstance(k, str) and is_plain(v) for k, v in value.items())
        if isinstance(value, list):
            return all(map(is_plain, value))
        return isinstance(value, int | float | str | bool | np.ndarray | None)

    env = make(task)
    env.reset()
    assert is_plain(env.state_dict())  # type: ignore[attr-defined]


def test_dummy_has_every_type_of_space() -> None:
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
    assert set(STEP_KEYS) <= disc.obs_space.keys()


def test_scores_of_optimal_and_random_policies_in_catch() -> None:
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


def test_memory_hides_the_cue_at_the_go_signal() -> None:
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


def test_pinpad_rewards_the_sequence_and_respawns() -> None:
    env = PinPad("three")
    first = env.reset(seed=0)
    positions = [np.argwhere(env.pads == pad)[0] for pad in (1, 2, 3)]
    rewards = []
    for position in positions:
        env._player = position
        rewards.append(float(env.step({"action": 0})["reward"]))
    assert rewards == [0.0, 0.0, 10.0]
    later = [env.step({"action": 0}) for _ in range(10)]
    assert not any(row["reward"] for row in later)
    assert env.pads[tuple(env._player)] == 0
    assert env._history == []
    assert first["image"].shape == (64, 64, 3)


def test_pinpad_does_not_reward_other_orders() -> None:
    env = PinPad("three")
    env.reset(seed=0)
    for pad in (2, 1, 3, 2, 3, 1):
        env._player = np.argwhere(env.pads == pad)[0]
        assert env.step({"action": 0})["reward"] == 0


def test_pinpad_has_the_published_settings() -> None:
    env = envs.make("pinpad_six")
    assert PinPadConfig().length == 10_000
    assert env.obs_space["image"].shape == (64, 64, 3)
    assert env.act_space["action"].classes == 5
    pinpad = PinPad("six")
    assert pinpad.pads.shape == (14, 16)
    assert set(np.unique(pinpad.pads)) == {-1, 0, 1, 2, 3, 4, 5, 6}
