"""Conversion of datasets: same episodes, atomic result, resuming, transforms."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from episode_helpers import (
    ACTION,
    alignment_error,
    assert_same,
    make_episode,
    write_npz,
)

from reverie.api import UserError
from reverie.datasets import convert as conversion
from reverie.datasets.convert import WriterConfig, convert
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.episodes import ReaderConfig, open_episodes
from reverie.datasets.readers import Reader, npz
from reverie.datasets.transforms import ROBOMIMIC, TransformedReader, Transforms, resize
from reverie.spaces import Space


class ArmReader(Reader):
    """Two cameras, one of them upside down, and joints; one demo may be invalid."""

    def __init__(self, count=4, spoil=None):
        self.origin, self.masks = "arm", {"train": ["demo_0", "demo_1"], "valid": []}
        self.count, self.spoil, self.reads = count, spoil or {}, []
        self._spaces = (
            {
                "side": Space(np.uint8, (8, 8, 3), 0, 256),
                "wrist": Space(np.uint8, (8, 8, 3), 0, 256),
                "joints": Space(np.float32, (2,)),
                "speed": Space(np.float32, (3,)),
            },
            ACTION,
        )

    def names(self):
        return [f"demo_{i}" for i in range(self.count)]

    def rows(self, name):
        return len(self.read(name)["reward"])

    def read(self, name):
        self.reads.append(name)
        if name in self.spoil and isinstance(self.spoil[name], Exception):
            raise self.spoil[name]
        seed = int(name[5:])
        episode = make_episode(5 + seed, seed)
        episode["side"] = episode.pop("image")
        episode["wrist"] = 255 - episode["side"]
        episode["joints"] = episode.pop("position")
        return {**episode, **self.spoil.get(name, {})}


STACK = Transforms(images=("wrist", "side"), vectors=("joints",), flip=("wrist",))


def test_a_converted_demo_has_the_layout_of_dreamerv3_torch(tmp_path):
    arm = ArmReader()
    done = convert(arm, tmp_path / "out", STACK)
    assert (done.written, done.existing, done.bad) == (4, 0, {})
    stored = npz.load_arrays(tmp_path / "out" / "demo_2-8.npz")
    episode = arm.read("demo_2")
    assert len(stored["action"]) == 8
    assert not stored["action"][0].any()
    np.testing.assert_array_equal(stored["action"][1:], episode["action"][:-1])
    np.testing.assert_array_equal(stored["image"][..., 3:], episode["side"])
    np.testing.assert_array_equal(stored["image"][..., :3], episode["wrist"][:, ::-1])
    assert stored["reward"][0] == 0
    assert stored["is_terminal"][-1]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_converted_episodes_equal_episodes_transformed_on_the_fly(tmp_path, format):
    arm = ArmReader()
    convert(arm, tmp_path / "out", STACK, WriterConfig(jobs=3), format=format)
    there, flying = (
        open_episodes(tmp_path / "out"),
        TransformedReader(ArmReader(), STACK),
    )
    assert there.names() == flying.names()
    assert list(there.obs_space) == list(flying.obs_space) == ["image", "joints"]
    assert there.obs_space["image"].shape == (8, 8, 6)
    assert there.masks == {"train": ["demo_0", "demo_1"], "valid": []}
    for name in there.names():
        episode = there.read(name)
        assert_same({k: episode[k] for k in flying.read(name)}, flying.read(name))
        assert alignment_error(episode | {"position": episode["joints"]}) < 1e-5


def test_keys_keep_the_given_order(tmp_path):
    transforms = Transforms(vectors=("speed", "joints"), aux=("joints",))
    convert(ArmReader(), tmp_path / "out", transforms)
    reader = open_episodes(tmp_path / "out")
    assert list(reader.obs_space) == ["speed", "joints", "aux_joints"]
    assert "image" not in reader.read("demo_0")


def test_images_are_resized_and_all_keys_kept_without_a_selection(tmp_path):
    convert(ArmReader(), tmp_path / "out", Transforms(size=(4, 6)))
    reader = open_episodes(tmp_path / "out")
    assert set(reader.obs_space) == {"side", "wrist", "joints", "speed"}
    assert reader.read("demo_1")["side"].shape == (7, 4, 6, 3)
    flat = np.full((8, 8, 2), 90, np.uint8)
    np.testing.assert_array_equal(resize(flat, (3, 5)), np.full((3, 5, 2), 90))


def test_an_interrupted_conversion_resumes_and_is_never_visible_incomplete(
    tmp_path, monkeypatch
):
    out = tmp_path / "out"
    write, calls = npz.write_npz_episode, []

    def interrupted(folder, name, *arguments):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(name)
        return write(folder, name, *arguments)

    monkeypatch.setattr(conversion, "write_npz_episode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(ArmReader(), out)
    assert not out.exists()
    monkeypatch.setattr(conversion, "write_npz_episode", write)
    with pytest.raises(UserError, match="left over from another conversion"):
        convert(ArmReader(), out, STACK)
    (tmp_path / "out.partial" / ".demo_3-9.npz.tmp").write_bytes(b"half")
    again, calls_of_progress = ArmReader(), []
    done = convert(
        again, out, progress=lambda n, total: calls_of_progress.append((n, total))
    )
    assert (done.written, done.existing) == (2, 2)
    assert not {*calls} & {*again.reads[-2:]}
    assert calls_of_progress[-1] == (4, 4)
    assert len(list(out.glob("*.npz"))) == 4
    assert not [path for path in out.iterdir() if path.suffix == ".tmp"]
    assert not list(out.glob("settings.json"))
    with pytest.raises(UserError, match="exists already"):
        convert(ArmReader(), out)


@pytest.mark.parametrize(
    ("spoilt", "complaint"),
    [
        (BadEpisode("cannot be read"), "demo_1 cannot be read"),
        ({"joints": np.full((7, 2), np.nan, np.float32)}, "'joints' has NaN"),
        ({"speed": np.zeros((3, 3), np.float32)}, "'speed' has 3 rows"),
        ({"side": np.zeros((7, 9, 9, 3), np.uint8)}, r"'side' has shape \(9, 9, 3\)"),
    ],
)
def test_a_bad_demo_is_skipped_or_stops_the_conversion(tmp_path, spoilt, complaint):
    arm = ArmReader(spoil={"demo_1": spoilt})
    with pytest.raises(UserError, match=f"(?s){complaint}.*Fix: .*--bad skip"):
        convert(arm, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = convert(arm, tmp_path / "out", config=WriterConfig(bad="skip", jobs=2))
    assert list(done.bad) == ["demo_1"]
    reader = open_episodes(tmp_path / "out")
    assert reader.names() == ["demo_0", "demo_2", "demo_3"]
    assert reader.masks["train"] == ["demo_0"]


def test_no_folder_is_left_if_no_episode_is_usable(tmp_path):
    spoil = {f"demo_{i}": BadEpisode("is empty") for i in range(4)}
    with pytest.raises(UserError, match=r"None of the 4 .*demo_\d is empty"):
        convert(
            ArmReader(spoil=spoil), tmp_path / "out", config=WriterConfig(bad="skip")
        )
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="jobs"):
        WriterConfig(jobs=0)


@pytest.mark.parametrize(
    ("transforms", "complaint"),
    [
        (
            Transforms(images=("front",)),
            "arm has no front. It has: side, wrist, joints, speed",
        ),
        (Transforms(images=("joints",)), "'joints' of arm is not an image"),
        (ROBOMIMIC, "has no agentview_image, robot0_joint_pos"),
    ],
)
def test_a_missing_camera_is_an_error_that_lists_existing_ones(transforms, complaint):
    with pytest.raises(UserError, match=complaint):
        TransformedReader(ArmReader(), transforms)


def test_cameras_of_different_sizes_must_be_resized():
    arm = ArmReader()
    arm.obs_space["side"] = Space(np.uint8, (9, 9, 3), 0, 256)
    transforms = Transforms(images=("side", "wrist"))
    with pytest.raises(UserError, match=r"differ in size.*\n  Fix: .*--size"):
        TransformedReader(arm, transforms)
    sized = Transforms(images=("side", "wrist"), size=(4, 4))
    assert sized.output_space(arm.obs_space, "arm")["image"].shape == (4, 4, 6)
    other = make_episode(3)
    other |= {"side": other.pop("image"), "wrist": np.zeros((4, 9, 9, 3), np.uint8)}
    with pytest.raises(BadEpisode, match="cameras of different sizes"):
        transforms.apply(other, ACTION)
    with pytest.raises(BadEpisode, match="has no 'front'"):
        Transforms(images=("front",)).apply(other, ACTION)


def test_converting_a_folder_keeps_its_episodes(tmp_path):
    episodes = write_npz(tmp_path / "a")
    convert(open_episodes(tmp_path / "a"), tmp_path / "b")
    reader = open_episodes(tmp_path / "b")
    for name, episode in episodes.items():
        found = reader.read(name)
        assert_same({k: found[k] for k in episode}, episode)


SLOW_CONVERSION = """
import sys, time
from reverie.cli.main import main
from reverie.datasets import convert

