"""Conversion: the same episodes in another form, whole or not at all; recipes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from walks import ACTION, same, slip, walk, write_npz

from reverie.api import UserError
from reverie.datasets import convert as conversion
from reverie.datasets.convert import ConvertConfig, convert
from reverie.datasets.episode_format import BadEpisode
from reverie.datasets.readers import Reader, npz, open_reader
from reverie.datasets.transforms import ROBOMIMIC, Prepared, Recipe, resize
from reverie.spaces import Space


class Arm(Reader):
    """Two cameras, one of them upside down, and joints; one demo may be spoilt."""

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
        episode = walk(5 + seed, seed)
        episode["side"] = episode.pop("image")
        episode["wrist"] = 255 - episode["side"]
        episode["joints"] = episode.pop("position")
        return {**episode, **self.spoil.get(name, {})}


STACK = Recipe(images=("wrist", "side"), vectors=("joints",), flip=("wrist",))


def test_a_converted_demo_has_one_row_more_than_actions_and_led_to_time(tmp_path):
    arm = Arm()
    done = convert(arm, tmp_path / "out", ConvertConfig(recipe=STACK))
    assert (done.written, done.kept, done.bad) == (4, 0, {})
    stored = npz.load(tmp_path / "out" / "demo_2-8.npz")
    episode = arm.read("demo_2")
    assert len(stored["action"]) == 8
    assert not stored["action"][0].any()
    np.testing.assert_array_equal(stored["action"][1:], episode["action"][:-1])
    np.testing.assert_array_equal(stored["image"][..., 3:], episode["side"])
    np.testing.assert_array_equal(stored["image"][..., :3], episode["wrist"][:, ::-1])
    assert stored["reward"][0] == 0
    assert stored["is_terminal"][-1]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("format", ["npz", "store"])
def test_what_is_written_reads_as_what_was_read_on_the_fly(tmp_path, format):
    arm = Arm()
    config = ConvertConfig(recipe=STACK, format=format, jobs=3)
    convert(arm, tmp_path / "out", config)
    there, flying = open_reader(tmp_path / "out"), Prepared(Arm(), STACK)
    assert there.names() == flying.names()
    assert list(there.obs_space) == list(flying.obs_space) == ["image", "joints"]
    assert there.obs_space["image"].shape == (8, 8, 6)
    assert there.masks == {"train": ["demo_0", "demo_1"], "valid": []}
    for name in there.names():
        episode = there.read(name)
        same({k: episode[k] for k in flying.read(name)}, flying.read(name))
        assert slip(episode | {"position": episode["joints"]}) < 1e-5


def test_keys_keep_the_order_that_was_asked_for(tmp_path):
    recipe = Recipe(vectors=("speed", "joints"), aux=("joints",))
    convert(Arm(), tmp_path / "out", ConvertConfig(recipe=recipe))
    reader = open_reader(tmp_path / "out")
    assert list(reader.obs_space) == ["speed", "joints", "aux_joints"]
    assert "image" not in reader.read("demo_0")


def test_images_are_resized_and_everything_stays_without_a_choice(tmp_path):
    convert(Arm(), tmp_path / "out", ConvertConfig(recipe=Recipe(size=(4, 6))))
    reader = open_reader(tmp_path / "out")
    assert set(reader.obs_space) == {"side", "wrist", "joints", "speed"}
    assert reader.read("demo_1")["side"].shape == (7, 4, 6, 3)
    flat = np.full((8, 8, 2), 90, np.uint8)
    np.testing.assert_array_equal(resize(flat, (3, 5)), np.full((3, 5, 2), 90))


def test_an_interrupted_conversion_goes_on_and_was_never_seen_half_done(
    tmp_path, monkeypatch
):
    out = tmp_path / "out"
    write, calls = npz.write_folder_file, []

    def interrupted(folder, name, *rest):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(name)
        return write(folder, name, *rest)

    monkeypatch.setattr(conversion.npz, "write_folder_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        convert(Arm(), out)
    assert not out.exists()
    monkeypatch.setattr(conversion.npz, "write_folder_file", write)
    with pytest.raises(UserError, match="left behind by another conversion"):
        convert(Arm(), out, ConvertConfig(recipe=STACK))
    (tmp_path / "out.partial" / ".demo_3-9.npz.tmp").write_bytes(b"half")
    again, told = Arm(), []
    done = convert(again, out, progress=lambda n, total: told.append((n, total)))
    assert (done.written, done.kept) == (2, 2)
    assert not {*calls} & {*again.reads[-2:]}
    assert told[-1] == (4, 4)
    assert len(list(out.glob("*.npz"))) == 4
    assert not [path for path in out.iterdir() if path.suffix == ".tmp"]
    assert not list(out.glob("plan.json"))
    with pytest.raises(UserError, match="exists already"):
        convert(Arm(), out)


@pytest.mark.parametrize(
    ("spoilt", "complaint"),
    [
        (BadEpisode("cannot be read"), "demo_1 cannot be read"),
        ({"joints": np.full((7, 2), np.nan, np.float32)}, "'joints' has NaN"),
        ({"speed": np.zeros((3, 3), np.float32)}, "'speed' has 3 rows"),
        ({"side": np.zeros((7, 9, 9, 3), np.uint8)}, r"'side' has shape \(9, 9, 3\)"),
    ],
)
def test_a_bad_demo_is_named_and_left_out_or_fatal(tmp_path, spoilt, complaint):
    arm = Arm(spoil={"demo_1": spoilt})
    with pytest.raises(UserError, match=f"(?s){complaint}.*Fix: .*--bad skip"):
        convert(arm, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    done = convert(arm, tmp_path / "out", ConvertConfig(bad="skip", jobs=2))
    assert list(done.bad) == ["demo_1"]
    reader = open_reader(tmp_path / "out")
    assert reader.names() == ["demo_0", "demo_2", "demo_3"]
    assert reader.masks["train"] == ["demo_0"]


def test_nothing_usable_leaves_nothing_behind(tmp_path):
    spoil = {f"demo_{i}": BadEpisode("is empty") for i in range(4)}
    with pytest.raises(UserError, match=r"None of the 4 .*demo_\d is empty"):
        convert(Arm(spoil=spoil), tmp_path / "out", ConvertConfig(bad="skip"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="jobs"):
        ConvertConfig(jobs=0)


@pytest.mark.parametrize(
    ("recipe", "complaint"),
    [
        (Recipe(images=("front",)), "arm has no front, but side, wrist, joints, speed"),
        (Recipe(images=("joints",)), "'joints' of arm is no image"),
        (ROBOMIMIC, "has no agentview_image, robot0_joint_pos"),
    ],
)
def test_a_missing_camera_is_one_sentence_with_those_there_are(recipe, complaint):
    with pytest.raises(UserError, match=complaint):
        Prepared(Arm(), recipe)


def test_cameras_of_several_sizes_do_not_stack_but_may_be_resized():
    arm = Arm()
    arm.obs_space["side"] = Space(np.uint8, (9, 9, 3), 0, 256)
    recipe = Recipe(images=("side", "wrist"))
    with pytest.raises(UserError, match=r"differ in size.*\n  Fix: .*--size"):
        Prepared(arm, recipe)
    sized = Recipe(images=("side", "wrist"), size=(4, 4))
    assert sized.spaces(arm.obs_space, "arm")["image"].shape == (4, 4, 6)
    other = walk(3)
    other |= {"side": other.pop("image"), "wrist": np.zeros((4, 9, 9, 3), np.uint8)}
    with pytest.raises(BadEpisode, match="cameras of several sizes"):
        recipe.apply(other, ACTION)
    with pytest.raises(BadEpisode, match="has no 'front'"):
        Recipe(images=("front",)).apply(other, ACTION)


def test_a_folder_converts_to_itself(tmp_path):
    episodes = write_npz(tmp_path / "a")
    convert(open_reader(tmp_path / "a"), tmp_path / "b")
    reader = open_reader(tmp_path / "b")
    for name, episode in episodes.items():
        found = reader.read(name)
        same({k: found[k] for k in episode}, episode)


SLOWLY = """
import sys, time
from reverie.cli.main import main
from reverie.datasets import convert

