"""Vector environments written in C++, behind the interface of a pool."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import types
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest

from reverie import envs
from reverie.api import Obs, UserError, VecEnv
from reverie.envs.suites.atari import AtariConfig, native

pytest.importorskip("ale_py")

SHORT = AtariConfig(size=(64, 64), gray=False, actions="minimal", length=80)


class FakeEnvPool:
    """Stands in for envpool: games of as many steps as asked for, channels first."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, task: str, **options: Any):
        self.options = {"task": task, **options}
        self.made.append(self.options)
        self.count = options["num_envs"]
        self.action_space = gymnasium.spaces.Discrete(6)
        self.clock = np.zeros(self.count, int)
        self.closed = False

    def _image(self) -> np.ndarray:
        shape = (3, self.options["img_height"], self.options["img_width"])
        seeds = np.array(self.options["env_seed"])
        shade = (seeds + self.clock) % 256
        return np.broadcast_to(shade[:, None, None, None], (self.count, *shape)).astype(
            np.uint8
        )

    def reset(self) -> Any:
        self.clock[:] = 0
        return self._image(), {"env_id": np.arange(self.count)}

    def send(self, action: np.ndarray) -> None:
        assert action.dtype == np.int32
        limit = self.options["max_episode_steps"]
        self.clock = np.where(self.clock == limit, 0, self.clock + 1)

    def recv(self) -> Any:
        over = self.clock == self.options["max_episode_steps"]
        order = np.arange(self.count)[::-1]  # whoever is first comes first
        none = np.zeros(self.count, bool)
        reward = np.arange(self.count, dtype=np.float32)
        return self._image()[order], reward[order], none, over[order], {"env_id": order}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(params=["ale", "envpool"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "envpool":
        module: Any = types.ModuleType("envpool")
        module.__spec__ = types.SimpleNamespace(name="envpool")
        module.make = lambda task, env_type, **options: FakeEnvPool(task, **options)
        monkeypatch.setitem(sys.modules, "envpool", module)
        FakeEnvPool.made.clear()
    name: str = request.param
    return name


def pool_of(
    backend: Any, count: int = 3, seed: int = 0, task: str = "atari_pong", **more: Any
) -> Any:
    config = envs.EnvConfig(
        atari=replace(SHORT, **more), vector=envs.VecEnvConfig(native=backend)
    )
    factory = envs.IndexOffset(envs.TaskFactory(task, config, seed), 0)
    return envs.make_vec_env(factory, count, config.vector)


def play(pool: Any, steps: int) -> list[Obs]:
    rng = np.random.default_rng(0)
    rows = [pool.reset()]
    for _ in range(steps):
        rows.append(pool.step({"action": rng.integers(0, 6, len(pool))}))
    return rows


def test_a_native_pool_is_a_pool(backend: str) -> None:
    pool = pool_of(backend)
    assert isinstance(pool, VecEnv)
    assert len(pool) == 3
    assert pool.act_space["action"].classes == 6
    assert pool.metrics()["env/restarts"] == 0
    rows = play(pool, 45)
    for row in rows:
        assert row.keys() == pool.obs_space.keys()
        for key, space in pool.obs_space.items():
            for value in row[key]:
                assert space.problem(value) is None, key
    assert rows[0]["is_first"].all()
    assert not rows[0]["reward"].any()
    for before, after in itertools.pairwise(rows):
        assert np.array_equal(after["is_first"], before["is_last"])
        assert not after["reward"][after["is_first"]].any()
    lengths = [t for t, row in enumerate(rows) if row["is_last"][0]]
    assert lengths == [20, 41]  # 80 frames are 20 steps, and one row begins anew
    pool.close()


def test_rows_come_in_the_order_of_the_environments() -> None:
    fake: Any = types.ModuleType("envpool")
    fake.make = lambda task, env_type, **options: FakeEnvPool(task, **options)
    sys.modules["envpool"] = fake
    try:
        games = native.EnvPool("ms_pacman", SHORT, 3)
        games.reset([5, 6, 7])
        games.send(np.zeros(3, np.int32))
        came = games.recv()
    finally:
        del sys.modules["envpool"]
    assert came.image[:, 0, 0, 0].tolist() == [6, 7, 8]
    assert came.reward.tolist() == [0, 1, 2]
    assert FakeEnvPool.made[-1]["task"] == "MsPacman-v5"


def test_a_cut_is_terminal_only_on_request(backend: str) -> None:
    for is_terminal in (True, False):
        pool = pool_of(backend, truncation_is_terminal=is_terminal)
        last = play(pool, 20)[-1]
        assert last["is_last"].all()
        assert (last["is_terminal"] == is_terminal).all()
        pool.close()


def test_a_seed_gives_the_same_games_and_resuming_others(backend: str) -> None:
    def images(pool: Any) -> list[Any]:
        rows = play(pool, 30)
        pool.close()
        return [row["image"] for row in rows]

    first = images(pool_of(backend, seed=1))
    assert np.array_equal(first, images(pool_of(backend, seed=1)))
    assert not np.array_equal(first, images(pool_of(backend, seed=2)))
    pool = pool_of(backend, seed=1)
    play(pool, 5)
    state = pool.state_dict()
    resumed = pool_of(backend, seed=1)
    assert resumed.load_state_dict(state)["is_first"].all()
    assert resumed.state_dict()["envs"][0]["attempt"] == 1
    with pytest.raises(UserError, match="holds 3 environments"):
        pool_of(backend, count=2).load_state_dict(state)


def test_settings_reach_the_back_end(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Recorder:
        single_action_space = gymnasium.spaces.Discrete(18)

        def __init__(self, game: str, count: int, **options: Any):
            asked.update(options, game=game, count=count)

    import ale_py

    monkeypatch.setattr(ale_py, "AtariVectorEnv", Recorder)
    native.Ale("montezuma_revenge", AtariConfig(), 5)
    assert asked == {
        "game": "montezuma_revenge",
        "count": 5,
        "max_num_frames_per_episode": 108_000,
        "repeat_action_probability": 0.25,
        "full_action_space": True,
        "img_height": 96,
        "img_width": 96,
        "grayscale": True,
        "stack_num": 1,
        "frameskip": 4,
        "maxpool": True,
        "noop_max": 30,
        "episodic_life": False,
        "reward_clipping": False,
        "use_fire_reset": False,
    }


@pytest.mark.parametrize(
    ("task", "config", "says"),
    [
        ("catch", envs.EnvConfig(), "has no native"),
        ("atari_pong", envs.EnvConfig(repeat=2), "cannot be wrapped"),
        ("atari_pong", envs.EnvConfig(length=9), "cannot be wrapped"),
        (
            "atari_pong",
            envs.EnvConfig(atari=AtariConfig(lives="discount")),
            "life is lost",
        ),
        (
            "atari_pong",
            envs.EnvConfig(atari=AtariConfig(min_noops=1)),
            "no min_noops",
        ),
        (
            "atari_pong",
            envs.EnvConfig(atari=AtariConfig(resize_first=True)),
            "no resize_first",
        ),
    ],
)
def test_what_a_native_pool_cannot_do_is_said(
    task: str, config: envs.EnvConfig, says: str
) -> None:
    pool = envs.VecEnvConfig(native="ale")
    with pytest.raises(UserError, match=says):
        envs.make_vec_env(envs.TaskFactory(task, config, 0), 2, pool)


def test_a_native_pool_needs_a_name_and_its_package() -> None:
    with pytest.raises(UserError, match="by its name"):
        envs.make_vec_env(
            lambda i: envs.make("catch"), 2, envs.VecEnvConfig(native="ale")
        )
    if importlib.util.find_spec("envpool") is None:
        config = envs.EnvConfig(vector=envs.VecEnvConfig(native="envpool"))
        factory = envs.TaskFactory("atari_pong", config, 0)
        with pytest.raises(UserError, match="pip install envpool"):
            envs.make_vec_env(factory, 2, config.vector)
