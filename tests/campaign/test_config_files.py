"""Config files of a campaign: they must not change between its runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from campaign_helpers import make_run, make_spec, starts

from reverie.api import UserError
from reverie.campaign.config_files import absolute_paths, check_unchanged, checksums
from reverie.campaign.spec import load_spec
from reverie.campaign.worker import Worker, create_campaign, run_worker
from reverie.cli.main import main
from reverie.cli.train import command_config


def load(words, file=None):
    return load_spec(file, words.split(), command_config)


@pytest.fixture
def settings(tmp_path):
    """A config file of runs."""
    path = tmp_path / "settings.yaml"
    path.write_text("run.steps: 50\n")
    return path


def test_changed_or_missing_config_file_is_refused(tmp_path, settings, capsys):
    folder = tmp_path / "campaign"
    flags = f"--tasks catch --configs debug --config {settings} --logdir {folder}"
    create_campaign(load(flags))
    saved = folder / "campaign.yaml"
    assert "config_sha256:" in saved.read_text()
    logdir = f"--logdir {folder}"
    assert load(logdir, saved).runs[0].frames == 50
    settings.write_text("run.steps: 60\n")
    message = f"file {settings} has changed since .*\n  Fix: restore .* --logdir"
    with pytest.raises(UserError, match=message):
        load(logdir, saved)
    with pytest.raises(UserError, match=message):  # the command that created it
        create_campaign(load(flags))
    other = load(f"--logdir {tmp_path}/other", saved)  # another campaign
    assert other.runs[0].frames == 60
    assert checksums([str(settings)]) == other.config_sha256
    settings.unlink()
    assert main(["campaign", str(folder)]) == 2
    assert f"The config file {settings} is missing" in capsys.readouterr().err
    settings.write_text("run.steps: 50\n")
    assert load(logdir, saved).runs[0].frames == 50


def test_worker_starts_no_run_after_a_change_of_a_config_file(
    tmp_path, program, settings, capsys
):
    folder = tmp_path / "campaign"
    runs = [make_run("a"), make_run("b")]
    spec = create_campaign(make_spec(folder, runs))
    spec = replace(spec, config_sha256=checksums([str(settings)]))
    with Worker(spec, program) as worker:
        worker.step()
        settings.write_text("run.steps: 60\n")
        worker.slots.free.append(1)
        worker.start_runs()
        assert [run.claim.run.name for run in worker.runs] == ["a"]  # it continues
        assert f"no other run is started: The config file {settings}" in (
            capsys.readouterr().err
        )
    with pytest.raises(UserError, match="has changed since"):
        run_worker(spec, program)
    assert starts(folder, "b") == 0
    settings.write_text("run.steps: 50\n")
    assert {status.state for status in run_worker(spec, program)} == {"finished"}


def test_paths_of_config_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs.yaml").write_text("defaults: {}\n")
    (tmp_path / "b.yaml").touch()
    paths = absolute_paths(["configs.yaml:crafter,b.yaml"])
    assert paths == [f"{tmp_path}/configs.yaml:crafter", f"{tmp_path}/b.yaml"]
    found = checksums(paths)
    assert [*found] == [f"{tmp_path}/configs.yaml", f"{tmp_path}/b.yaml"]
    check_unchanged(found)
    with pytest.raises(UserError, match="cannot be read"):
        check_unchanged({str(tmp_path): ""})
    with pytest.raises(UserError, match="cannot read the pipe /dev/fd/63"):
        absolute_paths(["/dev/fd/63"])
