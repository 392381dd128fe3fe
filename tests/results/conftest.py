"""A small trained run that all tests of this folder use."""

from __future__ import annotations

import pytest

from reverie.cli.main import main


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a run of a few updates; tests must not write to it."""
    logdir = tmp_path_factory.mktemp("trained") / "run"
    words = "--configs debug --task catch --run.steps 120 --logger.outputs jsonl"
    words += " --run.report_every 0 --run.save_every 0 --seed 3 --run.envs 2"
    arguments = ["train", *words.split(), "--logdir", str(logdir)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["reverie", *arguments])  # recorded by the run
        assert main(arguments) == 0
    return logdir


@pytest.fixture(autouse=True)
def _cache_directory(tmp_path, monkeypatch):
    """Keep packages that tests unpack out of the user's home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
