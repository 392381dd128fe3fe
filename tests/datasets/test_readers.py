"""Readers: whatever the origin, the same rows, each with the action chosen there."""

from __future__ import annotations

import json
import types
import zipfile

import numpy as np
import pytest
from walks import ACTION, same, slip, stand_in, walk, write_npz

from reverie.api import UserError
from reverie.datasets.episode_format import (
    BadEpisode,
    from_steps,
    problems,
    to_steps,
    with_flags,
)
from reverie.datasets.readers import READERS, Reader, in_order, npz, open_reader, some
from reverie.datasets.readers.metadata import About, read_about
from reverie.datasets.split import split_by_mask
from reverie.replay.buffer import Replay
from reverie.replay.config import ReplayConfig
from reverie.rows import Window
from reverie.spaces import FLAGS, Space
from reverie.storage.episodes import write_episode


def hdf5():
    pytest.importorskip("h5py")
    from reverie.datasets.readers import hdf5

    return hdf5


def write_robomimic(path, lengths=(5, 9, 12), **settings):
    episodes = {f"demo_{i}": walk(n, seed=i) for i, n in enumerate(lengths)}
    hdf5().write_robomimic(path, episodes.items(), ACTION, **settings)
    return episodes


def check(reader: Reader, episodes: dict) -> None:
    """The reader gives these episodes, and knows about them without loading any."""
    assert isinstance(reader, Reader)
    assert reader.names() == list(episodes)
    for name, episode in episodes.items():
        assert reader.rows(name) == len(episode["reward"])
        found = reader.read(name)
        same({key: found[key] for key in episode}, episode)
        assert slip(found) < 1e-5
        assert not problems(found, reader.obs_space, reader.act_space)
    assert set(reader.obs_space) == {"image", "position", "speed"}
    assert reader.obs_space["image"].is_image
    assert reader.act_space["action"] == ACTION["action"]


def test_steps_and_back():
    episode = walk(7)
    same(from_steps(*to_steps(episode, ACTION)), episode)


def test_a_shift_by_one_step_is_seen_in_these_episodes():
    episode = walk(7)
    assert slip(episode) < 1e-6
    late = {**episode, "action": np.roll(episode["action"], 1, 0)}
    early = {**episode, "action": np.roll(episode["action"], -1, 0)}
    assert min(slip(late), slip(early)) > 0.01


def test_a_folder_of_npz_files(tmp_path):
    episodes = write_npz(tmp_path, (5, 9, 12))
    check(open_reader(tmp_path), episodes)
    stored = npz.load(tmp_path / "demo_1-10.npz")
    assert not stored["action"][0].any()
    assert slip({**stored, "action": stored["action"]}) > 0.01  # theirs led to its row


def test_npz_files_are_named_in_numeric_order_and_measured_without_a_suffix(tmp_path):
    write_npz(tmp_path, [4] * 11)
    (tmp_path / "demo_10-5.npz").rename(tmp_path / "demo_10.npz")
    reader = open_reader(tmp_path)
    assert reader.names()[-2:] == ["demo_9", "demo_10"]
    assert reader.rows("demo_10") == 5
    assert in_order(["b2", "b10", "a"]) == ["a", "b2", "b10"]
    assert some(list("abcdefghij"), 3) == ["a", "e", "j"]


def test_one_hot_actions_of_a_folder_are_indices(tmp_path):
    space = {"action": Space(np.int32, (), 0, 4)}
    episode = walk(6) | {"action": np.array([3, 0, 1, 2, 2, 1, 0], np.int32)}
    npz.write_folder_file(tmp_path, "a", episode, space)
    reader = open_reader(tmp_path)
    assert reader.act_space["action"] == space["action"]
    same(reader.read("a"), episode)


def test_a_description_beside_the_files_holds(tmp_path):
    write_npz(tmp_path)
    order = {"speed": Space(np.float32, (3,)), "image": Space(np.uint8, (8, 8, 3))}
    About(order, ACTION, {"train": ["demo_0"]}, {"from": "here"}).write(tmp_path)
    reader = open_reader(tmp_path)
    assert list(reader.obs_space) == ["speed", "image"]
    assert "position" not in reader.read("demo_0")
    assert reader.masks == {"train": ["demo_0"]}
    assert read_about(tmp_path).more == {"from": "here"}
    (tmp_path / "dataset.json").write_text("[")
    with pytest.raises(UserError, match=r"dataset.json cannot be read"):
        open_reader(tmp_path)


