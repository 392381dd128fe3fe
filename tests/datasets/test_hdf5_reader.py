"""Reader of HDF5 files: robomimic, key maps, damaged files."""

from __future__ import annotations

import numpy as np
import pytest
from episode_helpers import (
    ACTION,
    alignment_error,
    assert_same,
    check_reader,
    make_episode,
    write_hdf5,
)

from reverie.api import UserError
from reverie.datasets.episode_format import (
    BadEpisode,
    to_steps,
)
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.readers.key_map import KeyMap
from reverie.datasets.robomimic import write_robomimic
from reverie.datasets.split import split_by_mask


def open_mapped(path, key_map):
    return open_episodes(path, ReaderConfig(map=key_map))


def test_robomimic(tmp_path):
    path = tmp_path / "demos.hdf5"
    episodes = write_hdf5(path, masks={"train": ["demo_0", "demo_2"]})
    reader = open_episodes(path)
    check_reader(reader, episodes)
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


def test_without_next_obs_the_last_observation_is_repeated_or_dropped(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    episodes = write_hdf5(path, (5,))
    with h5py.File(path, "a") as file:
        del file["data/demo_0/next_obs"]
    whole = episodes["demo_0"]
    reader = open_episodes(path)
    repeated = reader.read("demo_0")
    assert reader.rows("demo_0") == len(repeated["reward"]) == 6
    np.testing.assert_array_equal(repeated["action"], whole["action"])
    np.testing.assert_array_equal(repeated["position"][-1], whole["position"][-2])
    assert repeated["is_terminal"][-1]
    reader = open_mapped(path, KeyMap(last_obs="drop", terminal="none", reward="none"))
    dropped = reader.read("demo_0")
    assert reader.rows("demo_0") == len(dropped["reward"]) == 5
    assert alignment_error(dropped) < 1e-5
    assert not dropped["action"][-1].any()
    for names in ({"terminal": "none"}, {"reward": "none"}):
        with pytest.raises(UserError, match="would lose the reward or the terminal"):
            open_mapped(path, KeyMap(last_obs="drop", **names)).read("demo_0")


def test_key_map(tmp_path):
    h5py = pytest.importorskip("h5py")
    episodes = {f"take_{i}": make_episode(4 + i, seed=i) for i in range(3)}
    for name, episode in episodes.items():  # one file per episode, action before obs
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["observations/images/top"] = episode["image"]
            file["observations/qpos"] = episode["position"].astype(np.float64)
            file["action"] = np.roll(episode["action"], 1, 0)
            file["r"] = episode["reward"][:, None]
    keys = ("image=observations/images/top", "position=observations/qpos")
    names = {"action": "action", "reward": "r", "terminal": "none"}
    led = KeyMap(keys=keys, alignment="before_obs", **names)
    reader = open_mapped(tmp_path, led)
    assert reader.names() == list(episodes)
    for name, episode in episodes.items():
        found = reader.read(name)
        assert reader.rows(name) == len(episode["reward"])
        assert alignment_error(found) < 1e-5
        assert_same(
            {k: found[k] for k in ("image", "action", "reward")},
            {k: episode[k] for k in ("image", "action", "reward")},
        )
        assert not found["is_terminal"].any()
    with pytest.raises(ValueError, match="keys must be pairs like"):
        KeyMap(keys=("image",))
    wrong = open_mapped(tmp_path, KeyMap(keys=keys, **names))
    assert alignment_error(wrong.read("take_2")) > 0.01


@pytest.mark.parametrize(
    ("ends", "expected"), [("dones", 1), ("success", 0), ("never", 0)]
)
def test_terminate_on(tmp_path, ends, expected):
    failed = make_episode(5)
    failed["reward"][:] = 0
    path = tmp_path / "demos.hdf5"
    pytest.importorskip("h5py")
    write_robomimic(path, [("demo_0", failed)], ACTION)
    reader = open_mapped(path, KeyMap(terminate_on=ends))
    assert reader.read("demo_0")["is_terminal"].sum() == expected


def test_missing_h5py_is_an_error(monkeypatch, tmp_path):
    import sys

    monkeypatch.setitem(sys.modules, "h5py", None)
    (tmp_path / "a.hdf5").write_bytes(b"")
    with pytest.raises(UserError, match=r"pip install -e '.*\[hdf5\]'"):
        open_episodes(tmp_path / "a.hdf5")


def test_a_damaged_hdf5_file_is_an_error(tmp_path):
    path = tmp_path / "demos.hdf5"
    write_hdf5(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(UserError, match="it is damaged"):
        open_episodes(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match="not an HDF5 file"):
        open_episodes(path)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda d: d.__delitem__("actions"), "has no 'actions', only dones"),
        (lambda d: d.__delitem__("obs"), "has no group 'obs'"),
        (lambda d: d.__delitem__("next_obs/speed"), "has no speed in 'next_obs'"),
        (lambda d: truncate(d, "rewards"), "'rewards' has 3 rows"),
        (lambda d: truncate(d, "obs/image"), "different lengths"),
        (lambda d: make_scalar(d, "rewards"), "'rewards', which is not an array"),
        (lambda d: make_scalar(d, "obs/speed"), "'speed' is a single number"),
        (lambda d: [truncate(d, key, 0) for key in array_names(d)], "is empty"),
        (lambda d: truncate(d, "next_obs/image"), r"in 'next_obs'"),
    ],
)
def test_an_incomplete_demo_is_bad_and_others_are_readable(tmp_path, change, complaint):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    write_hdf5(path)
    with h5py.File(path, "a") as file:
        change(file["data/demo_1"])
    reader = open_episodes(path)
    with pytest.raises(BadEpisode, match=complaint):
        reader.read("demo_1")
    assert alignment_error(reader.read("demo_2")) < 1e-5
    assert reader.act_space["action"] == ACTION["action"]


