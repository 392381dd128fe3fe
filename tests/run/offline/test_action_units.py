"""Recorded actions reach an environment in its own units, whatever stores them.

The recorded torque is 1.5 or -1.5, the environment's bounds are -2 and 2.
"""

from __future__ import annotations

import types
from itertools import pairwise

import gymnasium
import numpy as np
import pytest
from episode_helpers import install_stub
from offline_helpers import settings

import reverie
from reverie.api import UserError
from reverie.datasets.action_units import make_action_converter
from reverie.datasets.episode_format import from_steps
from reverie.datasets.episodes import iterate_episodes, open_episodes
from reverie.datasets.readers import npz
from reverie.datasets.readers.metadata import DatasetMetadata
from reverie.datasets.robomimic import write_robomimic
from reverie.envs import EnvConfig, TaskFactory
from reverie.envs.vector.vec_env import VecEnvConfig, make_vec_env
from reverie.evaluation.episodes import evaluate, play_episodes
from reverie.run.load import open_run
from reverie.run.offline.datasets import open_split
from reverie.run.offline.train import offline
from reverie.spaces import Space
from reverie.storage.episodes import write_episode

TORQUE, BOUND, STEPS = 1.5, 2.0, 7
OBS = {"vector": Space(np.float32, (3,))}
OWN = {"action": Space(np.float32, (1,), -BOUND, BOUND)}
SCALED = {"action": OWN["action"].normalized()}


class SpyingPendulum(gymnasium.Env):
    """Records the torques that it receives; the observation asks for a positive one."""

    observation_space = gymnasium.spaces.Box(-9, 9, (3,), np.float32)
    action_space = gymnasium.spaces.Box(-BOUND, BOUND, (1,), np.float32)

    def __init__(self):
        self.torques: list[float] = []

    def reset(self, seed=None, options=None):
        return np.array([1, 0, 0], np.float32), {}

    def step(self, action):
        self.torques.append(float(action[0]))
        end = len(self.torques) % STEPS == 0
        return np.array([1, 0, 0], np.float32), 0.0, False, end, {}


def make_pendulum_episodes(scale=1.0):
    """Return episodes whose torque has the sign of the first observation."""
    episodes = {}
    for number in range(8):
        sign = np.random.default_rng(number).choice([-1, 1], STEPS + 1)
        vector = np.zeros((STEPS + 1, 3), np.float32)
        vector[:, 0] = sign
        action = (scale * TORQUE * sign[:-1, None]).astype(np.float32)
        zeros = np.zeros(STEPS, np.float32)
        episodes[f"demo_{number}"] = from_steps(
            {"vector": vector}, {"action": action}, zeros, zeros
        )
    return episodes


def write_minari(folder, monkeypatch):
    episodes = list(make_pendulum_episodes().values())

    class Dataset:
        episode_indices = np.arange(len(episodes))
        action_space = SpyingPendulum.action_space
        storage = types.SimpleNamespace(
            get_episode_metadata=lambda ids: [{"total_steps": STEPS} for _ in ids]
        )

        def iterate_episodes(self, ids):
            for number in ids:
                episode = episodes[number]
                yield types.SimpleNamespace(
                    observations=episode["vector"],
                    actions=episode["action"][:-1],
                    rewards=episode["reward"][1:],
                    terminations=episode["is_terminal"][1:],
                )

    install_stub(monkeypatch, "minari", load_dataset=lambda name: Dataset())
    return "minari:pendulum-v0"


def write_lerobot(folder, monkeypatch):
    frames = [
        {"observation.vector": episode["vector"][t], "action": episode["action"][t]}
        for episode in make_pendulum_episodes().values()
        for t in range(STEPS)
    ]
    starts = range(0, len(frames), STEPS)

    class LeRobotDataset:
        meta = types.SimpleNamespace(
            stats={"action": {"min": np.array([-TORQUE]), "max": np.array([TORQUE])}}
        )

        def __init__(self, name, root=None):
            stops = [start + STEPS for start in starts]
            self.episode_data_index = {"from": list(starts), "to": stops}

        def __getitem__(self, index):
            return frames[index]

    name = "lerobot.datasets.lerobot_dataset"
    install_stub(monkeypatch, name, LeRobotDataset=LeRobotDataset)
    return "lerobot:pendulum"


