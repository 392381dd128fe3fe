"""Recordings replayed and rendered in their simulator."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from reverie import envs
from reverie.api import UserError
from reverie.cli.main import main
from reverie.datasets.episode_format import STATE
from reverie.datasets.episodes import open_episodes
from reverie.datasets.robomimic import write_robomimic
from reverie.envs import opengl
from reverie.envs.suites.dmc import DMCConfig
from reverie.envs.wrappers import has_simulator_state
from reverie.recordings.simulate import OpenLoopReplay, Simulator, SimulatorConfig

h5py = pytest.importorskip("h5py")
pytest.importorskip("mujoco")
# Imports Triton. Its LLVM must be loaded before that of Mesa, which draws the images.
torch.use_deterministic_algorithms(torch.are_deterministic_algorithms_enabled())

TASK = "mujoco_InvertedPendulum-v5"
STEPS = 6
can_render = pytest.mark.skipif(
    all(opengl.probe_backend(name) for name in opengl.LIBRARIES),
    reason="there is no OpenGL backend",
)


def record(env: Any, seed: int) -> dict[str, np.ndarray]:
    """Record random actions, and the simulator state of every row."""
    rng = np.random.default_rng(seed)
    obs, rows = env.reset(seed), []
    for step in range(STEPS + 1):
        action = {k: s.zeros() for k, s in env.act_space.items()}
        if step < STEPS:
            action = {
                key: rng.uniform(-0.3, 0.3, space.shape).astype(np.float32)
                for key, space in env.act_space.items()
            }
        rows.append({**obs, **action, STATE: env.simulator_state()})
        obs = env.step(action)
    return {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def write(path: Any, task: str = TASK, **config: Any) -> dict[str, Any]:
    env = envs.make(task, envs.EnvConfig(**config))
    episodes = {f"demo_{i}": record(env, i) for i in range(2)}
    masks = {"train": ["demo_0"], "valid": ["demo_1"]}
    env_args = {"env_name": task}
    write_robomimic(
        path, episodes.items(), env.act_space, masks=masks, env_args=env_args
    )
    env.close()
    return episodes


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("recorded") / "pendulum.hdf5"
    write(path)
    return path


@pytest.fixture
def file(tmp_path: Any, monkeypatch: pytest.MonkeyPatch, recorded: Any) -> Any:
    monkeypatch.chdir(tmp_path)
    return shutil.copy(recorded, tmp_path / "pendulum.hdf5")


def without_states(path: Any) -> None:
    with h5py.File(path, "a") as data:
        for demo in data["data"].values():
            del demo["states"]


def replay_of(
    path: Any, name: str, play: Any = "actions", seed: int = 0, **config: Any
) -> OpenLoopReplay:
    config = {"task": TASK, **config}
    with Simulator(SimulatorConfig(**config), open_episodes(path), seed) as simulator:
        assert has_simulator_state(simulator.env)
        return simulator.replay(name, play)


def error_of(words: list[str], capsys: Any) -> str:
    assert main(["data", *words]) == 2
    message: str = capsys.readouterr().err
    assert "  Fix: " in message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("play", ["actions", "states"])
def test_a_replay_reaches_the_recorded_states(file: Any, play: Any) -> None:
    replay = replay_of(file, "demo_1", play)
    assert len(replay.rows) == STEPS + 1
    assert replay.errors()["vector"].max() < 1e-6
    if play == "actions":
        assert len(replay.state_errors) == STEPS
        assert max(replay.state_errors) < 1e-9
        assert replay.errors()["reward"].max() == 0


def test_other_actions_and_another_start_are_found(file: Any) -> None:
    with h5py.File(file, "a") as data:
        data["data/demo_0/actions"][2] += 0.5
        data["data/demo_1/states"][0] += 0.01
    replay = replay_of(file, "demo_0")
    assert max(replay.state_errors[:3]) < 1e-9 < 1e-3 < min(replay.state_errors[3:])
    assert replay_of(file, "demo_1").errors()["vector"][0] > 1e-3


def test_actions_are_played_without_recorded_states(file: Any) -> None:
    without_states(file)
    starts = [replay_of(file, "demo_1", seed=seed) for seed in (3, 3, 4)]
    first = [replay.errors()["vector"][0] for replay in starts]
    assert first[0] == first[1] != first[2]
    assert all(len(replay.rows) == STEPS + 1 for replay in starts)
    assert starts[0].state_errors == []
    with pytest.raises(ValueError, match="has no 'states'"):
        replay_of(file, "demo_1", "states")


def test_positions_and_velocities_without_time_are_states(file: Any) -> None:
    with h5py.File(file, "a") as data:
        for demo in data["data"].values():
            states = np.asarray(demo["states"])
            del demo["states"]
            demo["infos/qpos"], demo["infos/qvel"] = states[:, 1:3], states[:, 3:]
    keys = ("infos/qpos", "infos/qvel")
    replay = replay_of(file, "demo_1", states=keys)
    assert max(replay.state_errors) < 1e-9
    sizes = r"shape \(2,\), this task has \(5,\) or \(4,\)"
    with pytest.raises(UserError, match=sizes):
        replay_of(file, "demo_1", states=("infos/qpos",))


@can_render
def test_the_command_compares_and_writes_a_video(file: Any, capsys: Any) -> None:
    words = ["replay", "pendulum.hdf5", "--task", TASK, "--episode", "demo_1"]
    assert main(["data", *words, "--out", "replay.gif", "--fps", "5"]) == 0
    output = capsys.readouterr().out
    assert f"demo_1 in {TASK}, actions: 6 of 6 steps" in output
    assert "simulator state" in output
    assert "return: recorded 6, replayed 6" in output
    with Image.open("replay.gif") as video:
        assert video.n_frames > 1
    assert main(["data", *words, "--play", "states", "--out", "states.gif"]) == 0
    assert "has no episode" in error_of([*words, "--episode", "demo_7"], capsys)
    assert "--task TASK" in error_of(words[:2], capsys)


@can_render
def test_rendered_images_are_those_of_the_task(tmp_path: Any) -> None:
    task, config = "dmc_cartpole_swingup", DMCConfig(size=(24, 24))
    expected = write(tmp_path / "images.hdf5", task, dmc=config)
    write(tmp_path / "states.hdf5", task, dmc=DMCConfig(image=False))
    words = ["render", str(tmp_path / "states.hdf5"), str(tmp_path / "out")]
    flags = ["--task", task, "--env.dmc.size", "24", "24"]
    assert main(["data", *words, *flags]) == 0
    rendered = open_episodes(tmp_path / "out")
    assert rendered.masks == {"train": ["demo_0"], "valid": ["demo_1"]}
    for name, episode in expected.items():
        found = rendered.read(name)
        for key in ("image", "position", "velocity", "action"):
            np.testing.assert_array_equal(found[key], episode[key], err_msg=key)


@can_render
def test_rendered_episodes_as_hdf5(file: Any, capsys: Any) -> None:
    words = ["render", "pendulum.hdf5", "out.hdf5", "--task", TASK, "--first", "1"]
    assert main(["data", *words]) == 0
    rendered = open_episodes("out.hdf5")
    assert rendered.names() == ["demo_0"]
    assert rendered.obs_space["image"].is_image
    assert json.loads(rendered.metadata["env_args"])["env_name"] == TASK
    assert "exists already" in error_of(words, capsys)


@can_render
def test_episodes_without_states_stop_or_are_skipped(file: Any, capsys: Any) -> None:
    with h5py.File(file, "a") as data:
        del data["data/demo_1/states"]
    for out in ("out", "out.hdf5"):
        words = ["render", "pendulum.hdf5", out, "--task", TASK]
        assert "demo_1 has no 'states'" in error_of(words, capsys)
        assert main(["data", *words, "--bad", "skip"]) == 0
        assert "skipped: demo_1" in capsys.readouterr().err
        rendered = open_episodes(out)
        assert rendered.names() == ["demo_0"]
        assert rendered.masks == {"train": ["demo_0"], "valid": []}


def test_tasks_and_recordings_without_states_are_errors(
    file: Any, tmp_path: Any, capsys: Any
) -> None:
    words = ["render", "pendulum.hdf5", "out", "--task", "reach"]
    assert "those of reach are" in error_of(words, capsys)
    assert main(["data", "convert", "pendulum.hdf5", "folder"]) == 0
    words = ["replay", "folder", "--task", TASK, "--play", "states"]
    assert "has no simulator states" in error_of(words, capsys)


@pytest.mark.parametrize(
    "task", ["gym_InvertedPendulum-v5", "dmc_cartpole_swingup", "dmc_acrobot_swingup"]
)
def test_other_mujoco_tasks(task: str, tmp_path: Any) -> None:
    config = {"dmc": DMCConfig(image=False)}
    path = tmp_path / "recorded.hdf5"
    write(path, task, **config)
    for play in ("actions", "states"):
        replay = replay_of(
            path, "demo_1", play, task=task, env=envs.EnvConfig(**config)
        )
        errors = replay.errors()
        assert max(errors[key].max() for key in errors if key != "reward") < 1e-5


def test_the_state_of_other_gymnasium_tasks_cannot_be_set() -> None:
    env: Any = envs.make("gym_CartPole-v1")
    env.reset()
    with pytest.raises(UserError, match="CartPoleEnv cannot be set"):
        env.set_simulator_state(np.zeros(4))