def write(*rest, write=convert.npz.write_folder_file):
    time.sleep(0.1)
    return write(*rest)

convert.npz.write_folder_file = write
main(sys.argv[1:])
"""


def test_a_conversion_that_was_killed_goes_on_to_the_same_result(tmp_path):
    source, out, whole = tmp_path / "source", tmp_path / "out", tmp_path / "whole"
    write_npz(source, [12] * 40)
    words = f"data convert {source} {out} --images image --size 24 24 --jobs 2".split()
    command = [sys.executable, "-c", SLOWLY, *words]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    partial = tmp_path / "out.partial"
    while process.poll() is None and len(list(partial.glob("*.npz"))) < 5:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL  # it was not done yet
    there = {path.name for path in partial.glob("*.npz")}
    assert not out.exists()
    assert 5 <= len(there) < 40
    config = ConvertConfig(Recipe(images=("image",), size=(24, 24)), jobs=2)
    done = convert(open_reader(source), out, config)
    assert (done.kept, done.written) == (len(there), 40 - len(there))
    convert(open_reader(source), whole, config)
    names = {path.name for path in whole.iterdir()}
    assert {path.name for path in out.iterdir()} == names
    one, other = open_reader(out), open_reader(whole)
    assert one.names() == other.names()
    for name in one.names():
        same(one.read(name), other.read(name))


def test_another_key_map_is_another_conversion(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    from reverie.datasets.readers.hdf5 import KeyMap, write_robomimic

    write_robomimic(tmp_path / "a.hdf5", [("demo_0", walk(5))], ACTION)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion.npz, "write_folder_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(open_reader(tmp_path / "a.hdf5"), tmp_path / "out")
    never = open_reader(tmp_path / "a.hdf5", map=KeyMap(ends="never"))
    with pytest.raises(UserError, match="left behind by another conversion"):
        convert(never, tmp_path / "out")
    assert convert(open_reader(tmp_path / "a.hdf5"), tmp_path / "out").written == 1