def truncate(demo, key, rows=3):
    value = demo[key][:rows]
    del demo[key]
    demo[key] = value


def make_scalar(demo, key):
    del demo[key]
    demo[key] = 3.0


def array_names(demo):
    """Names of the arrays of a demonstration."""
    found = []
    demo.visititems(lambda name, thing: found.append(name) if is_array(thing) else None)
    return found


def is_array(thing):
    return hasattr(thing, "shape")


def test_a_damaged_hdf5_file_in_a_folder_is_a_bad_episode(tmp_path):
    pytest.importorskip("h5py")
    for name in "abc":
        write_hdf5(tmp_path / f"{name}.hdf5")
    (tmp_path / "a.hdf5").write_bytes(b"nothing of the kind")
    reader = open_episodes(tmp_path)
    assert reader.names()[:2] == ["a", "b_demo_0"]
    with pytest.raises(BadEpisode, match="is a damaged file"):
        reader.read("a")
    with pytest.raises(BadEpisode, match="is a damaged file"):
        reader.rows("a")
    assert alignment_error(reader.read("b_demo_2")) < 1e-5
    reader.close()
    for name in "bc":
        (tmp_path / f"{name}.hdf5").write_bytes(b"")
    with pytest.raises(UserError, match=r"a\.hdf5 is not an HDF5 file"):
        open_episodes(tmp_path)


def test_an_empty_mask_is_an_error(tmp_path):
    pytest.importorskip("h5py")
    masks = {"train": ["demo_0", "demo_1"], "valid": ["demo_7"]}
    write_hdf5(tmp_path / "demos.hdf5", masks=masks)
    with pytest.raises(UserError, match=r"mask 'valid' of .* selects no episodes"):
        split_by_mask(open_episodes(tmp_path / "demos.hdf5"), "train", "valid")


