"""Several datasets read, merged and trained on as one."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
from episode_helpers import ACTION, make_episode, write_npz

from reverie.api import UserError
from reverie.cli.main import main
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.joined import join_readers
from reverie.datasets.readers.metadata import DatasetMetadata
from reverie.datasets.readers.npz import write_npz_episode
from reverie.run.config import resolve
from reverie.run.offline.datasets import OfflineConfig, open_split
from reverie.spaces import Space

TINY = shlex.split(
    """--configs debug --device cpu --logger.outputs jsonl --run.steps 2
    --run.log_every 1 --run.report_every 2 --run.save_every 2 --offline.epochs 0
    --offline.keys position speed --bc.head.units 8 --bc.batch_size 4"""
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_npz(tmp_path / "first")
    write_npz(tmp_path / "second", (6, 7))
    return tmp_path


def test_a_merge_has_the_episodes_of_all_datasets(here, capsys):
    assert main(["data", "merge", "first", "second", "both"]) == 0
    assert "5 episodes in both." in capsys.readouterr().out
    merged = open_episodes("both")
    expected = {}
    for source in ("first", "second"):
        reader = open_episodes(source)
        expected |= {f"{source}_{n}": reader.read(n) for n in reader.names()}
    assert sorted(merged.names()) == sorted(expected)
    for name, episode in expected.items():
        for key, value in merged.read(name).items():
            np.testing.assert_array_equal(value, episode[key], strict=True)


def test_unique_names_are_kept(here):
    write_npz_episode(here / "third", "only", make_episode(4), ACTION)
    reader = join_readers([open_episodes(path) for path in ("third", "first")])
    assert reader.names() == ["only", *open_episodes("first").names()]
    assert reader.rows("only") == 5


def test_actions_have_the_units_of_the_first_dataset(here):
    """An action of 2 is 1 if the bounds are [-2, 2], and 0.5 if they are [-4, 4]."""
    for name, bound in (("wide", 4), ("narrow", 2)):
        space = {"action": Space(np.float32, (2,), -bound, bound).normalized()}
        episode = make_episode(3)
        episode["action"][:] = [[1, -1]] * 3 + [[0, 0]]
        write_npz_episode(here / name, name, episode, space)
        obs = open_episodes("first").obs_space
        DatasetMetadata(obs, space).write(here / name)
    with pytest.warns(RuntimeWarning, match="taken to be in the units of wide"):
        reader = join_readers([open_episodes("wide"), open_episodes("narrow")])
    assert reader.read("narrow")["action"].tolist() == [[0.5, -0.5]] * 3 + [[0, 0]]
    assert reader.read("wide")["action"].tolist() == [[1, -1]] * 3 + [[0, 0]]
    with pytest.raises(UserError, match="but bounds"):
        join_readers([open_episodes("narrow"), open_episodes("wide")])


def test_discrete_actions_have_the_values_of_all_datasets(here):
    obs = open_episodes("first").obs_space
    for name, count in (("few", 2), ("many", 5)):
        space = {"action": Space(np.int32, (), 0, count)}
        episode = {**make_episode(3), "action": np.array([1, 0, count - 1, 0], "i4")}
        write_npz_episode(here / name, name, episode, space)
        DatasetMetadata(obs, space).write(here / name)
    reader = join_readers([open_episodes("few"), open_episodes("many")])
    assert reader.act_space["action"].high == 5
    assert reader.read_valid("many")["action"][2] == 4


def test_masks_are_kept_if_every_dataset_has_them(here):
    readers = [open_episodes(path) for path in ("first", "second")]
    first, second = (reader.names()[0] for reader in readers)
    readers[0].masks = {"train": [first], "small": [first]}
    readers[1].masks = {"train": [second]}
    masks = join_readers(readers).masks
    assert masks == {"train": [f"first_{first}", f"second_{second}"]}


def test_different_observations_are_an_error_unless_common_ones_are_selected(
    here, capsys
):
    episode = make_episode(4)
    del episode["image"]
    write_npz_episode(here / "blind", "a", episode, ACTION)
    assert main(["data", "merge", "first", "blind", "out"]) == 2
    message = capsys.readouterr().err
    assert "image: first has uint8 (8, 8, 3), blind does not have it" in message
    assert not (here / "out").exists()
    words = ["merge", "first", "blind", "out", "--vectors", "position", "speed"]
    assert main(["data", *words]) == 0
    assert len(open_episodes("out").names()) == 4
    config = OfflineConfig(("first", "blind"), keys=("position",))
    training, held_out = open_split(config, 0)
    assert len(training.names()) + len(held_out.names()) == 4
    with pytest.raises(UserError, match=r"--offline\.keys"):
        open_split(OfflineConfig(("first", "blind")), 0)


def test_the_same_dataset_twice_is_an_error(here, capsys):
    assert main(["data", "merge", "first", "first", "out"]) == 2
    assert "first is given 2 times" in capsys.readouterr().err
    assert main(["data", "merge", "first", "out"]) == 2
    assert "reverie data merge SRC SRC DST" in capsys.readouterr().err


def test_an_interrupted_merge_is_not_resumed_with_other_transforms(here, capsys):
    words = ["data", "merge", "first", "second", "out"]
    bad = next((here / "second").glob("*.npz"))
    bad.write_bytes(b"damaged")
    assert main([*words, "--size", "16", "16"]) == 2
    assert (here / "out.partial").is_dir()
    capsys.readouterr()
    assert main([*words, "--bad", "skip"]) == 2
    assert "left over from another conversion" in capsys.readouterr().err
    assert main([*words, "--size", "16", "16", "--bad", "skip"]) == 0
    assert len(open_episodes("out").names()) == 4


@pytest.mark.parametrize(
    "value", ["first", "my data", ["first", "second"], ("first", "minari:a/b-v0")]
)
def test_the_setting_takes_one_path_or_several(value):
    data = resolve(["offline"], flags={"offline.data": value}).offline.data
    assert data == (value if isinstance(value, str) else tuple(value))


def test_training_on_several_datasets(here):
    paths = ["--offline.data", "first", "second", "--offline.eval_data", "second"]
    assert main(["bc", *paths, "--logdir", "run", *TINY]) == 0
    assert main(["bc", "--logdir", "run", "--run.steps", "4"]) == 0
    rows = (here / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["step"] == 4
    assert main(["eval", "run"]) == 0


def test_the_options_of_the_reader_apply_to_every_dataset(here):
    config = ReaderConfig(size=(4, 4))
    readers = [open_episodes(path, config) for path in ("first", "second")]
    reader = join_readers(readers)
    assert {reader.read(n)["image"].shape[1:] for n in reader.names()} == {(4, 4, 3)}