def test_our_own_files(tmp_path):
    episodes = {f"demo_{i}": walk(n, seed=i) for i, n in enumerate((5, 9))}
    for name, episode in episodes.items():
        write_episode(tmp_path, name, episode)
    check(open_reader(tmp_path), episodes)
    (path,) = tmp_path.glob("demo_1-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BadEpisode, match="checksum"):
        open_reader(tmp_path).read("demo_1")


def test_the_replay_of_a_run(tmp_path):
    first, second = walk(5, 1), walk(9, 2)
    obs = {"image": Space(np.uint8, (8, 8, 3)), "position": Space(np.float32, (2,))}
    obs["speed"] = Space(np.float32, (3,))
    spaces = with_flags(obs) | ACTION
    replay = Replay(
        spaces,
        {},
        ReplayConfig(capacity=64, segment=8),
        capacity=64,
        streams=2,
        windows={"train": Window(1, 2)},
        directory=tmp_path / "replay",
        seed=0,
    )
    unfinished = walk(9, 3)
    for t in range(10):  # the second environment ends once, and begins again
        one = second
        other, row = (first, t) if t < 6 else (unfinished, t - 6)
        rows = {k: np.stack([one[k][t], other[k][row]]) for k in spaces}
        replay.add(rows)
    replay.save()
    replay.close()
    described = {
        "obs": {k: s.to_json() for k, s in spaces.items() if k != "action"},
        "act": {"action": ACTION["action"].to_json()},
    }
    (tmp_path / "spaces.json").write_text(json.dumps(described))
    reader = open_reader(tmp_path)
    check(reader, {"env0_step0": second, "env1_step0": first})
    (tmp_path / "spaces.json").unlink()
    with pytest.raises(UserError, match="Fix: give the folder of a run"):
        open_reader(tmp_path)


def test_robomimic_layout_becomes_rows_as_the_page_draws_them(tmp_path):
    path = tmp_path / "demos.hdf5"
    episodes = write_robomimic(path, masks={"train": ["demo_0", "demo_2"]})
    reader = open_reader(path)
    check(reader, episodes)
    assert reader.masks == {"train": ["demo_0", "demo_2"]}
    assert reader.attributes()["total"] == 26
    assert reader.attributes("demo_1")["num_samples"] == 9
    h5py = pytest.importorskip("h5py")
    with h5py.File(path) as file:
        demo = file["data/demo_1"]
        episode = reader.read("demo_1")
        np.testing.assert_array_equal(episode["image"][0], demo["obs/image"][0])
        np.testing.assert_array_equal(episode["image"][1:], demo["next_obs/image"])
        np.testing.assert_array_equal(episode["action"][:-1], demo["actions"])
        np.testing.assert_array_equal(episode["reward"][1:], demo["rewards"])
    reader.close()


def test_demos_without_next_obs_repeat_or_drop_what_is_missing(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    episodes = write_robomimic(path, (5,))
    with h5py.File(path, "a") as file:
        del file["data/demo_0/next_obs"]
    whole = episodes["demo_0"]
    reader = open_reader(path)
    repeated = reader.read("demo_0")
    assert reader.rows("demo_0") == len(repeated["reward"]) == 6
    np.testing.assert_array_equal(repeated["action"], whole["action"])
    np.testing.assert_array_equal(repeated["position"][-1], whole["position"][-2])
    assert repeated["is_terminal"][-1]
    reader = open_reader(path, map=hdf5().KeyMap(final="drop"))
    dropped = reader.read("demo_0")
    assert reader.rows("demo_0") == len(dropped["reward"]) == 5
    assert slip(dropped) < 1e-5
    assert not dropped["action"][-1].any()


def test_a_key_map_reads_other_layouts(tmp_path):
    h5py = pytest.importorskip("h5py")
    episodes = {f"take_{i}": walk(4 + i, seed=i) for i in range(3)}
    for name, episode in episodes.items():  # a file per episode, actions that led here
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["observations/images/top"] = episode["image"]
            file["observations/qpos"] = episode["position"].astype(np.float64)
            file["action"] = np.roll(episode["action"], 1, 0)
            file["r"] = episode["reward"][:, None]
    keys = ("image=observations/images/top", "position=observations/qpos")
    names = {"action": "action", "reward": "r", "terminal": "none"}
    led = hdf5().KeyMap(keys=keys, alignment="led", **names)
    reader = open_reader(tmp_path, map=led)
    assert reader.names() == list(episodes)
    for name, episode in episodes.items():
        found = reader.read(name)
        assert reader.rows(name) == len(episode["reward"])
        assert slip(found) < 1e-5
        same(
            {k: found[k] for k in ("image", "action", "reward")},
            {k: episode[k] for k in ("image", "action", "reward")},
        )
        assert not found["is_terminal"].any()
    with pytest.raises(ValueError, match="keys are pairs like"):
        hdf5().KeyMap(keys=("image",))
    wrong = open_reader(tmp_path, map=hdf5().KeyMap(keys=keys, **names))
    assert slip(wrong.read("take_2")) > 0.01


@pytest.mark.parametrize(
    ("ends", "expected"), [("dones", 1), ("success", 0), ("never", 0)]
)
def test_who_decides_that_a_task_ended(tmp_path, ends, expected):
    failed = walk(5)
    failed["reward"][:] = 0
    path = tmp_path / "demos.hdf5"
    hdf5().write_robomimic(path, [("demo_0", failed)], ACTION)
    reader = open_reader(path, map=hdf5().KeyMap(ends=ends))
    assert reader.read("demo_0")["is_terminal"].sum() == expected


def test_minari(monkeypatch):
    episodes = [walk(5, 1), walk(8, 2)]

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
        if name != "walks-v0":
            raise FileNotFoundError("nothing there")
        return Dataset()

    stand_in(monkeypatch, "minari", load_dataset=load_dataset)
    check(
        open_reader("minari:walks-v0"),
        {"episode_0": episodes[0], "episode_1": episodes[1]},
    )
    with pytest.raises(UserError, match="Fix: minari download runs-v0"):
        open_reader("minari:runs-v0")


def test_minari_says_how_many_actions_there_are_and_no_key_hides_another(monkeypatch):
    """Actions that nobody took are actions all the same."""
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

    stand_in(monkeypatch, "minari", load_dataset=lambda name: Dataset())
    reader = open_reader("minari:walks-v0")
    assert list(reader.obs_space) == ["left/place", "speed", "right/place"]
    space = reader.act_space
    assert list(space) == ["action/0", "action/1/left", "action/1/right"]
    for key in ("action/0", "action/1/left"):
        assert (int(space[key].low), space[key].classes) == (1, 4)
    assert space["action/1/right"].shape == (1,)


def test_minari_counts_over_all_episodes_what_its_space_does_not(monkeypatch):
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

    stand_in(monkeypatch, "minari", load_dataset=lambda name: Dataset())
    space = open_reader("minari:walks-v0").act_space["action"]
    assert space.high.tolist() == [1, 6]


@pytest.mark.parametrize("place", ["lerobot.datasets", "lerobot.common.datasets"])
def test_lerobot(monkeypatch, tmp_path, place):
    episodes = [walk(5, 1), walk(8, 2)]
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

    stand_in(monkeypatch, f"{place}.lerobot_dataset", LeRobotDataset=LeRobotDataset)
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("{}")
    for name in ("lerobot:someone/walks", tmp_path):
        reader = open_reader(name)
        assert reader.names() == ["episode_0", "episode_1"]
        found, episode = reader.read("episode_1"), episodes[1]
        assert reader.rows("episode_1") == 9
        for key in ("action", "reward", "is_terminal"):
            np.testing.assert_array_equal(found[key], episode[key])
        np.testing.assert_array_equal(found["image"][:-1], episode["image"][:-1])
        assert slip({k: v[:-1] for k, v in found.items()}) < 1e-5
        assert reader.obs_space["image"].is_image
    with pytest.raises(UserError, match="LeRobot cannot open 'other'"):
        open_reader("lerobot:other")


@pytest.mark.parametrize("name", ["minari:x", "lerobot:x"])
def test_a_package_that_is_missing_is_named_with_how_to_get_it(monkeypatch, name):
    import sys

    for module in ("minari", "lerobot"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match="is not installed"):
        open_reader(name)


def test_without_h5py_the_extra_is_named(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "a.hdf5").write_bytes(b"")
    with pytest.raises(UserError, match=r"pip install 'reverie\[hdf5\]'"):
        open_reader(tmp_path / "a.hdf5")


def test_what_is_no_recording_is_refused_with_the_list_of_kinds(tmp_path):
    with pytest.raises(UserError, match="nothing at"):
        open_reader(tmp_path / "absent")
    with pytest.raises(UserError) as it:
        open_reader(tmp_path)
    for kind in READERS.values():
        assert kind.about in str(it.value)


def test_a_damaged_hdf5_file_is_one_sentence(tmp_path):
    path = tmp_path / "demos.hdf5"
    write_robomimic(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="damaged one"):
        open_reader(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="no HDF5 file"):
        open_reader(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.__delitem__("actions"), "has no 'actions', only dones"),
        (lambda d: d.__delitem__("obs"), "has no group 'obs'"),
        (lambda d: d.__delitem__("next_obs/speed"), "has no speed in 'next_obs'"),
        (lambda d: cut(d, "rewards"), "'rewards' has 3 rows"),
        (lambda d: cut(d, "obs/image"), "several lengths"),
        (lambda d: single(d, "rewards"), "'rewards' has no rows"),
        (lambda d: single(d, "obs/speed"), "'speed' is a single number"),
        (lambda d: [cut(d, key, 0) for key in every(d)], "is empty"),
        (lambda d: cut(d, "next_obs/image"), r"in 'next_obs'"),
    ],
)
def test_a_demo_that_lacks_something_is_bad_and_the_others_are_not(
    tmp_path, change, complaint
):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    write_robomimic(path)
    with h5py.File(path, "a") as file:
        change(file["data/demo_1"])
    reader = open_reader(path)
    with pytest.raises(BadEpisode, match=complaint):
        reader.read("demo_1")
    assert slip(reader.read("demo_2")) < 1e-5
    assert reader.act_space["action"] == ACTION["action"]