def test_text_and_reserved_names_are_not_observations(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    write_hdf5(path)
    with h5py.File(path, "a") as file:
        for name, demo in file["data"].items():
            count = len(demo["actions"])
            for part in ("obs", "next_obs"):
                demo[f"{part}/language"] = np.array([name.encode()] * count)
                demo[f"{part}/nothing"] = np.zeros((count, 0))
                demo[f"{part}/action"] = np.ones((count, 2))
    reader = open_episodes(path)
    assert set(reader.obs_space) == {"image", "position", "speed"}
    assert alignment_error(reader.read("demo_2")) < 1e-5
    assert reader.metadata["ignored"] == "action, language, nothing"


def test_missing_actions_are_an_error_that_lists_the_arrays(tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    write_hdf5(path)
    with pytest.raises(UserError, match=r"no 'moves' in 'data', only actions, dones"):
        open_mapped(path, KeyMap(action="moves"))


@pytest.mark.parametrize("option", ["reward", "terminal", "next_obs"])
def test_an_explicit_name_must_exist_in_an_episode(tmp_path, option):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "demos.hdf5"
    write_hdf5(path)
    wrong = KeyMap(**{option: "other"})
    arrays = "actions, dones, next_obs, obs, rewards"
    with pytest.raises(UserError, match=f"no 'other' in any .*only {arrays}") as info:
        open_mapped(path, wrong)
    assert f"  Fix: set --map.{option} " in str(info.value)
    open_mapped(path, KeyMap(**{option: "none"})).read("demo_2")
    with h5py.File(path, "a") as file:
        for name in ("demo_0", "demo_1", "demo_2"):
            del file[f"data/{name}/rewards"]
        demo = file["data/demo_2"]
        demo["other"] = demo["obs" if option == "next_obs" else "dones"]
    assert not open_episodes(path).read("demo_0")["reward"].any()
    assert len(open_mapped(path, wrong).read("demo_0")["reward"]) == 6
    with h5py.File(path, "a") as file:
        file["data/demo_2/actions"].parent.clear()
    with pytest.raises(UserError, match="no 'other' in any episode"):
        open_mapped(path, wrong)


def test_concatenated_episodes_are_split_at_their_ends(tmp_path):
    h5py = pytest.importorskip("h5py")
    episodes = [make_episode(n, seed=n, ends=n != 9) for n in (5, 9, 12)]
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
    dropping = KeyMap(
        episode_ends=marks, last_obs="drop", terminate_on="never", reward="", **keys
    )
    reader = open_mapped(tmp_path / "flat.hdf5", dropping)
    assert reader.names() == ["episode_0", "episode_1", "episode_2"]
    for name, episode in zip(reader.names(), episodes, strict=True):
        found = reader.read(name)
        assert len(found["reward"]) == reader.rows(name) == len(episode["reward"]) - 1
        assert alignment_error(found) < 1e-5
    repeating = KeyMap(episode_ends=marks, **keys)
    whole = open_mapped(tmp_path / "flat.hdf5", repeating)
    ends = [whole.read(name)["is_terminal"][-1] for name in whole.names()]
    assert ends == [True, False, True]
    assert whole.metadata == {}
    wrong = KeyMap(episode_ends=marks, action="act")
    with pytest.raises(UserError, match=r"has no array 'act'(.|\n)*--map.action"):
        open_mapped(tmp_path / "flat.hdf5", wrong)
    with pytest.raises(UserError, match="no array 'done' of 26 steps"):
        open_mapped(tmp_path / "flat.hdf5", KeyMap(episode_ends=("done",), **keys))


def test_hdf5_without_episodes_is_an_error(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["elsewhere/demo_0/actions"] = np.zeros((3, 2))
        file["elsewhere/demo_0/obs/speed"] = np.zeros((3, 2))
    with pytest.raises(UserError, match=r"--map.episodes"):
        open_episodes(tmp_path / "a.hdf5")
    assert open_mapped(tmp_path / "a.hdf5", KeyMap(episodes="elsewhere")).names() == [
        "demo_0"
    ]


def test_hdf5_files_with_the_same_stem_have_different_episode_names(tmp_path):
    for name in ("a.hdf5", "a.h5", "b.h5"):
        write_hdf5(tmp_path / name, (5,))
    reader = open_episodes(tmp_path)
    assert set(reader.names()) == {"a.hdf5_demo_0", "a.h5_demo_0", "b_demo_0"}
    reader.close()
    (tmp_path / "a.h5").write_bytes(b"x")
    reader = open_episodes(tmp_path)
    assert set(reader.names()) == {"a.hdf5_demo_0", "a.h5", "b_demo_0"}
