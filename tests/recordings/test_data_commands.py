"""The commands of `reverie data`: inspect, convert, split, stats, view and demos."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from episode_helpers import ACTION, alignment_error, make_episode, write_npz
from PIL import Image

from reverie.api import UserError
from reverie.cli.data import data_commands
from reverie.cli.main import main
from reverie.datasets.episodes import open_episodes
from reverie.datasets.readers import npz
from reverie.datasets.split import Subset
from reverie.envs.suites.reach import Reach, ReachConfig
from reverie.recordings import commands
from reverie.recordings.commands import (
    DATA_COMMANDS,
    ConvertOptions,
    ProgressBar,
    SplitOptions,
)
from reverie.recordings.demonstrate import successful_episodes
from reverie.spaces import Space
from reverie.storage.episodes import write_episode


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: str) -> int:
    return main(["data", *words.split()])


def error_of(words: str, capsys) -> str:
    """Return the error message of a command that fails."""
    assert run(words) == 2
    output = capsys.readouterr().err
    assert "  Fix: " in output
    assert "Traceback" not in output
    return output


def test_every_command_is_available():
    assert set(data_commands()) == {
        *DATA_COMMANDS,
        *("export", "balls", "maze", "replay", "render"),
    }


def test_inspect_prints_a_summary_and_writes_a_contact_sheet(here, capsys):
    write_npz(here / "demos")
    assert run("inspect demos") == 0
    output = capsys.readouterr().out
    assert "3 episodes" in output
    assert "No problems found" in output
    assert Image.open(here / "demos.png").size[0] > 100
    (here / "demos" / "demo_0-6.npz").write_bytes(b"PK")
    assert run("inspect demos --episodes 3 --out sheet.png") == 2
    assert "invalid: demo_0" in capsys.readouterr().out
    assert (here / "sheet.png").exists()
    for path in (here / "demos").glob("demo_[01]-*.npz"):
        path.write_bytes(b"PK")
    assert run("inspect demos --episodes 2") == 2
    assert "frames of demo_2" in capsys.readouterr().out


def test_without_images_there_are_curves_instead_of_a_video(here, capsys):
    episode = {k: v for k, v in make_episode(5).items() if k != "image"}
    npz.write_npz_episode(here / "demos", "a", episode, ACTION)
    assert run("inspect demos") == 0
    assert "frames of" not in capsys.readouterr().out
    assert run("view demos") == 0
    assert capsys.readouterr().out == "a.png\n"
    pixels = np.asarray(Image.open(here / "a.png"))
    assert len({tuple(color) for color in pixels.reshape(-1, 3).tolist()}) > 10
    assert "--out b.png" in error_of("view demos --out b.gif", capsys)


def test_generated_sequences_are_not_overwritten(here, capsys):
    for name in ("balls", "maze"):
        words = f"{name} --out {name} --train 2 --test 1 --length 4"
        assert run(words) == 0
        files = {path: path.read_bytes() for path in here.rglob("*.npz")}
        assert "exists already" in error_of(words + " --seed 1", capsys)
        assert {path: path.read_bytes() for path in here.rglob("*.npz")} == files


def test_convert_then_split_then_stats(here, capsys):
    write_npz(here / "demos", [5] * 12)
    words = "convert demos out --images image --vectors speed,position --jobs 2"
    assert run(f"{words} --size 4 4 --first 10") == 0
    assert "10 episodes in out" in capsys.readouterr().out
    reader = open_episodes(here / "out")
    assert list(reader.obs_space) == ["image", "speed", "position"]
    assert reader.obs_space["image"].shape == (4, 4, 3)
    assert alignment_error(reader.read("demo_9")) < 1e-5
    assert run("split out parts --fraction 0.2 --seed 3") == 0
    chosen = json.loads((here / "parts" / "split.json").read_text())
    train, held = open_episodes("parts/train"), open_episodes("parts/eval")
    assert (len(train.names()), len(held.names())) == (8, 2)
    assert (chosen["train"], chosen["eval"]) == (train.names(), held.names())
    assert sorted(train.names() + held.names()) == sorted(reader.names())
    assert list(held.obs_space) == list(reader.obs_space)
    assert run("stats parts/train") == 0
    assert "Saved as parts/train.stats.npz" in capsys.readouterr().out
    assert Image.open(here / "parts" / "train.stats.png").size[0] > 100
    saved = npz.load_arrays(here / "parts" / "train.stats.npz")
    assert saved["speed:rows"] == 48
    assert "exists already" in error_of("split out parts", capsys)
    assert "exists already" in error_of("convert demos out", capsys)
    shutil.copytree(here / "out", here / "out2")
    for words in ("convert demos n.hdf5", "split demos n.npz", "merge out out2 n.h5"):
        assert "written to a folder, but n" in error_of(words, capsys)
    assert not list(here.glob("n.*"))
    assert "has no mask 'train'" in error_of(
        "split out more --mask train valid", capsys
    )
    assert not list(here.glob("*.partial"))


def test_a_split_copies_files_that_cannot_be_linked(here, monkeypatch):
    for i in range(4):
        write_episode(here / "mine", f"demo_{i}", make_episode(5, i))

    def no_links(*_):
        raise OSError("not on this disk")

    monkeypatch.setattr(commands.os, "link", no_links)
    assert run("split mine parts --fraction 0.5") == 0
    assert len(open_episodes("parts/eval").names()) == 2
    assert (
        alignment_error(
            open_episodes("parts/train").read(open_episodes("parts/train").names()[0])
        )
        < 1e-5
    )


def test_a_video_shows_all_cameras(here, capsys):
    episode = make_episode(5) | {
        "two": np.zeros((6, 6, 8, 6), np.uint8),
        "gray": np.zeros((6, 8, 8, 1), np.uint8),
    }
    npz.write_npz_episode(here / "demos", "a", episode, ACTION)
    assert run("view demos --out video.gif --fps 5") == 0
    video = Image.open(here / "video.gif")
    assert video.n_frames >= 2
    assert video.size[0] == 4 * video.size[1]
    assert "has no episode 'b'" in error_of("view demos --episode b", capsys)
    (here / "demos" / "a-6.npz").write_bytes(b"PK")
    npz.write_npz_episode(here / "demos", "c", episode, ACTION)
    assert "a cannot be read" in error_of("view demos --episode a", capsys)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("inspect", "needs PATH"),
        ("convert demos", "needs SRC and DST"),
        ("convert demos out --imges a", "Did you mean 'images'"),
        ("convert demos out --images front", "has no front"),
        ("convert demos out --jobs many", "jobs must be a whole number"),
        ("convert demos out --like robomimic", "has no agentview_image"),
        ("convert demos out --map.action a", "has no group 'obs', only action"),
        ("convert demos out --jobs 0", "jobs must be at least 1"),
        ("convert demos out --size 0 24", "a height and a width above 0"),
        ("convert demos demos/demo_0-6.npz/out", "Not a directory"),
        ("split demos out --mask train", "mask takes two names"),
        ("split demos out --jobs 0", "jobs must be at least 1"),
        ("split demos out --seed -1", "seed must be at least 0"),
        ("demos reach.hdf5 --seed -1", "seed must be at least 0"),
        ("split demos out --fraction 2", "Cannot hold out a fraction of 2.0"),
        ("inspect demos --episodes -3", "episodes must be at least 0"),
        ("view demos --fps 0", "fps must be at least 1"),
        (
            "stats demos --out demos/demo_0-6.npz/x",
            "demo_0-6.npz could not be written (File exists)",
        ),
        ("inspect absent", "absent does not exist"),
        ("inspct demos", "Did you mean 'inspect'"),
        ("demos reach.npz", "Fix: reverie data demos reach.hdf5"),
        ("demos reach.hdf5 --episodes 1", "At least 2 demonstrations"),
        ("demos catch.hdf5 --task catch", "has no expert policy"),
    ],
)
def test_invalid_arguments_are_errors(here, capsys, words, sentence):
    if "catch" in words:
        pytest.importorskip("h5py")
    write_npz(here / "demos")
    assert sentence in error_of(words, capsys)
    assert not [p for p in here.iterdir() if p.name != "demos"]


def test_a_bad_file_stops_a_conversion_or_is_skipped(here, capsys):
    write_npz(here / "demos")
    path = here / "demos" / "demo_1-10.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert "demo_1 cannot be read" in error_of("convert demos out", capsys)
    assert not (here / "out").exists()
    assert run("convert demos out --bad skip") == 0
    output = capsys.readouterr()
    assert "skipped: demo_1 cannot be read" in output.err
    assert "2 episodes in out" in output.out


def test_stats_warns_about_bad_episodes(here, capsys):
    write_npz(here / "demos")
    path = here / "demos" / "demo_1-10.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(RuntimeWarning, match="demo_1 cannot be read .*not counted"):
        assert run("stats demos") == 0


def test_different_image_sizes_are_an_error(here, capsys):
    write_npz(here / "demos")
    npz.write_npz_episode(here / "demos", "demo_9", make_episode(5, size=6), ACTION)
    assert "demo_9 'image' has shape (6, 6, 3)" in error_of("convert demos out", capsys)


def test_demonstrations_are_recorded_converted_and_split(here, capsys):
    pytest.importorskip("h5py")
    assert run("demos reach.hdf5 --episodes 12 --noise 0.1 --seed 1") == 0
    source = open_episodes("reach.hdf5")
    assert set(source.masks) == {"train", "valid"}
    assert source.act_space["action"] == Space(np.float32, (2,), -1, 1)
    assert json.loads(source.attributes()["env_args"])["env_name"] == "reach"
    capsys.readouterr()
    assert run("inspect reach.hdf5") == 0
    assert '"env_name": "reach"' in capsys.readouterr().out
    assert run("convert reach.hdf5 out --images image --vectors proprio") == 0
    assert run("split out parts --mask train valid") == 0
    assert run("split reach.hdf5 others --mask train valid") == 0
    for folder in ("parts/train", "others/train"):
        for name in (reader := open_episodes(folder)).names():
            episode = reader.read(name)
            moved = np.diff(episode["proprio"], axis=0)
            free = (np.abs(episode["proprio"]) < 1).all(1)[1:]
            expected = 0.15 * episode["action"][:-1]
            np.testing.assert_allclose(moved[free], expected[free], atol=1e-5)
            assert episode["is_terminal"][-1]
            assert episode["reward"].sum() == 1
            assert "log/success" not in episode
    assert "exists already" in error_of("demos reach.hdf5 --episodes 2", capsys)
    again = here / "again.hdf5"
    assert run("demos again.hdf5 --episodes 12 --noise 0.1 --seed 1") == 0
    same = open_episodes(again).read("demo_3")["action"]
    np.testing.assert_array_equal(same, source.read("demo_3")["action"])


def test_demonstrations_use_environment_settings(here, capsys):
    pytest.importorskip("h5py")
    assert run("demos a.hdf5 --task reach --episodes 2 --env.reach.size 16 16") == 0
    reader = open_episodes("a.hdf5")
    assert reader.obs_space["image"].shape == (16, 16, 3)
    recorded = json.loads(reader.attributes()["env_args"])["env_kwargs"]
    assert recorded == {"reach.size": [16, 16]}
    assert "does not use presets" in error_of("inspect a.hdf5 --configs lift", capsys)


def test_an_expert_that_always_fails_is_an_error():
    class Lazy(Reach):
        def expert(self):
            return {"action": np.zeros(2, np.float32)}

    with pytest.raises(UserError, match="failed 50 times in a row"):
        next(successful_episodes(Lazy(ReachConfig(length=2)), "lazy", 0, 0.0))


def test_progress_is_a_bar_on_a_terminal_and_lines_elsewhere(capsys, monkeypatch):
    bar = ProgressBar("done")
    for n in range(101):
        bar(n, 100)
    bar.end()
    assert len(capsys.readouterr().err.splitlines()) == 11
    bar._is_tty = True
    bar(50, 100)
    bar.end()
    assert "[#####.....] 50/100" in capsys.readouterr().err


def test_options_override_the_robomimic_defaults():
    transforms = ConvertOptions(like="robomimic", images=("a", "b")).transforms
    assert transforms.images == ("a", "b")
    assert transforms.vectors[0] == "robot0_joint_pos"


def test_a_split_of_symlinks_links_their_targets(here):
    write_npz(here / "demos", [5] * 4)
    (here / "links").mkdir()
    for path in (here / "demos").glob("*.npz"):
        (here / "links" / path.name).symlink_to(f"../demos/{path.name}")
    assert run("split links parts --fraction 0.5") == 0
    for part in ("train", "eval"):
        for name in (reader := open_episodes(f"parts/{part}")).names():
            assert not reader.paths[name].is_symlink()
            assert alignment_error(reader.read(name)) < 1e-5


def write_demos(path, bad_demo=None):
    pytest.importorskip("h5py")
    from reverie.datasets.robomimic import write_robomimic

    episodes = {f"demo_{i}": make_episode(5, i) for i in range(8)}
    if bad_demo:
        episodes[bad_demo]["speed"][2] = np.nan
    masks = {"train": ["demo_0", "demo_1", "demo_2"], "valid": ["demo_3"]}
    write_robomimic(path, episodes.items(), ACTION, masks=masks)


@pytest.mark.parametrize(
    "other",
    ["--seed 4", "--fraction 0.25", "--mask train valid", "--map.terminate_on never"],
)
def test_an_interrupted_split_is_not_resumed_with_other_settings(
    here, capsys, monkeypatch, other
):
    write_demos(here / "a.hdf5")

    def interrupted(path, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(commands, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            commands.split_command("a.hdf5", "parts", SplitOptions(fraction=0.5))
    output = error_of(f"split a.hdf5 parts --fraction 0.5 {other}", capsys)
    assert "left over from another split" in output
    assert run("split a.hdf5 parts --fraction 0.5") == 0
    files = {path.name for path in (here / "parts").iterdir()}
    assert files == {"train", "eval", "split.json"}


def test_split_json_lists_only_written_episodes(here, capsys):
    write_demos(here / "a.hdf5", bad_demo="demo_1")
    assert run("split a.hdf5 parts --mask train valid --bad skip") == 0
    output = capsys.readouterr()
    assert "skipped: demo_1 'speed' has NaN" in output.err
    assert "2 episodes in parts/train, 1 in" in output.out
    chosen = json.loads((here / "parts" / "split.json").read_text())
    assert (
        chosen["train"] == open_episodes("parts/train").names() == ["demo_0", "demo_2"]
    )


def test_stats_of_the_working_directory(here, monkeypatch, capsys):
    write_npz(here / "demos")
    monkeypatch.chdir(here / "demos")
    assert run("stats .") == 0
    assert (here / "demos.stats.npz").exists()


def test_an_empty_dataset_has_no_episode_to_choose(tmp_path):
    write_npz(tmp_path, [5])
    with pytest.raises(UserError, match="has no episodes"):
        commands.choose_episode(Subset(open_episodes(tmp_path), []), "")


def test_inspect_concatenated_episodes(here, capsys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(here / "row.hdf5", "w") as file:
        file["obs/place"] = np.arange(12, dtype=np.float32).reshape(6, 2)
        file["actions"] = np.linspace(-1, 1, 6, dtype=np.float32)[:, None]
        file["dones"] = np.array([0, 0, 1, 0, 0, 1])
        file.attrs["made_by"] = "someone"
    assert run("inspect row.hdf5 --map.episode_ends dones") == 0
    output = capsys.readouterr().out
    assert "2 episodes" in output
    assert "made_by: someone" in output