def cut(demo, key, rows=3):
    value = demo[key][:rows]
    del demo[key]
    demo[key] = value


def single(demo, key):
    del demo[key]
    demo[key] = 3.0


def every(demo):
    """The arrays of a demonstration."""
    found = []
    demo.visititems(lambda name, thing: found.append(name) if shaped(thing) else None)
    return found


def shaped(thing):
    return hasattr(thing, "shape")


def test_a_damaged_file_in_a_folder_is_an_episode_that_cannot_be_read(tmp_path):
    pytest.importorskip("h5py")
    for name in "abc":
        write_robomimic(tmp_path / f"{name}.hdf5")
    (tmp_path / "a.hdf5").write_bytes(b"nothing of the kind")
    reader = open_reader(tmp_path)
    assert reader.names()[:2] == ["a", "b_demo_0"]
    with pytest.raises(BadEpisode, match="is a damaged file"):
        reader.read("a")
    with pytest.raises(BadEpisode, match="is a damaged file"):
        reader.rows("a")
    assert slip(reader.read("b_demo_2")) < 1e-5
    reader.close()
    for name in "bc":
        (tmp_path / f"{name}.hdf5").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.hdf5 is no HDF5 file"):
        open_reader(tmp_path)


def test_a_mask_of_nobody_is_refused(tmp_path):
    pytest.importorskip("h5py")
    masks = {"train": ["demo_0", "demo_1"], "valid": ["demo_7"]}
    write_robomimic(tmp_path / "demos.hdf5", masks=masks)
    with pytest.raises(UserError, match=r"mask 'valid' of .* names no episode"):
        split_by_mask(open_reader(tmp_path / "demos.hdf5"), "train", "valid")