def write(*arguments, write=convert.write_npz_episode):
    time.sleep(0.1)
    return write(*arguments)

convert.write_npz_episode = write
main(sys.argv[1:])
"""


@pytest.mark.extended
def test_a_killed_conversion_resumes_to_the_same_result(tmp_path):
    source, out, whole = tmp_path / "source", tmp_path / "out", tmp_path / "whole"
    write_npz(source, [12] * 40)
    words = f"data convert {source} {out} --images image --size 24 24 --jobs 2".split()
    command = [sys.executable, "-c", SLOW_CONVERSION, *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    partial = tmp_path / "out.partial"
    while process.poll() is None and len(list(partial.glob("*.npz"))) < 5:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL  # it was not done yet
    there = {path.name for path in partial.glob("*.npz")}
    assert not out.exists()
    assert 5 <= len(there) < 40
    settings = (Transforms(images=("image",), size=(24, 24)), WriterConfig(jobs=2))
    done = convert(open_episodes(source), out, *settings)
    assert (done.existing, done.written) == (len(there), 40 - len(there))
    convert(open_episodes(source), whole, *settings)
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    one, other = open_episodes(out), open_episodes(whole)
    assert one.names() == other.names()
    for name in one.names():
        assert_same(one.read(name), other.read(name))


def test_a_conversion_is_not_resumed_with_another_key_map(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    from reverie.datasets.readers.key_map import KeyMap
    from reverie.datasets.robomimic import write_robomimic

    write_robomimic(tmp_path / "a.hdf5", [("demo_0", make_episode(5))], ACTION)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "write_npz_episode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(open_episodes(tmp_path / "a.hdf5"), tmp_path / "out")
    never = open_episodes(
        tmp_path / "a.hdf5", ReaderConfig(map=KeyMap(terminate_on="never"))
    )
    with pytest.raises(UserError, match="left over from another conversion"):
        convert(never, tmp_path / "out")
    assert convert(open_episodes(tmp_path / "a.hdf5"), tmp_path / "out").written == 1
