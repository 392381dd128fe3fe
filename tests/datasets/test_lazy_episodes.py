"""Windows of episodes that are read when they are needed."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from reverie.api import UserError
from reverie.datasets.episode_format import from_steps
from reverie.datasets.episodes import open_episodes
from reverie.datasets.lru_cache import LruCache
from reverie.datasets.rng import make_rng
from reverie.datasets.sequences import SequenceConfig
from reverie.datasets.sequences.episodes import EpisodeSequences
from reverie.datasets.split import Subset
from reverie.datasets.synthetic import maze
from reverie.datasets.synthetic.chunks import EVALUATION, TRAINING
from reverie.rows import Window
from reverie.spaces import EVENT
from reverie.storage.episodes import write_episode

WINDOW = Window(batch=6, length=5, context=2)
LENGTH = 7
ROWS = (20, 9, 31, 7, 12, 25)
TEST = (1, 4)
ONE_BYTE = 2**-30  # in GiB: every episode is read again
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def make_images(index: int, rows: int) -> np.ndarray:
    rng = np.random.default_rng(index)
    return rng.integers(0, 256, (rows, 8, 8, 3), np.uint8)


def write_npz(folder: Path) -> None:
    for index, rows in enumerate(ROWS):
        np.savez_compressed(
            folder / f"e{index}.npz",
            image=make_images(index, rows),
            action=np.arange(rows, dtype=np.float32)[:, None],
            reward=(np.arange(rows) % 3 == 0).astype(np.float32),
        )


def write_hdf5(folder: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(folder / "demo.hdf5", "w") as file:
        for index, rows in enumerate(ROWS):
            group = file.create_group(f"data/demo_{index}")
            group["actions"] = np.arange(rows, dtype=np.float32)[:, None] / rows
            group["rewards"] = (np.arange(rows) % 3 == 0).astype(np.float32)
            group["dones"] = np.arange(rows) == rows - 1
            images = make_images(index, rows + 1)
            group["obs/camera_image"] = images[:-1]
            group["next_obs/camera_image"] = images[1:]


def write_native(folder: Path) -> None:
    for index, rows in enumerate(ROWS):
        steps = np.arange(rows - 1)
        obs = {"image": make_images(index, rows)}
        rewards, ends = (steps % 3 == 0).astype(float), np.zeros(rows - 1)
        episode = from_steps(obs, {"action": steps % 4}, rewards, ends)
        write_episode(folder, f"e{index:02d}", episode)


def sample(episodes: list[dict], count: int, *seed: int) -> dict[str, np.ndarray]:
    """Sample windows of episodes in memory, for comparison."""
    rows = [len(next(iter(episode.values()))) for episode in episodes]
    cumulative = np.cumsum([n - LENGTH + 1 for n in rows])
    windows = []
    for draw in make_rng(*seed).integers(cumulative[-1], size=count):
        index = int(np.searchsorted(cumulative, draw, "right"))
        start = draw - (cumulative[index - 1] if index else 0)
        windows.append(
            {k: v[start : start + LENGTH] for k, v in episodes[index].items()}
        )
    return {key: np.stack([w[key] for w in windows]) for key in windows[0]}


def assert_same(found: dict, expected: dict) -> None:
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert found[key].dtype == value.dtype
        np.testing.assert_array_equal(found[key], value)


def split(folder: Path) -> tuple[Subset, Subset]:
    reader = open_episodes(folder, incomplete=True)
    names = reader.names()
    test = [names[i] for i in TEST if i < len(names)]
    return Subset(reader, [n for n in names if n not in test]), Subset(reader, test)


def read_all(reader: Subset, key: str) -> list[dict]:
    found = []
    for name in reader.names():
        episode = reader.read(name)
        if len(episode[key]) >= LENGTH:
            arrays = {k: episode[k] for k in (key, "action")}
            found.append(arrays | {EVENT: episode["reward"] != 0})
    return found


@pytest.mark.parametrize("write", [write_npz, write_hdf5, write_native])
@pytest.mark.parametrize("memory", [ONE_BYTE, 1.0])
def test_windows_equal_those_of_episodes_in_memory(tmp_path, write, memory):
    write(tmp_path)
    train, test = split(tmp_path)
    key = next(iter(train.obs_space))
    config = SequenceConfig(evaluation=9, memory=memory)
    source = EpisodeSequences(train, test, config, WINDOW, 3)
    eager = [read_all(reader, key) for reader in (train, test)]
    for step in (4, 0, 2, 4):  # a resumed run starts at any step
        assert_same(source.batch(step), sample(eager[0], 6, 3, TRAINING, step))
    assert_same(source.evaluation(), sample(eager[1], 9, 3, EVALUATION))
    source.close()


@pytest.mark.parametrize("memory", [ONE_BYTE, 1.0])
def test_windows_of_a_maze_equal_those_of_episodes_in_memory(tmp_path, memory):
    maze.write_maze(tmp_path, train=4, test=2, length=30)
    (tmp_path / "train" / "episode_00001.npz").write_bytes(b"damaged")
    config = SequenceConfig(folder=str(tmp_path), evaluation=9, memory=memory)
    source = maze.Maze(config, WINDOW, 3)
    eager = [
        [
            maze.read_maze_episode(path, LENGTH)
            for path in sorted((tmp_path / part).iterdir())
            if path.stat().st_size > 100
        ]
        for part in ("train", "test")
    ]
    for step in (4, 0, 4):
        assert_same(source.batch(step), sample(eager[0], 6, 3, TRAINING, step))
    assert_same(source.evaluation(), sample(eager[1], 9, 3, EVALUATION))
    source.close()


def test_memory_is_bounded_and_used(tmp_path, monkeypatch):
    write_npz(tmp_path)
    size = max(ROWS) * (8 * 8 * 3 + 4 + 1)  # image, action and event of one episode
    config = SequenceConfig(memory=2 * size / 2**30)
    source = EpisodeSequences(*split(tmp_path), config, WINDOW, 0)
    cache, reads = source.episodes._cache, []
    monkeypatch.setattr(
        Subset, "read_keys", lambda s, name, keys: reads.append(name) or s.read(name)
    )
    for step in range(8):
        source.batch(step)
        assert 0 < cache.bytes <= 2 * size
    assert len(reads) > len(ROWS)  # some are read again
    source.close()
    reads.clear()
    source = EpisodeSequences(*split(tmp_path), SequenceConfig(), WINDOW, 0)
    assert len(reads) == len(ROWS)
    for step in range(8):
        source.batch(step)
    assert len(reads) == len(ROWS)
    source.close()


def test_changed_files_are_errors(tmp_path):
    write_npz(tmp_path)
    config = SequenceConfig(memory=ONE_BYTE)
    source = EpisodeSequences(*split(tmp_path), config, WINDOW, 0)
    arrays = {"image": make_images(0, 8), "action": np.zeros((8, 1), np.float32)}
    for index in range(len(ROWS)):
        np.savez(tmp_path / f"e{index}.npz", **arrays, reward=np.zeros(8))
    with pytest.raises(
        UserError, match=r"e\d has changed.*8 frames instead of(.|\n)*Fix"
    ):
        source.batch(0)
    for index in range(len(ROWS)):
        (tmp_path / f"e{index}.npz").unlink()
    with pytest.raises(UserError, match="cannot be read"):
        source.batch(0)
    source.close()


def test_reading_threads_are_as_many_as_workers():
    """At most as many episodes are read at the same time as there are workers."""
    held, most, lock = [0], [0], threading.Lock()

    def read(index: int) -> dict:
        with lock:
            held[0] += 1
            most[0] = max(most[0], held[0])
        return {"x": np.full(100, index)}

    def use(index: int, episode: dict) -> int:
        with lock:
            held[0] -= 1
        return int(episode["x"][0])

    cache = LruCache(read, capacity=1, workers=2)
    assert cache.apply(use, [*range(20), 3]) == {i: i for i in range(20)}
    assert most[0] <= 2
    cache.close()
    assert cache.bytes == 0