def test_words_among_the_observations_are_left_out(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    write_robomimic(path)
    with h5py.File(path, "a") as file:
        for name, demo in file["data"].items():
            count = len(demo["actions"])
            for part in ("obs", "next_obs"):
                demo[f"{part}/language"] = np.array([name.encode()] * count)
                demo[f"{part}/nothing"] = np.zeros((count, 0))
                demo[f"{part}/action"] = np.ones((count, 2))
    reader = open_reader(path)
    assert set(reader.obs_space) == {"image", "position", "speed"}
    assert slip(reader.read("demo_2")) < 1e-5
    assert reader.remarks["left out"] == "action, language, nothing"


def test_episodes_without_actions_say_what_they_have(tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    write_robomimic(path)
    with pytest.raises(UserError, match=r"no 'moves' in 'data', but actions, dones"):
        open_reader(path, map=hdf5().KeyMap(action="moves"))


def test_a_file_with_all_steps_in_a_row_is_cut_where_marks_are(tmp_path):
    h5py = pytest.importorskip("h5py")
    episodes = [walk(n, seed=n, ends=n != 9) for n in (5, 9, 12)]
    steps = [to_steps(episode, ACTION) for episode in episodes]
    with h5py.File(tmp_path / "flat.hdf5", "w") as file:
        file["observations"] = np.concatenate([s[0]["position"][:-1] for s in steps])
        file["actions"] = np.concatenate([s[1]["action"] for s in steps])
        file["rewards"] = np.concatenate([s[2] for s in steps])
        file["terminals"] = np.concatenate([s[3] for s in steps])
        timeouts = np.zeros(26, bool)
        timeouts[13] = True
        file["timeouts"] = timeouts
        file["infos/qpos"] = np.zeros((26, 2))
    marks = ("terminals", "timeouts")
    keys = {"keys": ("position=observations",), "terminal": "terminals"}
    reader = open_reader(
        tmp_path / "flat.hdf5", map=hdf5().KeyMap(breaks=marks, final="drop", **keys)
    )
    assert reader.names() == ["episode_0", "episode_1", "episode_2"]
    for name, episode in zip(reader.names(), episodes, strict=True):
        found = reader.read(name)
        assert len(found["reward"]) == reader.rows(name) == len(episode["reward"]) - 1
        assert slip(found) < 1e-5
    repeating = hdf5().KeyMap(breaks=marks, **keys)
    whole = open_reader(tmp_path / "flat.hdf5", map=repeating)
    ends = [whole.read(name)["is_terminal"][-1] for name in whole.names()]
    assert ends == [True, False, True]
    assert whole.remarks == {}
    wrong = hdf5().KeyMap(breaks=marks, action="act")
    with pytest.raises(UserError, match=r"has no array 'act'(.|\n)*--map.action"):
        open_reader(tmp_path / "flat.hdf5", map=wrong)
    with pytest.raises(UserError, match="no array 'done' of 26 steps"):
        open_reader(tmp_path / "flat.hdf5", map=hdf5().KeyMap(breaks=("done",), **keys))


def test_an_hdf5_file_without_episodes_asks_for_the_group(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["elsewhere/demo_0/actions"] = np.zeros((3, 2))
    with pytest.raises(UserError, match=r"--map.episodes"):
        open_reader(tmp_path / "a.hdf5")
    assert open_reader(
        tmp_path / "a.hdf5", map=hdf5().KeyMap(episodes="elsewhere")
    ).names() == ["demo_0"]


def test_truncated_and_foreign_npz_files_are_bad_episodes(tmp_path):
    write_npz(tmp_path, (5, 9, 12, 7))
    path = tmp_path / "demo_1-10.npz"
    path.write_bytes(path.read_bytes()[:200])
    with zipfile.ZipFile(tmp_path / "demo_9-4.npz", "w") as file:
        file.writestr("readme.txt", "not an array")
    (tmp_path / "demo_2-13.npz").rename(tmp_path / "demo_2-12.npz")
    reader = open_reader(tmp_path)
    for name, complaint in (
        ("demo_1", "cannot be read"),
        ("demo_9", "has no 'reward'"),
        ("demo_2", "has 13 rows, its name says 12"),
    ):
        with pytest.raises(BadEpisode, match=complaint):
            reader.read(name)
    assert slip(reader.read("demo_0")) < 1e-5
    with pytest.raises(BadEpisode, match="cannot be read"):
        npz.peek(path)


def test_a_folder_with_nothing_readable_says_why(tmp_path):
    (tmp_path / "a-3.npz").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no readable episode; a cannot be read"):
        open_reader(tmp_path).obs_space  # noqa: B018


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"speed": np.full((6, 3), np.nan, np.float32)}, "NaN .* row 0"),
        ({"speed": np.zeros((4, 3), np.float32)}, "'speed' has 4 rows"),
        ({"speed": np.zeros((6, 4), np.float32)}, r"shape \(4,\), the others have"),
        ({"speed": np.zeros((6, 3), np.int32)}, "dtype int32"),
        ({"is_first": np.ones(6, bool)}, "first row alone"),
    ],
)
def test_problems_of_an_episode_are_found(change, complaint):
    episode = walk(5)
    spaces = {k: Space(v.dtype, v.shape[1:]) for k, v in episode.items()}
    obs_space = {k: s for k, s in spaces.items() if k not in (*FLAGS, "action")}
    assert not problems(episode, obs_space, ACTION)
    (found,) = problems({**episode, **change}, obs_space, ACTION)
    assert __import__("re").search(complaint, found)
    lacking = {k: v for k, v in episode.items() if k != "speed"}
    assert problems(lacking, obs_space, ACTION) == ["has no 'speed'"]
    assert problems({}, obs_space, ACTION)[0].startswith("has no 'reward'")
    with pytest.raises(BadEpisode, match="is no number"):
        from_steps({"a": np.array(["x", "y"])}, {}, np.zeros(1), np.zeros(1))


