"""Reading with transforms gives the same episodes as a conversion."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch
from episode_helpers import ACTION, make_episode, write_npz

from reverie.api import UserError
from reverie.cli.data import parse_data_arguments
from reverie.cli.main import main as run_cli
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.feed import EpisodeFeed
from reverie.datasets.robomimic import write_robomimic
from reverie.datasets.transforms import ROBOMIMIC
from reverie.rows import Window
from reverie.run import checkpoint
from reverie.run.folder import read_config
from reverie.run.offline.datasets import OfflineConfig, OfflineEpisodes
from reverie.storage.run_spaces import read_spaces

h5py = pytest.importorskip("h5py")

KEYS = ("--images", "wrist", "side", "--vectors", "joints", "--aux", "speed")
WORDS = [*KEYS, "--flip", "wrist", "--size", "16", "16"]
READING = ReaderConfig(
    images=("wrist", "side"),
    vectors=("joints",),
    aux=("speed",),
    flip=("wrist",),
    size=(16, 16),
)
TINY = shlex.split(
    """--configs debug --device cpu --logger.outputs jsonl --run.steps 2
    --run.log_every 1 --run.report_every 2 --run.save_every 2"""
)
TINY_WORLD = shlex.split(
    """--dreamer.batch_size 2 --dreamer.batch_length 4 --dreamer.enc.mults 1 1
    --dreamer.dec.mults 1 1 --dreamer.enc.depth 8 --dreamer.dec.depth 8
    --offline.eval.context 2 --offline.eval.horizon 2
    --offline.eval.ensemble.samples 0"""
)
TINY_CLONE = shlex.split("--bc.head.units 8 --bc.batch_size 4 --offline.epochs 0")


def agent_state(run):
    """Return the state of the agent in the newest checkpoint."""
    return checkpoint.read_part(checkpoint.find_checkpoint(run), "agent")


def demos(path, count=6):
    """Write a robomimic file with two cameras, one upside down, and vectors."""
    episodes = []
    for i in range(count):
        episode = make_episode(6 + i, seed=i)
        episode["side"] = episode.pop("image")
        episode["wrist"] = 255 - episode["side"][:, ::-1]
        episode["joints"] = episode.pop("position")
        episode["unused"] = np.zeros((len(episode["reward"]), 2), np.float32)
        episodes.append((f"demo_{i}", episode))
    names = [name for name, _ in episodes]
    masks = {"train": names[2:], "valid": names[:2]}
    write_robomimic(path, episodes, ACTION, masks=masks)
    return path


def generic(path):
    """Write the same in another layout: no `obs` group, actions before observations."""
    source = h5py.File(demos(path.with_name("demos.hdf5")))
    with source, h5py.File(path, "w") as file:
        for name, demo in source["data"].items():
            group = file.create_group(f"runs/{name}")
            for key in ("side", "wrist", "joints", "speed"):
                first, then = demo[f"obs/{key}"][:1], demo[f"next_obs/{key}"]
                group[f"seen/{key}"] = np.concatenate([first, then])
            for name, original in (("did", "actions"), ("pay", "rewards")):
                value = np.asarray(demo[original])
                group[name] = np.concatenate([np.zeros_like(value[:1]), value])
    return path


MAP = shlex.split(
    """--map.episodes runs --map.action did --map.reward pay --map.terminal none
    --map.alignment before_obs --map.keys side=seen/side wrist=seen/wrist
    joints=seen/joints speed=seen/speed"""
)


def batches(config, count=3):
    dataset = OfflineEpisodes(config, seed=3)
    windows = {"train": Window(3, 8), "report": Window(2, 5)}
    found = EpisodeFeed(dataset.training, windows, held_out=dataset.held_out)
    cut = [found(name) for _ in range(count) for name in windows]
    whole = list(found.episodes(2))
    found.close()
    dataset.close()
    return dataset, [*cut, *whole]


@pytest.mark.parametrize("layout", ["robomimic", "generic"])
def test_transforming_while_reading_gives_the_batches_of_a_conversion(tmp_path, layout):
    make = demos if layout == "robomimic" else generic
    source = make(tmp_path / "source.hdf5")
    mapped = [] if layout == "robomimic" else MAP
    out = tmp_path / "out"
    words = ["data", "convert", str(source), str(out), *WORDS, *mapped]
    assert run_cli(words) == 0
    options = parse_data_arguments("convert", words[2:])[1]
    read = ReaderConfig(
        **{f: getattr(options, f) for f in ReaderConfig.__dataclass_fields__}
    )
    flying, one = batches(OfflineConfig(str(source), read=read))
    converted, other = batches(OfflineConfig(str(out)))
    assert list(flying.obs_space) == list(converted.obs_space)
    assert flying.act_space == converted.act_space
    assert flying.training.names() == converted.training.names()
    if layout == "robomimic":  # split by its masks
        assert flying.training.names() == [f"demo_{i}" for i in range(2, 6)]
        assert flying.held_out.names() == ["demo_0", "demo_1"]
    for mine, converted_batch in zip(one, other, strict=True):
        assert mine.keys() == converted_batch.keys()
        for key, value in mine.items():
            assert torch.equal(value, converted_batch[key]), key
    first = next(b for b in one if "episode" in b)
    moved = np.diff(first["joints"][0].numpy(), axis=0)
    done = 0.1 * first["action"][0, :-1].numpy()
    real = first["mask"][0, 1:].numpy()
    assert np.abs(moved - done)[real].max() < 1e-5


@pytest.mark.extended
def test_offline_training_is_the_same_on_a_file_and_on_its_conversion(tmp_path):
    source, out = demos(tmp_path / "demos.hdf5"), tmp_path / "out"
    assert run_cli(["data", "convert", str(source), str(out), *WORDS]) == 0
    flying = [f"--offline.read.{w[2:]}" if w[:2] == "--" else w for w in WORDS]
    weights = []
    for data, more in ((source, flying), (out, [])):
        run = tmp_path / f"run_{data.stem}"
        words = ["offline", "--offline.data", str(data), "--logdir", str(run)]
        assert run_cli([*words, *TINY, *TINY_WORLD, *more]) == 0
        weights.append(agent_state(run)["enc"])
    assert weights[0].keys() == weights[1].keys()
    for key, value in weights[0].items():
        assert torch.equal(value, weights[1][key]), key
    run = tmp_path / "run_demos"
    clone = ["--bc.run", str(run), "--logdir", str(tmp_path / "clone"), *TINY_CLONE]
    assert run_cli(["bc", "--offline.data", str(source), *clone, *TINY]) == 0
    assert read_config(tmp_path / "clone").offline.read == READING
    assert run_cli(["eval", str(run)]) == 0  # with the same reader settings
    assert json.loads((run / "eval.json").read_text())["episodes"]


def test_the_robomimic_presets_train_a_world_model_and_a_policy(tmp_path):
    """Two cameras of 84 pixels, cropped to 78, and the joints."""
    rng, episodes, eye = np.random.default_rng(0), [], "robot0_eye_in_hand_image"
    widths = dict.fromkeys((*ROBOMIMIC.vectors[:2], *ROBOMIMIC.aux), 7)
    for i in range(3):
        episode = make_episode(6, seed=i, size=84)
        episode["agentview_image"] = episode.pop("image")
        episode[eye] = 255 - episode["agentview_image"]
        for key in (*ROBOMIMIC.vectors, *ROBOMIMIC.aux, "object"):
            episode[key] = rng.normal(size=(7, widths.get(key, 2))).astype(np.float32)
        episodes.append((f"demo_{i}", episode))
    write_robomimic(tmp_path / "can.hdf5", episodes, ACTION)
    data = ["--offline.data", str(tmp_path / "can.hdf5")]
    read = ["--offline.read.like", "robomimic", "--offline.read.images"]
    small = shlex.split("--device cpu --logger.outputs jsonl --run.steps 1")
    sizes = shlex.split(
        """--dreamer.batch_size 2 --dreamer.batch_length 4 --offline.eval.horizon 2
        --offline.eval.ensemble.samples 2 --offline.eval.ensemble.horizon 2
        --offline.eval.ensemble.episodes 1"""
    )
    world, clone = tmp_path / "world", tmp_path / "clone"
    words = ["offline", "--configs", "robomimic", "size1m", "--logdir", str(world)]
    cameras = ["agentview_image", eye]
    assert run_cli([*words, *data, *read, *cameras, *sizes, *small]) == 0
    seen = read_spaces(world).obs_space
    assert seen["image"].shape == (78, 78, 6)
    assert {key for key in seen if key[:4] == "aux_"} == {
        "aux_robot0_joint_pos_sin",
        "aux_robot0_joint_pos_cos",
    }
    logged = (world / "metrics.jsonl").read_text()
    assert "train/loss/robot0_joint_pos" in logged
    assert "train/loss/aux_" not in logged  # seen, but not predicted
    assert "report/ensemble/robot0_joint_pos/coverage" in logged
    assert run_cli(["eval", str(world)]) == 0
    (video,) = (world / "eval").glob("openloop_image.*")  # both cameras
    assert video.stat().st_size
    words = ["bc", "--configs", "bc_can_PH", "--bc.run", str(world), "--logdir"]
    head = ["--bc.head.units", "8", "--bc.batch_size", "4"]
    assert run_cli([*words, str(clone), *data, *head, *small]) == 0
    assert read_spaces(clone).obs_space["image"].shape == (78, 78, 6)


def test_unused_observations_are_not_read(tmp_path):
    source = demos(tmp_path / "demos.hdf5")
    reader = open_episodes(source, READING)
    whole = open_episodes(source)
    assert "unused" in whole.obs_space
    whole.close()
    for key in ("unused", "joints"):
        reader.close()
        with h5py.File(source, "a") as file:
            del file[f"data/demo_1/next_obs/{key}"]
        if key == "unused":  # reading all keys would fail
            assert reader.read("demo_1")["image"].shape == (8, 16, 16, 6)
    with pytest.raises(ValueError, match="has no joints in 'next_obs'"):
        reader.read("demo_1")
    reader.close()


def test_a_missing_camera_and_an_inapplicable_key_map_are_errors(tmp_path, capsys):
    source = demos(tmp_path / "demos.hdf5")
    words = ["offline", "--logdir", str(tmp_path / "run"), "--offline.data"]
    more = ["--offline.read.images", "front"]
    assert run_cli([*words, str(source), *more]) == 2
    assert "has no front. It has: joints, side, speed" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    write_npz(tmp_path / "npz")
    more, other = ["--offline.read.map.action", "did"], str(tmp_path / "other")
    words_to_convert = ["data", "convert", str(tmp_path / "npz"), other]
    assert run_cli([*words_to_convert, "--format", "safetensors"]) == 0
    assert run_cli([*words, other, *more]) == 2
    assert "A key map describes HDF5 and NPZ files" in capsys.readouterr().err
    with pytest.raises(UserError, match="has no agentview_image"):
        open_episodes(source, ReaderConfig(like="robomimic"))
