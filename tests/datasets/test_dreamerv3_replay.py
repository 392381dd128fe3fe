"""Replay chunks of danijar/dreamerv3: episodes that span chunks, actions, latents."""

from __future__ import annotations

import numpy as np
import pytest
from episode_helpers import SCALED, check_reader, make_episode

from reverie.api import UserError
from reverie.datasets.episodes import open_episodes
from reverie.datasets.inspect import inspect_episodes
from reverie.datasets.readers import npz


def write_chunks(folder, env, cuts, episodes):
    """Write the rows of one environment as chunks that name each other."""
    folder.mkdir(exist_ok=True)
    rows = {k: np.concatenate([e[k] for e in episodes]) for k in episodes[0]}
    total = len(rows["reward"])
    rows["dyn/deter"] = np.ones((total, 4), np.float16)
    rows["dyn/stoch"] = np.ones((total, 2, 3), np.float16)
    rows["stepid"] = np.ones((total, 20), np.uint8)
    cuts = [0, *cuts, total]
    paths = []
    for i in range(len(cuts) - 1):
        time = f"2024010{i + 1}T120000F{env:06d}"
        length = cuts[i + 1] - cuts[i]
        name = f"{time}-{env}x{i}-{env}x{i + 1}-{length}.npz"
        paths.append(folder / name)
        npz.save_arrays(
            paths[-1], {k: v[cuts[i] : cuts[i + 1]] for k, v in rows.items()}
        )
    return paths


def test_episodes_that_span_chunks_of_two_environments(tmp_path):
    one = [make_episode(n, seed=n) for n in (5, 9)]
    two = [make_episode(n, seed=n) for n in (6, 4)]
    write_chunks(tmp_path / "replay", 0, (2, 8, 11), one)
    write_chunks(tmp_path / "replay", 1, (7,), two)
    episodes = {
        "env0_step0": one[0],
        "env0_step6": one[1],
        "env1_step0": two[0],
        "env1_step7": two[1],
    }
    for path in (tmp_path, tmp_path / "replay"):
        reader = open_episodes(path)
        check_reader(reader, episodes, SCALED)
        report = inspect_episodes(reader)
        assert report.is_ok
        assert "dyn/deter" not in report.describe()


def test_actions_beyond_the_bounds_are_scaled_too(tmp_path):
    episode = make_episode(5)
    episode["action"][2] = 1.7
    write_chunks(tmp_path, 0, (3,), [episode])
    assert open_episodes(tmp_path).act_space == SCALED


@pytest.mark.parametrize("one_hot", [False, True])
def test_discrete_actions_are_indices(tmp_path, one_hot):
    episode = make_episode(4)
    index = np.array([2, 0, 1, 2, 0], np.int32)
    vectors = np.eye(3, dtype=np.float32)[index]
    vectors[-1] = 0
    write_chunks(
        tmp_path, 0, (3,), [episode | {"action": vectors if one_hot else index}]
    )
    reader = open_episodes(tmp_path)
    assert reader.act_space["action"].classes == 3
    assert reader.read("env0_step0")["action"].tolist() == index.tolist()


def test_only_complete_episodes_are_read(tmp_path):
    episodes = [make_episode(n, seed=n) for n in (5, 9, 3)]
    unfinished = {key: value[:4] for key, value in make_episode(6).items()}
    paths = write_chunks(tmp_path, 0, (4, 8, 14), [*episodes, unfinished])
    assert len(open_episodes(tmp_path).names()) == 3
    paths[1].write_bytes(b"PK")
    reader = open_episodes(tmp_path)
    assert [reader.rows(name) for name in reader.names()] == [4]
    assert paths[1].name in inspect_episodes(reader).describe()
    for path in paths[2:]:
        path.unlink()
    with pytest.raises(UserError, match="has no readable episode"):
        open_episodes(tmp_path)


def test_a_folder_of_episodes_is_not_a_replay(tmp_path):
    paths = write_chunks(tmp_path, 0, (), [make_episode(5)])
    npz.write_npz_episode(tmp_path, "demo_0", make_episode(5), SCALED)
    assert "demo_0" in open_episodes(tmp_path).names()
    assert paths[0].exists()


@pytest.mark.parametrize("successor", ["0x1", "0x0"])
def test_chunks_that_name_each_other_in_a_circle_are_read_once(tmp_path, successor):
    episode = make_episode(5, seed=0)
    paths = write_chunks(tmp_path, 0, (2, 4), [episode])
    paths[2].rename(tmp_path / paths[2].name.replace("-0x3-", f"-{successor}-"))
    check_reader(open_episodes(tmp_path), {"env0_step0": episode}, SCALED)


WRONG_CHUNKS = {
    "text as flags": {"is_last": np.array(["a"] * 3)},
    "a single flag": {"is_first": np.float32(1), "is_last": np.float32(1)},
    "flags of another length": {"is_last": np.ones(9, bool)},
    "text as rewards": {"reward": np.array(["a"] * 3)},
    "two rewards": {"reward": np.zeros((3, 2))},
    "a single action": {"action": np.float32(0)},
    "large actions": {"action": np.full(3, 1 << 40)},
    "another shape": {"vector": np.zeros((3, 9), np.float32)},
}


@pytest.mark.parametrize("case", WRONG_CHUNKS)
def test_wrong_chunks_are_one_message(tmp_path, case):
    paths = write_chunks(tmp_path, 0, (3,), [make_episode(5, seed=0)])
    arrays = {**npz.load_arrays(paths[0]), **WRONG_CHUNKS[case]}
    npz.save_arrays(paths[0], arrays)
    with pytest.raises(UserError, match="Fix:"):
        _ = open_episodes(tmp_path).act_space