def write_counted(write, many=30, rare=11):
    """Episodes of actions 0 and 1, but for one that few would look at."""
    space = {"action": Space(np.int32, (), 0, 8)}
    for i in range(many):
        chosen = np.array([0, 1, 7 if i == rare else 1, 0], np.int32)
        write(f"demo_{i}", walk(3, i) | {"action": chosen}, space)


def test_integer_actions_are_counted_over_all_episodes(tmp_path):
    write_counted(lambda name, episode, _: write_episode(tmp_path / "a", name, episode))
    found = []
    write_counted(lambda name, episode, _: found.append((name, episode)))
    path = tmp_path / "b.hdf5"
    hdf5().write_robomimic(path, found, {"action": Space(np.int32)})
    for reader in (open_reader(tmp_path / "a"), open_reader(path)):
        assert reader.act_space["action"] == Space(np.int32, (), 0, 8)
        assert reader.read("demo_11")["action"][2] == 7


def test_an_action_that_is_none_of_those_there_are_is_a_problem():
    episode = walk(3) | {"action": np.array([1, 2, 3, 0], np.int32)}
    seen = {"speed": Space(np.float32, (3,))}
    assert not problems(episode, seen, {"action": Space(np.int32, (), 1, 4)})
    for low, high, wrong in ((2, 4, 1), (0, 3, 3)):
        (found,) = problems(episode, seen, {"action": Space(np.int32, (), low, high)})
        assert f"'action' holds {wrong}" in found


