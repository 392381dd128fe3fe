"""Readers: every format gives the same rows, with aligned actions."""

from __future__ import annotations

import json
import types

import numpy as np
import pytest
from episode_helpers import (
    ACTION,
    SCALED,
    alignment_error,
    assert_same,
    check_reader,
    install_stub,
    make_episode,
    write_npz,
)

from reverie.api import UserError
from reverie.datasets.episode_format import (
    BadEpisode,
    find_problems,
    from_steps,
    to_steps,
)
from reverie.datasets.episodes import open_episodes
from reverie.datasets.readers import READERS, natural_sort, npz
from reverie.datasets.readers.metadata import DatasetMetadata, read_metadata
from reverie.datasets.robomimic import write_robomimic
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.rows import Window
from reverie.spaces import STEP_KEYS, Space, step_spaces
from reverie.storage.episodes import write_episode


def test_from_steps_undoes_to_steps():
    episode = make_episode(7)
    assert_same(from_steps(*to_steps(episode, ACTION)), episode)


def test_alignment_error_detects_a_shift_by_one_row():
    episode = make_episode(7)
    assert alignment_error(episode) < 1e-6
    late = {**episode, "action": np.roll(episode["action"], 1, 0)}
    early = {**episode, "action": np.roll(episode["action"], -1, 0)}
    assert min(alignment_error(late), alignment_error(early)) > 0.01


def test_npz(tmp_path):
    episodes = write_npz(tmp_path, (5, 9, 12))
    check_reader(open_episodes(tmp_path), episodes, SCALED)
    stored = npz.load_arrays(tmp_path / "demo_1-10.npz")
    assert not stored["action"][0].any()
    assert (
        alignment_error({**stored, "action": stored["action"]}) > 0.01
    )  # action before obs


def test_dataset_json_defines_spaces_and_masks(tmp_path):
    write_npz(tmp_path)
    order = {"speed": Space(np.float32, (3,)), "image": Space(np.uint8, (8, 8, 3))}
    DatasetMetadata(order, ACTION, {"train": ["demo_0"]}, {"from": "here"}).write(
        tmp_path
    )
    reader = open_episodes(tmp_path)
    assert list(reader.obs_space) == ["speed", "image"]
    assert "position" not in reader.read("demo_0")
    assert reader.masks == {"train": ["demo_0"]}
    assert read_metadata(tmp_path).extra == {"from": "here"}
    (tmp_path / "dataset.json").write_text("[")
    with pytest.raises(UserError, match=r"dataset.json cannot be read"):
        open_episodes(tmp_path)


