"""Code that a saved sweep names is imported only if the sweep is trusted."""

from __future__ import annotations

import pytest
import yaml
from sweep_helpers import choices, make_spec

from reverie.api import UserError
from reverie.cli.main import main
from reverie.run.spec_file import code_in_spec
from reverie.run.trust import allow, check_trusted
from reverie.sweep import search as sweep


@pytest.fixture(autouse=True)
def _state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)


SAVED = {
    "metric": "episode/score",
    "goal": "max",
    "settings": {"agent": ["random"]},
    "ranges": {"run.envs": [1, 2]},
}


@pytest.mark.parametrize(
    "change",
    [
        {"settings": {"task": ["evilmod:make"]}},
        {"settings": {"agent": "evilmod:Agent"}},
        {"settings": {"dreamer": {"world": "evilmod:World"}}},
        {"settings": {"config": ["settings.yaml"]}},
        {"ranges": {"agent": ["random", "evilmod:Agent"]}},
        {"ranges": {".*world": {"choices": ["evilmod:World"]}}},
        {"settings": {"agent": "evilmod:1"}},
        {"settings": {"agent": "evil-mod:Agent"}},
        {"settings": {"agent=evilmod:Agent": []}},
        {"settings": {"(offline.|)agent": "evilmod:Agent"}},
        {"settings": {"offline.data": ["x", "--config", "settings.yaml"]}},
        {"eval": "--trust"},
        {"eval": "--task evilmod:make"},
        {"eval": "--episodes 2 --task=evilmod:make"},
    ],
)
@pytest.mark.parametrize("words", [["--logdir", "sweep"], ["sweep/sweep.yaml"]])
def test_a_saved_sweep_of_others_is_refused(tmp_path, capsys, change, words):
    (folder := tmp_path / "sweep").mkdir()
    (folder / "sweep.yaml").write_text(yaml.safe_dump({**SAVED, **change}))
    (folder / "study.journal").touch()
    (tmp_path / "settings.yaml").write_text("agent: evilmod:Agent\n")
    for name in ("evilmod.py", "evil-mod.py"):
        (tmp_path / name).write_text("open('imported', 'w')\n")
    assert main(["sweep", *words]) == 2
    error = capsys.readouterr().err
    assert "was not created by you on this machine" in error
    assert "--trust" in error
    assert not (tmp_path / "imported").exists()


def test_data_formats_and_devices_are_not_import_paths():
    settings = {"offline.data": ["minari:D4RL/door/human-v2"], "device": ["cuda:0"]}
    assert not code_in_spec({"settings": settings, "logdir": "/a/b:c"})


def test_a_sweep_of_this_user_continues(tmp_path, program):
    spec = make_spec(tmp_path, settings={"kind": ["mymod:Agent"]}, trials=1)
    path = sweep.sweep(spec, program)
    saved = code_in_spec(yaml.safe_load((path / "sweep.yaml").read_text()))
    assert saved == [("settings.kind", "mymod:Agent")]
    check_trusted(path, saved)
    with pytest.raises(UserError, match="--trust"):
        check_trusted(path, [("agent", "other:Agent")])


def test_hyperparameters_in_the_journal_are_checked(tmp_path, program):
    ranges = {"x": choices(1.0), "kind": choices("mymod:Agent")}
    path = sweep.sweep(make_spec(tmp_path, ranges, trials=1), program)
    journal = path / "study.journal"
    journal.write_text(journal.read_text().replace("mymod:Agent", "evilmod:Agent"))
    spec = make_spec(tmp_path, ranges, trials=2)
    with pytest.raises(UserError, match="kind 'evilmod:Agent'"):
        sweep.sweep(spec, program)


def test_trials_of_a_trusted_sweep_are_trusted(tmp_path):
    with allow(everything=True), sweep.Sweep(make_spec(tmp_path), ["true"]) as search:
        search.start_runs()
        words = [run.process.process.args for run in search.runs]
    assert [line[-1] for line in words] == ["--trust"] * 2
