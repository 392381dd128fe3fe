"""Datasets written by the installed versions of Minari and LeRobot are read back."""

from __future__ import annotations

import numpy as np
import pytest
from episode_helpers import ACTION, alignment_error, make_episode

from reverie.datasets.episode_format import to_steps
from reverie.datasets.episodes import open_episodes

EPISODES = [make_episode(5, 1), make_episode(8, 2)]


@pytest.mark.parametrize("format", ["hdf5", "arrow"])
def test_datasets_of_the_installed_minari(tmp_path, monkeypatch, format):
    minari = pytest.importorskip("minari")
    if format == "arrow":
        pytest.importorskip("pyarrow")
    from gymnasium import spaces

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    box = {
        "image": spaces.Box(0, 255, (8, 8, 3), np.uint8),
        "position": spaces.Box(-9, 9, (2,), np.float32),
        "speed": spaces.Box(-9, 9, (3,), np.float32),
    }
    buffers = []
    for episode in EPISODES:
        obs, action, reward, ends = to_steps(episode, ACTION)
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                observations={key: obs[key] for key in box},
                actions=action["action"],
                rewards=reward.astype(float).tolist(),
                terminations=ends.tolist(),
                truncations=[False] * len(ends),
            )
        )
    minari.create_dataset_from_buffers(
        "demos/test-v0",
        buffers,
        observation_space=spaces.Dict(box),
        action_space=spaces.Box(-1, 1, (2,), np.float32),
        data_format=format,
    )
    reader = open_episodes("minari:demos/test-v0")
    for name, episode in zip(reader.names(), EPISODES, strict=True):
        found = reader.read(name)
        assert reader.rows(name) == len(episode["reward"])
        for key, value in episode.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_datasets_of_the_installed_lerobot(tmp_path):
    module = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    features = {
        "observation.images.image": ("image", (8, 8, 3)),
        "observation.position": ("float32", (2,)),
        "observation.speed": ("float32", (3,)),
        "action": ("float32", (2,)),
        "next.reward": ("float32", (1,)),
        "next.done": ("bool", (1,)),
    }
    names = {3: ["height", "width", "channel"]}
    data = module.LeRobotDataset.create(
        "some/demos",
        fps=10,
        features={
            key: {"dtype": kind, "shape": shape, "names": names.get(len(shape))}
            for key, (kind, shape) in features.items()
        },
        root=tmp_path / "demos",
        use_videos=False,
    )
    for episode in EPISODES:
        for t in range(len(episode["reward"]) - 1):
            obs = {f"observation.{k}": episode[k][t] for k in ("position", "speed")}
            data.add_frame(
                {
                    **obs,
                    "observation.images.image": episode["image"][t],
                    "action": episode["action"][t],
                    "next.reward": episode["reward"][t + 1 : t + 2],
                    "next.done": episode["is_terminal"][t + 1 : t + 2],
                    "task": "move",
                }
            )
        data.save_episode()
    if hasattr(data, "finalize"):
        data.finalize()
    reader = open_episodes(tmp_path / "demos")
    assert list(reader.obs_space) == ["image", "position", "speed"]
    for name, episode in zip(reader.names(), EPISODES, strict=True):
        found = reader.read(name)
        assert reader.rows(name) == len(episode["reward"])
        for key in ("action", "reward", "is_terminal"):
            np.testing.assert_array_equal(found[key], episode[key], err_msg=key)
        np.testing.assert_array_equal(found["image"][:-1], episode["image"][:-1])
        assert alignment_error({key: value[:-1] for key, value in found.items()}) < 1e-5
