"""`reverie data`: looking at recordings, converting, splitting, measuring, showing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image
from walks import ACTION, slip, walk, write_npz

from reverie.api import UserError
from reverie.cli.data import data_verbs
from reverie.cli.main import main
from reverie.datasets import statistics as stats
from reverie.datasets.readers import npz, open_reader
from reverie.envs.suites.reach import Reach, ReachConfig
from reverie.recordings import tools as datasets
from reverie.recordings.demonstrate import successes
from reverie.recordings.tools import VERBS, ConvertOptions, Progress, SplitOptions
from reverie.spaces import Space
from reverie.storage.episodes import write_episode


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(words: str) -> int:
    return main(["data", *words.split()])


def complaint(words: str, capsys) -> str:
    """What a command that fails says; its last line is a fix."""
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "  Fix: " in said
    assert "Traceback" not in said
    return said


def test_every_verb_on_recordings_is_a_command():
    assert set(data_verbs()) == {*VERBS, "export", "balls", "maze"}


def test_inspect_tells_what_is_there_and_draws_a_contact_sheet(here, capsys):
    write_npz(here / "demos")
    assert run("inspect demos") == 0
    said = capsys.readouterr().out
    assert "3 episodes" in said
    assert "Nothing wrong was found" in said
    assert Image.open(here / "demos.png").size[0] > 100
    (here / "demos" / "demo_0-6.npz").write_bytes(b"PK")
    assert run("inspect demos --episodes 3 --out sheet.png") == 2
    assert "wrong: demo_0" in capsys.readouterr().out
    assert (here / "sheet.png").exists()
    for path in (here / "demos").glob("demo_[01]-*.npz"):
        path.write_bytes(b"PK")
    assert run("inspect demos --episodes 2") == 2
    assert "demo_2 at a glance" in capsys.readouterr().out


def test_vectors_alone_have_no_sheet_and_no_film(here, capsys):
    episode = {k: v for k, v in walk(5).items() if k != "image"}
    npz.write_folder_file(here / "demos", "a", episode, ACTION)
    assert run("inspect demos") == 0
    assert "at a glance" not in capsys.readouterr().out
    assert "no images to show" in complaint("view demos", capsys)


def test_convert_then_split_then_measure(here, capsys):
    write_npz(here / "demos", [5] * 12)
    words = "convert demos out --images image --vectors speed,position --jobs 2"
    assert run(f"{words} --size 4 4 --first 10") == 0
    assert "10 episodes in out" in capsys.readouterr().out
    reader = open_reader(here / "out")
    assert list(reader.obs_space) == ["image", "speed", "position"]
    assert reader.obs_space["image"].shape == (4, 4, 3)
    assert slip(reader.read("demo_9")) < 1e-5
    assert run("split out parts --fraction 0.2 --seed 3") == 0
    chosen = json.loads((here / "parts" / "split.json").read_text())
    train, held = open_reader("parts/train"), open_reader("parts/eval")
    assert (len(train.names()), len(held.names())) == (8, 2)
    assert (chosen["train"], chosen["eval"]) == (train.names(), held.names())
    assert sorted(train.names() + held.names()) == sorted(reader.names())
    assert list(held.obs_space) == list(reader.obs_space)
    assert run("stats parts/train") == 0
    assert "Saved as parts/train.stats.npz" in capsys.readouterr().out
    assert Image.open(here / "parts" / "train.stats.png").size[0] > 100
    assert stats.load(here / "parts" / "train.stats.npz")["speed"].count == 48
    assert "exists already" in complaint("split out parts", capsys)
    assert "exists already" in complaint("convert demos out", capsys)
    assert "has no mask 'train'" in complaint(
        "split out more --mask train valid", capsys
    )
    assert not list(here.glob("*.partial"))


def test_our_own_files_are_split_by_links_or_copies(here, monkeypatch):
    for i in range(4):
        write_episode(here / "mine", f"demo_{i}", walk(5, i))

    def no_links(*_):
        raise OSError("not on this disk")

    monkeypatch.setattr(datasets.os, "link", no_links)
    assert run("split mine parts --fraction 0.5") == 0
    assert len(open_reader("parts/eval").names()) == 2
    assert (
        slip(open_reader("parts/train").read(open_reader("parts/train").names()[0]))
        < 1e-5
    )


def test_a_film_shows_all_cameras_side_by_side(here, capsys):
    episode = walk(5) | {
        "two": np.zeros((6, 6, 8, 6), np.uint8),
        "gray": np.zeros((6, 8, 8, 1), np.uint8),
    }
    npz.write_folder_file(here / "demos", "a", episode, ACTION)
    assert run("view demos --out film.gif --fps 5") == 0
    film = Image.open(here / "film.gif")
    assert film.n_frames >= 2
    assert film.size[0] == 4 * film.size[1]
    assert "has no episode 'b'" in complaint("view demos --episode b", capsys)
    (here / "demos" / "a-6.npz").write_bytes(b"PK")
    open_reader("demos")
    npz.write_folder_file(here / "demos", "c", episode, ACTION)
    assert "a cannot be read" in complaint("view demos --episode a", capsys)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("inspect", "needs PATH"),
        ("convert demos", "needs SRC and DST"),
        ("convert demos out --imges a", "Did you mean 'images'"),
        ("convert demos out --images front", "has no front"),
        ("convert demos out --jobs many", "jobs must be a whole number"),
        ("convert demos out --like robomimic", "has no agentview_image"),
        ("convert demos out --map.action a", "is none"),
        ("convert demos out --jobs 0", "jobs begin at 1"),
        ("convert demos out --size 0 24", "a height and a width above zero"),
        ("convert demos demos/demo_0-6.npz/out", "Not a directory"),
        ("split demos out --mask train", "mask takes two names"),
        ("split demos out --jobs 0", "jobs begin at 1"),
        ("split demos out --seed -1", "seed begins at 0"),
        ("demos reach.hdf5 --seed -1", "seed begins at 0"),
        ("split demos out --fraction 2", "a share of 2.0 cannot be held out"),
        ("inspect demos --episodes -3", "episodes counts some"),
        ("view demos --fps 0", "fps begins at 1"),
        ("stats demos --out demos/demo_0-6.npz/x", "demo_0-6.npz: File exists"),
        ("inspect absent", "nothing at absent"),
        ("inspct demos", "Did you mean 'inspect'"),
        ("demos reach.npz", "Fix: reverie data demos reach.hdf5"),
        ("demos reach.hdf5 --episodes 1", "Fewer than two"),
        ("demos catch.hdf5 --task catch", "knows no expert"),
    ],
)
def test_mistakes_are_one_sentence_with_its_fix(here, capsys, words, sentence):
    if "catch" in words:
        pytest.importorskip("h5py")
    write_npz(here / "demos")
    assert sentence in complaint(words, capsys)
    assert not [p for p in here.iterdir() if p.name != "demos"]


def test_a_bad_file_stops_a_conversion_or_is_left_out(here, capsys):
    write_npz(here / "demos")
    path = here / "demos" / "demo_1-10.npz"
    path.write_bytes(path.read_bytes()[:100])
    assert "demo_1 cannot be read" in complaint("convert demos out", capsys)
    assert not (here / "out").exists()
    assert run("convert demos out --bad skip") == 0
    said = capsys.readouterr()
    assert "left out: demo_1 cannot be read" in said.err
    assert "2 episodes in out" in said.out


def test_what_is_not_measured_is_named(here, capsys):
    write_npz(here / "demos")
    path = here / "demos" / "demo_1-10.npz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(RuntimeWarning, match="demo_1 cannot be read .*not measured"):
        assert run("stats demos") == 0


def test_mixed_image_sizes_are_named(here, capsys):
    write_npz(here / "demos")
    npz.write_folder_file(here / "demos", "demo_9", walk(5, size=6), ACTION)
    assert "demo_9 'image' has shape (6, 6, 3)" in complaint(
        "convert demos out", capsys
    )


def test_demonstrations_of_reach_go_all_the_way(here, capsys):
    pytest.importorskip("h5py")
    assert run("demos reach.hdf5 --episodes 12 --noise 0.1 --seed 1") == 0
    source = open_reader("reach.hdf5")
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
        for name in (reader := open_reader(folder)).names():
            episode = reader.read(name)
            moved = np.diff(episode["proprio"], axis=0)
            free = (np.abs(episode["proprio"]) < 1).all(1)[1:]
            expected = 0.15 * episode["action"][:-1]
            np.testing.assert_allclose(moved[free], expected[free], atol=1e-5)
            assert episode["is_terminal"][-1]
            assert episode["reward"].sum() == 1
            assert "log/success" not in episode
    assert "exists already" in complaint("demos reach.hdf5 --episodes 2", capsys)
    again = here / "again.hdf5"
    assert run("demos again.hdf5 --episodes 12 --noise 0.1 --seed 1") == 0
    same = open_reader(again).read("demo_3")["action"]
    np.testing.assert_array_equal(same, source.read("demo_3")["action"])


def test_the_environment_of_demonstrations_is_set_like_that_of_a_run(here, capsys):
    pytest.importorskip("h5py")
    assert run("demos a.hdf5 --task reach --episodes 2 --env.reach.size 16 16") == 0
    reader = open_reader("a.hdf5")
    assert reader.obs_space["image"].shape == (16, 16, 3)
    noted = json.loads(reader.attributes()["env_args"])["env_kwargs"]
    assert noted == {"reach.size": [16, 16]}
    assert "does not use preset blocks" in complaint(
        "inspect a.hdf5 --configs lift", capsys
    )


def test_an_expert_that_never_arrives_is_given_up():
    class Lazy(Reach):
        def expert(self):
            return {"action": np.zeros(2, np.float32)}

    with pytest.raises(UserError, match="failed 50 times in a row"):
        next(successes(Lazy(ReachConfig(length=2)), "lazy", 0, 0.0))


def test_progress_is_a_bar_on_a_terminal_and_tenths_elsewhere(capsys, monkeypatch):
    bar = Progress("done")
    for n in range(101):
        bar(n, 100)
    bar.end()
    assert len(capsys.readouterr().err.splitlines()) == 11
    bar._tty = True
    bar(50, 100)
    bar.end()
    assert "[#####.....] 50/100" in capsys.readouterr().err


def test_options_lie_over_the_usual_keys():
    recipe = ConvertOptions(like="robomimic", images=("a", "b")).config().recipe
    assert recipe.images == ("a", "b")
    assert recipe.vectors[0] == "robot0_joint_pos"


def test_links_are_split_as_what_they_stand_for(here):
    write_npz(here / "demos", [5] * 4)
    (here / "links").mkdir()
    for path in (here / "demos").glob("*.npz"):
        (here / "links" / path.name).symlink_to(f"../demos/{path.name}")
    assert run("split links parts --fraction 0.5") == 0
    for part in ("train", "eval"):
        for name in (reader := open_reader(f"parts/{part}")).names():
            assert not reader.path(name).is_symlink()
            assert slip(reader.read(name)) < 1e-5


def write_demos(path, spoil=None):
    pytest.importorskip("h5py")
    from reverie.datasets.readers.hdf5 import write_robomimic

    episodes = {f"demo_{i}": walk(5, i) for i in range(8)}
    if spoil:
        episodes[spoil]["speed"][2] = np.nan
    masks = {"train": ["demo_0", "demo_1", "demo_2"], "valid": ["demo_3"]}
    write_robomimic(path, episodes.items(), ACTION, masks=masks)


@pytest.mark.parametrize(
    "other", ["--seed 4", "--fraction 0.25", "--mask train valid", "--map.ends never"]
)
def test_an_interrupted_split_is_not_mixed_with_another(
    here, capsys, monkeypatch, other
):
    write_demos(here / "a.hdf5")

    def interrupted(path, *_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(datasets, "write_json", interrupted)
        with pytest.raises(KeyboardInterrupt):
            datasets.split_data("a.hdf5", "parts", SplitOptions(fraction=0.5))
    said = complaint(f"split a.hdf5 parts --fraction 0.5 {other}", capsys)
    assert "left behind by another split" in said
    assert run("split a.hdf5 parts --fraction 0.5") == 0
    files = {path.name for path in (here / "parts").iterdir()}
    assert files == {"train", "eval", "split.json"}


def test_a_split_names_only_what_it_wrote(here, capsys):
    write_demos(here / "a.hdf5", spoil="demo_1")
    assert run("split a.hdf5 parts --mask train valid --bad skip") == 0
    said = capsys.readouterr()
    assert "left out: demo_1 'speed' has NaN" in said.err
    assert "2 episodes in parts/train, 1 in" in said.out
    chosen = json.loads((here / "parts" / "split.json").read_text())
    assert chosen["train"] == open_reader("parts/train").names() == ["demo_0", "demo_2"]


def test_the_folder_one_is_in_is_measured(here, monkeypatch, capsys):
    write_npz(here / "demos")
    monkeypatch.chdir(here / "demos")
    assert run("stats .") == 0
    assert (here / "demos.stats.npz").exists()


def test_steps_in_a_row_are_inspected(here, capsys):
    h5py = pytest.importorskip("h5py")
    with h5py.File(here / "row.hdf5", "w") as file:
        file["obs/place"] = np.arange(12, dtype=np.float32).reshape(6, 2)
        file["actions"] = np.linspace(-1, 1, 6, dtype=np.float32)[:, None]
        file["dones"] = np.array([0, 0, 1, 0, 0, 1])
        file.attrs["made_by"] = "somebody"
    assert run("inspect row.hdf5 --map.breaks dones") == 0
    said = capsys.readouterr().out
    assert "2 episodes" in said
    assert "made_by: somebody" in said