def write_hdf5(folder, monkeypatch):
    pytest.importorskip("h5py")
    path = folder / "demos.hdf5"
    write_robomimic(path, make_pendulum_episodes().items(), {"action": Space("f4", 1)})
    return path


def write_exported_hdf5(folder, monkeypatch):
    pytest.importorskip("h5py")
    path = folder / "demos.hdf5"
    write_robomimic(path, make_pendulum_episodes(1 / BOUND).items(), SCALED)
    return path


def write_npz(folder, monkeypatch, scale=1 / BOUND):
    for name, episode in make_pendulum_episodes(scale).items():
        npz.write_npz_episode(folder, name, episode, SCALED)
    return folder


def write_own_npz(folder, monkeypatch):
    return write_npz(folder, monkeypatch, scale=1)


def write_npz_with_metadata(folder, monkeypatch):
    DatasetMetadata(OBS, SCALED).write(folder)
    return write_npz(folder, monkeypatch)


def write_safetensors(folder, monkeypatch):
    for name, episode in make_pendulum_episodes().items():
        write_episode(folder, name, episode)
    return folder


def write_safetensors_with_metadata(folder, monkeypatch):
    for name, episode in make_pendulum_episodes(1 / BOUND).items():
        write_episode(folder, name, episode)
    DatasetMetadata(OBS, SCALED).write(folder)
    return folder


def write_replay(folder, monkeypatch):
    """Write the replay of a run that was filled with recorded episodes."""
    data = folder / "data"
    data.mkdir()
    write_own_npz(data, monkeypatch)
    return train_with_episodes(data, folder / "run")


def write_chunks(folder, monkeypatch):
    """Write the replay of danijar/dreamerv3; episodes span two chunks."""
    episodes = list(make_pendulum_episodes(1 / BOUND).values())
    rows = {k: np.concatenate([e[k] for e in episodes]) for k in episodes[0]}
    rows["dyn/deter"] = np.zeros((len(rows["reward"]), 5), np.float32)
    cuts = [0, 12, 30, len(rows["reward"])]
    for i, (start, stop) in enumerate(pairwise(cuts)):
        name = f"2024010{i + 1}T000000F000000-id{i}-id{i + 1}-{stop - start}.npz"
        npz.save_arrays(folder / name, {k: v[start:stop] for k, v in rows.items()})
    return folder


READERS = {
    "minari": (write_minari, 2),
    "lerobot": (write_lerobot, 1.5),
    "hdf5": (write_hdf5, 1),
    "exported_hdf5": (write_exported_hdf5, 2),
    "npz": (write_npz, 2),
    "own_npz": (write_own_npz, 1),
    "npz_with_metadata": (write_npz_with_metadata, 2),
    "safetensors": (write_safetensors, 1),
    "safetensors_with_metadata": (write_safetensors_with_metadata, 2),
    "replay": (write_replay, 2),
    "dreamerv3_replay": (write_chunks, 2),
}
"""Writers of data, and the torque of an agent's action 1. Δ-IRIS data is discrete."""

every_reader = pytest.mark.parametrize("reader", READERS)
pytestmark = pytest.mark.filterwarnings("ignore:The action")


def train_with_episodes(data, logdir, **settings):
    return reverie.train(
        SpyingPendulum(),
        configs=["debug"],
        logdir=str(logdir),
        agent="random",
        logger__outputs=(),
        run__steps=2,
        run__episodes=str(data),
        **settings,
    )


def factory(env):
    return TaskFactory(lambda: env, EnvConfig(), 0)


