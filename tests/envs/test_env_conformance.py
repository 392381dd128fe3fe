"""Every environment that can be made here, held to the one contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from reverie import envs
from reverie.api import FLAGS, Env, Obs, sight
from reverie.envs.check import check_env
from reverie.envs.pool import is_resumable

BUILT_IN = [
    "catch",
    "memory",
    "dummy_disc",
    "dummy_cont",
    "pinpad_three",
    "pinpad_four",
    "pinpad_five",
    "pinpad_six",
]
RESUMABLE = [*BUILT_IN, "atari_pong"]
TASKS = [*RESUMABLE, "gym_CartPole-v1", "gym_Pendulum-v1", "crafter_reward"]
CONFIG = envs.EnvConfig(
    pinpad=envs.PinPadConfig(length=60),
    crafter=envs.CrafterConfig(length=60),
    atari=envs.AtariConfig(length=240),
)


def make(task: str, seed: int = 0) -> Env:
    for package, suite in (("ale_py", "atari"), ("crafter", "crafter")):
        if task.startswith(suite):
            pytest.importorskip(package)
    return envs.make(task, CONFIG, seed)


@pytest.fixture(params=TASKS)
def env(request: pytest.FixtureRequest) -> Iterator[Env]:
    made = make(request.param)
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


def same(one: list[Obs], two: list[Obs]) -> bool:
    return all(
        a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
        for a, b in zip(one, two, strict=True)
    )


def test_conformance_rows_are_what_the_spaces_promise(env: Env) -> None:
    assert sight(env.obs_space)
    for row in play(env, 130):
        assert row.keys() == env.obs_space.keys()
        for key, space in env.obs_space.items():
            assert space.problem(row[key]) is None, key
        assert np.isfinite(row["reward"])


def test_conformance_flags_tell_where_an_episode_begins_and_ends(env: Env) -> None:
    rows = play(env, 130)
    assert rows[0]["is_first"]
    for before, after in itertools.pairwise(rows):
        assert after["is_first"] == before["is_last"]
    for row in rows:
        assert row["is_last"] or not row["is_terminal"]
        assert not (row["is_first"] and (row["is_last"] or row["reward"]))


def test_conformance_floats_are_f32_and_integers_i32(env: Env) -> None:
    kinds = {np.dtype(name) for name in ("float32", "int32", "uint8", "bool")}
    for space in (*env.obs_space.values(), *env.act_space.values()):
        assert space.dtype in kinds
    for space in env.act_space.values():
        if space.dtype.kind == "f":
            assert (space.low == -1).all()
            assert (space.high == 1).all()


def test_conformance_check_env_finds_nothing(env: Env) -> None:
    assert check_env(env, steps=70) == []


@pytest.mark.parametrize("task", TASKS)
def test_conformance_a_seed_gives_the_same_episodes_twice(task: str) -> None:
    assert same(play(make(task, seed=3), 70), play(make(task, seed=3), 70))


@pytest.mark.parametrize("task", [t for t in TASKS if t != "gym_CartPole-v1"])
def test_conformance_another_seed_gives_other_episodes(task: str) -> None:
    assert not same(play(make(task, seed=3), 70), play(make(task, seed=4), 70))


@pytest.mark.parametrize("task", RESUMABLE)
def test_conformance_resuming_continues_exactly(task: str) -> None:
    env = make(task)
    last = play(env, 33)[-1]
    state = env.state_dict()  # type: ignore[attr-defined]
    whole = play(env, 100, seed=1, obs=last)
    other = make(task, seed=9)
    other.load_state_dict(state)  # type: ignore[attr-defined]
    assert same(whole, play(other, 100, seed=1, obs=last))


def test_conformance_only_what_has_state_says_it_can_be_resumed() -> None:
    assert is_resumable(make("catch"))
    assert not is_resumable(make("gym_CartPole-v1"))


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
    spaces = sight(disc.obs_space)
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
    env = envs.pinpad.PinPad("three")
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
    env = envs.pinpad.PinPad("three")
    env.reset(seed=0)
    for pad in (2, 1, 3, 2, 3, 1):
        row, col = np.argwhere(env.pads == pad)[0]
        env._player = (int(row), int(col))
        assert env.step({"action": 0})["reward"] == 0
