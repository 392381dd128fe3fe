"""Small runs, most of them on catch."""

from __future__ import annotations

from pathlib import Path

import pytest
from play_runs import COMMON, RUNS

from reverie.play.load import LoadedRun, load_run
from reverie.run.config import resolve
from reverie.run.train import train

_folders: dict[str, Path] = {}


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A function that returns the folder of one of `RUNS`, trained at its first call.

    Tests must not write into the folder.
    """

    def make(name: str) -> Path:
        if name not in _folders:
            logdir = tmp_path_factory.mktemp("runs") / name
            presets, flags = RUNS[name]
            config = resolve(presets, flags={**COMMON, **flags, "logdir": str(logdir)})
            _folders[name] = train(config)
        return _folders[name]

    return make


@pytest.fixture
def loaded(run_folder, request) -> LoadedRun:
    """The loaded run that the test names, DreamerV3 by default."""
    run = load_run(run_folder(getattr(request, "param", "dreamer")))
    yield run
    run.close()