@pytest.mark.extended_except("minari", "hdf5", "lerobot")
@every_reader
def test_a_clone_applies_the_recorded_torque(reader, tmp_path, monkeypatch):
    data = READERS[reader][0](tmp_path, monkeypatch)
    flags = {"run.steps": 60, "run.report_every": 60, "run.save_every": 60}
    flags |= {"bc.opt.lr": 0.03, "bc.batch_size": 16, "bc.head.layers": 0}
    run = offline(settings(data, tmp_path / "clone", "bc", **flags))
    env = SpyingPendulum()
    evaluate(run, 2, [("run.eval_envs", 1)], make_env=factory(env), failures=0)
    np.testing.assert_allclose(env.torques, TORQUE, atol=0.2)
    if READERS[reader][0] not in (write_npz, write_chunks):  # bounds are not known
        torque = reverie.load(run).act(np.array([1, 0, 0], np.float32))
        np.testing.assert_allclose(torque, env.torques[0], rtol=1e-5)


@pytest.mark.extended_except("minari", "lerobot")
@every_reader
def test_a_policy_trained_in_imagination_acts_in_own_units(
    reader, tmp_path, monkeypatch
):
    write, scale = READERS[reader]
    data = write(tmp_path, monkeypatch)
    flags = {"dreamer.behaviour": True, "run.steps": 1}
    if scale == 1:  # the policy could not apply the recorded torque
        with pytest.raises(UserError, match="has no bounds, but the policy"):
            offline(settings(data, tmp_path / "policy", **flags))
        flags["offline.read.action_bounds"], scale = (-BOUND, BOUND), BOUND
    run = offline(settings(data, tmp_path / "policy", **flags))
    env, actions = SpyingPendulum(), []
    envs = make_vec_env(factory(env), 1, VecEnvConfig())
    agent = open_run(run).load_policy(envs)
    policy = agent.agent.policy

    def spying_policy(*arguments):
        carry, action, extras = policy(*arguments)
        actions.append(action["action"][0, 0])
        return carry, action, extras

    agent.agent.policy = spying_policy
    play_episodes(agent, envs, 1)
    chosen, torques = np.array(actions[:STEPS]), np.array(env.torques[:STEPS])
    inside = np.abs(chosen) < 1  # others are clipped
    assert inside.any()
    np.testing.assert_allclose(torques[inside], scale * chosen[inside], rtol=1e-4)


@every_reader
def test_episodes_in_a_replay_have_the_actions_of_the_run(
    reader, tmp_path, monkeypatch
):
    data = READERS[reader][0](tmp_path, monkeypatch)
    run = train_with_episodes(data, tmp_path / "online")
    replay = open_episodes(run)
    space = replay.act_space["action"]
    assert space == SCALED["action"]
    assert len(replay.names()) == 8
    for name in replay.names():
        torques = space.to_native(replay.read(name)["action"][:-1])
        np.testing.assert_allclose(np.abs(torques), TORQUE, rtol=1e-6)


def test_a_run_is_evaluated_in_the_units_of_its_own_environment(tmp_path):
    weak = SpyingPendulum()
    weak.action_space = gymnasium.spaces.Box(-0.5, 0.5, (1,), np.float32)
    options = {"agent": "random", "logdir": str(tmp_path), "logger__outputs": ()}
    run = reverie.train(weak, configs=["debug"], run__steps=2, **options)
    env = SpyingPendulum()
    with pytest.warns(RuntimeWarning, match=r"bounds \[-0.5, 0.5\] in the run"):
        reverie.evaluate(run, env=env, episodes=2)
    assert 0.3 < np.abs(env.torques).max() <= 0.5
    weak.action_space = gymnasium.spaces.Box(-0.1, 0.1, (1,), np.float32)
    with pytest.raises(UserError, match=r"but bounds \[-0.1, 0.1\]"):
        reverie.evaluate(run, env=weak, episodes=2)
    env.observation_space = gymnasium.spaces.Box(-8, 8, (2,), np.float32)
    with pytest.raises(UserError, match=r"shape \(2,\) in .* was trained with \(3,\)"):
        reverie.evaluate(run, env=env, episodes=2)