def test_safetensors(tmp_path):
    episodes = {f"demo_{i}": make_episode(n, seed=i) for i, n in enumerate((5, 9))}
    for name, episode in episodes.items():
        write_episode(tmp_path, name, episode)
    check_reader(open_episodes(tmp_path), episodes)
    (path,) = tmp_path.glob("demo_1-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadEpisode, match="checksum"):
        open_episodes(tmp_path).read("demo_1")


def test_replay_of_a_run(tmp_path):
    first, second = make_episode(5, 1), make_episode(9, 2)
    obs = {"image": Space(np.uint8, (8, 8, 3)), "position": Space(np.float32, (2,))}
    obs["speed"] = Space(np.float32, (3,))
    spaces = obs | step_spaces() | ACTION
    replay = Replay(
        spaces,
        {},
        ReplayConfig(capacity=64, segment=8),
        capacity=64,
        num_envs=2,
        windows={"train": Window(1, 2)},
        directory=tmp_path / "replay",
        seed=0,
    )
    unfinished = make_episode(9, 3)
    for t in range(10):  # the second environment starts a second episode
        one = second
        other, row = (first, t) if t < 6 else (unfinished, t - 6)
        rows = {k: np.stack([one[k][t], other[k][row]]) for k in spaces}
        replay.add(rows)
    replay.save()
    replay.close()
    described = {
        "obs": [[k, s.to_json()] for k, s in spaces.items() if k != "action"],
        "act": [["action", ACTION["action"].to_json()]],
    }
    (tmp_path / "spaces.json").write_text(json.dumps(described))
    reader = open_episodes(tmp_path)
    check_reader(reader, {"env0_step0": second, "env1_step0": first})
    (tmp_path / "spaces.json").unlink()
    with pytest.raises(UserError, match="Fix: use the folder of a run"):
        open_episodes(tmp_path)


def test_minari(monkeypatch):
    episodes = [make_episode(5, 1), make_episode(8, 2)]

    class Dataset:
        action_space = types.SimpleNamespace(shape=(2,))
        episode_indices = np.arange(2)
        storage = types.SimpleNamespace(
            get_episode_metadata=lambda ids: [
                {"total_steps": len(episodes[i]["reward"]) - 1} for i in ids
            ]
        )

        def iterate_episodes(self, ids):
            for i in ids:
                obs, action, reward, ends = to_steps(episodes[i], ACTION)
                yield types.SimpleNamespace(
                    observations={
                        "image": obs["image"],
                        "nest": {
                            "position": obs["position"],
                            "speed": obs["speed"],
                        },
                    },
                    actions=action["action"],
                    rewards=reward.astype(np.float64),
                    terminations=ends,
                )

    def load_dataset(name):
        if name != "demos-v0":
            raise FileNotFoundError("nothing there")
        return Dataset()

    install_stub(monkeypatch, "minari", load_dataset=load_dataset)
    check_reader(
        open_episodes("minari:demos-v0"),
        {"episode_0": episodes[0], "episode_1": episodes[1]},
    )
    with pytest.raises(UserError, match="Fix: minari download runs-v0"):
        open_episodes("minari:runs-v0")


def test_minari_action_spaces_and_ambiguous_keys(monkeypatch):
    few = types.SimpleNamespace(n=np.int64(4), start=np.int64(1))
    many = types.SimpleNamespace(spaces={"left": few, "right": None})

    class Dataset:
        episode_indices = np.arange(1)
        storage = None
        action_space = types.SimpleNamespace(spaces=(few, many))

        def iterate_episodes(self, ids):
            steps = np.ones(3, np.int64)
            yield types.SimpleNamespace(
                observations={
                    "left": {"place": np.zeros((4, 2)), "speed": np.zeros((4, 1))},
                    "right": {"place": np.zeros((4, 3))},
                },
                actions=(steps, {"left": steps, "right": np.zeros((3, 1))}),
                rewards=np.zeros(3),
                terminations=np.zeros(3, bool),
            )

    install_stub(monkeypatch, "minari", load_dataset=lambda name: Dataset())
    reader = open_episodes("minari:demos-v0")
    assert list(reader.obs_space) == ["left/place", "speed", "right/place"]
    space = reader.act_space
    assert list(space) == ["action/0", "action/1/left", "action/1/right"]
    for key in ("action/0", "action/1/left"):
        assert (int(space[key].low), space[key].classes) == (1, 4)
    assert space["action/1/right"].shape == (1,)


def test_minari_bounds_of_actions_without_a_discrete_space(monkeypatch):
    class Dataset:
        episode_indices = np.arange(30)
        storage = None
        action_space = types.SimpleNamespace(shape=(2,))

        def iterate_episodes(self, ids):
            yield types.SimpleNamespace(
                observations=np.zeros((2, 2)),
                actions=np.array([[0, 5 if ids == [11] else 1]]),
                rewards=np.zeros(1),
                terminations=np.zeros(1, bool),
            )

    install_stub(monkeypatch, "minari", load_dataset=lambda name: Dataset())
    space = open_episodes("minari:demos-v0").act_space["action"]
    assert space.high.tolist() == [1, 6]


@pytest.mark.parametrize("place", ["lerobot.datasets", "lerobot.common.datasets"])
def test_lerobot(monkeypatch, tmp_path, place):
    episodes = [make_episode(5, 1), make_episode(8, 2)]
    frames = []
    for episode in episodes:
        for t in range(len(episode["reward"]) - 1):
            image = episode["image"][t].astype(np.float32).transpose(2, 0, 1) / 255
            frames.append(
                {
                    "observation.images.image": image,
                    "observation.position": episode["position"][t],
                    "observation.speed": episode["speed"][t],
                    "action": episode["action"][t],
                    "next.reward": episode["reward"][t + 1 : t + 2],
                    "next.done": episode["is_last"][t + 1],
                    "timestamp": np.float32(t),
                }
            )

    class LeRobotDataset:
        def __init__(self, name, root=None):
            if name == "other":
                raise ValueError("no such thing")
            if "common" in place:
                self.episode_data_index = {"from": [0, 5], "to": [5, 13]}
            else:
                table = {"dataset_from_index": [0, 5], "dataset_to_index": [5, 13]}
                self.meta = types.SimpleNamespace(episodes=table)

        def __getitem__(self, index):
            return frames[index]

    install_stub(monkeypatch, f"{place}.lerobot_dataset", LeRobotDataset=LeRobotDataset)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    for name in ("lerobot:someone/demos", tmp_path):
        reader = open_episodes(name)
        assert reader.names() == ["episode_0", "episode_1"]
        found, episode = reader.read("episode_1"), episodes[1]
        assert reader.rows("episode_1") == 9
        for key in ("action", "reward", "is_terminal"):
            np.testing.assert_array_equal(found[key], episode[key])
        np.testing.assert_array_equal(found["image"][:-1], episode["image"][:-1])
        assert alignment_error({k: v[:-1] for k, v in found.items()}) < 1e-5
        assert reader.obs_space["image"].is_image
    with pytest.raises(UserError, match="LeRobot cannot open 'other'"):
        open_episodes("lerobot:other")


@pytest.mark.parametrize("name", ["minari:x", "lerobot:x"])
def test_a_missing_package_is_an_error(monkeypatch, name):
    import sys

    for module in ("minari", "lerobot"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="is not installed"):
        open_episodes(name)


def test_an_unknown_format_is_an_error_that_lists_the_formats(tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        open_episodes(tmp_path / "absent")
    with pytest.raises(UserError) as it:
        open_episodes(tmp_path)
    for entry in READERS.values():
        assert entry.description in str(it.value)


def test_a_folder_without_a_readable_episode_is_an_error(tmp_path):
    (tmp_path / "a-3.npz").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no readable episode; a cannot be read"):
        open_episodes(tmp_path).obs_space  # noqa: B018


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"speed": np.full((6, 3), np.nan, np.float32)}, "NaN .* row 0"),
        ({"speed": np.zeros((4, 3), np.float32)}, "'speed' has 4 rows"),
        ({"speed": np.zeros((6, 4), np.float32)}, r"shape \(4,\), expected"),
        ({"speed": np.zeros((6, 3), np.int32)}, "dtype int32"),
        ({"is_first": np.ones(6, bool)}, "first row only"),
    ],
)
def test_find_problems(change, complaint):
    episode = make_episode(5)
    spaces = {k: Space(v.dtype, v.shape[1:]) for k, v in episode.items()}
    obs_space = {k: s for k, s in spaces.items() if k not in (*STEP_KEYS, "action")}
    assert not find_problems(episode, obs_space, ACTION)
    (found,) = find_problems({**episode, **change}, obs_space, ACTION)
    assert __import__("re").search(complaint, found)
    lacking = {k: v for k, v in episode.items() if k != "speed"}
    assert find_problems(lacking, obs_space, ACTION) == ["has no 'speed'"]
    assert find_problems({}, obs_space, ACTION)[0].startswith("has no 'reward'")
    with pytest.raises(BadEpisode, match="is not numeric"):
        from_steps({"a": np.array(["x", "y"])}, {}, np.zeros(1), np.zeros(1))


