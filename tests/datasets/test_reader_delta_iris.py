"""Reader of datasets of the original Δ-IRIS; rewards stay aligned with actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from reverie.agents.iris.batches import to_segment
from reverie.api import UserError
from reverie.datasets.convert import convert
from reverie.datasets.episode_format import BadEpisode, find_problems
from reverie.datasets.episodes import open_episodes
from reverie.datasets.readers import natural_sort
from reverie.datasets.split import split_by_mask


def make_episode(steps: int, seed: int, ended: bool = True) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    ends = np.zeros(steps, np.int64)
    ends[-1] = ended
    return {
        "observations": torch.tensor(rng.integers(0, 256, (steps, 3, 6, 8), np.uint8)),
        "actions": torch.tensor(rng.integers(0, 5, steps)),
        "rewards": torch.tensor(rng.normal(size=steps).astype(np.float32)),
        "ends": torch.tensor(ends),
    }


def episode_file(root: Path, number: int) -> Path:
    """Return the file of an episode; 1437 is in 400/30/7."""
    digits = f"{number % 1000:03d}"
    folder = root / f"{digits[0]}00" / f"{digits[1]}0" / digits[2]
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{number}.pt"


def write(root: Path, episodes: dict[int, dict]) -> None:
    for number, episode in episodes.items():
        torch.save(episode, episode_file(root, number))
    lengths = np.array([len(e["ends"]) for e in episodes.values()])
    torch.save({"num_episodes": len(episodes), "lengths": lengths}, root / "info.pt")


@pytest.fixture
def episodes() -> dict[int, dict]:
    return {
        0: make_episode(7, 0),
        9: make_episode(1, 1),
        10: make_episode(4, 2, ended=False),
        1437: make_episode(12, 3),
    }


def test_rewards_and_ends_stay_aligned_with_their_actions(tmp_path, episodes):
    write(tmp_path, episodes)
    reader = open_episodes(tmp_path)
    assert reader.names() == ["0", "9", "10", "1437"]
    for name, original in zip(reader.names(), episodes.values(), strict=True):
        found = reader.read(name)
        assert not find_problems(found, reader.obs_space, reader.act_space)
        assert len(found["reward"]) == reader.rows(name) == len(original["ends"]) + 1
        batch = {k: torch.tensor(v)[None] for k, v in found.items()}
        batch["mask"] = torch.ones_like(batch["is_first"])
        segment = to_segment(batch, "image", "action", 0, "is_terminal")
        frames = original["observations"].movedim(1, -1)
        assert torch.equal(segment.image[0], frames)
        assert torch.equal(segment.action[0], original["actions"])
        assert torch.equal(segment.reward[0], original["rewards"])
        assert torch.equal(segment.end[0], original["ends"].bool())


def test_the_number_of_actions_is_taken_from_all_episodes(tmp_path):
    many = {number: make_episode(3, number) for number in range(30)}
    for episode in many.values():
        episode["actions"] %= 2
    many[11]["actions"][1] = 16  # not in the sample that spaces are inferred from
    write(tmp_path, many)
    reader = open_episodes(tmp_path)
    assert reader.act_space["action"].classes == 17
    assert reader.obs_space["image"].shape == (6, 8, 3)


def test_train_and_test_folders_are_masks(tmp_path, episodes):
    write(tmp_path / "train", episodes)
    write(tmp_path / "test", {0: make_episode(5, 8)})
    reader = open_episodes(tmp_path)
    train, held = split_by_mask(reader, "train", "valid")
    assert train == ["train_0", "train_9", "train_10", "train_1437"]
    assert held == ["test_0"]
    assert reader.rows("test_0") == 6
    done = convert(reader, tmp_path / "out")
    assert open_episodes(done.folder).names() == natural_sort(train + held)


def test_an_episode_is_truncated_after_its_first_end(tmp_path):
    episode = make_episode(9, 0)
    episode["ends"][4] = 1
    write(tmp_path, {0: episode})
    reader = open_episodes(tmp_path)
    assert reader.rows("0") == len(reader.read("0")["reward"]) == 6


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"ends": None}, "has no 'ends'"),
        ({"rewards": torch.zeros(3)}, "3 rows"),
        ({"observations": torch.zeros(7, 3, 6, 8)}, "expected uint8"),
        ({"ends": torch.zeros(0)}, "0 steps"),
        ({"actions": 3}, "has no 'actions'"),
        ({"actions": torch.zeros(7)}, "expected integers"),
        ({"actions": torch.zeros(7, 2, dtype=torch.int64)}, "expected integers"),
        ({k: v[:0] for k, v in make_episode(7, 0).items()}, "0 steps"),
    ],
)
def test_bad_episodes_are_reported_with_the_reason(tmp_path, change, complaint):
    episode = {**make_episode(7, 0), **change}
    episode = {key: value for key, value in episode.items() if value is not None}
    write(tmp_path, {0: make_episode(5, 1)})
    torch.save(episode, episode_file(tmp_path, 1))
    with pytest.raises(BadEpisode, match=complaint):
        open_episodes(tmp_path).read("1")
    assert open_episodes(tmp_path).act_space["action"].classes <= 5


def test_damaged_files_and_empty_folders_are_errors(tmp_path):
    write(tmp_path, {0: make_episode(5, 1), 1: make_episode(5, 2)})
    file = episode_file(tmp_path, 1)
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(BadEpisode, match="File is not a zip file"):
        open_episodes(tmp_path).rows("1")
    for path in tmp_path.rglob("*/*.pt"):
        path.unlink()
    with pytest.raises(UserError, match=r"no readable episode(.|\n)*Fix: "):
        assert open_episodes(tmp_path).obs_space


@pytest.mark.parametrize(
    "change",
    [
        {"rewards": torch.zeros(4, 2)},
        {"rewards": torch.zeros(4, dtype=torch.bfloat16)},
        {"ends": torch.zeros(4, 2)},
        {"actions": torch.full((4,), 1 << 40)},
        {"observations": torch.zeros(4, 3, 6, 8, dtype=torch.bool)},
    ],
)
def test_tensors_of_other_shapes_and_types_are_bad_episodes(tmp_path, change):
    write(tmp_path, {0: make_episode(4, 0), 1: {**make_episode(4, 1), **change}})
    reader = open_episodes(tmp_path)
    assert reader.act_space["action"].high <= 5
    assert len(reader.read("0")["reward"]) == 5
    with pytest.raises(BadEpisode):
        reader.read("1")