def test_a_key_map_describes_the_episodes_of_an_online_run(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for name, episode in make_pendulum_episodes().items():
        did, gain = episode["action"][:-1], episode["reward"][1:]
        np.savez(data / f"{name}.npz", seen=episode["vector"], did=did, gain=gain)
    names = {"keys": ("vector=seen",), "action": "did", "reward": "gain"}
    names |= {"terminal": "none"}
    settings = {f"offline__read__map__{k}": v for k, v in names.items()}
    run = train_with_episodes(data, tmp_path / "run", **settings)
    replay = open_episodes(run)
    assert len(replay.names()) == 8
    action = replay.read(replay.names()[0])["action"][:-1]
    np.testing.assert_allclose(np.abs(action), TORQUE / BOUND, rtol=1e-6)


def test_bounds_that_exceed_those_of_the_environment_are_refused():
    wide = {"action": Space("f4", 1, -3, 3).normalized()}
    with pytest.raises(UserError, match=r"bounds \[-3, 3\] in a, but bounds \[-2, 2\]"):
        make_action_converter(wide, SCALED, "a", "b")


def test_an_assumption_about_units_is_reported(tmp_path, monkeypatch):
    unbounded = {"action": Space("f4", 1)}
    unit = {"action": Space("f4", 1, -1, 1)}
    for target in (SCALED, unit):
        assert not make_action_converter(target, target, "a", "b")[1]
    assert not make_action_converter(unbounded, unit, "a", "b")[1]
    message = make_action_converter(unbounded, SCALED, "a", "b")[1]
    assert message == (
        "The action 'action' has no bounds in a, and is taken to be in the units of b "
        "(bounds [-2, 2])"
    )
    write_own_npz(tmp_path, monkeypatch)
    with pytest.warns(RuntimeWarning, match="in the units of the environment"):
        list(iterate_episodes(tmp_path, OBS, SCALED))


def test_bounds_of_data_without_them_can_be_set(tmp_path, monkeypatch):
    data = write_hdf5(tmp_path, monkeypatch)
    flags = {"offline.read.action_bounds": (-2.0, 2.0), "dreamer.behaviour": True}
    config = settings(data, tmp_path / "run", **flags)
    reader = open_episodes(data, config.offline.read)
    assert reader.act_space == SCALED
    action = reader.read("demo_0")["action"]
    np.testing.assert_allclose(np.abs(action[:-1]), TORQUE / BOUND)
    assert action[-1] == 0


def test_a_base_run_in_other_units_is_refused(tmp_path, monkeypatch):
    data = write_hdf5(tmp_path, monkeypatch)
    bounds = {"offline.read.action_bounds": (-2.0, 2.0)}
    world = offline(settings(data, tmp_path / "world", **bounds))
    (tmp_path / "own").mkdir()
    other = write_hdf5(tmp_path / "own", monkeypatch)
    flags = {"bc.run": str(world)}
    with pytest.raises(UserError, match=r"Fix: --offline.read.action_bounds -2 2"):
        offline(settings(other, tmp_path / "clone", "bc", **flags))
    offline(settings(other, tmp_path / "clone", "bc", **flags, **bounds))


def test_evaluation_data_is_converted_to_the_units_of_the_training_data(
    tmp_path, monkeypatch
):
    data = write_hdf5(tmp_path, monkeypatch)
    (tmp_path / "eval").mkdir()
    other = write_npz_with_metadata(tmp_path / "eval", monkeypatch)
    config = settings(data, tmp_path / "run", **{"offline.eval_data": str(other)})
    training, held_out = open_split(config.offline, 0)
    for reader in (training, held_out):
        action = reader.read("demo_0")["action"][:-1]
        np.testing.assert_allclose(np.abs(action), TORQUE, rtol=1e-6)