def write_discrete(write, many=30, rare=11):
    """Write episodes with actions 0 and 1, and one episode with action 7."""
    space = {"action": Space(np.int32, (), 0, 8)}
    for i in range(many):
        chosen = np.array([0, 1, 7 if i == rare else 1, 0], np.int32)
        write(f"demo_{i}", make_episode(3, i) | {"action": chosen}, space)


def test_bounds_of_discrete_actions_are_taken_from_all_episodes(tmp_path):
    write_discrete(
        lambda name, episode, _: write_episode(tmp_path / "a", name, episode)
    )
    found = []
    write_discrete(lambda name, episode, _: found.append((name, episode)))
    path = tmp_path / "b.hdf5"
    pytest.importorskip("h5py")
    write_robomimic(path, found, {"action": Space(np.int32)})
    for reader in (open_episodes(tmp_path / "a"), open_episodes(path)):
        assert reader.act_space["action"] == Space(np.int32, (), 0, 8)
        assert reader.read("demo_11")["action"][2] == 7


def test_a_discrete_action_out_of_bounds_is_a_problem():
    episode = make_episode(3) | {"action": np.array([1, 2, 3, 0], np.int32)}
    obs_space = {"speed": Space(np.float32, (3,))}
    assert not find_problems(episode, obs_space, {"action": Space(np.int32, (), 1, 4)})
    for low, high, wrong in ((2, 4, 1), (0, 3, 3)):
        (found,) = find_problems(
            episode, obs_space, {"action": Space(np.int32, (), low, high)}
        )
        assert f"'action' has the value {wrong}" in found


def test_log_keys_are_not_checked(tmp_path):
    logged = {"log/a": np.full(6, np.nan), "log/b": np.zeros((2, 3))}
    episode = make_episode(5) | logged
    assert not find_problems(episode, {"speed": Space(np.float32, (3,))}, ACTION)
    npz.write_npz_episode(tmp_path, "a", episode, ACTION)
    assert_same(open_episodes(tmp_path).read("a"), episode)


def test_names_with_long_numbers_and_other_digits_are_sorted():
    names = ["a10", "a²", "a" + "9" * 5000, "a2"]
    assert natural_sort(names) == ["a2", "a10", "a" + "9" * 5000, "a²"]
