"""Native vectorized Atari environments implement `VecEnv`."""

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
    """Replaces envpool: games with a fixed number of steps, channels first."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, task: str, **options: Any):
        self.options = {"task": task, **options}
        self.made.append(self.options)
        self.count = options["num_envs"]
        self.action_space = gymnasium.spaces.Discrete(6)
        self.steps = np.zeros(self.count, int)
        self.closed = False

    def _image(self) -> np.ndarray:
        shape = (3, self.options["img_height"], self.options["img_width"])
        seeds = np.array(self.options["env_seed"])
        value = (seeds + self.steps) % 256
        return np.broadcast_to(value[:, None, None, None], (self.count, *shape)).astype(
            np.uint8
        )

    def reset(self) -> Any:
        self.steps[:] = 0
        return self._image(), {"env_id": np.arange(self.count)}

    def send(self, action: np.ndarray) -> None:
        assert action.dtype == np.int32
        limit = self.options["max_episode_steps"]
        self.steps = np.where(self.steps == limit, 0, self.steps + 1)

    def recv(self) -> Any:
        truncated = self.steps == self.options["max_episode_steps"]
        order = np.arange(self.count)[::-1]  # results are not in order
        none = np.zeros(self.count, bool)
        reward = np.arange(self.count, dtype=np.float32)
        return (
            self._image()[order],
            reward[order],
            none,
            truncated[order],
            {"env_id": order},
        )

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


def make_native(
    backend: Any, count: int = 3, seed: int = 0, task: str = "atari_pong", **kwargs: Any
) -> Any:
    config = envs.EnvConfig(
        atari=replace(SHORT, **kwargs), vector=envs.VecEnvConfig(native=backend)
    )
    factory = envs.IndexOffset(envs.TaskFactory(task, config, seed), 0)
    return envs.make_vec_env(factory, count, config.vector)


def play(vec_env: Any, steps: int) -> list[Obs]:
    rng = np.random.default_rng(0)
    rows = [vec_env.reset()]
    for _ in range(steps):
        rows.append(vec_env.step({"action": rng.integers(0, 6, len(vec_env))}))
    return rows


def test_it_implements_vec_env(backend: str) -> None:
    vec_env = make_native(backend)
    assert isinstance(vec_env, VecEnv)
    assert len(vec_env) == 3
    assert vec_env.act_space["action"].classes == 6
    assert vec_env.metrics()["env/restarts"] == 0
    rows = play(vec_env, 45)
    for row in rows:
        assert row.keys() == vec_env.obs_space.keys()
        for key, space in vec_env.obs_space.items():
            for value in row[key]:
                assert space.problem(value) is None, key
    assert rows[0]["is_first"].all()
    assert not rows[0]["reward"].any()
    for before, after in itertools.pairwise(rows):
        assert np.array_equal(after["is_first"], before["is_last"])
        assert not after["reward"][after["is_first"]].any()
    lengths = [t for t, row in enumerate(rows) if row["is_last"][0]]
    assert lengths == [20, 41]  # 80 frames are 20 steps; each episode has one more row
    vec_env.close()


def test_results_are_sorted_by_environment() -> None:
    fake: Any = types.ModuleType("envpool")
    fake.make = lambda task, env_type, **options: FakeEnvPool(task, **options)
    sys.modules["envpool"] = fake
    try:
        vec_env = native.EnvPoolVecEnv("ms_pacman", SHORT, 3, seed=0)
        vec_env.reset()
        obs = vec_env.step({"action": np.zeros(3, np.int32)})
    finally:
        del sys.modules["envpool"]
    seeds = np.array(FakeEnvPool.made[-1]["env_seed"])
    assert obs["image"][:, 0, 0, 0].tolist() == ((seeds + 1) % 256).tolist()
    assert len(set(seeds % 256)) == 3
    assert obs["reward"].tolist() == [0, 1, 2]
    assert FakeEnvPool.made[-1]["task"] == "MsPacman-v5"


def test_truncation_is_terminal_only_if_configured(backend: str) -> None:
    for is_terminal in (True, False):
        vec_env = make_native(backend, truncation_is_terminal=is_terminal)
        last = play(vec_env, 20)[-1]
        assert last["is_last"].all()
        assert (last["is_terminal"] == is_terminal).all()
        vec_env.close()


def test_seeds_reproduce_games_and_resuming_starts_new_ones(backend: str) -> None:
    def images(vec_env: Any) -> list[Any]:
        rows = play(vec_env, 30)
        vec_env.close()
        return [row["image"] for row in rows]

    first = images(make_native(backend, seed=1))
    assert np.array_equal(first, images(make_native(backend, seed=1)))
    assert not np.array_equal(first, images(make_native(backend, seed=2)))
    vec_env = make_native(backend, seed=1)
    play(vec_env, 5)
    state = vec_env.state_dict()
    resumed = make_native(backend, seed=1)
    assert resumed.load_state_dict(state)["is_first"].all()
    assert resumed.state_dict()["envs"][0]["attempt"] == 1
    with pytest.raises(UserError, match="has 3 environments"):
        make_native(backend, count=2).load_state_dict(state)


def test_settings_are_passed_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    options_used: dict[str, Any] = {}

    class Recorder:
        single_action_space = gymnasium.spaces.Discrete(18)

        def __init__(self, game: str, count: int, **options: Any):
            options_used.update(options, game=game, count=count)

    import ale_py

    monkeypatch.setattr(ale_py, "AtariVectorEnv", Recorder)
    native.AleVecEnv("montezuma_revenge", AtariConfig(), 5, seed=0)
    assert options_used == {
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
    ("task", "config", "message"),
    [
        ("catch", envs.EnvConfig(), "has no native"),
        ("atari_pong", envs.EnvConfig(repeat=2), "Wrappers cannot be applied"),
        ("atari_pong", envs.EnvConfig(length=9), "Wrappers cannot be applied"),
        (
            "atari_pong",
            envs.EnvConfig(atari=AtariConfig(lives="discount")),
            "does not report lost lives",
        ),
        (
            "atari_pong",
            envs.EnvConfig(atari=AtariConfig(min_noops=1)),
            "does not support min_noops",
        ),
        (
            "atari_pong",
            envs.EnvConfig(atari=AtariConfig(resize_first=True)),
            "resize_first",
        ),
    ],
)
def test_unsupported_settings_are_refused(
    task: str, config: envs.EnvConfig, message: str
) -> None:
    vector = envs.VecEnvConfig(native="ale")
    with pytest.raises(UserError, match=message):
        envs.make_vec_env(envs.TaskFactory(task, config, 0), 2, vector)


def test_it_needs_a_task_name_and_its_package() -> None:
    with pytest.raises(UserError, match="built from a task name"):
        envs.make_vec_env(
            lambda i: envs.make("catch"), 2, envs.VecEnvConfig(native="ale")
        )
    if importlib.util.find_spec("envpool") is None:
        config = envs.EnvConfig(vector=envs.VecEnvConfig(native="envpool"))
        factory = envs.TaskFactory("atari_pong", config, 0)
        with pytest.raises(UserError, match="pip install envpool"):
            envs.make_vec_env(factory, 2, config.vector)