def test_what_is_logged_is_no_problem(tmp_path):
    logged = {"log/a": np.full(6, np.nan), "log/b": np.zeros((2, 3))}
    episode = walk(5) | logged
    assert not problems(episode, {"speed": Space(np.float32, (3,))}, ACTION)
    npz.write_folder_file(tmp_path, "a", episode, ACTION)
    same(open_reader(tmp_path).read("a"), episode)


def test_files_of_one_stem_keep_their_own_episodes(tmp_path):
    for name in ("a.hdf5", "a.h5", "b.h5"):
        write_robomimic(tmp_path / name, (5,))
    reader = open_reader(tmp_path)
    assert set(reader.names()) == {"a.hdf5_demo_0", "a.h5_demo_0", "b_demo_0"}
    reader.close()
    (tmp_path / "a.h5").write_bytes(b"x")
    reader = open_reader(tmp_path)
    assert set(reader.names()) == {"a.hdf5_demo_0", "a.h5", "b_demo_0"}


def test_actions_that_are_not_one_hot_are_told_not_guessed(tmp_path):
    space = {"action": Space(np.int32, (), 0, 3)}
    episode = walk(3) | {"action": np.array([2, 1, 0, 0], np.int32)}
    theirs = npz.to_theirs(episode, space)
    for row, wrong in ((1, [0, 0, 0]), (2, [0.5, 0.5, 0]), (3, [1, 1, 0])):
        changed = theirs["action"].copy()
        changed[row] = wrong
        with pytest.raises(ValueError, match=f"'action' is not one-hot in row {row}"):
            npz.to_ours({**theirs, "action": changed}, {}, space)
