"""NPZ files with other names, read with a key map."""

from __future__ import annotations

import numpy as np
import pytest
from episode_helpers import ACTION, check_reader, make_episode

from reverie.api import UserError
from reverie.cli.main import main
from reverie.datasets.episode_format import BadEpisode, to_steps
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.readers.key_map import KeyMap

KEYS = ("image=frames", "position=pos", "speed=extra/speed")
MAP = KeyMap(keys=KEYS, action="did", reward="gain", terminal="end")


def write(folder, lengths=(4, 11), **changes):
    """Write episodes under other names, with an observation after the last action."""
    folder.mkdir()
    episodes = {f"run_{i}": make_episode(n, seed=i) for i, n in enumerate(lengths)}
    for name, episode in episodes.items():
        obs, action, reward, terminal = to_steps(episode, ACTION)
        arrays = {
            "frames": obs["image"],
            "pos": obs["position"],
            "extra/speed": obs["speed"],
            "did": action["action"],
            "gain": reward,
            "end": terminal,
        }
        np.savez(folder / f"{name}.npz", **arrays | changes)
    return episodes


def test_a_key_map_names_the_arrays(tmp_path):
    episodes = write(tmp_path / "runs")
    check_reader(open_episodes(tmp_path / "runs", ReaderConfig(map=MAP)), episodes)


def test_groups_are_parts_of_names(tmp_path):
    """The default names of a key map are those of robomimic."""
    (tmp_path / "runs").mkdir()
    episode = make_episode(5)
    obs, action, reward, terminal = to_steps(episode, ACTION)
    arrays = {f"obs/{key}": value[:-1] for key, value in obs.items()}
    arrays |= {f"next_obs/{key}": value[1:] for key, value in obs.items()}
    arrays |= {"actions": action["action"], "rewards": reward, "done": terminal}
    np.savez(tmp_path / "runs" / "a.npz", **arrays)
    reader = open_episodes(tmp_path / "runs", ReaderConfig(map=KeyMap(terminal="done")))
    check_reader(reader, {"a": episode})


def test_missing_arrays_are_named(tmp_path):
    write(tmp_path / "runs")
    wrong = ReaderConfig(map=KeyMap(keys=KEYS, action="acts"))
    with pytest.raises(UserError, match="has no 'acts', only did, end, extra"):
        _ = open_episodes(tmp_path / "runs", wrong).obs_space
    write(tmp_path / "short", gain=np.zeros(3, np.float32))
    reader = open_episodes(tmp_path / "runs", ReaderConfig(map=MAP))
    assert len(reader.names()) == 2
    with pytest.raises(UserError, match="'gain' has 3 rows, the actions have 4"):
        open_episodes(tmp_path / "short", ReaderConfig(map=MAP))
    ends = KeyMap(keys=KEYS, action="did", episode_ends=("end",))
    with pytest.raises(UserError, match="one NPZ file per episode"):
        open_episodes(tmp_path / "runs", ReaderConfig(map=ends))


def test_a_mistyped_reward_is_an_error_of_the_command(tmp_path, capsys):
    write(tmp_path / "runs")
    words = ["data", "inspect", str(tmp_path / "runs"), "--map.action", "did"]
    assert main([*words, "--map.keys", *KEYS, "--map.reward", "gains"]) == 2
    error = capsys.readouterr().err
    assert "has no 'gains' in any episode, only did, end, extra, frames, gain" in error
    assert "  Fix: set --map.reward " in error
    assert "Traceback" not in error


def test_a_damaged_file_is_a_bad_episode(tmp_path):
    write(tmp_path / "runs")
    reader = open_episodes(tmp_path / "runs", ReaderConfig(map=MAP))
    (tmp_path / "runs" / "run_1.npz").write_bytes(b"damaged")
    with pytest.raises(BadEpisode, match="cannot be read"):
        reader.read("run_1")
    with pytest.raises(BadEpisode, match="cannot be read"):
        reader.rows("run_1")


def test_a_conversion_with_a_key_map(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    episodes = write(tmp_path / "runs")
    options = ["--map.action", "did", "--map.reward", "gain", "--map.terminal", "end"]
    words = ["data", "convert", "runs", "out", *options, "--map.keys", *KEYS]
    assert main(words) == 0
    check_reader(open_episodes("out"), episodes)
